"""A rollout on a new channel says what its engine holds."""

import pytest

from rl_bridge import TensorBridge, WeightBridgeUnavailableError, make_weight_bridge
from rl_bridge.ray import PairChoice, RolloutEndpoint
from rl_bridge.ray.calls import RolloutAnswer
from tests.integrations.threaded_engine import (
    Engine,
    broken,
    driven,
    driver,
    engine,
    publish,
    trainer,
)

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


def channel(transport: str) -> bytes:
    return PairChoice(transport=transport, reason="a test").to_json()


@pytest.fixture
def endpoint(engine: Engine) -> RolloutEndpoint:
    """It has version 1, and is on another channel."""
    endpoint = RolloutEndpoint(lambda: driver(engine))
    endpoint.join(channel("local-clone"))
    with make_weight_bridge("local", source_worker="trainer") as before:
        endpoint.update(publish(before, 1).to_json().encode())
    endpoint.join(channel("shared-memory"))
    assert endpoint.check_servable() == 1
    return endpoint


def updated(endpoint: RolloutEndpoint, trainer: TensorBridge, version: int) -> RolloutAnswer:
    return RolloutAnswer.from_json(endpoint.update(publish(trainer, version).to_json().encode()))


@pytest.mark.parametrize("fails", ["prepare", "prove"])
@pytest.mark.parametrize("meanwhile", ["another driver", "a fresh engine"])
def test_a_rollout_whose_first_update_there_is_refused_says_no_version_that_is_gone(
    engine: Engine, trainer: TensorBridge, endpoint: RolloutEndpoint, meanwhile: str, fails: str
) -> None:
    if meanwhile == "another driver":
        with driven(engine) as (other, _):
            other.update_weights(publish(trainer, 2))
    else:
        engine.start(len(engine.ranks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.models[0], fails, broken)
        answer = updated(endpoint, trainer, 3)
    assert (answer.outcome, answer.active_version) == ("refused", None)
    with pytest.raises(WeightBridgeUnavailableError):
        endpoint.check_servable()
    assert updated(endpoint, trainer, 4).active_version == endpoint.check_servable() == 4
    endpoint.close()


@pytest.mark.parametrize("fails", ["prepare", "prove"])
def test_a_rollout_whose_first_update_there_is_refused_keeps_the_version_that_is_there(
    engine: Engine, trainer: TensorBridge, endpoint: RolloutEndpoint, fails: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.models[0], fails, broken)
        answer = updated(endpoint, trainer, 3)
    assert (answer.outcome, answer.active_version) == ("refused", 1)
    assert endpoint.check_servable() == engine.told()["weight_version"] == 1
    endpoint.close()


def test_a_rollout_whose_engine_another_driver_has_says_no_version_and_names_the_driver(
    engine: Engine, trainer: TensorBridge, endpoint: RolloutEndpoint
) -> None:
    with driven(engine) as (other, _):
        other.update_weights(publish(trainer, 2))
        answer = updated(endpoint, trainer, 3)
        assert (answer.error, answer.active_version) == ("SessionRefused", None)
        assert "has this engine" in answer.message
    assert updated(endpoint, trainer, 4).active_version == 4
    endpoint.close()
