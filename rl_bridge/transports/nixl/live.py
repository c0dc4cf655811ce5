"""One version, in the trainer's own tensors: registered by reference, never copied.

What protects it is the stamp in a segment beside it, which `release` empties at once, and the
digests. The trainer must not write to these tensors before it released the version.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch

from rl_bridge.errors import SegmentError, SlotsExhausted
from rl_bridge.memory import vm
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.places import Place
from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.memory.slots import Slot
from rl_bridge.transports.nixl.agent import AgentError, Kind, Region
from rl_bridge.transports.nixl.host import Host
from rl_bridge.transports.nixl.messages import Entry
from rl_bridge.transports.nixl.shelf import Placed, Published, Ranges, Shelf, Taken

__all__ = ["LiveShelf"]


@dataclass(frozen=True, slots=True, eq=False)
class _Registered:
    """The tensors of one plan, which stay where they are for as long as they are registered.

    Attributes:
        plan: whose.
        tensors: kept alive.
        number: readers know them by it.
        region: theirs.
        where: those that are not empty.

    """

    plan: PackPlan
    tensors: tuple[torch.Tensor, ...]
    number: int
    region: Region | None
    where: Ranges


class LiveShelf(Shelf):
    """The version that the trainer's tensors hold, one at a time."""

    is_in_place: ClassVar[bool] = True

    def __init__(self, host: Host, place: Place, label: str) -> None:
        """Start empty."""
        super().__init__(host)
        self._place = place
        # No arena: its one page has the stamp.
        self._slot = Slot(OwnedSegment.make(f"{label}-stamp", vm.PAGE))
        self._slot.before_close = self._retire
        self._stamp = host.register_segment(self._slot.segment)
        self._numbers = 0
        self._live: _Registered | None = None
        self._held: dict[str, _Registered] = {}
        """Update -> what it lies in, while anybody may read it."""

    def take(
        self,
        plan: PackPlan,
        tensors: Mapping[str, torch.Tensor],
        update_id: str,
        *,
        lock: AbstractContextManager[object],
        num_threads: int | None,
    ) -> Taken:
        """Digest the tensors where they are."""
        with lock:
            self._make_way()
            slot = self._slot
            slot.generation += 1
            slot.stamp(None, 0)
            generation = slot.generation
        try:
            staged = time.perf_counter()
            digests = plan.digest_in_place(tensors, num_threads=num_threads)
            with lock:
                self._held[update_id] = self._registered(plan, tensors)
                slot.update_id = update_id
                slot.stamp(update_id, plan.table.arena_nbytes)
                self._published[update_id] = Published(slot, generation, plan.table.arena_nbytes)
            return Taken(digests, generation, staged)
        except BaseException:
            with lock:
                self.release(update_id)
                self._free(update_id)
            raise

    def _make_way(self) -> None:
        held = [update_id for update_id, one in self._published.items() if not one.is_released]
        if held:
            readers = "".join(f", {holder}" for holder in self.readers_of(held[0]))
            raise SlotsExhausted(
                f"update {held[0]} lies in these very tensors, and was not released{readers}. "
                "Release it before the weights change (in_place=True), and then publish."
            )

    def _registered(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor]) -> _Registered:
        live = self._live
        if live is not None and live.plan is plan:
            return live
        before, self._live = self._live, None
        self._let_go(before)
        kept = tuple(tensors[name] for name in plan.table.names)
        rows = [
            (tensor.data_ptr(), start, nbytes)
            for tensor, start, nbytes in zip(
                kept, plan.table.offsets, plan.table.nbytes, strict=True
            )
            if nbytes
        ]
        columns = tuple(tuple(row[column] for row in rows) for column in range(3))
        region = self._register([(address, nbytes) for address, _, nbytes in rows])
        self._numbers += 1
        where = (columns[0], columns[1], columns[2])
        self._live = _Registered(plan, kept, self._numbers, region, where)
        return self._live

    def _register(self, ranges: list[tuple[int, int]]) -> Region | None:
        if not ranges:
            return None
        try:
            return self._host.register(ranges, self._kind, self._device)
        except AgentError as error:
            msg = (
                f"{len(ranges)} tensors cannot be read from elsewhere: {error} Raise the limit of "
                "locked memory (ulimit -l), or leave in_place out."
            )
            raise SegmentError(msg) from error

    @property
    def _kind(self) -> Kind:
        return "DRAM" if self._place.device.type == "cpu" else "VRAM"

    @property
    def _device(self) -> int:
        return self._place.device.index or 0

    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Keep the digest of the manifest's header in the stamp."""
        slot = self._slot
        if slot.update_id == update_id:
            slot.stamp(update_id, slot.arena_nbytes, digest)

    def release(self, update_id: str) -> None:
        """Let nobody in any more, and have those who read it know that it is no version now."""
        slot = self._slot
        if slot.update_id == update_id:
            slot.generation += 1
            slot.stamp(None, 0)
            slot.update_id = None  # behind it: what an interrupt cuts off is done again
        super().release(update_id)

    def attend(self, *, is_sure: bool = False) -> bool:
        """Nothing: this process serves."""
        return self._host.ensure(is_sure=is_sure)

    def _place_of(self, update_id: str, known: Published) -> Placed:
        """One range for each tensor."""
        live = self._held[update_id]
        assert known.slot is self._slot
        regions = (self._stamp,) if live.region is None else (self._stamp, live.region)
        return Placed(
            number=live.number,
            regions=regions,
            stamp=self._stamp.address,
            ranges=live.where,
            memory=self._kind,
            device=self._device,
        )

    def _free(self, update_id: str) -> None:
        """Give the registration back, if the tensors are others by now."""
        self._let_go(self._held.get(update_id), but=update_id)
        self._held.pop(update_id, None)  # behind it: what an interrupt cuts off is done again

    def entries(self) -> tuple[Entry, ...]:
        """The version that the tensors hold, or none."""
        live = self._live
        if live is None:
            return ()
        return (self._entry(live.number, self._slot, sum(live.where[2])),)

    @property
    def nbytes(self) -> int:
        """Bytes beside the trainer's own."""
        return self._slot.nbytes

    def _let_go(self, live: _Registered | None, *, but: str = "") -> None:
        """Give a registration back that nothing needs but that update: who reads must have it."""
        others = (one for update_id, one in self._held.items() if update_id != but)
        if live is None or live is self._live or live in others:
            return
        if live.region is not None:
            self._host.deregister(live.region)

    def close(self) -> None:
        """Let go of everything."""
        self._published.clear()
        live, self._live = self._live, None
        for one in {live, *self._held.values()}:
            self._held.clear()
            self._let_go(one)
        self._slot.close()

    def _retire(self) -> None:
        # What a late reader still sees of its page is no version any more.
        self._slot.stamp(None, 0)
        self._host.deregister(self._stamp)
