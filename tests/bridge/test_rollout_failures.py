"""The executor's transaction when it fails: undone to the byte, told to everybody."""

import logging
from typing import Any

import pytest
import torch

from rl_bridge import (
    InstallProof,
    ModuleInstallAdapter,
    RolloutExecutor,
    TensorBridge,
    make_weight_bridge,
)
from rl_bridge.errors import (
    ProofFailed,
)
from rl_bridge.lifecycle import State
from tests.bridge.engines import Recording, SeedStyle, Unseen, bridge_of, content, publish
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


@pytest.mark.parametrize("style", [SeedStyle, Unseen])
def test_a_seed_style_adapter_that_fails_half_way_is_undone(
    style: type[SeedStyle], publisher: TensorBridge, engine: dict[str, torch.Tensor]
) -> None:
    adapter = style(engine)
    initial = content(engine)
    with make_weight_bridge(publisher.transport) as bridge:
        executor = RolloutExecutor(
            weight_bridge=bridge,
            weight_install_adapter=adapter,
            initial_weights=dict(engine) if style is Unseen else None,
        )
        adapter.fails_after = 2
        with pytest.raises(LookupError, match="the engine said no"):
            # The undo of an unseen engine goes through the adapter: let it work by then.
            _update_failing_once(executor, publish(publisher, 1), adapter)
        assert content(engine) == initial
        assert executor.active_weight_version is None
        executor.update_weights(publish(publisher, 2))
        adapter.fails_after = 1
        with pytest.raises(LookupError):
            _update_failing_once(executor, publish(publisher, 3), adapter)
        assert content(engine) == content(weights(2))
        assert executor.active_weight_version == 2


def _update_failing_once(executor: RolloutExecutor, manifest: Any, adapter: SeedStyle) -> None:
    install = adapter.install

    def once(*args: Any) -> object:
        try:
            return install(*args)
        finally:
            adapter.fails_after = None

    adapter.install = once  # type: ignore[method-assign,assignment]  # for this call only
    try:
        executor.update_weights(manifest)
    finally:
        del adapter.install


def test_a_proof_of_another_root_fails_the_update(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    executor.update_weights(publish(publisher, 1))
    adapter.proof = InstallProof(method="digest", root="0" * 32)
    with pytest.raises(ProofFailed, match=r"version 2: the proof is for root 0{32}, expected"):
        executor.update_weights(publish(publisher, 2))
    assert executor.active_weight_version == 1
    assert content(adapter.engine) == content(weights(1))


def test_an_adapter_that_shows_nothing_is_acknowledged_as_unproven(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    adapter.proof = InstallProof(method="unproven")
    manifest = publish(publisher, 1)
    executor.update_weights(manifest)
    (report,) = publisher.holders(manifest.update_id)
    assert report.proof is not None
    assert (report.proof["method"], report.proof["root"]) == ("unproven", "")


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


@pytest.mark.parametrize("step", ["commit", "release"])
def test_what_fails_after_the_acknowledgement_does_not_fail_the_update(
    step: str,
    publisher: TensorBridge,
    executor: RolloutExecutor,
    adapter: Recording,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = publish(publisher, 1)
    executor.update_weights(first)
    adapter.fails["commit" if step == "commit" else f"release {first.update_id[:4]}"] = OSError("x")
    with caplog.at_level(logging.ERROR):
        executor.update_weights(publish(publisher, 2))
    assert executor.active_weight_version == 2
    assert content(adapter.engine) == content(weights(2))
    assert "version 2 is active, but the old one was not released" in caplog.text


def test_an_engine_in_this_process_is_proven_by_its_own_bytes(
    publisher: TensorBridge, engine: dict[str, torch.Tensor]
) -> None:
    with make_weight_bridge(publisher.transport) as bridge:
        executor = RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=ModuleInstallAdapter(engine)
        )
        manifest = publish(publisher, 1)
        executor.update_weights(manifest)
        assert executor.last_ack is not None
        assert executor.last_ack.proof.digested_nbytes == manifest.total_nbytes
        assert content(engine) == content(weights(1))
