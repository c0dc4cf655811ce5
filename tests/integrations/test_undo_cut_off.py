"""An undo that its driver does not live to end: what the next one lets requests go on with."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from rl_bridge import TensorBridge, TornEngine
from rl_bridge.engines.vllm.calls import answer
from rl_bridge.engines.vllm.client import PauseMode, Replies
from rl_bridge.engines.vllm.rank import VLLMRank
from rl_bridge.errors import DeadlineExceeded
from rl_bridge.vllm import VLLMEngineAdapter
from tests.integrations.test_engine_adapter import Engine, broken, driver, trainer
from tests.integrations.test_rank import Group, Model, publish, rank_with

__all__ = ["trainer"]  # a fixture, for this file, too

# No fewer than a driver makes in an undo.
CALLS = 16
FAR = 1 << 20

T = TypeVar("T")


class DeadError(Exception):
    """The driver has ended."""


class Serving(Engine):
    """Its requests run wherever they may; its driver ends at one of its calls."""

    def __init__(self, rank: VLLMRank, model: Model) -> None:
        super().__init__(rank)
        self.model = model
        self.shown = "0@"
        self.cached: set[int] = set()
        self.left = FAR  # calls of a driver that is to end
        self.is_done = False  # the last of them
        self.goes_on = False  # it only takes that one for lost

    def serve(self) -> None:
        """A step of the model, which caches what it makes."""
        if not self.stopped:
            self.cached.add(self.model.version)
            assert self.cached == {self.model.version}
            assert self.shown.startswith(f"{self.model.version}@")

    def _do(self, action: Callable[[], T]) -> T:
        self.left -= 1
        is_cut_off = self.left == 0 or (self.left < 0 and not self.goes_on)
        self.serve()
        if is_cut_off and not (self.left == 0 and self.is_done):
            raise DeadError
        told = action()
        self.serve()
        if is_cut_off:
            raise DeadError
        return told

    def call(self, verb: str, payload: dict[str, Any] | None = None) -> Replies:
        return self._do(lambda: [json.loads(json.dumps(answer(self.rank, verb, payload or {})))])

    def pause(self, mode: PauseMode) -> None:
        self._do(lambda: super(Serving, self).pause(mode))

    def resume(self) -> None:
        self._do(super().resume)

    def is_paused(self) -> bool:
        return self._do(super().is_paused)

    def reset_caches(self, *, running: bool) -> bool:
        self._do(self.cached.clear)
        return running

    def label(self) -> str:
        return self._do(super().label)

    def set_label(self, label: str) -> None:
        self._do(lambda: super(Serving, self).set_label(label))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    Group(monkeypatch, 1)
    monkeypatch.setattr(VLLMRank, "configure", lambda _rank, _options: None)
    model = Model()
    rank = rank_with(model)
    yield Serving(rank, model)
    rank.close()


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("at", range(1, CALLS + 1))
def test_wherever_an_undo_is_cut_off_the_next_driver_serves_one_version_under_its_label(
    engine: Serving, trainer: TensorBridge, at: int, *, is_done: bool, goes_on: bool
) -> None:
    dead = VLLMEngineAdapter(engine)
    for version in (1, 2):
        manifest = publish(trainer, version)
        dead.prepare(manifest, {})
        dead.install(manifest, {})
        dead.resume()
        if version == 1:
            dead.commit()
    engine.left, engine.is_done, engine.goes_on = at, is_done, goes_on
    with suppress(DeadError):
        dead.undo()
    engine.left = FAR
    with driver(engine) as (executor, _):
        executor.recover()
    assert not engine.stopped
    engine.serve()
    told = engine.rank.describe()
    assert (told["pending"], told["pausing"]) == (None, None)


def test_behind_an_undo_without_a_pause_nothing_of_what_was_undone_is_cached(
    engine: Serving, trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.stopped = True  # nobody looks at what the steps beside it make
    adapter, manifest = VLLMEngineAdapter(engine, pause=None), publish(trainer, 1)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    held: list[int] = []

    def reset(*, running: bool) -> bool:
        held.append(engine.model.version)
        return running

    monkeypatch.setattr(engine, "reset_caches", reset)
    adapter.undo()
    assert held[-1] == engine.model.version == 0


def test_what_an_undo_could_not_let_go_of_is_let_go_of_by_the_next_attempt(
    engine: Serving, trainer: TensorBridge
) -> None:
    real = engine.call

    def call(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        if verb == "abandon":
            patch.undo()
            raise DeadlineExceeded("planted")
        return real(verb, payload)

    with driver(engine) as (executor, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "pause", broken)
            patch.setattr(engine, "call", call)
            with pytest.raises(TornEngine, match="planted"):
                executor.update_weights(publish(trainer, 1))
        assert engine.rank.describe()["pending"] is not None
        executor.recover()
        assert engine.rank.describe()["pending"] is None


@pytest.mark.parametrize("recovers", [False, True])
def test_an_undo_whose_last_call_is_lost_does_not_end_what_the_user_pauses_later(
    engine: Serving, trainer: TensorBridge, *, recovers: bool
) -> None:
    real = engine.call

    def call(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        if verb == "pauses" and not (payload or {}).get("pauses"):
            raise DeadlineExceeded("planted")
        return real(verb, payload)

    with driver(engine) as (executor, _):
        executor.update_weights(publish(trainer, 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.model, "prove", broken)
            patch.setattr(engine, "call", call)
            with pytest.raises(TornEngine, match="planted"):
                executor.update_weights(publish(trainer, 2))
        assert not engine.stopped
        if recovers:
            executor.recover()
            assert engine.rank.describe()["pausing"] is None
        engine.pause("keep")
        executor.update_weights(publish(trainer, 3))
    assert engine.stopped


def test_an_undo_in_an_engine_that_was_started_anew_is_not_told_as_the_version_before(
    engine: Serving, trainer: TensorBridge
) -> None:
    with driver(engine) as (executor, _):
        executor.update_weights(publish(trainer, 1))
        engine.rank.close()
        engine.model, engine.shown, engine.cached = Model(), "0@", set()
        engine.rank = rank_with(engine.model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.model, "prove", broken)
            with pytest.raises(TornEngine, match="or it was started anew: it holds update None"):
                executor.update_weights(publish(trainer, 2))
        with pytest.raises(TornEngine, match="version 2"):
            executor.check_servable()
        executor.update_weights(publish(trainer, 3))
        executor.check_servable()
    assert engine.model.version == 3
    engine.rank.close()
