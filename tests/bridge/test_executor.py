"""One executor: what an update does and leaves behind, and who shares its bridge."""

import gc
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import (
    Acknowledgement,
    ModuleInstallAdapter,
    RolloutExecutor,
    SharedMemoryTensorBridge,
    TensorBridge,
    make_weight_bridge,
)
from rl_bridge.errors import (
    BridgeClosed,
    ForeignTransport,
    IncompatibleUpdate,
    StaleUpdate,
    TransportUnavailable,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.lifecycle import State
from rl_bridge.memory.passes import BytePlan
from tests.bridge.engines import (
    OwnConsumer,
    Recording,
    TwoVerbs,
    Unseen,
    bridge_of,
    content,
    fours,
    publish,
)
from tests.helpers import weights

# ---- success ------------------------------------------------------------------------------------


def test_an_update_is_installed_proven_acknowledged_and_the_old_one_released_in_this_order(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    first, second = publish(publisher, 1), publish(publisher, 2)
    executor.update_weights(first)
    assert adapter.calls == ["prepare", "install", "prove", "commit"]
    adapter.calls.clear()
    tensors = executor.update_weights(second.to_json())
    assert adapter.calls == [
        "prepare",
        "install",
        "prove",
        "commit",
        f"release {first.update_id[:4]}",
    ]
    assert content(adapter.engine) == content(weights(2)) == content(tensors)
    assert executor.active_weight_version == 2
    assert executor.active_weight_update_id == second.update_id
    assert executor.shared_weights is tensors.tensors
    bridge = bridge_of(executor)
    assert bridge.update_status(first.update_id) == "released"
    assert bridge.update_status(second.update_id) == "acknowledged"
    assert bridge.active_weight_version == 2
    executor.check_servable()


def test_what_update_weights_returns_tells_what_the_acknowledgement_tells(
    executor: RolloutExecutor, publisher: TensorBridge
) -> None:
    installed = executor.update_weights(publish(publisher, 1))
    ack = executor.last_ack
    assert isinstance(installed, Acknowledgement)
    assert ack is not None
    assert installed == ack
    assert installed.proof.root == ack.root
    assert installed.timings_ms["total"] > 0
    assert not hasattr(ack, "tensors")  # what is kept keeps no version's memory
    assert "version 1 installed: proof by digest, <3 imported tensors" in repr(installed)


def test_without_an_adapter_the_imported_mapping_is_what_serves(publisher: TensorBridge) -> None:
    manifest = publish(publisher, 1)
    with make_weight_bridge(publisher.transport) as bridge:
        executor = RolloutExecutor(weight_bridge=bridge)
        tensors = executor.update_weights(manifest)
        assert content(tensors) == content(weights(1))
        assert executor.last_ack is not None
        assert executor.last_ack.proof.method == "import"
        assert executor.shared_weights is tensors.tensors
        executor.release_weights()
        assert executor.shared_weights == {}
        assert executor.active_weight_update_id is None
        assert executor.active_weight_version == 1
        executor.release_weights()
        assert bridge.update_status(manifest.update_id) == "released"


def test_without_a_bridge_the_executor_makes_one() -> None:
    executor = RolloutExecutor(weight_transport="local")
    assert bridge_of(executor).transport == "local-clone"
    assert bridge_of(executor).source_worker == "rollout"
    executor.recover()
    with pytest.raises(WeightBridgeUnavailableError, match="no verified version yet"):
        executor.check_servable()


def test_a_consumer_of_the_users_own_needs_only_the_protocol(
    publisher: TensorBridge, adapter: Recording
) -> None:
    with make_weight_bridge(publisher.transport) as bridge:
        consumer = OwnConsumer(bridge)
        executor = RolloutExecutor(weight_bridge=consumer, weight_install_adapter=adapter)
        executor.update_weights(publish(publisher, 1))
        adapter.fails["install"] = LookupError("no")
        with pytest.raises(LookupError):
            executor.update_weights(publish(publisher, 2))
        del adapter.fails["install"]
        executor.update_weights(publish(publisher, 3))
        assert consumer.calls == [
            "import",
            "acknowledge",
            "import",
            "reject: rollout weight install failed: LookupError: no",
            "import",
            "acknowledge",
            "release",
        ]
        assert executor.last_ack is not None
        assert "verify" not in executor.last_ack.timings_ms


# ---- refused before the engine is touched -------------------------------------------------------


def test_the_active_update_is_not_installed_again(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    manifest = publish(publisher, 1)
    executor.update_weights(manifest)
    adapter.calls.clear()
    with pytest.raises(StaleUpdate, match=r"version 1 .* is active already"):
        executor.update_weights(manifest)
    assert adapter.calls == []
    assert bridge_of(executor).update_status(manifest.update_id) == "acknowledged"


def test_what_prepare_refuses_leaves_the_engine_as_it_was(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    executor.update_weights(publish(publisher, 1))
    refusal = IncompatibleUpdate("tensor 'x': the engine has none")
    adapter.fails["prepare"] = refusal
    adapter.calls.clear()
    manifest = publish(publisher, 2)
    with pytest.raises(IncompatibleUpdate) as caught:
        executor.update_weights(manifest)
    assert caught.value is refusal
    assert refusal.__notes__ == [
        (
            "rl_bridge: version 2 was refused before the engine was touched; "
            "the engine holds version 1."
        )
    ]
    assert adapter.calls == ["prepare"]
    assert content(adapter.engine) == content(weights(1))
    assert (
        bridge_of(executor).rejection_reason(manifest.update_id) == f"IncompatibleUpdate: {refusal}"
    )
    with pytest.raises(WeightUpdateRejectedError, match="was rejected"):
        executor.update_weights(manifest)


@pytest.mark.parametrize("policy", ["warn", "reject"])
def test_installing_the_released_update_once_more_is_not_suspicious(
    policy: str, publisher: TensorBridge, adapter: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    # After a loss: the engine was reloaded and needs its version again.
    manifest = publish(publisher, 1)
    with make_weight_bridge(publisher.transport) as bridge:
        executor = RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=adapter, suspicious=policy
        )
        executor.update_weights(manifest)
        executor.release_weights()
        adapter.engine["steps"].zero_()
        executor.update_weights(manifest)
        assert content(adapter.engine) == content(weights(1))
        assert executor.active_weight_update_id == manifest.update_id
        assert caplog.messages == []


def test_a_copy_refused_for_its_transport_leaves_the_imported_update_alone(
    trainer: SharedMemoryTensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    good = trainer.publish(fours(1), weight_version=1)
    executor = RolloutExecutor(
        weight_bridge=rollout, weight_install_adapter=ModuleInstallAdapter(fours(0))
    )
    rollout.import_update(good)
    with pytest.raises(ForeignTransport):
        executor.update_weights(good.model_copy(update={"transport": "local-clone"}))
    executor.update_weights(good)
    assert executor.active_weight_version == 1


# ---- who shares the bridge -----------------------------------------------------------------------


def executor_on(bridge: Any) -> RolloutExecutor:
    return RolloutExecutor(
        weight_bridge=bridge, weight_install_adapter=ModuleInstallAdapter(fours(0))
    )


def test_an_update_acknowledged_by_hand_is_refused_by_an_executor_and_keeps_its_tensors(
    trainer: SharedMemoryTensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    manifest = trainer.publish(fours(1), weight_version=1)
    mapping = rollout.import_update(manifest)
    rollout.acknowledge(manifest)
    executor = executor_on(rollout)
    with pytest.raises(StaleUpdate, match=r"acknowledged .*release_imported"):
        executor.update_weights(manifest)
    assert rollout.update_state(manifest) is State.ACKNOWLEDGED
    assert mapping["weight"].tolist() == [1.0] * 4
    rollout.release_imported(manifest)  # as the message says
    executor.update_weights(manifest)
    assert executor.active_weight_version == 1


def closed_bridge() -> dict[str, Any]:
    bridge = SharedMemoryTensorBridge(source_worker="rollout")
    bridge.close()
    return {"weight_bridge": bridge}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (closed_bridge, BridgeClosed),
        (lambda: {"weight_transport": "cuda-vmm"}, TransportUnavailable),
    ],
    ids=["closed", "blocked"],
)
def test_an_executor_whose_bridge_cannot_be_opened_says_so_once_and_can_be_closed(
    options: Callable[[], dict[str, Any]],
    error: type[Exception],
    trainer: SharedMemoryTensorBridge,
) -> None:
    manifest = trainer.publish(fours(1), weight_version=1)
    adapter = ModuleInstallAdapter(fours(0))
    with RolloutExecutor(weight_install_adapter=adapter, **options()) as executor:
        for _ in range(2):
            with pytest.raises(error):
                executor.update_weights(manifest)
        executor.recover()
        executor.release_weights()
    executor.close()


@pytest.mark.parametrize("mode", ["copy", "wrapped", "unseen"])
def test_no_pass_takes_more_threads_than_it_was_given(
    mode: str,
    publisher: TensorBridge,
    engine: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: set[object] = set()
    run = BytePlan._run

    def counting(plan: BytePlan, *args: Any, num_threads: int | None, **kwargs: Any) -> bytes:
        given.add(num_threads)
        return run(plan, *args, num_threads=num_threads, **kwargs)

    adapters: dict[str, Any] = {
        "copy": lambda: ModuleInstallAdapter(engine, num_threads=1),
        "wrapped": lambda: TwoVerbs(engine),
        "unseen": lambda: Unseen(engine),
    }
    adapter = adapters[mode]()
    with make_weight_bridge(publisher.transport, num_threads=1) as bridge:
        executor = RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=adapter, num_threads=1
        )
        manifests = [publish(publisher, version) for version in (1, 2)]
        executor.update_weights(manifests[0])
        install = adapter.install

        def fails(*args: Any) -> None:
            install(*args)
            adapter.install = install
            raise LookupError("the engine said no")

        adapter.install = fails
        monkeypatch.setattr(BytePlan, "_run", counting)
        with pytest.raises(LookupError):
            executor.update_weights(manifests[1])
        assert given == {1}
        assert content(engine) == content(weights(1))


# ---- initial weights -----------------------------------------------------------------------------


def anonymous_nbytes() -> int:
    """Private memory of this process that is in use."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_initial_weights_are_copied_once_and_let_go_by_the_first_commit() -> None:
    nbytes = 96 << 20
    engine = {"w": torch.ones(nbytes // 4)}
    with (
        make_weight_bridge("shared-memory", suspicious="off") as trainer,
        make_weight_bridge("shared-memory") as rollout,
    ):
        manifest = trainer.publish({"w": torch.zeros(nbytes // 4)}, weight_version=1)
        gc.collect()
        before = anonymous_nbytes()
        executor = RolloutExecutor(
            weight_bridge=rollout, weight_install_adapter=Unseen(engine), initial_weights=engine
        )
        assert nbytes <= anonymous_nbytes() - before + (4 << 20) < 1.5 * nbytes
        executor.update_weights(manifest)
        assert anonymous_nbytes() - before < 0.5 * nbytes
        assert not engine["w"].any()


class WithUndo(TwoVerbs):
    def undo(self) -> None:
        """Knows a way of its own."""


@pytest.mark.parametrize("style", [None, ModuleInstallAdapter, WithUndo])
def test_initial_weights_that_nothing_would_use_are_refused(
    style: Callable[[Any], Any] | None, engine: dict[str, torch.Tensor]
) -> None:
    adapter = None if style is None else style(engine)
    with pytest.raises(ValueError, match=r"initial_weights= would never be used: .*Leave them out"):
        RolloutExecutor(
            weight_transport="local", weight_install_adapter=adapter, initial_weights=engine
        )


# ---- closing -------------------------------------------------------------------------------------


def test_a_closed_executor_has_released_its_version_and_closed_its_own_bridge(
    publisher: TensorBridge,
) -> None:
    manifest = publish(publisher, 1)
    with RolloutExecutor(weight_transport=publisher.transport) as executor:
        executor.update_weights(manifest)
    executor.close()
    (report,) = publisher.holders(manifest.update_id)
    assert (report.state, report.presence) == ("released", "gone")
    with pytest.raises(BridgeClosed, match="executor is closed"):
        executor.update_weights(publish(publisher, 2))


def test_a_closed_executor_leaves_a_bridge_that_it_was_given_open(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    with RolloutExecutor(weight_bridge=consumer) as executor:
        executor.update_weights(manifest)
    assert consumer.update_status(manifest.update_id) == "released"
    assert consumer.import_update(publish(publisher, 2))


def test_closing_closes_the_bridge_although_the_adapter_fails(
    publisher: TensorBridge, adapter: Recording
) -> None:
    manifest = publish(publisher, 1)
    executor = RolloutExecutor(weight_transport=publisher.transport, weight_install_adapter=adapter)
    executor.update_weights(manifest)
    adapter.fails[f"release {manifest.update_id[:4]}"] = LookupError("no")
    with pytest.raises(LookupError):
        executor.close()
    (report,) = publisher.holders(manifest.update_id)
    assert report.presence == "gone"


def test_an_executor_on_a_publishing_bridge_leaves_its_updates_to_other_readers(
    trainer: TensorBridge,
) -> None:
    executor = executor_on(trainer)
    first = trainer.publish({"weight": torch.ones(4)}, weight_version=1)
    second = trainer.publish({"weight": torch.full((4,), 2.0)}, weight_version=2)
    executor.update_weights(first)
    executor.update_weights(second)
    executor.release_weights()
    with SharedMemoryTensorBridge(source_worker="other") as other:
        assert other.import_update(first)["weight"].tolist() == [1.0] * 4
        assert other.import_update(second)["weight"].tolist() == [2.0] * 4
    assert [r.state for r in trainer.holders(first.update_id) if r.worker == "trainer"] == [
        "released"
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("shared-memory", "a str, .* Pass what make_weight_bridge returned"),
        (SharedMemoryTensorBridge, "the class SharedMemoryTensorBridge"),
        (Future(), "a Future, .* can import_update, acknowledge, reject, release"),
    ],
)
def test_what_is_no_bridge_is_refused(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"weight_bridge: got {message}"):
        RolloutExecutor(weight_bridge=given)
