"""A vote that not all ranks heard, of a driver that died of it."""

import pytest

from rl_bridge import TensorBridge
from rl_bridge.vllm import VLLMEngineAdapter
from tests.integrations.test_commit_fails import RanksOfOne, engine
from tests.integrations.test_engine_adapter import driver, trainer
from tests.integrations.test_rank import RANKS, publish

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


@pytest.mark.parametrize("back", range(RANKS))
def test_what_only_some_ranks_took_back_is_taken_back_on_all_by_the_next_driver(
    engine: RanksOfOne, trainer: TensorBridge, back: int
) -> None:
    with driver(engine) as (executor, _):
        executor.update_weights(publish(trainer, 1))
    shown, manifest = engine.shown, publish(trainer, 2)
    dead = VLLMEngineAdapter(engine)
    dead.prepare(manifest, {})
    dead.install(manifest, {})
    engine.ranks[back].undo("it took the vote for a no")
    with driver(engine) as (executor, _):
        executor.recover()
    assert [model.version for model in engine.models] == [1] * RANKS
    assert engine.shown == shown
    assert not engine.is_paused()


def test_what_only_some_ranks_have_committed_is_committed_on_all_by_the_next_driver(
    engine: RanksOfOne, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1)
    dead = VLLMEngineAdapter(engine)
    dead.prepare(manifest, {})
    dead.install(manifest, {})
    engine.ranks[-1].commit(manifest.update_id)
    with driver(engine) as (executor, _):
        executor.recover()
    assert {rank.describe()["update_id"] for rank in engine.ranks} == {manifest.update_id}
    assert [model.version for model in engine.models] == [1] * RANKS
