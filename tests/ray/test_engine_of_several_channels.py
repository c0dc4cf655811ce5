"""A rollout on a new channel says what its engine holds."""

import pytest

from rl_bridge import TensorBridge, WeightBridgeUnavailableError, make_weight_bridge
from rl_bridge.ray import PairChoice, RolloutEndpoint
from rl_bridge.ray.calls import RolloutAnswer
from tests.engine_protocol.conftest import engine, trainer
from tests.engine_protocol.fake import Engine, broken, driven, driver, publish

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


def channel(transport: str) -> bytes:
    return PairChoice(transport=transport, reason="a test").to_json()


@pytest.fixture
def side(engine: Engine) -> RolloutEndpoint:
    """It has version 1, and is on another channel."""
    side = RolloutEndpoint(lambda: driver(engine))
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
        with driven(engine) as (other, _, _):
            other.update_weights(publish(trainer, 2))
    else:
        engine.start(len(engine.ranks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.models[0], fails, broken)
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
        patch.setattr(engine.models[0], fails, broken)
        answer = updated(side, trainer, 3)
    assert (answer.outcome, answer.active_version) == ("refused", 1)
    assert side.check_servable() == engine.told()["weight_version"] == 1
    side.close()


def test_a_rollout_whose_engine_another_driver_has_says_no_version_and_names_the_driver(
    engine: Engine, trainer: TensorBridge, side: RolloutEndpoint
) -> None:
    with driven(engine) as (other, _, _):
        other.update_weights(publish(trainer, 2))
        answer = updated(side, trainer, 3)
        assert (answer.error, answer.active_version) == ("SessionRefused", None)
        assert "has this engine" in answer.message
    assert updated(side, trainer, 4).active_version == 4
    side.close()
