"""An executor of an SGLang engine says no version of its own where the engine holds another's."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rl_bridge import (
    RolloutExecutor,
    TensorBridge,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    make_weight_bridge,
)
from tests.integrations.sglang_drivers import Engine, engine, importing, interrupt, trainer, update
from tests.integrations.test_sglang_exchange import Model, equal, held, loaded, version

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


def broken() -> None:
    raise WeightBridgeError("planted")


@contextmanager
def driven(engine: Engine) -> Iterator[RolloutExecutor]:
    with (
        make_weight_bridge("local", source_worker="rollout") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=importing(engine)) as executor,
    ):
        yield executor


@pytest.mark.parametrize("call", ["prepare", "install", "prove"])
def test_an_update_that_fails_where_another_driver_was_in_between_leaves_no_version_of_ones_own(
    engine: Engine, trainer: TensorBridge, call: str
) -> None:
    mine, theirs, failing = (trainer.publish(version(n), weight_version=n) for n in (1, 2, 3))
    with driven(engine) as executor:
        executor.update_weights(mine)
        update(importing(engine), theirs)
        interrupt(executor.weight_install_adapter, call, broken)  # type: ignore[arg-type]
        with pytest.raises(WeightBridgeError, match="planted"):
            executor.update_weights(failing)
        assert equal(held(engine.model), loaded(2))
        assert executor.active_weight_version is None
        with pytest.raises(WeightBridgeUnavailableError, match="another driver has updated it"):
            executor.check_servable()
        executor.update_weights(trainer.publish(version(4), weight_version=4))
        executor.check_servable()
        assert equal(held(engine.model), loaded(4))


def test_an_engine_that_was_started_anew_is_told_as_that_when_its_executor_recovers(
    engine: Engine, trainer: TensorBridge
) -> None:
    with driven(engine) as executor:
        executor.update_weights(trainer.publish(version(1), weight_version=1))
        engine.model = Model()
        executor.recover()
        assert executor.active_weight_version is None
        with pytest.raises(WeightBridgeUnavailableError, match="or it was started anew"):
            executor.check_servable()
