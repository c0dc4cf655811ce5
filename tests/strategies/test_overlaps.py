"""Requests that come while an update is being installed wait: only its install ends that one."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rl_bridge.errors import StaleUpdate, UnknownUpdate
from rl_bridge.strategies.requests import AbandonedWeightUpdateRequest, WeightUpdateRequest
from tests.strategies.rig import Rig, rig, run, weights

DEADLINE_S = 60.0


class Overlap:
    """An engine whose first load call waits until it may go on."""

    def __init__(self, r: Rig) -> None:
        self.rig, self.began, self.may_go_on = r, threading.Event(), threading.Event()
        adapter: Any = r.loader.executor.weight_install_adapter
        adapter._load = self._load

    def _load(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        self.began.set()
        assert self.may_go_on.wait(DEADLINE_S)
        self.rig.engine.load(pairs)

    def requests(self, version: int, *, num: int = 2) -> list[WeightUpdateRequest]:
        """Those of a version that is published, in `num` batches."""
        sender = self.rig.sender
        manifest = sender.bridge.publish(weights(version), weight_version=version)
        names = list(manifest.table.rows)
        size = len(names) // num
        batches = [tuple(names[at : at + size]) for at in range(0, len(names), size)]
        return sender._requests(manifest, batches)

    def give(self, request: WeightUpdateRequest) -> Coroutine[Any, Any, None]:
        return self.rig.loader.load_weights(self.rig.receiver, request)

    async def begin(self, requests: list[WeightUpdateRequest]) -> "asyncio.Task[None]":
        """Give all of them; when this returns, the install is under way."""
        for request in requests[:-1]:
            await self.give(request)
        task = asyncio.create_task(self.give(requests[-1]))
        assert await asyncio.to_thread(self.began.wait, DEADLINE_S)
        return task


@contextmanager
def overlap() -> Iterator[Overlap]:
    with rig() as r:
        made = Overlap(r)
        try:
            yield made
        finally:
            made.may_go_on.set()


@pytest.mark.parametrize("fails", [False, True], ids=["it succeeds", "it fails"])
def test_the_next_update_may_come_during_an_install_and_neither_ends_the_other(
    fails: bool,
) -> None:
    async def scenario(o: Overlap) -> None:
        first, second = o.requests(1), o.requests(2)
        engine = o.rig.engine
        engine.fails_at = 1 if fails else None
        installing = await o.begin(first)
        waiting = asyncio.create_task(o.give(second[0]))
        await asyncio.wait({waiting}, timeout=0)
        o.may_go_on.set()
        if fails:
            with pytest.raises(RuntimeError, match="the engine's loader failed"):
                await installing
            engine.fails_at = None
            assert engine.holds(0)
        else:
            await installing
            assert engine.holds(1)
        await waiting
        with pytest.raises(
            UnknownUpdate, match="the engine's loader" if fails else "it was loaded"
        ):
            await o.give(first[1])
        await o.give(second[1])
        assert engine.holds(2)

    with overlap() as o:
        run(scenario(o))


def test_an_install_goes_on_when_whoever_waits_for_it_is_cancelled() -> None:
    async def scenario(o: Overlap) -> None:
        first, second = o.requests(1), o.requests(2)
        installing = await o.begin(first)
        installing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await installing
        waiting = asyncio.create_task(o.give(second[0]))
        await asyncio.wait({waiting}, timeout=0)
        o.may_go_on.set()
        await waiting
        await o.give(second[1])
        assert o.rig.engine.holds(2)
        assert len(o.rig.engine.calls) == 4
        assert o.rig.receiver.bridge.rejection_reason(first[0].update_id) is None

    with overlap() as o:
        run(scenario(o))


def test_an_install_that_is_cancelled_before_it_began_may_come_again() -> None:
    async def scenario(o: Overlap) -> None:
        (request,) = o.requests(1, num=1)
        with ThreadPoolExecutor(1) as pool:
            asyncio.get_running_loop().set_default_executor(pool)
            pool.submit(o.may_go_on.wait, DEADLINE_S)
            waiting = asyncio.create_task(o.give(request))
            await asyncio.wait({waiting}, timeout=0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            o.may_go_on.set()
            assert not o.began.is_set()
            await o.give(request)
            assert o.rig.engine.holds(1)

    with overlap() as o:
        run(scenario(o))


def test_a_trainer_that_gives_up_during_an_install_does_not_undo_it() -> None:
    async def scenario(o: Overlap) -> None:
        first = o.requests(1)
        installing = await o.begin(first)
        given_up = AbandonedWeightUpdateRequest(
            update_id=first[0].update_id, weight_version=1, reason="no answer in 60 s"
        )
        await o.give(given_up)
        o.may_go_on.set()
        await installing
        assert o.rig.engine.holds(1)
        assert o.rig.loader.executor.active_weight_version == 1

    with overlap() as o:
        run(scenario(o))


def test_an_update_that_comes_again_during_its_install_is_refused_and_does_not_end_it() -> None:
    async def scenario(o: Overlap) -> None:
        (request,) = o.requests(2, num=1)
        installing = await o.begin([request])
        again = asyncio.create_task(o.give(request))
        await asyncio.wait({again}, timeout=0)
        o.may_go_on.set()
        await installing
        with pytest.raises(StaleUpdate):
            await again
        assert o.rig.engine.holds(2)
        assert o.rig.loader.executor.active_weight_version == 2

    with overlap() as o:
        run(scenario(o))


def test_a_first_batch_may_come_twice() -> None:
    with overlap() as o:
        o.may_go_on.set()
        first, last = o.requests(1)
        for request in (first, first, last):
            run(o.give(request))
        assert o.rig.engine.holds(1)
