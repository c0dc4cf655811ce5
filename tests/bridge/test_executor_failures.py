"""Updates that fail: undone to the byte, reported to everybody, and nothing held."""

import asyncio
from typing import Any

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    SharedMemoryTensorBridge,
    TensorBridge,
    make_weight_bridge,
)
from rl_bridge.errors import ProofFailed, TornEngine, WeightBridgeError
from rl_bridge.lifecycle import State
from tests.bridge.engines import (
    OwnConsumer,
    Recording,
    TwoVerbs,
    Unseen,
    bridge_of,
    content,
    fours,
    linear_weights,
    publish,
)
from tests.helpers import weights

# ---- failures after the engine was touched ------------------------------------------------------


@pytest.mark.parametrize("step", ["install", "prove"])
@pytest.mark.parametrize("has_version", [False, True], ids=["first", "later"])
def test_a_failure_is_undone_and_the_adapters_own_error_comes_out(
    step: str,
    has_version: bool,
    publisher: TensorBridge,
    executor: RolloutExecutor,
    adapter: Recording,
) -> None:
    if has_version:
        executor.update_weights(publish(publisher, 1))
    before = content(adapter.engine)
    own = LookupError("the engine said no")
    adapter.fails[step] = own
    adapter.calls.clear()
    manifest = publish(publisher, 2)
    with pytest.raises(LookupError) as caught:
        executor.update_weights(manifest)
    assert caught.value is own
    assert str(own) == "the engine said no"
    # Whether the engine held a version before, an executor that was just made cannot know.
    nothing = "this executor has installed nothing yet."
    told = "the engine holds version 1." if has_version else nothing
    assert own.__notes__ == [f"rl_bridge: version 2 was undone; {told}"]
    assert adapter.calls[-1] == "undo"
    assert content(adapter.engine) == before
    assert executor.active_weight_version == (1 if has_version else None)
    assert not executor.is_torn
    bridge = bridge_of(executor)
    assert bridge.update_state(manifest.update_id) is State.REJECTED
    reason = "rollout weight install failed: LookupError: the engine said no"
    assert bridge.rejection_reason(manifest.update_id) == reason
    (report,) = publisher.holders(manifest.update_id)
    assert (report.state, report.reason) == ("rejected", reason)
    adapter.fails.clear()
    executor.update_weights(publish(publisher, 3))
    assert content(adapter.engine) == content(weights(3))


