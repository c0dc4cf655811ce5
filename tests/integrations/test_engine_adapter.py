"""What an engine's adapter leaves alone: another's pause and label. No vLLM is needed here."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rl_bridge import (
    RolloutExecutor,
    TensorBridge,
    TornEngine,
    WeightUpdateRejectedError,
    make_weight_bridge,
)
from rl_bridge.engines.vllm.calls import answer
from rl_bridge.engines.vllm.client import EngineHandle, PauseMode, Replies
from rl_bridge.engines.vllm.rank import VLLMRank
from rl_bridge.errors import DeadlineExceeded
from rl_bridge.vllm import VLLMEngineAdapter
from tests.integrations.test_rank import Group, Model, publish, rank_with


class Engine(EngineHandle):
    """An engine of one rank, with its scheduler and its label."""

    def __init__(self, rank: VLLMRank) -> None:
        super().__init__(20)
        self.rank = rank
        self.stopped = False
        self.shown = "user's"

    def call(self, verb: str, payload: dict[str, Any] | None = None) -> Replies:
        return [json.loads(json.dumps(answer(self.rank, verb, payload or {})))]

    def data_parallel_size(self) -> int:
        return 1

    def pause(self, mode: PauseMode) -> None:
        del mode
        self.stopped = True

    def resume(self) -> None:
        self.stopped = False

    def is_paused(self) -> bool:
        return self.stopped

    def reset_caches(self, *, running: bool) -> bool:
        return running

    def label(self) -> str:
        return self.shown

    def set_label(self, label: str) -> None:
        self.shown = label


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", source_worker="trainer") as bridge:
        yield bridge


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    Group(monkeypatch, 1)
    monkeypatch.setattr(VLLMRank, "configure", lambda _rank, _options: None)
    rank = rank_with(Model())
    yield Engine(rank)
    rank.close()


@contextmanager
def driver(engine: Engine) -> Iterator[tuple[RolloutExecutor, TensorBridge]]:
    with (
        make_weight_bridge("shared-memory", source_worker="driver") as bridge,
        RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=VLLMEngineAdapter(engine)
        ) as executor,
    ):
        yield executor, bridge


def broken(*_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_pause_of_the_users_own_outlasts_an_update(
    engine: Engine, trainer: TensorBridge, *, is_refused: bool
) -> None:
    engine.pause("keep")
    with driver(engine) as (executor, bridge):
        if is_refused:
            bridge.acknowledge = broken  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="planted"):
                executor.update_weights(publish(trainer, 1))
        else:
            executor.update_weights(publish(trainer, 1))
    assert engine.is_paused()


def test_a_pause_of_the_drivers_own_ends_with_its_update(
    engine: Engine, trainer: TensorBridge
) -> None:
    with driver(engine) as (executor, _):
        executor.update_weights(publish(trainer, 1))
        assert not engine.is_paused()


def test_a_pause_that_a_dead_driver_left_ends_with_the_next_update(
    engine: Engine, trainer: TensorBridge
) -> None:
    dead, manifest = VLLMEngineAdapter(engine), publish(trainer, 1)
    dead.prepare(manifest, {})
    dead.install(manifest, {})
    with driver(engine) as (executor, _):
        executor.update_weights(publish(trainer, 2))
    assert not engine.is_paused()


def test_a_label_that_somebody_set_since_is_not_taken_back(
    engine: Engine, trainer: TensorBridge
) -> None:
    late, manifest = VLLMEngineAdapter(engine), publish(trainer, 1)
    late.prepare(manifest, {})
    late.install(manifest, {})
    late.resume()
    assert engine.shown == f"1@{manifest.root}"
    engine.set_label("another's")
    late.undo()
    assert engine.shown == "another's"


def test_a_label_of_its_own_is_taken_back(engine: Engine, trainer: TensorBridge) -> None:
    adapter, manifest = VLLMEngineAdapter(engine), publish(trainer, 1)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    adapter.resume()
    adapter.undo()
    assert engine.shown == "user's"


def test_a_driver_whose_acknowledgement_fails_behind_the_next_driver_is_torn_and_in_nobodys_way(
    engine: Engine, trainer: TensorBridge
) -> None:
    mine, theirs = publish(trainer, 1), publish(trainer, 2)

    def taken_over(*_args: Any, **_kwargs: Any) -> None:
        with driver(engine) as (other, _):
            other.update_weights(theirs)
        raise RuntimeError("planted")

    with driver(engine) as (late, bridge):
        bridge.acknowledge = taken_over  # type: ignore[method-assign]
        with pytest.raises(TornEngine, match="another driver has committed it"):
            late.update_weights(mine)
    assert engine.rank.describe()["update_id"] == theirs.update_id
    assert engine.shown == f"2@{theirs.root}"
    assert not engine.is_paused()


def left_paused(engine: Engine, trainer: TensorBridge) -> None:
    """A driver pauses and installs, the rank takes it back; it dies before it resumes."""
    dead, manifest = VLLMEngineAdapter(engine), publish(trainer, 1)
    dead.prepare(manifest, {})
    dead.install(manifest, {})
    assert engine.call("undo", {"call": 0})[0]["ok"]
    assert engine.is_paused()


def test_a_pause_that_is_all_that_a_dead_driver_left_ends_with_the_next_update(
    engine: Engine, trainer: TensorBridge
) -> None:
    left_paused(engine, trainer)
    with driver(engine) as (executor, _):
        executor.update_weights(publish(trainer, 2))
    assert not engine.is_paused()


def test_recovering_ends_what_a_dead_driver_left(engine: Engine, trainer: TensorBridge) -> None:
    left_paused(engine, trainer)
    with driver(engine) as (executor, _):
        executor.recover()
        assert not engine.is_paused()
        assert engine.rank.describe()["update_id"] is None
    dead, manifest = VLLMEngineAdapter(engine), publish(trainer, 2)
    dead.prepare(manifest, {})
    dead.install(manifest, {})
    with driver(engine) as (executor, _):
        executor.recover()
    told = engine.rank.describe()
    assert (told["update_id"], told["pending"]) == (manifest.update_id, None)
    assert not engine.is_paused()


@pytest.mark.parametrize("fails", ["prepare", "acknowledge"])
def test_a_pause_of_the_users_own_outlasts_updates_behind_a_refused_one(
    engine: Engine, trainer: TensorBridge, fails: str
) -> None:
    with driver(engine) as (executor, bridge):
        with pytest.MonkeyPatch.context() as patch:
            if fails == "prepare":
                patch.setattr(engine.rank._installer, "prepare", broken)
            else:
                patch.setattr(bridge, "acknowledge", broken)
            with pytest.raises(Exception, match="planted"):
                executor.update_weights(publish(trainer, 1))
        assert not engine.is_paused()
        engine.pause("keep")
        executor.update_weights(publish(trainer, 2))
    assert engine.is_paused()


def test_nobody_ends_a_pause_of_the_users_own_that_a_dead_driver_found(
    engine: Engine, trainer: TensorBridge
) -> None:
    engine.pause("keep")
    left_paused(engine, trainer)
    with driver(engine) as (executor, _):
        executor.recover()
        executor.update_weights(publish(trainer, 2))
    assert engine.is_paused()


class Reading(VLLMEngineAdapter):
    """A user's, whose executor is to read every update itself."""

    imports_itself = False


