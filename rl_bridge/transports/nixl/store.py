"""The versions that a publisher offers to readers, and the readers of each.

`SlotStore` copies each version into a registered slot of a ring. `InPlaceStore` registers the
trainer's own tensors and copies nothing: a stamp in a segment beside them, which `release` empties
at once, and the digests protect the version. The trainer must not write to the tensors before it
released the version.

A store is called under the server's lock, except `take`, which takes the lock itself.
"""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from rl_bridge.errors import SegmentError, SlotsExhausted
from rl_bridge.memory import vm
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.places import Place
from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.memory.slots import Slot, SlotRing
from rl_bridge.memory.views import Pin, anonymous_pin
from rl_bridge.transports.nixl.agent import AgentError, Host, Kind, Region
from rl_bridge.transports.nixl.arenas import RegisteredArenas, SlotRegistration
from rl_bridge.transports.nixl.messages import MAX_REASON, Entry, Lease, Leased
from rl_bridge.transports.wire.channel import Gone

_MAX_NAME = 1024  # a name is long if its characters have to be escaped

_Ranges = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The addresses of a version's ranges, their first bytes in the arena, and their sizes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A version that was taken: its digests, the write of its slot, and when copying began."""

    digests: bytes
    generation: int
    staged: float


@dataclass(slots=True, eq=False)
class _Published:
    """One version, and its readers."""

    slot: Slot
    generation: int
    arena_nbytes: int
    readers: dict[Hashable, str] = field(default_factory=dict)
    is_released: bool = False


