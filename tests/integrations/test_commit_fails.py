"""A commit that fails, and which label outputs carry behind it."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from rl_bridge import TensorBridge, WeightUpdateRejectedError
from rl_bridge.engines.vllm.calls import answer
from rl_bridge.engines.vllm.client import Replies
from rl_bridge.engines.vllm.rank import VLLMRank
from rl_bridge.vllm import VLLMEngineAdapter
from tests.integrations.test_engine_adapter import Engine, driver, trainer
from tests.integrations.test_rank import RANKS, Group, Model, publish, rank_with

__all__ = ["trainer"]  # a fixture, for this file, too


class RanksOfOne(Engine):
    """An engine of several ranks."""

    def __init__(self, group: Group, models: list[Model]) -> None:
        self.ranks = [rank_with(model) for model in models]
        self.models = models
        self._group = group
        super().__init__(self.ranks[0])

    def call(self, verb: str, payload: dict[str, Any] | None = None) -> Replies:
        def ask(rank: VLLMRank) -> str:
            return json.dumps(answer(rank, verb, payload or {}))

        told = self._group.each([partial(ask, rank) for rank in self.ranks])
        return [json.loads(text) for text in told]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[RanksOfOne]:
    group = Group(monkeypatch, RANKS)
    monkeypatch.setattr(VLLMRank, "configure", lambda _rank, _options: None)
    made = RanksOfOne(group, [Model() for _ in range(RANKS)])
    yield made
    for rank in made.ranks:
        rank.close()


def test_a_commit_that_one_rank_fails_once_leaves_the_label_of_what_is_served(
    engine: RanksOfOne, trainer: TensorBridge
) -> None:
    failures = [OSError(28, "planted")]

    def fails_once() -> None:
        if failures:
            raise failures.pop()

    with driver(engine) as (executor, _), pytest.MonkeyPatch.context() as patch:
        executor.update_weights(publish(trainer, 1))
        patch.setattr(engine.models[-1], "commit", fails_once)
        executor.update_weights(publish(trainer, 2))
    assert not failures
    assert [model.version for model in engine.models] == [2] * RANKS
    assert engine.shown.startswith("2@")


def test_a_commit_that_comes_behind_another_drivers_takes_its_label_back(
    engine: RanksOfOne, trainer: TensorBridge
) -> None:
    late, other = VLLMEngineAdapter(engine), VLLMEngineAdapter(engine)
    mine, theirs = publish(trainer, 1), publish(trainer, 2)
    late.prepare(mine, {})
    late.install(mine, {})
    late.resume()
    other.prepare(theirs, {})
    other.install(theirs, {})
    other.resume()
    engine.shown, shown = f"1@{mine.root}", engine.shown  # late's call is the last to arrive
    other.commit()
    with pytest.raises(WeightUpdateRejectedError, match="is not pending here"):
        late.commit()
    assert engine.shown == "user's" != shown