@pytest.mark.parametrize("kind", [VLLMEngineAdapter, Reading])
def test_phases_are_told_once_whoever_verifies(
    engine: Engine, trainer: TensorBridge, kind: type[VLLMEngineAdapter]
) -> None:
    with (
        make_weight_bridge("shared-memory", source_worker="driver") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=kind(engine)) as executor,
    ):
        manifest = publish(trainer, 1)
        executor.update_weights(manifest)
        ack = executor.last_ack
    assert ack is not None
    timings = dict(ack.timings_ms)
    assert timings["verify"] > 0
    assert all(ms >= 0 for ms in timings.values()), timings


@pytest.mark.parametrize("first", ["pause", "prepare"])
def test_nobody_ends_a_pause_of_the_users_own_for_a_driver_that_died_before_its_own(
    engine: Engine, trainer: TensorBridge, first: str
) -> None:
    if first == "pause":
        engine.pause("keep")
    VLLMEngineAdapter(engine).prepare(publish(trainer, 1), {})
    engine.pause("keep")
    with driver(engine) as (executor, _):
        executor.recover()
        executor.update_weights(publish(trainer, 2))
    assert engine.is_paused()


def test_an_executor_that_was_overtaken_does_not_recover_to_a_version_that_is_gone(
    engine: Engine, trainer: TensorBridge
) -> None:
    with driver(engine) as (late, bridge):
        late.update_weights(publish(trainer, 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bridge, "acknowledge", broken)
            patch.setattr(engine.rank._installer, "undo", broken)
            with pytest.raises(TornEngine):
                late.update_weights(publish(trainer, 2))
        theirs = publish(trainer, 3)
        with driver(engine) as (other, _):
            other.update_weights(theirs)
        trainer.release(theirs.update_id)
        for refused in (None, None, publish(trainer, 4)):  # nor at the next attempt
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine.rank._installer, "prepare", broken)
                if refused is not None:
                    with pytest.raises(WeightUpdateRejectedError, match="planted"):
                        late.update_weights(refused)
            with pytest.raises(TornEngine, match="another driver has updated this engine"):
                late.recover()
            with pytest.raises(TornEngine):
                late.check_servable()
            assert engine.rank.describe()["update_id"] == theirs.update_id
            assert not engine.is_paused()
        mine = publish(trainer, 5)
        late.update_weights(mine)
        late.check_servable()
    assert engine.rank.describe()["update_id"] == mine.update_id


