"""An undo stops requests where they are, also for who lets them end before an install."""

from collections.abc import Callable
from typing import Any

import pytest

from rl_bridge import RolloutExecutor, TensorBridge, WeightBridgeError, make_weight_bridge
from rl_bridge.engines.vllm.asking import held_by
from rl_bridge.vllm import VLLMEngineAdapter
from tests.integrations.test_commit_fails import RanksOfOne, engine
from tests.integrations.test_engine_adapter import broken, trainer
from tests.integrations.test_rank import publish

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


class Requests:
    """What runs: as vLLM's scheduler does, a pause that waits lets it end, and new ones wait."""

    def __init__(self, engine: RanksOfOne, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running = False
        self.steps: list[list[int]] = []  # versions of all ranks, at each
        self.begins: Callable[[], object] = lambda: None
        self._engine = engine
        self._resume = engine.resume
        monkeypatch.setattr(engine, "pause", self._pause)
        monkeypatch.setattr(engine, "resume", self._go_on)

    def _pause(self, mode: str) -> None:
        self._engine.stopped = True
        if mode == "wait" and self.running:
            self.steps.append([model.version for model in self._engine.models])
            self.running = False

    def _go_on(self) -> None:
        self._resume()
        self.begins()

    def begin(self) -> None:
        self.running = True


def test_no_request_ends_with_a_version_that_is_to_be_undone(
    engine: RanksOfOne, trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take longer than the call that would wait for it."""
    requests = Requests(engine, monkeypatch)
    adapter = VLLMEngineAdapter(engine, pause="wait")
    with (
        make_weight_bridge("shared-memory", source_worker="driver") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        executor.update_weights(publish(trainer, 1))
        requests.begins = requests.begin
        monkeypatch.setattr(bridge, "acknowledge", broken)
        with pytest.raises(Exception, match="planted"):
            executor.update_weights(publish(trainer, 2))
        assert requests.steps == []
        assert not executor.is_torn


def test_no_request_runs_on_while_the_ranks_hold_two_versions(
    engine: RanksOfOne, trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that freezes them died in the middle; the next one lets them end."""
    requests = Requests(engine, monkeypatch)
    dead = VLLMEngineAdapter(engine)
    first, second = publish(trainer, 1), publish(trainer, 2)
    dead.prepare(first, {})
    dead.install(first, {})
    dead.resume()
    dead.commit()
    requests.begin()
    dead.prepare(second, {})
    dead.install(second, {})
    engine.ranks[0].undo("it took the vote for a no")
    assert [model.version for model in engine.models] == [1, 2]
    adapter: Any = VLLMEngineAdapter(engine, pause="wait")
    with (
        make_weight_bridge("shared-memory", source_worker="driver") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        executor.recover()
    assert requests.steps == []
    assert requests.running
    assert [model.version for model in engine.models] == [1, 1]


def test_nobody_says_a_version_that_only_some_ranks_hold(
    engine: RanksOfOne, trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a dead driver left on the others does not go, at first."""
    adapter: Any = VLLMEngineAdapter(engine)
    with (
        make_weight_bridge("shared-memory", source_worker="driver") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        executor.update_weights(publish(trainer, 1))
        dead, left = VLLMEngineAdapter(engine), publish(trainer, 2)
        dead.prepare(left, {})
        dead.install(left, {})
        engine.ranks[0].undo("it took the vote for a no")
        with monkeypatch.context() as patch:
            patch.setattr(engine.models[1], "undo", broken)
            with pytest.raises(WeightBridgeError, match="planted"):
                executor.update_weights(publish(trainer, 3))
        assert [model.version for model in engine.models] == [1, 2]
        assert executor.active_weight_version is None
        with pytest.raises(WeightBridgeError):
            executor.check_servable()
        executor.recover()
        assert [model.version for model in engine.models] == [1, 1]
        executor.check_servable()
        assert executor.active_weight_version == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "last"])
def test_a_version_that_some_ranks_hold_is_not_the_engines(order: tuple[int, int]) -> None:
    """Nothing is under way: one of them was started anew."""
    idle = {"exchanged": False, "torn": "", "installed": None, "pending": None, "mine": False}
    replies = [{**idle, "update_id": "one"}, {**idle, "update_id": None}]
    assert held_by([replies[at] for at in order], "one", is_undone=False) is None
