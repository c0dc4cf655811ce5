"""The acknowledgement: what comes before it and behind it, and what may happen in its middle."""

from collections.abc import Callable

import pytest
import torch

from rl_bridge import RolloutExecutor, TensorBridge, make_weight_bridge
from rl_bridge.errors import IllegalTransition, TornEngine
from rl_bridge.lifecycle import State
from tests.bridge.engines import Recording, bridge_of, content, publish
from tests.helpers import weights


@pytest.fixture
def transport() -> str:
    return "shared-memory"


class Watching(Recording):
    """Notes, in each step, how the torn update stands."""

    look: Callable[[], tuple[State, bool]] | None = None

    def _step(self, name: str) -> None:
        super()._step(name)
        if self.look is not None:
            self.seen[name] = self.look()

    def __init__(self, engine: dict[str, torch.Tensor]) -> None:
        super().__init__(engine)
        self.seen: dict[str, tuple[State, bool]] = {}

    def resume(self) -> None:
        self._step("resume")


@pytest.fixture
def adapter(engine: dict[str, torch.Tensor]) -> Watching:
    return Watching(engine)


def test_what_tore_the_engine_is_rejected_before_the_next_version_is_committed(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Watching
) -> None:
    adapter.fails = {"install": LookupError("no"), "undo": OSError("full")}
    torn = publish(publisher, 1)
    with pytest.raises(TornEngine):
        executor.update_weights(torn)
    adapter.fails = {}
    bridge = bridge_of(executor)
    adapter.look = lambda: (bridge.update_state(torn), executor.is_torn)
    executor.update_weights(publish(publisher, 2))
    assert adapter.seen["install"] == (State.TORN, True)
    assert adapter.seen["commit"] == (State.REJECTED, False)


def test_an_engine_is_resumed_once_it_is_proven_and_before_anybody_is_told(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Watching
) -> None:
    manifest = publish(publisher, 1)
    bridge = bridge_of(executor)
    adapter.look = lambda: (bridge.update_state(manifest), executor.is_torn)
    executor.update_weights(manifest)
    assert adapter.calls == ["prepare", "install", "prove", "resume", "commit"]
    assert adapter.seen["resume"][0] is State.INSTALLED
    assert "resume" in (executor.last_ack or pytest.fail("none")).timings_ms


def test_an_engine_that_cannot_resume_goes_back(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Watching
) -> None:
    executor.update_weights(publish(publisher, 1))
    adapter.fails = {"resume": OSError("stuck")}
    with pytest.raises(OSError, match="stuck"):
        executor.update_weights(publish(publisher, 2))
    assert executor.active_weight_version == 1
    assert content(adapter.engine) == content(weights(1))


def test_an_update_that_was_refused_and_released_before_its_acknowledgement_is_undone(
    publisher: TensorBridge,
) -> None:
    class Refusing(Recording):
        def resume(self) -> None:
            if self.calls.count("install") > 1:
                (imported,) = [key for key in bridge.consumer._updates if key != first]
                bridge.reject(imported, "not this one")
                bridge.release_imported(imported)

    with make_weight_bridge("shared-memory", source_worker="rollout") as bridge:
        adapter = Refusing(weights(0))
        executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
        manifest = publish(publisher, 1)
        first = manifest.update_id
        executor.update_weights(manifest)
        with pytest.raises(IllegalTransition):
            executor.update_weights(publish(publisher, 2))
        assert executor.active_weight_version == bridge.active_weight_version == 1
        assert content(adapter.engine) == content(weights(1))