def test_recovering_lets_go_of_what_a_dead_driver_had_staged(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1)
    VLLMEngineAdapter(engine).prepare(manifest, {})
    with driver(engine) as (executor, _):
        executor.recover()
    assert engine.rank.describe()["pending"] is None
    (report,) = [report for report in trainer.holders(manifest) if report.worker == "vllm"]
    assert (report.state, report.tensors_held) == ("released", 0)
    engine.pause("keep")  # the user's own: the dead driver never came to its pause
    with driver(engine) as (executor, _):
        executor.update_weights(publish(trainer, 2))
    assert engine.is_paused()


@pytest.mark.parametrize("fails", ["undo", "cache"])
def test_recovering_that_fails_is_done_by_the_next_attempt(
    engine: Engine, trainer: TensorBridge, fails: str
) -> None:
    dead, manifest = VLLMEngineAdapter(engine), publish(trainer, 1)
    dead.prepare(manifest, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.rank._installer, "prove", broken)
        patch.setattr(engine.rank._installer, "undo", broken)
        with pytest.raises(TornEngine):
            dead.install(manifest, {})
    with driver(engine) as (executor, _):
        with pytest.MonkeyPatch.context() as patch:
            if fails == "undo":
                patch.setattr(engine.rank._installer, "undo", broken)
            else:
                patch.setattr(engine, "reset_caches", lambda **_: False)
            for _attempt in range(2):
                with pytest.raises(TornEngine):
                    executor.recover()
        executor.recover()
    assert engine.rank.describe()["torn"] == ""
    assert not engine.is_paused()


def test_a_commit_whose_answer_is_lost_tears_no_engine(
    engine: Engine, trainer: TensorBridge
) -> None:
    real, answers = engine.call, iter(["lost"])

    def call(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        told = real(verb, payload)
        if verb == "commit" and next(answers, ""):
            raise DeadlineExceeded("planted")
        return told

    with driver(engine) as (executor, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "call", call)
        executor.update_weights(publish(trainer, 1))
        patch.setattr(engine.rank._installer, "prove", broken)
        with pytest.raises(WeightUpdateRejectedError, match="planted"):
            executor.update_weights(publish(trainer, 2))
        executor.check_servable()
        assert executor.active_weight_version == 1


def test_a_pause_outlasts_no_driver_however_many_die(engine: Engine, trainer: TensorBridge) -> None:
    dead, manifest = VLLMEngineAdapter(engine), publish(trainer, 1)
    dead.prepare(manifest, {})
    dead.install(manifest, {})
    real = engine.call

    def dies(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        told = real(verb, payload)
        if verb == "commit":
            raise KeyboardInterrupt
        return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "call", dies)
        with pytest.raises(KeyboardInterrupt):
            VLLMEngineAdapter(engine).take_over()
    assert engine.is_paused()
    with driver(engine) as (executor, _):
        executor.recover()
    assert engine.rank.describe()["update_id"] == manifest.update_id
    assert not engine.is_paused()


def test_a_driver_that_gives_up_leaves_the_next_ones_pause_to_be_ended(
    engine: Engine, trainer: TensorBridge
) -> None:
    one, other = VLLMEngineAdapter(engine), VLLMEngineAdapter(engine)
    one.prepare(publish(trainer, 1), {})
    theirs = publish(trainer, 2)
    other.prepare(theirs, {})
    one.undo()
    other.install(theirs, {})  # and dies
    with driver(engine) as (executor, _):
        executor.recover()
    assert not engine.is_paused()


@pytest.mark.parametrize("given", [("memory_budget_nbytes", "1"), ("label", "v1")])
def test_a_wrong_option_is_told_before_any_update(engine: Engine, given: tuple[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{given[0]}='{given[1]}': expected"):
        VLLMEngineAdapter(engine, **dict([given]))
