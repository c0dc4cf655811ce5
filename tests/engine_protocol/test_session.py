"""One driver at a time: another one is refused by name, and recover() takes the engine over."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from rl_bridge import (
    EngineLost,
    RolloutExecutor,
    TensorBridge,
    TornEngine,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateManifest,
)
from rl_bridge.engines.driver import EngineDriver
from rl_bridge.engines.session import Session
from rl_bridge.errors import SessionRefused
from tests.engine_protocol.fake import Engine, broken, client_of, driven, driver, publish, update

NAMED = rf"driver .*process {os.getpid()} on .* has this engine"


def test_a_second_driver_is_refused_by_the_name_of_the_first(
    engine: Engine, trainer: TensorBridge
) -> None:
    first, manifest = publish(trainer, 1), publish(trainer, 2)
    with driven(engine) as (one, _, _), driven(engine) as (other, _, client):
        one.update_weights(first)
        with pytest.raises(SessionRefused, match=NAMED) as caught:
            other.update_weights(manifest)
        assert "recover()" in str(caught.value)
        assert set(client.calls) == {"describe"}, "it has touched nothing"
        one.check_servable()
        assert (one.active_weight_version, other.active_weight_version) == (1, None)
        one.update_weights(manifest)  # nothing is wrong with it
    assert engine.version == 2


def test_an_update_that_was_refused_at_the_door_may_come_again(
    engine: Engine, trainer: TensorBridge
) -> None:
    with driven(engine) as (one, _, _):
        one.update_weights(publish(trainer, 0))
        manifest = publish(trainer, 1)
        with driven(engine) as (other, _, _):
            with pytest.raises(SessionRefused) as caught:
                other.update_weights(manifest)
            assert "may be installed again" in caught.value.__notes__[-1]
            other.recover()
            other.update_weights(manifest)
    assert engine.version == 1


def test_a_driver_that_leaves_leaves_the_engine_to_the_next_one(
    engine: Engine, trainer: TensorBridge
) -> None:
    for version in (1, 2, 3):
        with driven(engine) as (executor, _, _):
            executor.update_weights(publish(trainer, version))
    assert engine.version == 3
    assert [rank.session.epoch for rank in engine.ranks] == [3] * len(engine.ranks)


def test_an_adapter_that_was_left_has_the_engine_again_with_its_next_update(
    engine: Engine, trainer: TensorBridge
) -> None:
    adapter = driver(engine)
    for version in (1, 2):
        update(adapter, publish(trainer, version))
        adapter.close()
    assert engine.version == 2


Step = Callable[[EngineDriver, WeightUpdateManifest], object]
STEPS: dict[str, Step] = {
    "prepare": lambda late, manifest: late.prepare(manifest, {}),
    "install": lambda late, manifest: late.install(manifest, {}),
    "resume": lambda late, _: late.resume(),
    "undo": lambda late, _: late.undo(),
    "commit": lambda late, _: late.commit(),
}


@pytest.mark.parametrize("step", STEPS)
def test_every_step_of_a_driver_that_was_taken_over_is_refused_by_name_and_changes_nothing(
    engine: Engine, trainer: TensorBridge, step: str
) -> None:
    mine, theirs = publish(trainer, 1), publish(trainer, 2)
    late, successor = driver(engine), driver(engine, take_over=True)
    for name, take in STEPS.items():
        if name in {step, "undo"}:
            break
        take(late, mine)
    if step == "commit":
        late.resume()
    update(successor, theirs)
    seen = engine.modes.copy(), engine.shown, engine.versions
    with pytest.raises((SessionRefused, TornEngine), match=NAMED):
        STEPS[step](late, mine)
    assert (engine.modes, engine.shown, engine.versions) == seen
    assert engine.is_idle()
    assert late.is_overtaken
    assert not successor.is_overtaken


@pytest.mark.parametrize("step", ["install", "resume"])
def test_a_driver_that_was_taken_over_in_its_pause_ends_no_pause_of_its_successors(
    engine: Engine, trainer: TensorBridge, step: str
) -> None:
    mine, theirs = publish(trainer, 1), publish(trainer, 2)
    late, successor = driver(engine), driver(engine, take_over=True)
    late.prepare(mine, {})
    if step == "resume":
        late.install(mine, {})
    successor.prepare(theirs, {})
    successor.install(theirs, {})
    with pytest.raises(SessionRefused, match=NAMED):
        STEPS[step](late, mine)
    with pytest.raises((SessionRefused, TornEngine), match=NAMED):
        late.undo()
    assert engine.stopped
    successor.resume()
    successor.commit()
    assert engine.is_idle()
    assert engine.version == 2


def test_an_executor_whose_engine_was_taken_over_holds_no_version(
    engine: Engine, trainer: TensorBridge
) -> None:
    with driven(engine) as (one, _, _):
        one.update_weights(publish(trainer, 1))
        with driven(engine) as (other, _, _):
            other.recover()
            other.update_weights(publish(trainer, 2))
            with pytest.raises(SessionRefused, match=NAMED):
                one.update_weights(publish(trainer, 3))
            assert one.active_weight_version is None
            with pytest.raises(WeightBridgeUnavailableError):
                one.check_servable()
            other.check_servable()
            one.recover()
            one.update_weights(publish(trainer, 4))
            one.check_servable()
            with pytest.raises(SessionRefused, match=NAMED):
                other.update_weights(publish(trainer, 5))
    assert engine.version == 4


def test_an_executor_that_was_taken_over_behind_its_install_is_torn_until_it_recovers(
    engine: Engine, trainer: TensorBridge
) -> None:
    mine, theirs = publish(trainer, 1), publish(trainer, 2)
    with driven(engine) as (late, _, client), driven(engine) as (successor, _, _):

        def overtaken() -> None:
            successor.recover()  # all ranks have proven the late one's: it is committed by that
            successor.update_weights(theirs)

        client.plant("serves", overtaken)
        with pytest.raises(TornEngine, match=NAMED):
            late.update_weights(mine)
        assert engine.version == 2
        assert engine.is_idle()
        late.recover()
        assert not late.is_torn
        assert late.active_weight_version is None
        with pytest.raises(SessionRefused):
            successor.update_weights(publish(trainer, 3))
        late.update_weights(publish(trainer, 4))
        late.check_servable()
    assert engine.version == 4


def test_taking_over_is_for_the_first_update_alone(engine: Engine, trainer: TensorBridge) -> None:
    """Else two drivers would take the engine from each other for ever."""
    one, other = driver(engine, take_over=True), driver(engine, take_over=True)
    update(one, publish(trainer, 1))
    update(other, publish(trainer, 2))
    with pytest.raises(SessionRefused, match=NAMED):
        one.prepare(publish(trainer, 3), {})


def test_recovering_an_engine_that_is_ones_own_changes_nothing(
    engine: Engine, trainer: TensorBridge
) -> None:
    with driven(engine) as (executor, _, client):
        executor.update_weights(publish(trainer, 1))
        epoch = client.epoch
        executor.recover()
        executor.check_servable()
        assert (executor.active_weight_version, client.epoch) == (1, epoch)
        executor.update_weights(publish(trainer, 2))


@pytest.mark.parametrize("by", ["update", "refused", "recover"])
def test_an_engine_that_was_started_anew_holds_no_version_until_it_gets_one(
    engine: Engine, trainer: TensorBridge, by: str
) -> None:
    with driven(engine) as (executor, _, _):
        executor.update_weights(publish(trainer, 1))
        engine.start(len(engine.ranks))
        if by == "recover":
            executor.recover()
        elif by == "refused":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine.models[0], "prepare", broken)
                with pytest.raises(WeightBridgeError, match="planted"):
                    executor.update_weights(publish(trainer, 2))
        if by != "update":
            assert executor.active_weight_version is None
            with pytest.raises(WeightBridgeUnavailableError):
                executor.check_servable()
        executor.update_weights(publish(trainer, 3))
        executor.check_servable()
    assert engine.version == 3


def test_an_engine_that_was_started_anew_in_an_update_is_torn_until_it_gets_a_version(
    engine: Engine, trainer: TensorBridge
) -> None:
    with driven(engine) as (executor, _, client):
        executor.update_weights(publish(trainer, 1))
        client.plant("serves", lambda: engine.start(len(engine.ranks)))
        with pytest.raises(TornEngine, match="started anew"):
            executor.update_weights(publish(trainer, 2))
        executor.recover()
        assert executor.active_weight_version is None
        executor.update_weights(publish(trainer, 3))
        executor.check_servable()
    assert engine.version == 3


def test_an_engine_that_a_driver_has_left_is_told_as_that(
    engine: Engine, trainer: TensorBridge
) -> None:
    late, manifest = driver(engine), publish(trainer, 1)
    late.prepare(manifest, {})
    other = driver(engine, take_over=True)
    update(other, publish(trainer, 2))
    other.leave()
    with pytest.raises(SessionRefused, match=r"no driver has this engine .*had it last"):
        late.install(manifest, {})


def test_a_session_that_only_some_ranks_heard_of_is_opened_again(trainer: TensorBridge) -> None:
    engine = Engine(2)
    engine.ranks[1].session.open("lost", "somebody lost", 7, take_over=False)
    adapter, manifest = driver(engine), publish(trainer, 1)
    with pytest.raises(SessionRefused, match="driver somebody lost has this engine"):
        adapter.prepare(manifest, {})
    adapter.take_over()
    update(adapter, manifest)
    assert {rank.session.epoch for rank in engine.ranks} == {8}
    engine.close()


def test_a_call_that_comes_without_a_session_is_refused(engine: Engine) -> None:
    for verb in ("prepare", "pauses", "install", "undo", "abandon", "commit", "leave"):
        for reply in engine.ask(verb, {"driver": "nobody", "epoch": 0}):
            assert (reply["ok"], reply["type"]) == (False, "SessionRefused")


def test_an_opening_that_comes_late_opens_nothing() -> None:
    session = Session()
    session.open("one", "driver 1", 3, take_over=False)
    session.leave()
    with pytest.raises(SessionRefused, match="too late"):
        session.open("other", "driver 2", 3, take_over=True)
    session.open("other", "driver 2", 4, take_over=False)
    assert (session.driver, session.epoch) == ("other", 4)


def test_an_engine_that_is_gone_does_not_keep_its_executor_from_closing(
    engine: Engine, trainer: TensorBridge
) -> None:
    def gone(*_args: Any) -> None:
        raise EngineLost("planted")

    with driven(engine) as (executor, _, client):
        executor.update_weights(publish(trainer, 1))
        client.plant("leave", gone)


def test_a_driver_that_failed_to_take_over_tries_again(
    engine: Engine, trainer: TensorBridge
) -> None:
    update(driver(engine), publish(trainer, 1))
    adapter = driver(engine)
    client_of(adapter).plant("open", broken)
    with pytest.raises(RuntimeError, match="planted"):
        adapter.take_over()
    assert adapter.take_over()
    update(adapter, publish(trainer, 2))
    assert engine.version == 2


def test_the_refusal_names_the_driver_whose_executor_it_is(
    engine: Engine, trainer: TensorBridge
) -> None:
    with driven(engine) as (one, _, _):
        assert isinstance(one, RolloutExecutor)
        one.update_weights(publish(trainer, 1))
        said = {reply["driver_name"] for reply in engine.ask("describe", {})}
    assert len(said) == 1
    assert str(os.getpid()) in said.pop()
