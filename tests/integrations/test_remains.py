"""What a driver of a vLLM engine leaves that died, or failed twice: pause, label, weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rl_bridge import (
    RolloutExecutor,
    TensorBridge,
    TornEngine,
    WeightBridgeError,
    WeightUpdateManifest,
    WeightUpdateRejectedError,
    make_weight_bridge,
)
from rl_bridge.engines.vllm.client import PauseMode, Replies
from rl_bridge.errors import DeadlineExceeded
from rl_bridge.vllm import VLLMEngineAdapter
from tests.integrations.test_engine_adapter import Engine, broken, driver, engine, trainer
from tests.integrations.test_rank import publish

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


class KilledError(Exception):
    """The driver ends here."""


def killed(*_args: Any, **_kwargs: Any) -> None:
    raise KilledError


def dies_before_its_pause(engine: Engine, manifest: WeightUpdateManifest) -> None:
    dead = VLLMEngineAdapter(engine)
    dead.prepare(manifest, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "pause", killed)
        with pytest.raises(KilledError):
            dead.install(manifest, {})


def dies_behind_its_resume(engine: Engine, manifest: WeightUpdateManifest) -> None:
    dead = VLLMEngineAdapter(engine)
    dead.prepare(manifest, {})
    dead.install(manifest, {})
    dead.resume()


@pytest.mark.parametrize("dies", [dies_before_its_pause, dies_behind_its_resume])
@pytest.mark.parametrize("then", ["recover", "refused", "without a pause", "update"])
def test_a_dead_drivers_note_is_gone_behind_the_next_driver_whatever_it_does(
    engine: Engine,
    trainer: TensorBridge,
    dies: Callable[[Engine, WeightUpdateManifest], None],
    then: str,
) -> None:
    dies(engine, publish(trainer, 1))
    adapter = VLLMEngineAdapter(engine, pause=None if then == "without a pause" else "keep")
    with (
        make_weight_bridge("shared-memory", source_worker="driver") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        if then == "recover":
            executor.recover()
        elif then == "refused":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine.rank._installer, "prepare", broken)
                with pytest.raises(WeightUpdateRejectedError, match="planted"):
                    executor.update_weights(publish(trainer, 2))
        else:
            executor.update_weights(publish(trainer, 2))
        assert not engine.is_paused()
        engine.pause("keep")  # the user's
        executor.update_weights(publish(trainer, 3))
    assert engine.is_paused()


def answer_is_lost(engine: Engine, patch: pytest.MonkeyPatch, lost: str) -> None:
    """Of the next call of that verb: it is done all the same."""
    real = engine.call

    def call(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        told = real(verb, payload)
        if verb == lost:
            patch.setattr(engine, "call", real)
            raise DeadlineExceeded("planted")
        return told

    patch.setattr(engine, "call", call)


@pytest.mark.parametrize("lost", ["", "commit", "pauses"])
def test_a_pause_that_is_left_to_another_driver_behind_its_resume_ends_with_its_commit(
    engine: Engine, trainer: TensorBridge, lost: str
) -> None:
    late, other = VLLMEngineAdapter(engine), VLLMEngineAdapter(engine)
    mine, theirs = publish(trainer, 1), publish(trainer, 2)
    late.prepare(mine, {})

    def stands_still(mode: PauseMode) -> None:
        patch.undo()
        other.prepare(theirs, {})
        other.install(theirs, {})
        other.resume()
        engine.pause(mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "pause", stands_still)
        with pytest.raises(WeightUpdateRejectedError, match="is prepared here"):
            late.install(mine, {})
    late.undo()
    assert engine.is_paused()  # the other one is noted
    with pytest.MonkeyPatch.context() as patch:
        answer_is_lost(engine, patch, lost)
        if lost:
            with pytest.raises(DeadlineExceeded, match="planted"):
                other.commit()
        other.commit()
    assert not engine.is_paused()
    assert engine.rank.describe()["pausing"] is None


def test_a_pause_that_begins_behind_ones_look_is_not_taken_for_the_users(
    engine: Engine, trainer: TensorBridge
) -> None:
    dead, other = VLLMEngineAdapter(engine), VLLMEngineAdapter(engine)
    mine, theirs, real = publish(trainer, 1), publish(trainer, 2), engine.call
    dead.prepare(mine, {})

    def call(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        if verb == "prepare":
            patch.undo()
            dead._pause.begin({"update_id": mine.update_id})  # and dies
        return real(verb, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "call", call)
        other.prepare(theirs, {})
    other.install(theirs, {})
    other.resume()
    other.commit()
    assert not engine.is_paused()


@pytest.mark.parametrize(("whose", "mode"), [("user", "keep"), ("driver", "wait")])
def test_what_the_user_froze_stays_frozen_whatever_the_driver_pauses_by(
    engine: Engine, trainer: TensorBridge, whose: str, mode: str
) -> None:
    modes: list[str] = []
    real = engine.pause
    if whose == "user":
        engine.pause("keep")

    def pause(mode: PauseMode) -> None:
        modes.append(mode)
        real(mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "pause", pause)
        adapter, manifest = VLLMEngineAdapter(engine, pause="wait"), publish(trainer, 1)
        adapter.prepare(manifest, {})
        adapter.install(manifest, {})
    assert modes == [mode]


def undo_fails(engine: Engine, patch: pytest.MonkeyPatch, *, behind: bool) -> None:
    """At the next call; `behind`: it is done, and its answer is lost."""
    real = engine.call

    def call(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        if verb != "undo":
            return real(verb, payload)
        if behind:
            real(verb, payload)
        raise DeadlineExceeded("planted")

    patch.setattr(engine, "call", call)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("is_refused", [False, True])
def test_an_undo_that_is_due_is_made_before_the_next_update_is_let_in(
    engine: Engine, trainer: TensorBridge, *, behind: bool, is_refused: bool
) -> None:
    with driver(engine) as (executor, bridge):
        executor.update_weights(publish(trainer, 1))
        model: Any = engine.rank._installer
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bridge, "acknowledge", broken)
            undo_fails(engine, patch, behind=behind)
            with pytest.raises(TornEngine):
                executor.update_weights(publish(trainer, 2))
        with pytest.MonkeyPatch.context() as patch:
            if is_refused:
                patch.setattr(model, "prepare", broken)
                with pytest.raises(WeightUpdateRejectedError, match="planted"):
                    executor.update_weights(publish(trainer, 3))
                executor.recover()
            else:
                executor.update_weights(publish(trainer, 3))
        executor.check_servable()
        assert executor.active_weight_version == model.version == (1 if is_refused else 3)
        assert engine.shown.startswith(f"{model.version}@")
    assert not engine.is_paused()


def test_a_label_that_an_undo_could_not_take_back_goes_with_the_next_ones(
    engine: Engine, trainer: TensorBridge
) -> None:
    adapter = VLLMEngineAdapter(engine)
    for version in (1, 2):
        manifest = publish(trainer, version)
        adapter.prepare(manifest, {})
        adapter.install(manifest, {})
        with pytest.MonkeyPatch.context() as patch:
            if version == 2:
                patch.setattr(engine, "set_label", broken)
                with pytest.raises(RuntimeError, match="planted"):
                    adapter.resume()
            else:
                adapter.resume()
                patch.setattr(engine, "set_label", broken)
                with pytest.raises(RuntimeError, match="planted"):
                    adapter.undo()
        if version == 1:
            # Not without the label: who finds it in the model commits it, and labels it anew.
            assert engine.rank.describe()["pending"] == manifest.update_id
            assert engine.is_paused()
    adapter.undo()
    assert engine.shown == "user's"


def test_a_driver_that_dies_in_an_undo_leaves_no_label_of_what_is_undone(
    engine: Engine, trainer: TensorBridge
) -> None:
    dead, manifest = VLLMEngineAdapter(engine), publish(trainer, 1)
    dead.prepare(manifest, {})
    dead.install(manifest, {})
    dead.resume()
    with pytest.MonkeyPatch.context() as patch:
        undo_fails(engine, patch, behind=True)
        with pytest.raises(DeadlineExceeded):
            dead.undo()
    assert engine.rank.describe()["pending"] is None
    assert engine.shown == "user's"


def test_what_its_driver_undoes_while_another_takes_it_over_leaves_no_label(
    engine: Engine, trainer: TensorBridge
) -> None:
    owner, before, manifest = VLLMEngineAdapter(engine), publish(trainer, 1), publish(trainer, 2)
    owner.prepare(before, {})
    owner.install(before, {})
    owner.resume()
    owner.commit()
    owner.prepare(manifest, {})
    owner.install(manifest, {})
    other, real = VLLMEngineAdapter(engine), engine.call

    def call(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        if verb == "commit":
            patch.undo()
            owner.undo()
        return real(verb, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "call", call)
        other.take_over()
    assert engine.rank.describe()["update_id"] == before.update_id
    assert engine.shown == f"1@{before.root}"
    assert not engine.is_paused()


def test_what_another_driver_commits_in_the_middle_of_an_undo_keeps_its_label(
    engine: Engine, trainer: TensorBridge
) -> None:
    owner, manifest = VLLMEngineAdapter(engine), publish(trainer, 1)
    owner.prepare(manifest, {})
    owner.install(manifest, {})
    owner.resume()
    other, real = VLLMEngineAdapter(engine), engine.label

    def label() -> str:
        patch.undo()
        other.take_over()
        return real()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "label", label)
        with pytest.raises(WeightUpdateRejectedError, match="another driver has committed it"):
            owner.undo()
    assert engine.rank.describe()["update_id"] == manifest.update_id
    assert engine.shown == f"1@{manifest.root}"
    assert not engine.is_paused()


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_overtaken_driver_takes_its_label_back_at_its_commit(
    engine: Engine, trainer: TensorBridge, *, is_lost: bool
) -> None:
    late, other = VLLMEngineAdapter(engine), VLLMEngineAdapter(engine)
    mine, theirs = publish(trainer, 1), publish(trainer, 2)
    late.prepare(mine, {})
    late.install(mine, {})
    real = late._pause.require

    def overtaken(meant: dict[str, Any]) -> None:
        real(meant)
        other.prepare(theirs, {})
        other.install(theirs, {})
        other.resume()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late._pause, "require", overtaken)
        late.resume()
        answer_is_lost(engine, patch, "commit" if is_lost else "")
        if is_lost:
            with pytest.raises(DeadlineExceeded, match="planted"):
                late.commit()
        late.commit()  # the other one has done it
    other.commit()
    assert engine.shown == f"2@{theirs.root}"


def test_what_is_taken_back_is_told_also_where_it_comes_again(
    engine: Engine, trainer: TensorBridge, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = publish(trainer, 1)
    for _ in range(2):
        assert engine.rank.receive(manifest.to_json()) == ""
    assert any("taken back" in record.getMessage() for record in caplog.records)


def late(*_args: Any, **_kwargs: Any) -> None:
    raise DeadlineExceeded("planted")


@pytest.mark.parametrize("fails", ["reset_caches", "label", "set_label"])
@pytest.mark.parametrize("by", ["update", "recover"])
def test_who_fails_to_take_a_dead_drivers_update_over_leaves_its_pause(
    engine: Engine, trainer: TensorBridge, fails: str, by: str
) -> None:
    dead, manifest = VLLMEngineAdapter(engine), publish(trainer, 1)
    dead.prepare(manifest, {})
    dead.install(manifest, {})
    with driver(engine) as (executor, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, fails, late)
            act = (
                partial(executor.update_weights, publish(trainer, 2))
                if by == "update"
                else executor.recover
            )
            with pytest.raises(WeightBridgeError, match="planted"):
                act()
        assert engine.is_paused()
        executor.recover()
    assert engine.rank.describe()["update_id"] == manifest.update_id
    assert engine.shown == f"1@{manifest.root}"
    assert not engine.is_paused()


def test_a_torn_rank_that_a_dead_driver_left_serves_nothing_however_the_next_one_fails(
    engine: Engine, trainer: TensorBridge
) -> None:
    dead, manifest, real = VLLMEngineAdapter(engine), publish(trainer, 1), engine.call
    dead.prepare(manifest, {})
    dead.install(manifest, {})

    def call(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        told = real(verb, payload)
        if verb == "pauses" and payload is not None and payload.get("whosever"):
            raise DeadlineExceeded("planted")
        return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.rank._installer, "undo", broken)
        with pytest.raises(TornEngine):
            dead.undo()
        patch.setattr(engine, "call", call)
        with driver(engine) as (executor, _), pytest.raises(DeadlineExceeded):
            executor.update_weights(publish(trainer, 2))
    assert engine.rank.describe()["torn"]
    assert engine.is_paused()
    with driver(engine) as (executor, _):
        executor.update_weights(publish(trainer, 3))
    assert not engine.is_paused()