def test_a_proof_that_is_none_is_told(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    nothing: Any = None
    adapter.prove = lambda: nothing  # type: ignore[method-assign]
    before = content(adapter.engine)
    with pytest.raises(ProofFailed, match="returned a NoneType, expected an InstallProof"):
        executor.update_weights(publish(publisher, 1))
    assert content(adapter.engine) == before


def test_an_exception_that_takes_no_notes_comes_out_all_the_same(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    class Silent(Exception):
        def add_note(self, note: str) -> None:
            raise TypeError(note)

    before = content(adapter.engine)
    adapter.fails = {"install": Silent()}
    with pytest.raises(Silent):
        executor.update_weights(publish(publisher, 1))
    assert not executor.is_torn
    assert content(adapter.engine) == before


def test_kept_exceptions_pin_no_slots() -> None:
    class Failing(ModuleInstallAdapter):
        def install(self, manifest: Any, tensors: Any) -> None:
            raise RuntimeError(f"no {manifest.weight_version} of {len(tensors)}")

    kept = []
    with (
        SharedMemoryTensorBridge(max_slots=2) as trainer,
        SharedMemoryTensorBridge() as rollout,
    ):
        executor = RolloutExecutor(
            weight_bridge=rollout, weight_install_adapter=Failing(linear_weights(0.0))
        )
        for version in range(1, 8):
            manifest = trainer.publish(linear_weights(float(version)), weight_version=version)
            with pytest.raises(RuntimeError, match=f"no {version} of 2") as caught:
                executor.update_weights(manifest)
            kept.append(caught.value)
            trainer.release(manifest.update_id)
    assert len(kept) == 7


def test_an_exception_that_cannot_be_printed_comes_out_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    class Adapter(ModuleInstallAdapter):
        def install(self, manifest: Any, tensors: Any) -> None:
            del manifest, tensors
            raise Mute

    with make_weight_bridge("local") as trainer, make_weight_bridge("local") as rollout:
        executor = RolloutExecutor(
            weight_bridge=rollout, weight_install_adapter=Adapter(linear_weights(0.0))
        )
        manifest = trainer.publish(linear_weights(1.0), weight_version=1)
        with pytest.raises(Mute):
            executor.update_weights(manifest)
        assert rollout.update_status(manifest.update_id) == "rejected"


class Hooked(ModuleInstallAdapter):
    """Calls a function behind its install, or in its commit."""

    behind_install: Any = None
    in_commit: Any = None

    def install(self, manifest: Any, tensors: Any) -> None:
        super().install(manifest, tensors)
        if self.behind_install is not None:
            self.behind_install(manifest)

    def commit(self) -> None:
        if self.in_commit is not None:
            self.in_commit()
        super().commit()


def test_an_update_that_is_released_in_the_middle_is_undone_and_the_next_one_works(
    trainer: SharedMemoryTensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    engine = fours(0)
    adapter = Hooked(engine)
    executor = RolloutExecutor(
        weight_bridge=rollout, weight_install_adapter=adapter, suspicious="off"
    )
    executor.update_weights(trainer.publish(fours(1), weight_version=1))
    adapter.behind_install = lambda manifest: rollout.release(manifest.update_id)
    with pytest.raises(WeightBridgeError):
        executor.update_weights(trainer.publish(fours(2), weight_version=2))
    assert engine["weight"].tolist() == [1.0] * 4
    assert executor.active_weight_version == 1
    adapter.behind_install = None
    executor.update_weights(trainer.publish(fours(3), weight_version=3))
    assert engine["weight"].tolist() == [3.0] * 4


def test_an_interrupt_behind_the_acknowledgement_rejects_nothing_on_a_bridge_of_ones_own(
    trainer: SharedMemoryTensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    def interrupt() -> None:
        adapter.in_commit = None
        raise KeyboardInterrupt

    engine = fours(0)
    adapter = Hooked(engine)
    own = OwnConsumer(rollout)
    executor = RolloutExecutor(weight_bridge=own, weight_install_adapter=adapter)
    adapter.in_commit = interrupt
    with pytest.raises(KeyboardInterrupt):
        executor.update_weights(trainer.publish(fours(1), weight_version=1))
    assert executor.active_weight_version == 1
    executor.recover()
    assert (executor.active_weight_version, own.calls) == (1, ["import", "acknowledge"])
    assert engine["weight"].tolist() == [1.0] * 4


def test_a_release_that_the_adapter_refuses_is_told_and_done(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    manifest = publish(publisher, 1)
    executor.update_weights(manifest)
    own = LookupError("the engine said no")
    adapter.fails[f"release {manifest.update_id[:4]}"] = own
    with pytest.raises(LookupError) as caught:
        executor.release_weights()
    assert caught.value is own
    assert bridge_of(executor).update_status(manifest.update_id) == "released"
    assert executor.active_weight_update_id is None


def test_an_install_that_fails_when_a_version_comes_again_over_a_bridge_of_ones_own_is_undone(
    trainer: TensorBridge, rollout: TensorBridge
) -> None:
    adapter = TwoVerbs({name: torch.zeros_like(one) for name, one in linear_weights(0).items()})
    executor = RolloutExecutor(weight_bridge=OwnConsumer(rollout), weight_install_adapter=adapter)
    manifest = trainer.publish(linear_weights(1), weight_version=1)
    executor.update_weights(manifest)
    executor.release_weights()
    for tensor in adapter.engine.values():
        tensor.fill_(-1)
    before = content(adapter.engine)
    adapter.fails_after = 1
    with pytest.raises(LookupError):
        executor.update_weights(manifest)
    assert content(adapter.engine) == before


def test_a_previous_version_without_all_tensors_of_the_failed_one_is_no_undo(
    trainer: TensorBridge, rollout: TensorBridge
) -> None:
    whole = {"a": torch.ones(2), "b": torch.ones(2)}
    adapter = Unseen({name: torch.zeros(2) for name in whole})
    executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
    executor.update_weights(trainer.publish(whole, weight_version=1))
    executor.update_weights(trainer.publish({"a": torch.full((2,), 2.0)}, weight_version=2))

    def install(manifest: Any, tensors: Any) -> None:
        TwoVerbs.install(adapter, manifest, tensors)
        raise LookupError

    adapter.install = install  # type: ignore[method-assign]
    with pytest.raises(TornEngine, match="does not have 'b'"):
        executor.update_weights(
            trainer.publish({name: torch.full((2,), 3.0) for name in whole}, weight_version=3)
        )
    assert executor.is_torn


def test_an_update_of_a_task_that_was_cancelled_is_undone_and_may_come_again(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    executor.update_weights(publish(publisher, 1))
    before = content(adapter.engine)
    adapter.fails = {"install": asyncio.CancelledError()}
    manifest = publish(publisher, 2)
    with pytest.raises(asyncio.CancelledError):
        executor.update_weights(manifest)
    assert content(adapter.engine) == before
    assert executor.active_weight_version == 1
    adapter.fails = {}
    executor.update_weights(manifest)
    assert executor.active_weight_version == 2
