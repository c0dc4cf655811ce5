"""Two drivers of one SGLang engine: whatever one is refused, it takes nothing of the other's."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from rl_bridge import (
    RolloutExecutor,
    TensorBridge,
    WeightBridgeError,
    WeightUpdateRejectedError,
    make_weight_bridge,
)
from tests.integrations.sglang_drivers import (
    Engine,
    drivers,
    end,
    engine,
    importing,
    interrupt,
    loading,
    trainer,
    update,
)
from tests.integrations.test_sglang_exchange import equal, held, loaded, version

__all__ = ["engine", "trainer"]  # fixtures, for this file, too

# No more than a driver makes behind its `prepare`, for an update that is refused.
CALLS = 18
# The one call that nothing can be asked within: SGLang's own, that ends the pause.
BETWEEN = "continue_generation"


# ---- a driver that stood still ------------------------------------------------------------------


def test_a_driver_that_stood_still_behind_its_install_says_nothing_of_its_successors_version(
    engine: Engine, trainer: TensorBridge
) -> None:
    mine, theirs = (trainer.publish(version(n), weight_version=n) for n in (1, 2))
    late, successor = drivers(engine)
    late.prepare(mine, {})
    late.install(mine, {})
    update(successor, theirs)
    with pytest.raises(WeightUpdateRejectedError, match="not prepared here by this driver"):
        late.resume()
    with pytest.raises(WeightUpdateRejectedError, match="another driver has updated this engine"):
        late.undo()
    assert equal(held(engine.model), loaded(2))
    assert engine.label == f"2@{theirs.root}"
    assert not engine.is_paused


def test_a_driver_labels_no_other_drivers_install_of_the_same_update(
    engine: Engine, trainer: TensorBridge
) -> None:
    """Of routes that import nothing in the engine, one's undo does not keep the other's out."""
    manifest = trainer.publish(version(1), weight_version=1)
    late, successor = loading(engine), loading(engine)
    late.prepare(manifest, version(1))
    late.install(manifest, version(1))
    successor.prepare(manifest, version(1))
    successor.install(manifest, version(1))
    with pytest.raises(WeightUpdateRejectedError, match="not prepared here by this driver"):
        late.resume()
    assert engine.label == "user's"
    assert engine.is_paused
    with pytest.raises(WeightUpdateRejectedError, match="another driver has updated this engine"):
        late.undo()
    assert engine.is_paused, "the other one's pause was ended"
    successor.resume()
    successor.commit()
    assert equal(held(engine.model), loaded(1))
    assert (engine.label, engine.is_paused) == (f"1@{manifest.root}", False)


def test_a_driver_that_gives_up_takes_back_no_other_drivers_install_of_the_same_update(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = trainer.publish(version(1), weight_version=1)
    late, successor = drivers(engine)
    late.prepare(manifest, {})
    successor.prepare(manifest, {})
    successor.install(manifest, {})
    with pytest.raises(WeightUpdateRejectedError, match="not prepared here by this driver"):
        late.commit()
    late.undo()
    successor.resume()
    successor.commit()
    assert equal(held(engine.model), loaded(1))


# ---- whose the label is -------------------------------------------------------------------------


def test_a_driver_that_is_overtaken_in_its_flush_labels_nothing(
    engine: Engine, trainer: TensorBridge
) -> None:
    mine, theirs = (trainer.publish(version(n), weight_version=n) for n in (1, 2))
    late, successor = drivers(engine)
    late.prepare(mine, {})
    late.install(mine, {})
    interrupt(late, "flush", lambda: update(successor, theirs))
    with pytest.raises(WeightUpdateRejectedError, match="not prepared here by this driver"):
        late.resume()
    assert engine.label == f"2@{theirs.root}"


@pytest.mark.parametrize("at", range(1, CALLS + 1))
def test_a_version_that_is_committed_as_another_driver_recovers_keeps_its_label(
    engine: Engine, trainer: TensorBridge, at: int
) -> None:
    before = held(engine.model)
    mine = trainer.publish(version(1), weight_version=1)
    late, fresh = drivers(engine)
    late.prepare(mine, {})
    late.install(mine, {})
    late.resume()

    def commit() -> None:
        with suppress(WeightBridgeError):
            late.commit()

    handle = interrupt(fresh, at, commit)
    fresh.take_over()
    handle.catch_up()
    is_there = engine.ask("describe")["weight_version"] == 1
    assert equal(held(engine.model), loaded(1) if is_there else before)
    assert engine.label == (f"1@{mine.root}" if is_there else "user's")
    assert not engine.is_paused


def test_a_label_that_is_set_as_its_version_is_undone_is_taken_back_with_it(
    engine: Engine, trainer: TensorBridge
) -> None:
    mine = trainer.publish(version(1), weight_version=1)
    late, fresh = drivers(engine)
    late.prepare(mine, {})
    late.install(mine, {})
    late._serving.announce("1", late._meant())
    interrupt(fresh, "undo", lambda: late._serving.relabel("1"))
    fresh.take_over()
    assert engine.label == "user's"


def test_a_driver_whose_update_another_one_committed_sets_no_label(
    engine: Engine, trainer: TensorBridge
) -> None:
    """It is right, and by the time that it is set it may be the next version's."""
    manifest = trainer.publish(version(1), weight_version=1)
    late, successor = loading(engine), loading(engine)
    late.prepare(manifest, version(1))
    late.install(manifest, version(1))
    late._serving.announce(f"1@{manifest.root}", late._meant())
    successor.prepare(manifest, version(1))
    end(successor, manifest)
    interrupt(late, "update_weight_version", lambda: pytest.fail("set once more"))
    with pytest.raises(WeightUpdateRejectedError, match="another driver has updated this engine"):
        late.undo()
    assert engine.label == f"1@{manifest.root}"