class VersionStore(ABC):
    """Versions that can be leased."""

    is_in_place: ClassVar[bool] = False
    """Whether versions lie in the trainer's own tensors."""

    def __init__(self, host: Host) -> None:
        """Start empty; `host` serves readers."""
        self._host = host
        self._published: dict[str, _Published] = {}

    def lease(self, lease: Lease, reader: Hashable, name: str) -> Leased | Gone:
        """Let a reader read a version, or return the reason against it."""
        known = self._published.get(lease.update_id)
        if known is None or known.is_released:
            reason = "its publisher released it"
            return Gone(update_id=lease.update_id, reason=reason, is_stale=True)
        asked = lease.generation, lease.arena_nbytes
        found = known.generation, known.arena_nbytes
        if asked != found:
            reason = f"asked for (write, bytes) {asked}, but it is {found}"
            return Gone(update_id=lease.update_id, reason=reason, is_stale=False)
        known.readers[reader] = name
        return self._where(lease, known)

    @abstractmethod
    def take(
        self,
        plan: PackPlan,
        tensors: Mapping[str, torch.Tensor],
        update_id: str,
        *,
        lock: AbstractContextManager[object],
        num_threads: int | None,
    ) -> Stored:
        """Keep a version from now on; takes `lock` only for its short steps.

        Raises:
            WeightBridgeError: nothing was taken.

        """

    @abstractmethod
    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Keep the digest of the manifest's header in the version's stamp."""

    def _where(self, lease: Lease, known: _Published) -> Leased | Gone:
        at, (addresses, starts, nbytes) = self._locate(lease.update_id, known)
        for region in at.regions:
            if region.refusal:
                reason = f"its memory cannot be served: {region.refusal}"[:MAX_REASON]
                return Gone(update_id=lease.update_id, reason=reason, is_stale=False)
        host = self._host
        is_moved = lease.epoch != host.epoch
        parts = () if at.number in lease.known and not is_moved else at.regions
        return Leased(
            update_id=lease.update_id,
            slot=at.number,
            metadata=tuple(host.metadata(part).hex() for part in parts),
            stamp=at.stamp,
            addresses=addresses,
            starts=starts,
            nbytes=nbytes,
            memory=at.memory,
            device=at.device,
            epoch=host.epoch,
            moved=host.metadata(None).hex() if is_moved else "",
        )

    @abstractmethod
    def _locate(self, update_id: str, known: _Published) -> tuple[SlotRegistration, _Ranges]:
        """Find where a version lies, as readers see it."""

    def unlease(self, update_id: str, reader: Hashable) -> None:
        """Note that a reader is done; unknown readers are ignored."""
        known = self._published.get(update_id)
        if known is not None:
            known.readers.pop(reader, None)
            self._free_if_unused(update_id, known)

    def readers_of(self, update_id: str) -> list[str]:
        """Name the readers of a version."""
        known = self._published.get(update_id)
        return [] if known is None else [f"{name} reads it" for name in known.readers.values()]

    def is_released(self, update_id: str) -> bool:
        """Whether a version is kept only because it is still being read."""
        known = self._published.get(update_id)
        return known is not None and known.is_released

    def release(self, update_id: str) -> None:
        """Refuse new readers; the slot is written again once nobody reads the version."""
        known = self._published.get(update_id)
        if known is not None:
            known.is_released = True
            self._free_if_unused(update_id, known)

    def _free_if_unused(self, update_id: str, known: _Published) -> None:
        if known.is_released and not known.readers:
            self._free(update_id)
            del self._published[update_id]

    @abstractmethod
    def _free(self, update_id: str) -> None:
        """Let its memory be written again."""

    def slot_of(self, update_id: str) -> Slot | None:
        """Find the slot of a version."""
        known = self._published.get(update_id)
        return None if known is None else known.slot

    @abstractmethod
    def entries(self) -> tuple[Entry, ...]:
        """Describe the versions, for the catalog."""

    def _entry(self, number: int, slot: Slot, nbytes: int) -> Entry:
        known = self._published.get(slot.update_id or "")
        return Entry(
            slot=number,
            update_id=slot.update_id,
            generation=slot.generation,
            arena_nbytes=slot.arena_nbytes,
            nbytes=nbytes,
            readers=tuple(name[:_MAX_NAME] for name in known.readers.values()) if known else (),
        )

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""


class SlotStore(VersionStore):
    """Snapshots in a ring of registered slots."""

    def __init__(self, arenas: RegisteredArenas, host: Host, label: str, max_slots: int) -> None:
        """Start empty; slots are made when they are needed."""
        super().__init__(host)
        self._arenas = arenas
        self._label = label
        self._numbers = itertools.count(1)
        self._slots: dict[Slot, None] = {}
        self.ring = SlotRing(
            self._make_slot,
            limit=max_slots,
            name_holders=self.readers_of,
            is_released=self.is_released,
        )

    def _make_slot(self, arena_nbytes: int) -> Slot:
        slot = self._arenas.make_slot(f"{self._label}-{next(self._numbers)}", arena_nbytes)
        self._slots[slot] = None
        return slot

    def take(
        self,
        plan: PackPlan,
        tensors: Mapping[str, torch.Tensor],
        update_id: str,
        *,
        lock: AbstractContextManager[object],
        num_threads: int | None,
    ) -> Stored:
        """Copy a version into a slot."""
        table = plan.table
        with lock:
            slot = self.ring.acquire(table.arena_nbytes)
        try:
            self._arenas.require_served(slot)
            if slot.layout_digest != table.digest:
                plan.clear_padding(slot.address)
                slot.layout_digest = table.digest
            staged = time.perf_counter()
            digests = plan.pack(tensors, slot.address, num_threads=num_threads)
            with lock:
                self.ring.publish(slot, update_id, table.arena_nbytes)
                self._published[update_id] = _Published(slot, slot.generation, table.arena_nbytes)
            return Stored(digests, slot.generation, staged)
        except BaseException:
            with lock:
                self.ring.abandon(slot)
            raise

    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Keep the digest of the manifest's header in the slot's stamp."""
        self.ring.seal_header(update_id, digest)

    def _locate(self, update_id: str, known: _Published) -> tuple[SlotRegistration, _Ranges]:
        """Find the whole arena, as one range."""
        del update_id
        at, nbytes = self._arenas.known(known.slot), known.arena_nbytes
        return at, (((at.address,), (0,), (nbytes,)) if nbytes else ((), (), ()))

    def _free(self, update_id: str) -> None:
        self.ring.release(update_id)

    def entries(self) -> tuple[Entry, ...]:
        """Describe every slot, with or without a version."""
        for slot in list(self._slots):
            if slot.before_close is None:
                del self._slots[slot]
        known = self._arenas.known
        return tuple(self._entry(known(slot).number, slot, slot.nbytes) for slot in self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.ring.nbytes

    def close(self) -> None:
        """Close the slots."""
        self._published.clear()
        self.ring.close()
        self._slots.clear()
        self._arenas.close()


@dataclass(frozen=True, slots=True, eq=False)
class _LiveTensors:
    """The tensors of one plan, which stay where they are for as long as they are registered.

    Attributes:
        plan: the plan.
        tensors: keeps the tensors alive.
        number: the number that readers know them by.
        lists: memory of the store's own for their lists of digests; None if they have none.
        region: all of this memory, registered; None if there is none.
        where: the ranges of the tensors that are not empty, and of the leaf list.

    """

    plan: PackPlan
    tensors: tuple[torch.Tensor, ...]
    number: int
    lists: Pin | None
    region: Region | None
    where: _Ranges


class InPlaceStore(VersionStore):
    """The version that the trainer's own tensors hold, one at a time."""

    is_in_place: ClassVar[bool] = True

    def __init__(self, host: Host, place: Place, label: str) -> None:
        """Start empty."""
        super().__init__(host)
        self._place = place
        self._slot = Slot(OwnedSegment.make(f"{label}-stamp", vm.PAGE))  # no arena, only a stamp
        self._slot.before_close = self._retire
        self._stamp = host.register_segment(self._slot.segment)
        self._numbers = 0
        self._live: _LiveTensors | None = None
        self._tensors_of: dict[str, _LiveTensors] = {}
        """Update -> the tensors that it lies in, while it may be read."""

    def take(
        self,
        plan: PackPlan,
        tensors: Mapping[str, torch.Tensor],
        update_id: str,
        *,
        lock: AbstractContextManager[object],
        num_threads: int | None,
    ) -> Stored:
        """Digest the tensors where they are."""
        with lock:
            self._require_released()
            slot = self._slot
            slot.generation += 1
            slot.stamp(None, 0)
            generation = slot.generation
        try:
            staged = time.perf_counter()
            digests = plan.digest_in_place(tensors, num_threads=num_threads)
            with lock:
                live = self._tensors_of[update_id] = self._registered(plan, tensors)
                if live.lists is not None:
                    plan.write_lists(live.lists.address)
                slot.update_id = update_id
                slot.stamp(update_id, plan.table.arena_nbytes)
                self._published[update_id] = _Published(slot, generation, plan.table.arena_nbytes)
            return Stored(digests, generation, staged)
        except BaseException:
            with lock:
                self.release(update_id)
                self._free(update_id)
            raise

    def _require_released(self) -> None:
        held = [update_id for update_id, one in self._published.items() if not one.is_released]
        if held:
            readers = "".join(f", {holder}" for holder in self.readers_of(held[0]))
            raise SlotsExhausted(
                f"update {held[0]} lies in these very tensors, and was not released{readers}. "
                "Release it before the weights change (in_place=True), and then publish."
            )

    def _registered(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor]) -> _LiveTensors:
        live = self._live
        if live is not None and live.plan is plan:
            return live
        before, self._live = self._live, None
        self._deregister_unused(before)
        kept = tuple(tensors[name] for name in plan.table.names)
        rows = [
            (tensor.data_ptr(), start, nbytes)
            for tensor, start, nbytes in zip(
                kept, plan.table.offsets, plan.table.nbytes, strict=True
            )
            if nbytes
        ]
        table, lists = plan.table, None
        if table.lists_nbytes:
            lists = anonymous_pin(table.lists_nbytes)
            rows.append((lists.address, table.leaves_offset, table.lists_nbytes))
        columns = tuple(tuple(row[column] for row in rows) for column in range(3))
        region = self._register([(address, nbytes) for address, _, nbytes in rows])
        self._numbers += 1
        where = (columns[0], columns[1], columns[2])
        self._live = _LiveTensors(plan, kept, self._numbers, lists, region, where)
        return self._live

    def _register(self, ranges: list[tuple[int, int]]) -> Region | None:
        if not ranges:
            return None
        try:
            return self._host.register(ranges, self._kind, self._device)
        except AgentError as error:
            msg = (
                f"{len(ranges)} tensors cannot be registered: {error} Raise the limit of locked "
                "memory (ulimit -l), or leave in_place out."
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
        """Refuse new readers, and empty the stamp: a read under way sees that it is no version."""
        slot = self._slot
        if slot.update_id == update_id:
            slot.generation += 1
            slot.stamp(None, 0)
            slot.update_id = None
        super().release(update_id)

    def _locate(self, update_id: str, known: _Published) -> tuple[SlotRegistration, _Ranges]:
        """Find one range for each tensor."""
        live = self._tensors_of[update_id]
        assert known.slot is self._slot
        regions = (self._stamp,) if live.region is None else (live.region, self._stamp)
        return SlotRegistration(live.number, regions, self._kind, self._device, 0), live.where

    def _free(self, update_id: str) -> None:
        """Deregister the tensors, if the trainer has others by now."""
        self._deregister_unused(self._tensors_of.get(update_id), but=update_id)
        self._tensors_of.pop(update_id, None)

    def entries(self) -> tuple[Entry, ...]:
        """Describe the version that the tensors hold, if there is one."""
        live = self._live
        if live is None:
            return ()
        return (self._entry(live.number, self._slot, sum(live.where[2])),)

    @property
    def nbytes(self) -> int:
        """Bytes besides the trainer's own."""
        live = self._live
        return self._slot.nbytes + (live.lists.nbytes if live and live.lists else 0)

    def _deregister_unused(self, live: _LiveTensors | None, *, but: str = "") -> None:
        """Deregister tensors unless a version other than `but` lies in them and may be read."""
        others = (one for update_id, one in self._tensors_of.items() if update_id != but)
        if live is None or live is self._live or live in others:
            return
        if live.region is not None:
            self._host.deregister(live.region)

    def close(self) -> None:
        """Release everything."""
        self._published.clear()
        live, self._live = self._live, None
        for one in {live, *self._tensors_of.values()}:
            self._tensors_of.clear()
            self._deregister_unused(one)
        self._slot.close()

    def _retire(self) -> None:
        self._slot.stamp(None, 0)  # so a late reader sees that it is no longer a version
        self._host.deregister(self._stamp)
