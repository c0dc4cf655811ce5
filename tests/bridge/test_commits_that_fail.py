"""What fails behind the acknowledgement: no undo leads further back than the active version."""

import errno
import logging
from typing import Any

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    TensorBridge,
    TornEngine,
    WeightUpdateManifest,
)
from rl_bridge.bridge.consumer import Consumer
from rl_bridge.lifecycle import State
from rl_bridge.memory.views import SegmentView
from tests.bridge.engines import Recording, TwoVerbs, bridge_of, content, failing_at_first, publish
from tests.helpers import weights


@pytest.fixture(autouse=True)
def nobody_keeps_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Else pytest would, with the frames of each exception and their tensors."""
    caplog.set_level(logging.CRITICAL, logger="rl_bridge")


@pytest.fixture
def transport() -> str:
    """The one with slots, which a version that stays behind would hold."""
    return "shared-memory"


def test_an_undo_behind_a_commit_that_failed_leaves_the_engine_torn(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    executor.update_weights(publish(publisher, 1))
    adapter.fails = {"commit": OSError("full")}
    executor.update_weights(publish(publisher, 2))
    adapter.fails["install"] = LookupError("no")
    with pytest.raises(TornEngine, match=r"commit of version 2 had failed \(OSError: full\)"):
        executor.update_weights(publish(publisher, 3))
    assert executor.is_torn
    with pytest.raises(TornEngine, match="commit of version 2"):
        executor.recover()
    adapter.fails = {}
    executor.update_weights(publish(publisher, 4))
    assert executor.active_weight_version == 4
    assert content(adapter.engine) == content(weights(4))
    executor.check_servable()


def test_an_adapter_without_an_undo_may_fail_to_commit(
    publisher: TensorBridge, consumer: TensorBridge, engine: dict[str, torch.Tensor]
) -> None:
    class Adapter(TwoVerbs):
        def commit(self) -> None:
            raise OSError("nobody listens")

    adapter = Adapter(engine)
    executor = RolloutExecutor(weight_bridge=consumer, weight_install_adapter=adapter)
    for version in (1, 2):
        executor.update_weights(publish(publisher, version))
    adapter.fails_after = 1
    with pytest.raises(LookupError):
        executor.update_weights(publish(publisher, 3))
    assert executor.active_weight_version == 2
    assert content(engine) == content(weights(2))


def test_a_flip_whose_old_pages_cannot_be_refreshed_is_committed(
    publisher: TensorBridge,
    consumer: TensorBridge,
    engine: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Adapter(ModuleInstallAdapter):
        fails = False

        def install(self, manifest: Any, tensors: Any) -> None:
            super().install(manifest, tensors)
            if self.fails:
                raise LookupError

    adapter = Adapter(engine, mode="flip")
    executor = RolloutExecutor(weight_bridge=consumer, weight_install_adapter=adapter)
    executor.update_weights(publish(publisher, 1))
    with monkeypatch.context() as patched:
        error = OSError(errno.ENOMEM, "no")
        patched.setattr(
            SegmentView, "refresh", failing_at_first(error, SegmentView.refresh, times=2)
        )
        executor.update_weights(publish(publisher, 2))
    adapter.fails = True
    with pytest.raises(LookupError):
        executor.update_weights(publish(publisher, 3))
    assert executor.active_weight_version == 2
    assert content(engine) == content(weights(2))


@pytest.mark.parametrize("times", [1, 2])
def test_a_shortage_while_the_old_version_is_released_does_not_keep_it(
    times: int,
    publisher: TensorBridge,
    executor: RolloutExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = publish(publisher, 1)
    executor.update_weights(first)
    with monkeypatch.context() as patched:
        failing = failing_at_first(MemoryError(), Consumer.release, times=times)
        patched.setattr(Consumer, "release", failing)
        executor.update_weights(publish(publisher, 2))
    if times > 1:  # twice in a row: the next update sees to it
        assert bridge_of(executor).update_status(first.update_id) == "acknowledged"
        executor.update_weights(publish(publisher, 3))
    assert bridge_of(executor).update_status(first.update_id) == "released"


class Failing(Recording):
    """Fails in one step, always, after it has noted the call."""

    def __init__(self, engine: dict[str, torch.Tensor], step: str) -> None:
        super().__init__(engine)
        self.failing = step

    def _step(self, name: str) -> None:
        super()._step(name)
        if name.startswith(self.failing):
            raise OSError("the engine said no")


@pytest.mark.parametrize("step", ["commit", "release"])
def test_an_adapter_that_cannot_release_does_not_block_the_publisher(
    step: str,
    publisher: TensorBridge,
    consumer: TensorBridge,
    engine: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # What is told would be kept by pytest, with the frames of each exception and their tensors.
    caplog.set_level(logging.CRITICAL, logger="rl_bridge")
    adapter = Failing(engine, step)
    executor = RolloutExecutor(weight_bridge=consumer, weight_install_adapter=adapter)
    before: WeightUpdateManifest | None = None
    for version in range(1, 13):
        manifest = publish(publisher, version)
        executor.update_weights(manifest)
        if before is not None:
            assert consumer.update_status(before.update_id) == "released"
            assert adapter.calls[-1] == f"release {before.update_id[:4]}"
        publisher.release(manifest.update_id)
        before = manifest
    assert content(engine) == content(weights(12))


def test_a_commit_that_fails_does_not_leave_an_earlier_update_torn(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    torn = publish(publisher, 1)
    adapter.fails = {"install": LookupError("no"), "undo": OSError("full")}
    with pytest.raises(TornEngine):
        executor.update_weights(torn)
    adapter.fails = {"commit": OSError("no")}
    executor.update_weights(publish(publisher, 2))
    assert not executor.is_torn
    assert bridge_of(executor).update_state(torn.update_id) is State.REJECTED
