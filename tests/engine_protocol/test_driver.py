"""One driver of an engine: all ranks or none; the pause, the caches and the label of an update."""

import errno
import os
from typing import Any

import pytest

from rl_bridge import (
    EngineLost,
    RolloutExecutor,
    TensorBridge,
    TornEngine,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.engines.driver import EngineDriver
from rl_bridge.engines.serving import ServingOptions, default_label
from rl_bridge.errors import DeadlineExceeded, DriverError, IncompatibleUpdate, TransportUnavailable
from rl_bridge.groups import GroupBridge
from rl_bridge.groups.bridge import GROUP
from tests.engine_protocol.fake import (
    Engine,
    Loads,
    broken,
    client_of,
    driven,
    driver,
    publish,
    update,
)

STEPS = ["prepare", "install", "prove"]


def late(*_args: Any) -> None:
    raise DeadlineExceeded("planted")


# ---- all ranks or none --------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_fed", [False, True], ids=["import", "load"])
def test_a_rank_that_fails_takes_the_others_back_and_the_next_update_works(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch, step: str, rank: int, *, is_fed: bool
) -> None:
    engine = Engine(2)
    adapter = driver(engine, loader=Loads(engine) if is_fed else None)
    with driven(engine, adapter) as (executor, _, _):
        executor.update_weights(publish(trainer, 1))
        with monkeypatch.context() as patch:
            name = "begin" if is_fed and step == "install" else step
            patch.setattr(engine.models[rank], name, broken)
            with pytest.raises(WeightUpdateRejectedError, match=f"rank {rank}: RuntimeError: plan"):
                executor.update_weights(publish(trainer, 2))
        assert engine.versions == [1, 1]
        assert engine.is_idle()
        assert executor.active_weight_version == 1
        executor.update_weights(publish(trainer, 3))
    assert engine.versions == [3, 3]
    engine.close()


def test_ranks_go_back_within_the_call_that_failed(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step of the model comes in between, whatever becomes of the driver."""
    engine, adapter = Engine(2), None
    adapter = driver(engine)
    manifest = publish(trainer, 1)
    adapter.prepare(manifest, {})
    monkeypatch.setattr(engine.models[1], "prove", broken)
    with pytest.raises(WeightUpdateRejectedError, match="planted"):
        adapter.install(manifest, {})
    assert engine.versions == [0, 0]
    engine.close()


def test_a_torn_rank_is_told_before_the_ranks_that_are_back(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(2)
    with driven(engine) as (executor, _, _):
        with monkeypatch.context() as patch:
            patch.setattr(engine.models[1], "prove", broken)
            patch.setattr(engine.models[1], "undo", broken)
            with pytest.raises(TornEngine, match="rank 1: "):
                executor.update_weights(publish(trainer, 1))
            assert engine.stopped
        executor.recover()
        assert engine.is_idle()
        assert engine.versions == [0, 0]
    engine.close()


def test_a_driver_that_reaches_some_of_the_ranks_only_is_refused_before_they_stage(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(2)
    real = engine.ask
    monkeypatch.setattr(engine, "ask", lambda *given: real(*given)[:1])
    with pytest.raises(WeightBridgeUnavailableError, match="1 of the engine's ranks answered"):
        driver(engine).prepare(publish(trainer, 1), {})
    assert engine.ranks[0].session.epoch == 0
    engine.close()


def test_an_acknowledgement_of_each_rank_reaches_the_trainer(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1)
    update(driver(engine), manifest)
    told = {report.rank: report for report in trainer.holders(manifest)}
    assert set(told) == set(range(len(engine.ranks)))
    for report in told.values():
        assert dict(report.proof or {})["root"] == manifest.root
        assert report.tensors_held == 0


# ---- updates that come again, or never ----------------------------------------------------------


def exhausted(*_args: Any, **_options: Any) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Elsewhere(WeightBridgeUnavailableError):
    """Of a transport of somebody's own: the driver does not have it."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        DriverError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", "no memory is left", "Free some."),
        TransportUnavailable("cuda-vmm", "no device is left", "Use another one."),
        Elsewhere("nothing is left. Use less."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_rank_is_short_of_costs_no_update_whichever_error_tells_it(
    engine: Engine, trainer: TensorBridge, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    manifest = publish(trainer, 1)
    with driven(engine) as (executor, _, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.models[-1], "prepare", fail)
            with pytest.raises(WeightBridgeUnavailableError) as caught:
                executor.update_weights(manifest)
            assert "may be installed again" in caught.value.__notes__[-1]
        executor.update_weights(manifest)
    assert engine.version == 1


def test_a_refusal_is_told_before_what_another_rank_is_only_short_of(trainer: TensorBridge) -> None:
    engine = Engine(2)

    def refuses(*_: object) -> None:
        raise IncompatibleUpdate("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.models[0], "prepare", exhausted)
        patch.setattr(engine.models[1], "prepare", refuses)
        with pytest.raises(IncompatibleUpdate, match="rank 1: planted"):
            driver(engine).prepare(publish(trainer, 1), {})
    engine.close()


def test_what_a_rank_refused_is_told_to_the_trainer_and_never_let_in_again(
    trainer: TensorBridge,
) -> None:
    engine, manifest = Engine(2), publish(trainer, 1)
    with driven(engine) as (executor, _, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.models[1], "prepare", broken)
        with pytest.raises(WeightUpdateRejectedError, match="rank 1: RuntimeError: planted"):
            executor.update_weights(manifest)
    told = {(r.worker, r.rank): r.reason for r in trainer.holders(manifest)}
    assert told["engine", 0] == "another rank refused it"
    assert told["engine", 1] == "RuntimeError: planted"
    with pytest.raises(WeightUpdateRejectedError, match="was rejected"):
        driver(engine).prepare(manifest, {})
    engine.close()


@pytest.mark.parametrize("behind", [False, True])
def test_an_update_whose_engine_does_not_answer_before_it_is_installed_may_come_again(
    engine: Engine, trainer: TensorBridge, *, behind: bool
) -> None:
    def lose() -> None:
        raise EngineLost("planted")

    manifest = publish(trainer, 1)
    with driven(engine) as (executor, _, client):
        client.plant("prepare", lose, behind=behind)
        with pytest.raises(EngineLost, match="planted"):
            executor.update_weights(manifest)
        executor.update_weights(manifest)
        executor.check_servable()
    assert engine.version == 1


def test_a_refusal_names_the_version_that_the_ranks_hold(
    engine: Engine, trainer: TensorBridge
) -> None:
    """An executor that begins anew knows of none that was installed before."""
    with driven(engine) as (executor, _, _):
        executor.update_weights(publish(trainer, 1))
    with driven(engine) as (executor, _, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.models[0], "prepare", broken)
        with pytest.raises(WeightBridgeError, match="planted") as caught:
            executor.update_weights(publish(trainer, 2))
    assert "ranks hold version 1." in "".join(caught.value.__notes__)


def test_what_was_assembled_of_a_group_is_refused_with_what_to_do(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1).model_copy(update={"transport": GROUP})
    with (
        GroupBridge() as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=driver(engine)) as executor,
        pytest.raises(WeightBridgeError),
    ):
        executor.update_weights(manifest)
    with pytest.raises(WeightBridgeUnavailableError, match="Publish what was assembled"):
        driver(engine).prepare(manifest, {})


# ---- answers that are lost, or another call's ---------------------------------------------------


def test_an_answer_to_another_call_is_not_taken(engine: Engine) -> None:
    real, said = engine.ask, list[Any]()

    def one_behind(*given: Any) -> Any:
        said.append(real(*given))
        return said[-2] if len(said) > 1 else said[-1]

    adapter = driver(engine)
    adapter.describe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "ask", one_behind)
        adapter.describe()
        with pytest.raises(EngineLost, match="out of step"):
            driver(engine).describe()


@pytest.mark.parametrize("is_made", [False, True])
def test_a_commit_whose_answer_is_lost_is_ended_by_the_next_update_and_never_undone(
    engine: Engine, trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch, *, is_made: bool
) -> None:
    adapter, manifest = driver(engine), publish(trainer, 1)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    adapter.resume()
    client_of(adapter).plant("commit", late, behind=is_made)
    with pytest.raises(DeadlineExceeded):
        adapter.commit()
    second = publish(trainer, 2)
    with monkeypatch.context() as patch:
        patch.setattr(engine.models[0], "prove", broken)
        adapter.prepare(second, {})
        with pytest.raises(WeightUpdateRejectedError, match="planted"):
            adapter.install(second, {})
    adapter.undo()
    assert engine.version == 1
    assert engine.shown == f"1@{manifest.root}"
    assert {reply["update_id"] for reply in engine.ask("describe", {})} == {manifest.update_id}
    assert engine.is_idle()


def test_a_commit_that_one_rank_fails_once_is_made_by_the_next_call(
    engine: Engine, trainer: TensorBridge
) -> None:
    failures = [OSError(28, "planted")]

    def fails_once() -> None:
        if failures:
            raise failures.pop()

    with driven(engine) as (executor, _, _), pytest.MonkeyPatch.context() as patch:
        executor.update_weights(publish(trainer, 1))
        patch.setattr(engine.models[-1], "commit", fails_once)
        executor.update_weights(publish(trainer, 2))
        assert not failures
        executor.update_weights(publish(trainer, 3))
    assert engine.version == 3


def test_a_commit_that_is_asked_for_again_says_nothing_more(
    engine: Engine, trainer: TensorBridge
) -> None:
    adapter = driver(engine)
    update(adapter, publish(trainer, 1))
    adapter.commit()
    adapter.undo()
    assert engine.version == 1


def test_a_trainer_that_cannot_be_told_is_a_warning(
    engine: Engine,
    trainer: TensorBridge,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lose(*_: object, **__: object) -> None:
        raise WeightBridgeError("the way back is gone")

    monkeypatch.setattr(TensorBridge, "acknowledge", lose)
    update(driver(engine), publish(trainer, 1))
    said = [r.getMessage() for r in caplog.records if r.name == "rl_bridge.engines.rpc"]
    assert len(said) == len(engine.ranks)
    assert "the way back is gone" in said[0]
    assert engine.version == 1


# ---- the pause ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["", "prepare", "prove", "acknowledge"])
def test_a_pause_of_the_users_own_outlasts_an_update_whatever_becomes_of_it(
    engine: Engine, trainer: TensorBridge, fails: str
) -> None:
    engine.stopped = True
    with driven(engine) as (executor, bridge, _), pytest.MonkeyPatch.context() as patch:
        if fails == "acknowledge":
            patch.setattr(bridge.consumer, "acknowledge", broken)
        elif fails:
            patch.setattr(engine.models[0], fails, broken)
        if fails:
            with pytest.raises(Exception, match="planted"):
                executor.update_weights(publish(trainer, 1))
        else:
            executor.update_weights(publish(trainer, 1))
    assert engine.stopped
    assert not engine.told()["paused"]


def test_what_the_user_froze_stays_frozen_whatever_the_driver_pauses_by(
    engine: Engine, trainer: TensorBridge
) -> None:
    engine.stopped = True
    update(driver(engine, serving=ServingOptions("wait", "recompute")), publish(trainer, 1))
    assert engine.modes == ["keep"]


def test_a_pause_of_the_users_own_outlasts_a_dead_driver_that_found_it(
    engine: Engine, trainer: TensorBridge
) -> None:
    engine.stopped = True
    dead, manifest = driver(engine), publish(trainer, 1)
    dead.prepare(manifest, {})
    dead.install(manifest, {})
    with driven(engine) as (executor, _, _):
        executor.recover()
        executor.update_weights(publish(trainer, 2))
    assert engine.stopped


def test_a_pause_of_the_users_own_outlasts_a_driver_that_died_before_its_own(
    engine: Engine, trainer: TensorBridge
) -> None:
    driver(engine).prepare(publish(trainer, 1), {})
    engine.stopped = True
    with driven(engine) as (executor, _, _):
        executor.recover()
        executor.update_weights(publish(trainer, 2))
    assert engine.stopped


@pytest.mark.parametrize("fails", ["prepare", "acknowledge", "pauses"])
def test_a_pause_of_the_users_own_outlasts_updates_behind_a_refused_one(
    engine: Engine, trainer: TensorBridge, fails: str
) -> None:
    with driven(engine) as (executor, bridge, client):
        with pytest.MonkeyPatch.context() as patch:
            if fails == "pauses":
                client.plant("pauses", broken, behind=True)
            elif fails == "acknowledge":
                patch.setattr(bridge.consumer, "acknowledge", broken)
            else:
                patch.setattr(engine.models[0], "prepare", broken)
            with pytest.raises(Exception, match="planted"):
                executor.update_weights(publish(trainer, 1))
        assert engine.is_idle()
        engine.stopped = True
        executor.update_weights(publish(trainer, 2))
    assert engine.stopped


def test_a_pause_that_fails_is_ended(engine: Engine, trainer: TensorBridge) -> None:
    with driven(engine) as (executor, _, client):
        client.plant("pause", broken, behind=True)
        with pytest.raises(RuntimeError, match="planted"):
            executor.update_weights(publish(trainer, 1))
        assert engine.is_idle()
        executor.update_weights(publish(trainer, 2))


def test_an_engine_that_does_not_go_on_is_told_until_it_does(
    engine: Engine, trainer: TensorBridge
) -> None:
    adapter, manifest = driver(engine), publish(trainer, 1)
    client = client_of(adapter)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    for step in (adapter.resume, adapter.undo, adapter.undo):
        client.plant("resume", late)
        with pytest.raises(DeadlineExceeded):
            step()
        assert engine.stopped
    adapter.undo()
    assert engine.is_idle()
    assert engine.version == 0


# ---- what the old weights cached ----------------------------------------------------------------


def test_requests_that_hold_what_the_policy_drops_have_the_update_undone(
    engine: Engine, trainer: TensorBridge
) -> None:
    with driven(engine) as (executor, _, _):
        executor.update_weights(publish(trainer, 1))
        engine.keeps = "requests hold some"
        with pytest.raises(WeightUpdateRejectedError, match="could not be dropped: requests hold"):
            executor.update_weights(publish(trainer, 2))
        assert engine.version == 1
        assert engine.is_idle()
        engine.keeps = ""
        executor.update_weights(publish(trainer, 3))


def test_what_cannot_be_undone_with_its_caches_is_kept_and_not_served(
    engine: Engine, trainer: TensorBridge
) -> None:
    with driven(engine) as (executor, bridge, _):
        executor.update_weights(publish(trainer, 1))
        manifest = publish(trainer, 2)

        def fail(*_: Any, **__: Any) -> None:
            engine.keeps = "requests hold some"
            raise RuntimeError("planted")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bridge.consumer, "acknowledge", fail)
            with pytest.raises(TornEngine, match=r"keeps what the version that is undone cached"):
                executor.update_weights(manifest)
        assert engine.stopped
        assert engine.version == 2
        with pytest.raises(TornEngine):
            executor.recover()
        engine.keeps = ""
        executor.recover()
        executor.check_servable()
        assert executor.active_weight_version == engine.version == 1
        assert engine.is_idle()


# ---- the label ----------------------------------------------------------------------------------


def test_a_label_is_taken_back_with_its_version(engine: Engine, trainer: TensorBridge) -> None:
    adapter, manifest = driver(engine), publish(trainer, 1)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    adapter.resume()
    assert engine.shown == f"1@{manifest.root}"
    adapter.undo()
    assert engine.shown == "0@"


def test_a_label_that_somebody_set_since_is_not_taken_back(
    engine: Engine, trainer: TensorBridge
) -> None:
    engine.serves = False
    adapter, manifest = driver(engine), publish(trainer, 1)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    adapter.resume()
    engine.shown = "another's"
    adapter.undo()
    assert engine.shown == "another's"


def test_a_label_that_an_undo_could_not_take_back_keeps_the_weights_until_it_does(
    engine: Engine, trainer: TensorBridge
) -> None:
    adapter, manifest = driver(engine), publish(trainer, 1)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    adapter.resume()
    client_of(adapter).plant("set_label", late)
    with pytest.raises(DeadlineExceeded):
        adapter.undo()
    assert engine.told()["pending"] == manifest.update_id
    assert engine.stopped
    adapter.undo()
    assert engine.shown == "0@"
    assert engine.is_idle()


def test_a_label_that_is_no_text_is_an_update_that_is_undone(
    engine: Engine, trainer: TensorBridge
) -> None:
    wrong: Any = lambda manifest: manifest.weight_version  # noqa: E731 - no text
    adapter = driver(engine, serving=ServingOptions("keep", "recompute", wrong))
    with (
        driven(engine, adapter) as (executor, _, _),
        pytest.raises(TypeError, match="expected a str"),
    ):
        executor.update_weights(publish(trainer, 1))
    assert engine.is_idle()
    assert (engine.version, engine.shown) == (0, "0@")


def test_a_driver_without_a_label_leaves_it_alone(engine: Engine, trainer: TensorBridge) -> None:
    engine.serves = False
    update(driver(engine, serving=ServingOptions("keep", "recompute", None)), publish(trainer, 1))
    assert engine.shown == "0@"


def test_options_that_an_engine_does_not_have_are_refused_by_name() -> None:
    known: Any = (("keep", None), ("recompute", "keep"))
    ServingOptions("keep", "keep").check(*known)
    with pytest.raises(ValueError, match="pause='stop': expected 'keep' or None"):
        ServingOptions("stop", "keep").check(*known)
    with pytest.raises(ValueError, match="cache='drop': expected 'recompute' or 'keep'"):
        ServingOptions(None, "drop").check(*known)
    wrong: Any = "v1"
    with pytest.raises(TypeError, match="label='v1': expected a function"):
        ServingOptions(None, "keep", wrong).check(*known)
    assert ServingOptions(None, "keep").label is default_label


# ---- what is told -------------------------------------------------------------------------------


class Reading(EngineDriver):
    """A user's, whose executor is to read every update itself."""

    imports_itself = False


@pytest.mark.parametrize("kind", [EngineDriver, Reading])
def test_phases_are_told_once_whoever_verifies(
    engine: Engine, trainer: TensorBridge, kind: type[EngineDriver]
) -> None:
    made = driver(engine)
    adapter = kind(made._client, serving=ServingOptions("keep", "recompute"), options={})
    with driven(engine, adapter) as (executor, _, _):
        executor.update_weights(publish(trainer, 1))
        ack = executor.last_ack
    assert ack is not None
    timings = dict(ack.timings_ms)
    assert timings["verify"] > 0
    assert {"pause", "cache", "label"} <= timings.keys()
    assert all(ms >= 0 for ms in timings.values()), timings


def test_options_reach_the_ranks_and_change_with_the_driver(
    engine: Engine, trainer: TensorBridge
) -> None:
    for speed in (1, 2):
        adapter = EngineDriver(
            client_of(driver(engine)),
            serving=ServingOptions("keep", "recompute"),
            options={"speed": speed},
        )
        update(adapter, publish(trainer, speed))
        adapter.close()
        assert [host.options for host in engine.hosts] == [{"speed": speed}] * len(engine.hosts)
