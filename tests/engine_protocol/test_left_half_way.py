"""Whatever a driver left half-way, wherever it ended: the next one's engine is at one version.

After each call of a driver the engine of these tests checks by itself what it serves: one version
on all ranks, cached values of that version alone, under its label.
"""

from collections.abc import Callable
from contextlib import suppress

import pytest

from rl_bridge import (
    TensorBridge,
    TornEngine,
    WeightBridgeError,
    WeightUpdateManifest,
    WeightUpdateRejectedError,
)
from rl_bridge.engines.driver import EngineDriver
from rl_bridge.engines.rank import Stage
from rl_bridge.engines.serving import ServingOptions
from rl_bridge.errors import DeadlineExceeded
from tests.engine_protocol.fake import (
    Client,
    Engine,
    KilledError,
    Loads,
    broken,
    client_of,
    driven,
    driver,
    publish,
    update,
)

# No fewer than a driver makes from its `prepare` to its commit, or in an undo.
CALLS = 16
EACH_CALL = pytest.mark.parametrize("at", range(1, CALLS + 1))
BEHIND = pytest.mark.parametrize("behind", [False, True], ids=["call_lost", "answer_lost"])

Make = Callable[[Engine], EngineDriver]


def importing(engine: Engine) -> EngineDriver:
    return driver(engine)


def loading(engine: Engine) -> EngineDriver:
    return driver(engine, loader=Loads(engine))


MAKE = pytest.mark.parametrize("make", [importing, loading])


def left(engine: Engine, manifest: WeightUpdateManifest) -> EngineDriver:
    """A driver that was killed behind its resume."""
    dead = driver(engine)
    dead.prepare(manifest, {})
    dead.install(manifest, {})
    dead.resume()
    return dead


@MAKE
@BEHIND
@EACH_CALL
def test_a_driver_that_was_killed_anywhere_is_taken_over(
    engine: Engine, trainer: TensorBridge, at: int, make: Make, *, behind: bool
) -> None:
    first, second = publish(trainer, 1), publish(trainer, 2)
    dead = make(engine)
    update(dead, first)
    client_of(dead).kill(at, behind=behind)
    with suppress(KilledError):
        update(dead, second)
    stages = {rank.stage for rank in engine.ranks}
    active = {rank.describe()["weight_version"] for rank in engine.ranks}
    is_proven = active == {2} or stages <= {Stage.PROVEN, Stage.COMMITTING}
    with driven(engine) as (executor, _, _):
        executor.recover()
        assert engine.is_idle()
        assert engine.version == (2 if is_proven else 1)
        engine.step()
        executor.update_weights(publish(trainer, 3))
        executor.check_servable()
    assert engine.version == 3
    assert engine.is_idle()


@BEHIND
@EACH_CALL
def test_a_driver_that_was_killed_in_an_undo_is_taken_over(
    engine: Engine, trainer: TensorBridge, at: int, *, behind: bool
) -> None:
    dead = driver(engine)
    update(dead, publish(trainer, 1))
    second = publish(trainer, 2)
    dead.prepare(second, {})
    dead.install(second, {})
    dead.resume()
    client_of(dead).kill(at, behind=behind)
    with suppress(KilledError):
        dead.undo()
    with driven(engine) as (executor, _, _):
        executor.recover()
        assert engine.is_idle()
        assert engine.version in {1, 2}
        engine.step()


@BEHIND
@EACH_CALL
def test_a_driver_that_was_killed_as_it_took_over_is_taken_over(
    engine: Engine, trainer: TensorBridge, at: int, *, behind: bool
) -> None:
    left(engine, publish(trainer, 1))
    dead = driver(engine)
    client_of(dead).kill(at, behind=behind)
    with suppress(KilledError):
        dead.take_over()
    with driven(engine) as (executor, _, _):
        executor.recover()
        assert engine.is_idle()
        assert engine.version == 1
        engine.step()


@BEHIND
@EACH_CALL
def test_a_call_that_fails_anywhere_leaves_an_engine_that_recovers(
    engine: Engine, trainer: TensorBridge, at: int, *, behind: bool
) -> None:
    """The driver lives on: its update is undone, or its undo is due until it is made."""

    def fail() -> None:
        raise DeadlineExceeded("planted")

    with driven(engine) as (executor, _, client):
        executor.update_weights(publish(trainer, 1))
        client.plant(at, fail, behind=behind)
        with suppress(WeightBridgeError):
            executor.update_weights(publish(trainer, 2))
        client.plant(0, lambda: None)
        executor.recover()
        executor.check_servable()
        assert executor.active_weight_version == engine.version
        assert engine.is_idle()
        engine.step()
        executor.update_weights(publish(trainer, 3))
        assert engine.version == 3
    assert engine.is_idle()


