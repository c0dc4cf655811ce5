"""Two drivers that update one engine at once: whatever they refuse, requests go on behind them."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from rl_bridge import (
    TensorBridge,
    WeightBridgeError,
    WeightUpdateManifest,
    WeightUpdateRejectedError,
    make_weight_bridge,
)
from rl_bridge.engines.vllm.client import PauseMode, Replies
from rl_bridge.engines.vllm.rank import VLLMRank
from rl_bridge.vllm import VLLMEngineAdapter
from tests.integrations.test_engine_adapter import Engine
from tests.integrations.test_rank import Group, Model, publish, rank_with

# No more than a driver makes behind its `prepare`, for an update that is refused.
CALLS = 12


class Interleaved(Engine):
    """An engine at one of whose calls something else is done first."""

    def __init__(self, rank: VLLMRank) -> None:
        super().__init__(rank)
        self._left = 0
        self._first: Callable[[], None] = lambda: None

    def interrupt(self, at: int, first: Callable[[], None]) -> None:
        """Before the call that is the `at`-th from now on."""
        self._left, self._first = at, first

    def catch_up(self) -> None:
        """Do it now, if that call did not come."""
        if self._left > 0:
            self._left = 0
            self._first()

    def _come_in(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._first()

    def call(self, verb: str, payload: dict[str, Any] | None = None) -> Replies:
        self._come_in()
        return super().call(verb, payload)

    def pause(self, mode: PauseMode) -> None:
        self._come_in()
        super().pause(mode)

    def resume(self) -> None:
        self._come_in()
        super().resume()

    def is_paused(self) -> bool:
        self._come_in()
        return super().is_paused()


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", source_worker="trainer") as bridge:
        yield bridge


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interleaved]:
    Group(monkeypatch, 1)
    monkeypatch.setattr(VLLMRank, "configure", lambda _rank, _options: None)
    rank = rank_with(Model())
    yield Interleaved(rank)
    rank.close()


def end(adapter: VLLMEngineAdapter, manifest: WeightUpdateManifest, *, is_installed: bool) -> None:
    """Go on with an update as an executor does."""
    try:
        if not is_installed:
            adapter.install(manifest, {})
        adapter.prove()
        adapter.resume()
        adapter.commit()
    except WeightBridgeError:
        with suppress(WeightBridgeError):
            adapter.undo()


@pytest.mark.parametrize("at", range(1, CALLS + 1))
def test_the_engine_is_not_left_paused_wherever_another_drivers_update_ends_in_ones_own(
    engine: Interleaved, trainer: TensorBridge, at: int
) -> None:
    one, other = VLLMEngineAdapter(engine), VLLMEngineAdapter(engine)
    mine, theirs = publish(trainer, 1), publish(trainer, 2)
    one.prepare(mine, {})
    other.prepare(theirs, {})
    other.install(theirs, {})
    engine.interrupt(at, lambda: end(other, theirs, is_installed=True))
    end(one, mine, is_installed=False)
    engine.catch_up()
    told = engine.rank.describe()
    assert (told["update_id"], told["pending"]) == (theirs.update_id, None)
    assert not engine.is_paused()


def test_the_undo_of_an_overtaken_driver_leaves_the_others_pause_alone(
    engine: Interleaved, trainer: TensorBridge
) -> None:
    late, other = VLLMEngineAdapter(engine), VLLMEngineAdapter(engine)
    mine, theirs = publish(trainer, 1), publish(trainer, 2)
    late.prepare(mine, {})
    late.install(mine, {})
    other.prepare(theirs, {})  # commits what it finds installed
    other.install(theirs, {})
    with pytest.raises(WeightUpdateRejectedError, match="another driver has committed it"):
        late.undo()
    assert engine.is_paused()
    end(other, theirs, is_installed=True)
    assert not engine.is_paused()