# ---- whose the pause is -------------------------------------------------------------------------


def test_a_driver_whose_update_another_one_committed_leaves_no_pause(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = trainer.publish(version(1), weight_version=1)
    late, successor = drivers(engine)
    late.prepare(manifest, {})
    update(successor, manifest)
    with pytest.raises(WeightUpdateRejectedError, match="not prepared here by this driver"):
        late.install(manifest, {})
    late.undo()
    assert equal(held(engine.model), loaded(1))
    assert not engine.is_paused


def test_an_executor_that_came_too_late_is_told_and_is_not_torn(
    engine: Engine, trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = trainer.publish(version(1), weight_version=1)
    late, successor = drivers(engine)
    install = late.install

    def overtaken(*given: Any) -> None:
        update(successor, manifest)
        install(*given)

    monkeypatch.setattr(late, "install", overtaken)
    with (
        make_weight_bridge("local", source_worker="rollout") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=late) as executor,
    ):
        with pytest.raises(WeightUpdateRejectedError, match="not prepared here by this driver"):
            executor.update_weights(manifest)
        executor.recover()
        assert not executor.is_torn
        assert not engine.is_paused
        assert engine.label == f"1@{manifest.root}"


def test_an_undo_of_what_is_committed_is_refused_and_requests_go_on(
    engine: Engine, trainer: TensorBridge
) -> None:
    """Its answer was lost, or another driver did it in between."""
    manifest = trainer.publish(version(1), weight_version=1)
    adapter, other = drivers(engine)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    given = {"update_id": manifest.update_id, "driver": adapter._handle.name}
    # The undo's second to last call: it has looked, and has paused the engine again.
    interrupt(adapter, 4, lambda: engine.ask("commit", **given))
    with pytest.raises(WeightUpdateRejectedError, match="is committed: it cannot be undone"):
        adapter.undo()
    assert not engine.is_paused
    with pytest.raises(WeightUpdateRejectedError, match="leave it to the other one"):
        adapter.undo()
    later = trainer.publish(version(2), weight_version=2)
    update(adapter, later)
    update(other, trainer.publish(version(3), weight_version=3))
    assert equal(held(engine.model), loaded(3))


def test_a_pause_that_comes_as_another_driver_ends_its_own_is_ended_with_it(
    engine: Engine, trainer: TensorBridge
) -> None:
    mine = trainer.publish(version(1), weight_version=1)
    late, fresh = drivers(engine)
    late.prepare(mine, {})
    late._handle.call("pauses", pauses=True, **late._meant())  # and there it stands still

    def go_on() -> None:
        late._serving._is_paused = True
        late._handle.pause("retract")
        late.undo()

    interrupt(fresh, "pauses", go_on)  # its last call: the engine goes on already
    fresh.take_over()
    assert not engine.is_paused
    assert engine.ask("describe")["pausing"] is None


def test_a_pause_that_is_left_to_a_driver_ends_with_its_update(
    engine: Engine, trainer: TensorBridge
) -> None:
    mine = trainer.publish(version(1), weight_version=1)
    late, successor = drivers(engine)
    late._serving._is_paused = True
    successor.prepare(mine, {})
    successor.install(mine, {})
    late._serving.end_pause()
    assert engine.is_paused
    successor.resume()
    assert (engine.is_paused, engine.ask("describe")["pausing"]) == (False, None)


def test_a_driver_that_is_refused_does_not_end_anothers_pause(
    engine: Engine, trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = (trainer.publish(version(n), weight_version=n) for n in (1, 2))
    late, other = importing(engine), loading(engine)
    load = other._route.load

    def meanwhile(*given: Any) -> None:
        with pytest.raises(WeightUpdateRejectedError, match="not prepared here by this driver"):
            late.install(mine, {})
        late.undo()
        assert engine.is_paused, "in the middle of another driver's load"
        load(*given)

    late.prepare(mine, {})
    other.prepare(theirs, version(2))
    monkeypatch.setattr(other._route, "load", meanwhile)
    other.install(theirs, version(2))
    other.resume()
    other.commit()
    assert equal(held(engine.model), loaded(2))
    assert not engine.is_paused


@pytest.mark.parametrize("at", range(1, CALLS + 1))
@pytest.mark.parametrize("is_same", [False, True], ids=["other_update", "same_update"])
@pytest.mark.parametrize("make", [importing, loading])
def test_the_engine_is_at_one_version_wherever_another_drivers_update_comes_in(
    engine: Engine, trainer: TensorBridge, make: Callable[..., Any], at: int, *, is_same: bool
) -> None:
    before = held(engine.model)
    one, other = make(engine), make(engine)
    mine = trainer.publish(version(1), weight_version=1)
    theirs = mine if is_same else trainer.publish(version(2), weight_version=2)

    def come_in() -> None:
        try:
            other.prepare(theirs, version(theirs.weight_version))
        except WeightBridgeError:
            other.abandon()  # what the first one's undo rejected is let in no more
        else:
            end(other, theirs)

    one.prepare(mine, version(1))
    handle = interrupt(one, at, come_in)
    end(one, mine)
    handle.catch_up()
    told = engine.ask("describe")
    assert (told["pending"], told["pausing"], told["begun"]) == (None, None, False)
    assert not engine.is_paused
    number = told["weight_version"]
    assert equal(held(engine.model), before if number is None else loaded(number))
    assert engine.label == ("user's" if number is None else f"{number}@{told['root']}")


@pytest.mark.parametrize("at", range(1, CALLS + 1))
def test_the_engine_is_not_left_paused_wherever_another_drivers_update_ends(
    engine: Engine, trainer: TensorBridge, at: int
) -> None:
    one, other = drivers(engine)
    mine, theirs = (trainer.publish(version(n), weight_version=n) for n in (1, 2))
    one.prepare(mine, {})
    other.prepare(theirs, {})
    other.install(theirs, {})
    handle = interrupt(one, at, lambda: end(other, theirs, is_installed=True))
    end(one, mine)
    assert handle._left <= 0 or engine.is_paused, "in the middle of another driver's update"
    handle.catch_up()
    told = engine.ask("describe")
    assert (told["update_id"], told["pending"]) == (theirs.update_id, None)
    assert engine.label == f"2@{theirs.root}"
    assert not engine.is_paused


@pytest.mark.parametrize("at", range(1, CALLS + 1))
def test_a_driver_that_is_taken_over_serves_nothing_of_what_is_being_undone(
    engine: Engine, trainer: TensorBridge, at: int
) -> None:
    """It would go on in the middle of that, with an engine that the successor has paused."""
    before = held(engine.model)
    successor, late = drivers(engine)
    mine, theirs = (trainer.publish(version(n), weight_version=n) for n in (1, 2))
    late.prepare(mine, {})
    late.install(mine, {})
    handle = interrupt(successor, at, lambda: end(late, mine, is_installed=True))
    with suppress(WeightBridgeError):
        successor.prepare(theirs, {})
    successor.abandon()
    handle.catch_up()
    told = engine.ask("describe")
    assert (told["pending"], told["pausing"], told["begun"]) == (None, None, False)
    assert (engine.is_paused, engine.is_written_to_paused) == (False, True)
    number = told["weight_version"]
    assert equal(held(engine.model), before if number is None else loaded(number))
    assert engine.label == ("user's" if number is None else f"{number}@{told['root']}")


@pytest.mark.parametrize("at", range(1, CALLS + 1))
def test_no_driver_ends_the_pause_of_an_update_that_begins_within_its_own(
    engine: Engine, trainer: TensorBridge, at: int
) -> None:
    one, other = drivers(engine)
    mine, theirs = (trainer.publish(version(n), weight_version=n) for n in (1, 2))
    has_begun: list[bool] = []

    def begin() -> None:
        with suppress(WeightBridgeError):
            other.prepare(theirs, {})
            other.install(theirs, {})
            has_begun.append(True)

    one.prepare(mine, {})
    handle = interrupt(one, at, begin)
    end(one, mine)
    if has_begun and handle.came_in_at != BETWEEN:
        assert engine.is_paused
        assert engine.label == "user's"
        other.resume()
        other.commit()
        assert equal(held(engine.model), loaded(2))
        assert (engine.label, engine.is_paused) == (f"2@{theirs.root}", False)
