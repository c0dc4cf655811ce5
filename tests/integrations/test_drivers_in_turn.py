"""Executors that take turns at one engine, or outlive it: what each says that the engine holds."""

from typing import Any

import pytest

from rl_bridge import (
    EngineLost,
    TensorBridge,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.engines.vllm.client import Replies
from rl_bridge.errors import DeadlineExceeded
from rl_bridge.vllm import VLLMEngineAdapter
from tests.integrations.test_engine_adapter import Engine, broken, driver, engine, trainer
from tests.integrations.test_rank import Model, publish, rank_with

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


@pytest.mark.parametrize("fails", ["prepare", "prove"])
def test_an_executor_does_not_say_its_own_version_of_an_engine_that_holds_another_ones(
    engine: Engine, trainer: TensorBridge, fails: str
) -> None:
    with driver(engine) as (one, _), driver(engine) as (other, _):
        one.update_weights(publish(trainer, 1))
        theirs = publish(trainer, 2)
        other.update_weights(theirs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.rank._installer, fails, broken)
            with pytest.raises(WeightUpdateRejectedError, match="planted") as caught:
                one.update_weights(publish(trainer, 3))
        assert "nothing of this executor's" in caught.value.__notes__[-1]
        assert engine.rank.describe()["update_id"] == theirs.update_id
        assert engine.shown == f"2@{theirs.root}"
        assert one.active_weight_version is None
        with pytest.raises(WeightBridgeUnavailableError, match="another driver has updated it"):
            one.check_servable()
        other.check_servable()
        one.update_weights(publish(trainer, 4))
        one.check_servable()
        assert one.active_weight_version == 4


def test_an_executor_does_not_say_its_own_version_where_a_dead_drivers_one_serves(
    engine: Engine, trainer: TensorBridge
) -> None:
    with driver(engine) as (one, _):
        one.update_weights(publish(trainer, 1))
        theirs, dead = publish(trainer, 2), VLLMEngineAdapter(engine)
        dead.prepare(theirs, {})
        dead.install(theirs, {})
        dead.resume()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "reset_caches", lambda **_: False)
            with pytest.raises(WeightUpdateRejectedError):
                one.update_weights(publish(trainer, 3))
        assert engine.shown == f"2@{theirs.root}"
        assert one.active_weight_version is None


def test_a_commit_that_another_driver_has_gone_on_from_keeps_no_engine_torn(
    engine: Engine, trainer: TensorBridge
) -> None:
    real = engine.call

    def loses(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        told = real(verb, payload)
        if verb == "commit":
            raise DeadlineExceeded("planted")
        return told

    with driver(engine) as (one, _), driver(engine) as (other, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "call", loses)
            one.update_weights(publish(trainer, 1))
        other.update_weights(publish(trainer, 2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.rank._installer, "prove", broken)
            with pytest.raises(WeightUpdateRejectedError, match="planted"):
                one.update_weights(publish(trainer, 3))
        assert not one.is_torn
        one.recover()
        assert engine.rank.describe()["weight_version"] == 2


def test_a_version_that_is_in_no_engine_any_more_is_told_and_installed_again(
    engine: Engine, trainer: TensorBridge
) -> None:
    def gone(*_args: Any, **_options: Any) -> Replies:
        raise EngineLost("planted")

    manifest, first = publish(trainer, 1), engine.rank
    with driver(engine) as (executor, _):
        executor.update_weights(manifest)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "call", gone)
            with pytest.raises(EngineLost, match="planted") as caught:
                executor.update_weights(publish(trainer, 2))
        assert "not known before recover()" in caught.value.__notes__[-1]
        first.close()
        engine.rank = rank_with(Model())  # it is started anew
        executor.recover()
        with pytest.raises(WeightBridgeUnavailableError, match="was started anew"):
            executor.check_servable()
        executor.update_weights(manifest)
        executor.check_servable()
        assert engine.rank.describe()["update_id"] == manifest.update_id
        engine.rank.close()


def test_an_executor_whose_own_commit_is_still_due_goes_on_saying_its_version(
    engine: Engine, trainer: TensorBridge
) -> None:
    real = engine.call

    def late(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        if verb == "commit":
            raise DeadlineExceeded("planted")
        return real(verb, payload)

    with driver(engine) as (executor, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "call", late)
            executor.update_weights(publish(trainer, 1))
            patch.setattr(engine, "reset_caches", lambda **_: False)
            with pytest.raises(WeightUpdateRejectedError, match="hold cached blocks"):
                executor.update_weights(publish(trainer, 2))
        executor.check_servable()
        assert executor.active_weight_version == 1


def test_an_update_that_is_staged_when_its_answer_is_lost_may_come_again(
    engine: Engine, trainer: TensorBridge
) -> None:
    real, manifest = engine.call, publish(trainer, 1)

    def lost(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        told = real(verb, payload)
        if verb == "prepare":
            raise EngineLost("planted")
        return told

    with driver(engine) as (executor, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "call", lost)
            with pytest.raises(EngineLost, match="planted"):
                executor.update_weights(manifest)
        executor.update_weights(manifest)
    assert engine.rank.describe()["update_id"] == manifest.update_id
