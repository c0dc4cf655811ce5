"""An engine that is back at a version is said to be, whatever stood in it meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rl_bridge import (
    RolloutExecutor,
    TensorBridge,
    TornEngine,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    make_weight_bridge,
)
from rl_bridge.engines.sglang.model_installer import SGLangModelInstaller
from rl_bridge.vllm import VLLMEngineAdapter
from tests.integrations.sglang_drivers import Engine as SGLangEngine
from tests.integrations.sglang_drivers import engine as sglang_engine
from tests.integrations.sglang_drivers import importing
from tests.integrations.sglang_drivers import update as sglang_update
from tests.integrations.test_engine_adapter import Engine, broken, driver, engine, trainer
from tests.integrations.test_rank import publish
from tests.integrations.test_sglang_exchange import Model, equal, held, loaded, version

__all__ = ["engine", "sglang_engine", "trainer"]  # fixtures, for this file, too


def interrupted(**_given: Any) -> bool:
    raise KeyboardInterrupt


def kept(**_given: Any) -> bool:
    """Cached blocks stay: requests hold them."""
    return False


def test_a_driver_that_recovers_from_its_own_update_says_the_version_that_is_back(
    engine: Engine, trainer: TensorBridge
) -> None:
    with driver(engine) as (executor, bridge):
        one = publish(trainer, 1)
        executor.update_weights(one)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bridge, "acknowledge", broken)
            told = iter([True])
            patch.setattr(engine, "reset_caches", lambda **_: next(told, False))
            with pytest.raises(TornEngine, match="cached blocks"):
                executor.update_weights(publish(trainer, 2))
            with pytest.raises(WeightBridgeError, match="cached blocks"):
                executor.update_weights(publish(trainer, 3))
        assert executor.active_weight_update_id == one.update_id  # which its undo leads back to
        executor.recover()
        executor.check_servable()
        assert executor.active_weight_version == engine.rank.describe()["weight_version"] == 1


@pytest.mark.parametrize("reset", [kept, interrupted])
def test_a_driver_that_takes_back_what_a_dead_one_left_says_the_version_that_is_back(
    engine: Engine, trainer: TensorBridge, reset: Any
) -> None:
    """Also where that goes wrong once; and it says none as long as the other one's is there."""
    with driver(engine) as (executor, _):
        executor.update_weights(publish(trainer, 1))
        dead, left = VLLMEngineAdapter(engine), publish(trainer, 2)
        dead.prepare(left, {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.rank._installer, "prove", broken)
            patch.setattr(engine.rank, "undo", lambda *_args, **_given: {})
            with pytest.raises(WeightBridgeError, match="planted"):
                dead.install(left, {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "reset_caches", reset)
            with pytest.raises((WeightBridgeError, KeyboardInterrupt)):
                executor.update_weights(publish(trainer, 3))
        assert executor.active_weight_version is None
        executor.recover()
        executor.check_servable()
        assert executor.active_weight_update_id == engine.rank.describe()["update_id"]
        assert executor.active_weight_version == engine.rank.describe()["weight_version"] == 1


def test_a_driver_says_no_version_of_a_mixture_that_began_as_its_own(
    engine: Engine, trainer: TensorBridge
) -> None:
    """Another trainer's came in between; who installs the first one's again dies half-way."""
    with (
        make_weight_bridge("shared-memory", source_worker="other") as other,
        driver(engine) as (executor, _),
    ):
        one = publish(trainer, 1)
        executor.update_weights(one)
        with driver(engine) as (second, _):
            second.update_weights(publish(other, 2))
        executor.recover()
        dead = VLLMEngineAdapter(engine)
        dead.prepare(one, {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.rank._installer, "prove", broken)
            patch.setattr(engine.rank, "undo", lambda *_args, **_given: {})
            with pytest.raises(WeightBridgeError, match="planted"):
                dead.install(one, {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "reset_caches", kept)
            with pytest.raises(WeightBridgeError, match="cached blocks"):
                executor.update_weights(publish(trainer, 3))
        assert executor.active_weight_version is None
        with pytest.raises(WeightBridgeUnavailableError, match="another driver"):
            executor.check_servable()


@contextmanager
def sglang_driver(engine: SGLangEngine) -> Iterator[tuple[RolloutExecutor, TensorBridge]]:
    with (
        make_weight_bridge("local", source_worker="rollout") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=importing(engine)) as executor,
    ):
        yield executor, bridge


def torn(
    engine: SGLangEngine, executor: RolloutExecutor, bridge: TensorBridge, *updates: Any
) -> None:
    """Updates that fail behind their install, while prefixes that they made cannot be dropped."""
    engine.flushes = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor.weight_install_adapter, "_flush", lambda: None)  # as cache="keep"
        patch.setattr(bridge, "acknowledge", broken)
        for one in updates:
            with pytest.raises(TornEngine):
                executor.update_weights(one)
    engine.flushes = True


def test_a_driver_of_sglang_that_recovers_says_the_version_that_is_back(
    sglang_engine: SGLangEngine,
) -> None:
    with (
        make_weight_bridge("local", source_worker="trainer") as trainer,
        sglang_driver(sglang_engine) as (executor, bridge),
    ):
        one, two, three = (trainer.publish(version(n), weight_version=n) for n in (1, 2, 3))
        executor.update_weights(one)
        torn(sglang_engine, executor, bridge, two, three)
        assert executor.active_weight_update_id == one.update_id
        executor.recover()
        executor.check_servable()
        assert executor.active_weight_update_id == one.update_id
        assert equal(held(sglang_engine.model), loaded(1))


def test_a_driver_of_sglang_says_no_version_of_an_engine_that_is_back_at_its_start(
    sglang_engine: SGLangEngine,
) -> None:
    """It was started anew, and the version that it had is installed again, and torn."""
    with (
        make_weight_bridge("local", source_worker="trainer") as trainer,
        sglang_driver(sglang_engine) as (executor, bridge),
    ):
        one, two = (trainer.publish(version(n), weight_version=n) for n in (1, 2))
        executor.update_weights(one)
        sglang_engine.model = Model()
        executor.recover()
        torn(sglang_engine, executor, bridge, one, two)
        assert executor.active_weight_version is None
        executor.recover()
        assert not equal(held(sglang_engine.model), loaded(1))
        with pytest.raises(WeightBridgeUnavailableError, match="started anew"):
            executor.check_servable()


def test_a_driver_of_sglang_says_no_version_of_a_mixture_that_began_as_its_own(
    sglang_engine: SGLangEngine,
) -> None:
    with (
        make_weight_bridge("local", source_worker="trainer") as trainer,
        make_weight_bridge("local", source_worker="other") as other,
        sglang_driver(sglang_engine) as (executor, _),
    ):
        one, three = (trainer.publish(version(n), weight_version=n) for n in (1, 3))
        executor.update_weights(one)
        sglang_update(importing(sglang_engine), other.publish(version(2), weight_version=2))
        executor.recover()
        dead = importing(sglang_engine)
        dead.prepare(one, {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SGLangModelInstaller, "install", broken)
            with pytest.raises(WeightBridgeError, match="planted"):
                dead.install(one, {})
        sglang_engine.flushes = False
        with pytest.raises(TornEngine, match="cached prefixes"):
            executor.update_weights(three)
        assert executor.active_weight_version is None
        with pytest.raises(WeightBridgeUnavailableError, match="another driver"):
            executor.check_servable()


def test_a_driver_of_sglang_says_no_version_while_a_dead_ones_update_stays(
    sglang_engine: SGLangEngine,
) -> None:
    with (
        make_weight_bridge("local", source_worker="trainer") as bridge,
        make_weight_bridge("local", source_worker="rollout") as rollout,
        RolloutExecutor(
            weight_bridge=rollout, weight_install_adapter=importing(sglang_engine)
        ) as executor,
    ):
        one, two, three = (bridge.publish(version(n), weight_version=n) for n in (1, 2, 3))
        executor.update_weights(one)
        dead = importing(sglang_engine)
        dead.prepare(two, {})
        dead.install(two, {})
        dead.resume()
        sglang_engine.flushes = False
        with pytest.raises(WeightBridgeError, match="cached prefixes"):
            executor.update_weights(three)
        assert equal(held(sglang_engine.model), loaded(2))
        with pytest.raises((WeightBridgeUnavailableError, TornEngine)):
            executor.check_servable()
        sglang_engine.flushes = True
        executor.recover()
        executor.check_servable()
        assert executor.active_weight_version == 1
        assert equal(held(sglang_engine.model), loaded(1))
