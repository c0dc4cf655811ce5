"""What follows a sync: one order, every step, and all ranks learn what became of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rl_bridge.errors import GroupAborted
from rl_bridge.groups.exchange import GroupExchange, StoreExchange
from rl_bridge.strategies.sender import HelperTransferSender
from rl_bridge.trainers.chunks import WeightChunk
from tests.groups.rig import HashStore, everywhere
from tests.strategies.rig import Rig, chunks_of, rig, run, weights


class Device:
    """Notes what it is asked; one of it may fail."""

    def __init__(self, order: list[str], broken: str = "") -> None:
        self.order, self.broken = order, broken

    def _note(self, step: str) -> None:
        if step == self.broken:
            raise RuntimeError("the driver is gone")
        self.order.append(step)

    def ipc_collect(self) -> None:
        self._note("ipc_collect")

    def synchronize(self) -> None:
        self._note("synchronize")

    def empty_cache(self) -> None:
        self._note("empty_cache")


class Alone(GroupExchange):
    """One rank that notes its barriers."""

    def __init__(self, order: list[str]) -> None:
        super().__init__(0, 1)
        self.order = order

    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        self.order.append("barrier")
        return [payload]


def exchanges(num: int) -> list[StoreExchange]:
    store = HashStore()
    return [StoreExchange(store, rank=rank, world_size=num) for rank in range(num)]


AFTER = ["delete", "ipc_collect", "barrier", "synchronize", "empty_cache", "reset_prefix_cache"]


class Chunks:
    """Chunks of a version, which notes that it is closed."""

    def __init__(self, version: int, order: list[str]) -> None:
        self._chunks, self._order = chunks_of(weights(version)), order

    def __iter__(self) -> Iterator[WeightChunk]:
        return self._chunks

    def close(self) -> None:
        self._order.append("delete")


@contextmanager
def noting(order: list[str], broken: str = "") -> Iterator[Rig]:
    """A rig that notes what is loaded and what follows a sync."""
    with rig(threshold_nbytes=320, device=Device(order, broken), exchange=Alone(order)) as r:
        load = r.engine.load

        def noted(pairs: list[tuple[str, torch.Tensor]]) -> None:
            order.append("load")
            load(pairs)

        async def reset() -> None:
            order.append("reset_prefix_cache")

        r.loader.executor.weight_install_adapter._load = noted  # type: ignore[union-attr]
        r.client.reset_prefix_cache = reset  # type: ignore[attr-defined]
        yield r


def test_the_steps_are_taken_in_the_documented_order_when_the_engines_have_loaded() -> None:
    order: list[str] = []
    with noting(order) as r:
        run(r.sender.send_chunks(Chunks(1, order), r.client))
        assert order == ["load"] * 3 + AFTER
        order.clear()
        r.engine.fails_at = 3
        with pytest.raises(RuntimeError, match="the engine's loader failed"):
            run(r.sender.send_chunks(Chunks(2, order), r.client))
        # Nothing was installed, so nothing that the engines cached is wrong.
        assert [step for step in order if step != "load"] == AFTER[:-1]


def test_a_step_that_fails_does_not_keep_the_others_from_being_taken() -> None:
    order: list[str] = []
    with noting(order, "ipc_collect") as r:
        with pytest.raises(RuntimeError, match="the driver is gone") as caught:
            run(r.sender.send_chunks(Chunks(1, order), r.client))
        assert caught.value.__notes__ == ["rl_bridge: version 0 was sent and stands."]
        assert order == ["load"] * 3 + [step for step in AFTER if step != "ipc_collect"]


def test_helper_ranks_learn_what_became_of_a_sync_and_why() -> None:
    here, there = exchanges(2)
    with rig(exchange=here, timeout_s=20) as r:
        helper = HelperTransferSender(exchange=there, timeout_s=20)

        def sync(version: int) -> list[Any]:
            r.engine.calls.clear()
            chunks = chunks_of(weights(version))
            calls: list[Callable[[], Any]] = [
                lambda: r.sync(version),
                lambda: run(helper.send_chunks(chunks, r.client)),
            ]
            return everywhere(calls)

        manifest, nothing = sync(1)
        assert (manifest.weight_version, nothing) == (0, None)
        assert r.engine.holds(1), "when the helper returns"
        r.engine.fails_at = 0
        mine, others = sync(2)
        assert isinstance(mine, RuntimeError)
        assert "the engine's loader failed" in str(mine)
        assert isinstance(others, GroupAborted)
        assert others.ranks == (0,)
        assert "the engine's loader failed" in str(others)
        r.engine.fails_at = None
        sync(3)
        assert r.engine.holds(3)


def test_a_rank_that_never_comes_ends_the_wait_within_the_deadline() -> None:
    here, _ = exchanges(2)
    helper = HelperTransferSender(exchange=here, timeout_s=0.2)
    with pytest.raises(GroupAborted, match=r"no answer from ranks \(1,\)"), rig() as r:
        run(helper.send_chunks(chunks_of(weights(1)), r.client))


def test_an_error_behind_the_send_says_that_the_version_stands_and_not_that_it_is_withdrawn() -> (
    None
):
    here, there = exchanges(2)
    with rig(exchange=here, timeout_s=0.2) as r:
        with pytest.raises(GroupAborted, match=r"no answer from ranks \(1,\)") as caught:
            r.sync(1)
        assert r.engine.holds(1)
        told = [str(caught.value), *caught.value.__notes__]
        assert told[-1] == "rl_bridge: version 0 was sent and stands."
        assert not any("withdraw" in one or "no rank publishes" in one for one in told)
        r.sender._timeout_s = 20
        helper = HelperTransferSender(exchange=there, timeout_s=20)

        def broken() -> Iterator[WeightChunk]:
            yield from chunks_of(weights(2))
            raise MemoryError("no room")

        calls: list[Callable[[], Any]] = [
            lambda: r.sync(2),
            lambda: run(helper.send_chunks(broken(), r.client)),
        ]
        mine, its = everywhere(calls)
        assert isinstance(mine, GroupAborted)
        assert "the sync failed on rank 1: MemoryError: no room" in str(mine)
        assert isinstance(its, MemoryError)
        for one in (mine, its):
            assert one.__notes__ == ["rl_bridge: version 1 was sent and stands."]


@pytest.mark.parametrize("num", [2, 3])
def test_a_rank_that_waited_in_a_gather_for_one_that_broke_off_learns_why(num: int) -> None:
    here, there, *_ = exchanges(num)  # a third rank never comes
    with rig(exchange=here, timeout_s=20) as r:
        helper = HelperTransferSender(exchange=there, timeout_s=0.1)

        def broken() -> Iterator[WeightChunk]:
            yield next(chunks_of(weights(1)))
            raise MemoryError("no room")

        def waiting() -> Iterator[WeightChunk]:
            yield next(chunks_of(weights(1)))
            # Meanwhile the other rank fails, waits for this one in vain, and raises.
            (its,) = everywhere([lambda: run(helper.send_chunks(broken(), r.client))])
            assert isinstance(its, MemoryError)
            raise RuntimeError("the process group's deadline is over")

        with pytest.raises(RuntimeError, match="the process group's deadline") as caught:
            run(r.sender.send_chunks(waiting(), r.client))
        assert "MemoryError: no room" in "".join(caught.value.__notes__)