@pytest.mark.parametrize("by", ["recover", "take_over", "left"])
def test_what_all_ranks_have_proven_is_committed_by_whoever_has_the_engine_next(
    engine: Engine, trainer: TensorBridge, by: str
) -> None:
    manifest = publish(trainer, 1)
    dead = left(engine, manifest)
    if by == "left":
        dead.close()
    adapter = driver(engine, take_over=by == "take_over")
    with driven(engine, adapter) as (executor, _, _):
        if by == "recover":
            executor.recover()
            told = engine.told()
            assert (told["update_id"], told["pending"]) == (manifest.update_id, None)
            assert engine.shown == f"1@{manifest.root}"
        executor.update_weights(publish(trainer, 2))
    (report, *_) = [r for r in trainer.holders(manifest) if r.worker == "engine"]
    assert report.proof is not None
    assert engine.version == 2


@pytest.mark.parametrize("back", [0, 1])
def test_what_only_some_ranks_hold_is_taken_back_on_all(trainer: TensorBridge, back: int) -> None:
    """They took a vote that they did not hear for a no."""
    engine = Engine(2)
    update(driver(engine), publish(trainer, 1))
    dead, second = driver(engine, take_over=True), publish(trainer, 2)
    dead.prepare(second, {})
    dead.install(second, {})
    engine.ranks[back].undo("it took the vote for a no")
    with driven(engine) as (executor, _, _):
        executor.recover()
    assert engine.versions == [1, 1]
    assert engine.is_idle()
    engine.close()


def test_what_only_some_ranks_have_committed_is_committed_on_all(trainer: TensorBridge) -> None:
    engine, manifest = Engine(2), publish(trainer, 1)
    left(engine, manifest)
    engine.ranks[-1].commit(manifest.update_id)
    with driven(engine) as (executor, _, _):
        executor.recover()
    assert {reply["update_id"] for reply in engine.ask("describe", {})} == {manifest.update_id}
    assert engine.versions == [1, 1]
    engine.close()


def test_what_was_only_staged_is_released_and_may_come_again(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1)
    driver(engine).prepare(manifest, {})
    with driven(engine) as (executor, _, _):
        executor.recover()
        assert engine.is_idle()
        for report in trainer.holders(manifest):
            assert (report.state, report.tensors_held) == ("released", 0)
        executor.update_weights(manifest)
    assert engine.version == 1


@pytest.mark.parametrize("fails", ["undo", "cache"])
def test_a_take_over_that_fails_is_done_by_the_next_attempt_and_nothing_is_served_meanwhile(
    engine: Engine, trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    dead, manifest = driver(engine), publish(trainer, 1)
    dead.prepare(manifest, {})
    with monkeypatch.context() as patch:
        for model in engine.models:
            patch.setattr(model, "prove", broken)
            patch.setattr(model, "undo", broken)
        with pytest.raises(TornEngine):
            dead.install(manifest, {})
    with driven(engine) as (executor, _, _):
        with monkeypatch.context() as patch:
            if fails == "undo":
                for model in engine.models:
                    patch.setattr(model, "undo", broken)
            else:
                patch.setattr(engine, "keeps", "requests hold some")
            for _ in range(2):
                with pytest.raises(TornEngine):
                    executor.recover()
                assert engine.stopped
            with pytest.raises(TornEngine):
                executor.update_weights(publish(trainer, 2))
            assert engine.stopped
            assert executor.active_weight_version is None
        executor.recover()
        assert engine.version == 0
        assert engine.is_idle()
        executor.update_weights(publish(trainer, 3))
    assert engine.version == 3


def test_a_load_that_another_driver_left_open_is_ended(
    engine: Engine, trainer: TensorBridge
) -> None:
    dead = loading(engine)
    manifest = publish(trainer, 1)
    dead.prepare(manifest, {})
    client_of(dead).kill("prove")
    with pytest.raises(KilledError):
        dead.install(manifest, {})
    loader = Loads(engine)
    driver(engine, loader=loader).take_over()
    assert loader.aborted == [True]
    assert engine.version == 0


def test_an_undo_that_is_due_is_made_before_the_next_update_is_let_in(
    engine: Engine, trainer: TensorBridge
) -> None:
    """The way is back, although all ranks have proven it: its caller was told that it failed."""

    def fail() -> None:
        raise DeadlineExceeded("planted")

    with driven(engine) as (executor, bridge, client):
        executor.update_weights(publish(trainer, 1))
        client.plant("undo", fail)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bridge.consumer, "acknowledge", broken)
            with pytest.raises(TornEngine):
                executor.update_weights(publish(trainer, 2))
        with pytest.MonkeyPatch.context() as patch:
            for model in engine.models:
                patch.setattr(model, "prepare", broken)
            with pytest.raises(WeightUpdateRejectedError, match="planted"):
                executor.update_weights(publish(trainer, 3))
        assert engine.version == 1
        assert engine.is_idle()


def test_an_update_without_a_pause_leaves_nothing_cached_when_it_is_undone(
    engine: Engine, trainer: TensorBridge
) -> None:
    engine.serves = False  # nobody looks at what the steps beside it make
    adapter = driver(engine, serving=ServingOptions(pause=None, cache="recompute"))
    manifest = publish(trainer, 1)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    held: list[int] = []
    client: Client = client_of(adapter)
    real = client.drop_caches

    def drop(policy: str | None) -> str:
        held.append(engine.version)
        return real(policy)

    client.drop_caches = drop  # type: ignore[method-assign]
    adapter.undo()
    assert held == [1, 0]
    assert not engine.modes
