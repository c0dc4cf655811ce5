"""A rollout on a new channel says what its engine holds."""

import pytest

from rl_bridge import (
    TensorBridge,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    make_weight_bridge,
)
from rl_bridge.ray import PairChoice, RolloutEndpoint
from rl_bridge.ray.calls import RolloutAnswer
from rl_bridge.vllm import VLLMEngineAdapter
from tests.integrations.test_engine_adapter import Engine, broken, driver, engine, trainer
from tests.integrations.test_rank import Model, publish, rank_with

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


def channel(transport: str) -> bytes:
    return PairChoice(transport=transport, reason="a test").to_json()


@pytest.fixture
def side(engine: Engine) -> RolloutEndpoint:
    """It has version 1, and is on another channel."""
    side = RolloutEndpoint(lambda: VLLMEngineAdapter(engine))
    side.join(channel("local-clone"))
    with make_weight_bridge("local", source_worker="trainer") as before:
        side.update(publish(before, 1).to_json().encode())
    side.join(channel("shared-memory"))
    assert side.check_servable() == 1
    return side


def updated(side: RolloutEndpoint, trainer: TensorBridge, version: int) -> RolloutAnswer:
    return RolloutAnswer.from_json(side.update(publish(trainer, version).to_json().encode()))


@pytest.mark.parametrize("fails", ["prepare", "prove"])
@pytest.mark.parametrize("meanwhile", ["another driver", "a fresh engine"])
def test_a_rollout_whose_first_update_there_is_refused_says_no_version_that_is_gone(
    engine: Engine, trainer: TensorBridge, side: RolloutEndpoint, meanwhile: str, fails: str
) -> None:
    if meanwhile == "another driver":
        with driver(engine) as (other, _):
            other.update_weights(publish(trainer, 2))
    else:
        engine.rank.close()
        engine.rank = rank_with(Model())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.rank._installer, fails, broken)
        answer = updated(side, trainer, 3)
    assert (answer.outcome, answer.active_version) == ("refused", None)
    with pytest.raises(WeightBridgeUnavailableError):
        side.check_servable()
    assert updated(side, trainer, 4).active_version == side.check_servable() == 4
    side.close()


@pytest.mark.parametrize("fails", ["prepare", "prove"])
def test_a_rollout_whose_first_update_there_is_refused_keeps_the_version_that_is_there(
    engine: Engine, trainer: TensorBridge, side: RolloutEndpoint, fails: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.rank._installer, fails, broken)
        answer = updated(side, trainer, 3)
    assert (answer.outcome, answer.active_version) == ("refused", 1)
    assert side.check_servable() == engine.rank.describe()["weight_version"] == 1
    side.close()


def test_a_rollout_that_recovers_from_its_first_update_there_says_no_version_that_is_gone(
    engine: Engine, trainer: TensorBridge, side: RolloutEndpoint
) -> None:
    with driver(engine) as (other, _):
        other.update_weights(publish(trainer, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.rank._installer, "prove", broken)
        patch.setattr(engine.rank._installer, "undo", broken)
        assert updated(side, trainer, 3).outcome == "torn"
    side.executor.recover()
    assert engine.rank.describe()["weight_version"] == 2
    with pytest.raises(WeightBridgeUnavailableError):
        side.check_servable()
    side.close()


def test_a_rollout_whose_first_update_there_finds_remains_says_what_it_had_once_they_are_gone(
    engine: Engine, trainer: TensorBridge, side: RolloutEndpoint
) -> None:
    dead, left = VLLMEngineAdapter(engine), publish(trainer, 2)
    dead.prepare(left, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.rank._installer, "prove", broken)
        patch.setattr(engine.rank, "undo", lambda *_args, **_given: {})
        with pytest.raises(WeightBridgeError, match="planted"):
            dead.install(left, {})
    with pytest.MonkeyPatch.context() as patch:
        busy = iter([False])  # requests hold cached blocks, at first
        patch.setattr(engine, "reset_caches", lambda **_given: next(busy, True))
        assert updated(side, trainer, 3).error == "TornEngine"
    assert side.check_servable() == engine.rank.describe()["weight_version"] == 1
    side.close()
