"""SGLang's session: an engine has one, and while it is open every other update is refused."""

from collections.abc import Iterator

import pytest

from rl_bridge import (
    RolloutExecutor,
    TensorBridge,
    WeightUpdateRejectedError,
    make_weight_bridge,
)
from rl_bridge.engines.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.errors import SessionRefused
from tests.installers.test_model_installer import equal, held, loaded, version
from tests.integrations.sglang_engine import (
    Client,
    Engine,
    LostError,
    engine,
    importing,
    loading,
    update,
)

__all__ = ["engine"]  # a fixture, for this file, too


@pytest.fixture
def executor(engine: Engine) -> Iterator[RolloutExecutor]:
    with (
        make_weight_bridge("shared-memory", source_worker="rollout") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=loading(engine)) as made,
    ):
        yield made


def client_of(executor: RolloutExecutor) -> Client:
    adapter = executor.weight_install_adapter
    assert isinstance(adapter, SGLangInstallAdapter)
    assert isinstance(adapter._client, Client)
    return adapter._client


@pytest.mark.parametrize("is_made", [False, True], ids=["call_lost", "answer_lost"])
@pytest.mark.parametrize(
    "call", ["begin_weight_update", "update_weights_from_tensor", "end_weight_update", "prove"]
)
def test_a_session_that_was_cut_off_anywhere_is_closed_with_the_undo(
    engine: Engine, trainer: TensorBridge, executor: RolloutExecutor, call: str, *, is_made: bool
) -> None:
    before = held(engine.model)
    client_of(executor).lose(call, is_made=is_made)
    with pytest.raises(LostError):
        executor.update_weights(trainer.publish(version(1), weight_version=1))
    assert not engine.is_in_session
    assert equal(held(engine.model), before)
    executor.update_weights(trainer.publish(version(2), weight_version=2))
    assert equal(held(engine.model), loaded(2))


@pytest.mark.parametrize("is_made", [False, True], ids=["call_lost", "answer_lost"])
def test_an_end_that_is_lost_behind_a_failed_load_is_asked_for_again(
    engine: Engine, trainer: TensorBridge, executor: RolloutExecutor, *, is_made: bool
) -> None:
    engine.refuses = "update_weights_from_tensor"
    client_of(executor).lose("end_weight_update", is_made=is_made)
    with pytest.raises(LostError):
        executor.update_weights(trainer.publish(version(1), weight_version=1))
    assert not engine.is_in_session
    engine.refuses = ""
    executor.update_weights(trainer.publish(version(2), weight_version=2))
    assert equal(held(engine.model), loaded(2))


def test_a_load_that_comes_behind_a_take_over_is_not_let_in_and_its_session_is_closed(
    engine: Engine, trainer: TensorBridge, executor: RolloutExecutor
) -> None:
    """It would write over what the other driver has proven, and nobody would look again."""
    mine, theirs = (trainer.publish(version(n), weight_version=n) for n in (1, 2))
    late, successor = client_of(executor), importing(engine, take_over=True)
    late.before("begin_weight_update", lambda: update(successor, theirs))
    with pytest.raises(SessionRefused, match="has this engine"):
        executor.update_weights(mine)
    assert not engine.is_in_session
    assert equal(held(engine.model), loaded(2))


def test_a_session_that_a_dead_driver_left_open_is_closed_by_whoever_takes_over(
    engine: Engine, trainer: TensorBridge
) -> None:
    before = held(engine.model)
    dead, manifest = loading(engine), trainer.publish(version(1), weight_version=1)
    dead.prepare(manifest, version(1))
    assert isinstance(dead._client, Client)
    dead._client.lose("end_weight_update", is_made=False)
    with pytest.raises(LostError):
        dead.install(manifest, version(1))
    left_open = engine.is_in_session
    importing(engine).take_over()
    assert (left_open, engine.is_in_session) == (True, False)
    assert equal(held(engine.model), before)


def test_a_session_of_somebody_elses_stays_open(
    engine: Engine, trainer: TensorBridge, executor: RolloutExecutor
) -> None:
    engine.turn_session(is_on=True)
    with pytest.raises(WeightUpdateRejectedError, match="SGLang refused begin_weight_update"):
        executor.update_weights(trainer.publish(version(1), weight_version=1))
    assert engine.is_in_session
    assert not engine.is_paused
