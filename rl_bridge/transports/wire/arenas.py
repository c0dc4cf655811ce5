"""The memory of versions on both sides of a socket, and the versions that a receiver keeps.

Both sides keep a ring of slots that are written again and again. On the CPU a slot is a sealed
segment, as in shared memory: a consumer maps it privately, so that an engine may write to what it
imported, or exchange it by flip. On a GPU the arena is memory of torch's allocator, and a segment
of one page holds lease and stamp.

A receiver keeps each version that its engine holds. Of versions that nobody imported yet it keeps
two: the newest, and one more for an import that is under way.
"""

import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass

import torch

from rl_bridge.errors import SegmentError, WeightBridgeUnavailableError
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory import vm
from rl_bridge.memory.arrival_digest import ArrivalDigest, ArrivalPlan
from rl_bridge.memory.places import CPU_PLACE, Pass, Place
from rl_bridge.memory.segment import OwnedSegment, SegmentRef
from rl_bridge.memory.slots import ARRIVING, Slot, SlotRing, slot_segment_nbytes
from rl_bridge.memory.views import Attachment, LeasedView, Pin, ViewCache
from rl_bridge.transports.wire.channel import keep_newest


class Arenas(ABC):
    """Makes slots in one kind of memory, and makes the versions in them readable."""

    place: Place = CPU_PLACE

    @abstractmethod
    def make_slot(self, name: str, arena_nbytes: int) -> Slot:
        """Make a slot.

        Raises:
            SegmentError: no memory.
            WeightBridgeUnavailableError: no memory on the device.

        """

    @abstractmethod
    def pin(self, slot: Slot, update_id: str, arena_nbytes: int) -> Pin:
        """Lease the version in a slot of this process's own.

        Raises:
            StaleUpdate: the slot holds another version by now.
            SegmentError: the segment shrank.

        """

    @abstractmethod
    def sweep(self) -> None:
        """Release the views of slots that were closed."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that no tensor needs."""

    def tensor(self, slot: Slot, arena_nbytes: int) -> torch.Tensor:
        """The arena's bytes, to be written or sent: uint8, one dimension."""
        if arena_nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.place.device)
        return self.place.bytes_at(slot.address, arena_nbytes)


class CPUArenas(Arenas):
    """Sealed segments, mapped a second time for each consumer."""

    def __init__(self) -> None:
        """Start empty."""
        self._views = ViewCache()

    def make_slot(self, name: str, arena_nbytes: int) -> Slot:
        """Make a slot."""
        return Slot(OwnedSegment.make(name, slot_segment_nbytes(arena_nbytes)))

    def pin(self, slot: Slot, update_id: str, arena_nbytes: int) -> Pin:
        """Lease the version in a slot."""
        return self.pin_at(slot.segment.ref, update_id, slot.generation, arena_nbytes)

    def pin_at(self, ref: SegmentRef, update_id: str, generation: int, arena_nbytes: int) -> Pin:
        """Lease the version in a slot of this host, which may be another process's.

        Raises:
            StaleUpdate: the slot holds another version by now.
            SegmentError: it is gone, or not what `ref` says.
            WeightBridgeUnavailableError: it may not be opened, or memory or descriptors are short.

        """
        return self._views.get(ref).pin(update_id, generation, arena_nbytes)

    def sweep(self) -> None:
        """Release the views of slots that were closed."""
        self._views.sweep()

    def close(self) -> None:
        """Release everything that no tensor needs."""
        self._views.close()


class DeviceArenas(Arenas):
    """Memory of one device, from torch's allocator."""

    def __init__(self, place: Place) -> None:
        """Use a device."""
        self.place = place
        self._views: weakref.WeakKeyDictionary[Slot, _ArenaView] = weakref.WeakKeyDictionary()

    def make_slot(self, name: str, arena_nbytes: int) -> Slot:
        """Make a slot."""
        arena = _TensorArena(arena_nbytes, self.place)
        try:
            return Slot(OwnedSegment.make(name, vm.PAGE), arena)
        except BaseException:
            arena.close()
            raise

    def pin(self, slot: Slot, update_id: str, arena_nbytes: int) -> Pin:
        """Lease the version in a slot."""
        view = self._views.get(slot)
        if view is None:
            view = self._views[slot] = _ArenaView(slot, self.place)
        pin = view.pin(update_id, slot.generation, arena_nbytes)
        # There are no private pages: it cannot be flipped, and an engine's writes to it stay.
        pin.view = None
        return pin

    def sweep(self) -> None:
        """Release the views of slots that were closed."""
        for slot, view in list(self._views.items()):
            view.settle()
            if slot.address == 0 and not view.is_pinned:
                self._views.pop(slot).retire()

    def close(self) -> None:
        """Release everything that no tensor needs."""
        for view in list(self._views.values()):
            view.retire()
        self._views.clear()


class _TensorArena:
    """A slot's arena: one tensor of bytes."""

    def __init__(self, arena_nbytes: int, place: Place) -> None:
        self.nbytes = vm.round_up(max(arena_nbytes, 1))
        try:
            self.bytes: torch.Tensor | None = torch.empty(
                self.nbytes, dtype=torch.uint8, device=place.device
            )
        except torch.OutOfMemoryError as error:
            msg = (
                f"no {self.nbytes} bytes on {place.device} for a version: {error}. Free some, or "
                "lower max_slots."
            )
            raise WeightBridgeUnavailableError(msg) from error

    @property
    def address(self) -> int:
        return 0 if self.bytes is None else self.bytes.data_ptr()

    def close(self) -> None:
        self.bytes = None


class _ArenaView(LeasedView):
    """A slot with an arena of its own, seen from the process that made it."""

    def __init__(self, slot: Slot, place: Place) -> None:
        assert isinstance(slot.arena, _TensorArena)
        self.place = place
        self._bytes = slot.arena.bytes  # not the slot: tensors outlive the ring
        self._nbytes = slot.arena.nbytes
        super().__init__(slot.segment.ref, None)

    @property
    def capacity(self) -> int:
        return self._nbytes

    def _open(self) -> int:
        return 0 if self._bytes is None else self._bytes.data_ptr()

    def _is_quiet(self) -> bool:
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)  # kernels may still read the last tensor
        return True

    def _unmap(self) -> None:
        self._bytes = None

    def refresh(self, address: int, nbytes: int) -> bool:
        del address, nbytes
        return False

    def prefault(self, nbytes: int) -> None:
        del nbytes


# ---- versions that arrived ----------------------------------------------------------------------

_MAX_UNCLAIMED = 2
_UNLIMITED = 1 << 30
_KEPT_LAYOUTS = 4  # layouts may take turns, such as those of whole models and of adapters


@dataclass(slots=True)
class Arrival:
    """One version that arrived whole."""

    update_id: str
    generation: int
    arena_nbytes: int
    layout_digest: str
    slot: Slot
    digests: bytes | None
    header: bytes | None = None
    is_claimed: bool = False


class Arrivals:
    """All versions of one publisher that are in this process. Thread-safe."""

    def __init__(self, arenas: Arenas, label: str) -> None:
        """Start empty; `label` names the memory in the system's lists."""
        self._arenas = arenas
        self._label = label
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._ring = SlotRing(self._make_slot, limit=_UNLIMITED, name_holders=lambda _: [])
        self._arrived: OrderedDict[str, Arrival] = OrderedDict()
        self._plans: OrderedDict[str, ArrivalPlan] = OrderedDict()
        self._tables: OrderedDict[str, TensorTable] = OrderedDict()
        self._passes: OrderedDict[str, Pass] = OrderedDict()

    def _make_slot(self, arena_nbytes: int) -> Slot:
        return self._arenas.make_slot(f"{self._label}-{next(self._numbers)}", arena_nbytes)

    # ---- while a version arrives ----------------------------------------------------------------

    def reserve(self, arena_nbytes: int) -> Slot:
        """Find room for a version; end with `commit` or `abandon`.

        Raises:
            WeightBridgeError: there is no room.

        """
        with self._lock:
            self._evict()
            slot = self._ring.acquire(arena_nbytes)
            slot.update_id = ARRIVING
            return slot

    def tensor(self, slot: Slot, arena_nbytes: int) -> torch.Tensor:
        """The slot's bytes."""
        return self._arenas.tensor(slot, arena_nbytes)

    def learn(self, table: TensorTable) -> None:
        """Note a layout before its first version arrives."""
        with self._lock:
            self._tables[table.digest] = table
            self._tables.move_to_end(table.digest)
            keep_newest(self._tables, _KEPT_LAYOUTS)

    def digest_of(
        self, layout_digest: str, slice_nbytes: int, slot: Slot, arena_nbytes: int
    ) -> ArrivalDigest | None:
        """Begin to digest a version while it arrives; None if its layout is not known yet."""
        if self._arenas.place.device.type != "cpu":
            return None
        with self._lock:
            table = self._tables.get(layout_digest)
            if table is None or table.arena_nbytes != arena_nbytes:
                return None  # a longer layout's digest would read beyond the slot
            plan = self._plans.get(layout_digest)
            if plan is None or plan.slice_nbytes != slice_nbytes:
                plan = self._plans[layout_digest] = ArrivalPlan(table, slice_nbytes)
                keep_newest(self._plans, _KEPT_LAYOUTS)
            return plan.start(slot.address)

    def commit(self, arrival: Arrival) -> None:
        """Note that a version arrived: from now on it can be attached."""
        with self._lock:
            slot = arrival.slot
            self._ring.publish(slot, arrival.update_id, arrival.arena_nbytes, arrival.header)
            known = self._arrived.get(arrival.update_id)
            if known is not None:
                self._forget(known)
            self._arrived[arrival.update_id] = arrival
            self._evict()

    def abandon(self, slot: Slot) -> None:
        """Release a slot whose version did not arrive."""
        with self._lock:
            self._ring.abandon(slot)

    # ---- once a version is here -----------------------------------------------------------------

    def find(self, update_id: str) -> Arrival | None:
        """Find a version that is here."""
        with self._lock:
            return self._arrived.get(update_id)

    def attach(
        self, update_id: str, table: TensorTable, *, generation: int, num_threads: int | None
    ) -> Attachment | None:
        """Lease a version that is here; None if it is not.

        Raises:
            SegmentError: the version here has another size, or is another write of the slot.
            StaleUpdate: it is overwritten.
            WeightBridgeUnavailableError: this process is short of memory or descriptors.

        """
        with self._lock:
            arrival = self._arrived.get(update_id)
            if arrival is None:
                return None
            expected, found = (
                (table.arena_nbytes, generation),
                (arrival.arena_nbytes, arrival.generation),
            )
            if expected != found:
                msg = (
                    f"update {update_id} arrived with (bytes, write) {found}, but the manifest "
                    f"says {expected}. Use the manifest as it was published."
                )
                raise SegmentError(msg)
            pin = self._arenas.pin(arrival.slot, update_id, arrival.arena_nbytes)
            pin.header = arrival.header
            arrival.is_claimed = True
            self.learn(table)
            made = self.attach_pin(pin, table, num_threads=num_threads)
            made.digested(arrival.digests if arrival.layout_digest == table.digest else None)
            return made

    def attach_pin(self, pin: Pin, table: TensorTable, *, num_threads: int | None) -> Attachment:
        """Make the attachment of a version that was leased."""
        with self._lock:
            return Attachment(table, pin, self._pass(table), num_threads=num_threads)

    def attach_part(
        self,
        slot: Slot,
        update_id: str,
        table: TensorTable,
        *,
        header: bytes | None,
        num_threads: int | None,
        room_nbytes: int,
    ) -> Attachment:
        """Lease a version of which only some ranges arrived; `find` does not return it.

        The slot was reserved with `room_nbytes`: 0 where nothing of the version arrived.

        Raises:
            WeightBridgeUnavailableError: this process is short of memory or descriptors.

        """
        with self._lock:
            self._ring.publish(slot, update_id, room_nbytes, header)
            try:
                pin = self._arenas.pin(slot, update_id, room_nbytes)
            finally:
                slot.update_id = None
            return Attachment(table, pin, self._pass(table), num_threads=num_threads, is_part=True)

    def _pass(self, table: TensorTable) -> Pass:
        """Make the pass that reads versions of a layout, once."""
        found = self._passes.get(table.digest)
        if found is None:
            found = self._passes[table.digest] = self._arenas.place.plan(table.nbytes_column)
            keep_newest(self._passes, _KEPT_LAYOUTS)
        return found

    def drop(self, update_id: str) -> None:
        """Forget a version that nobody imported: its publisher released it."""
        with self._lock:
            arrival = self._arrived.get(update_id)
            if arrival is not None and not arrival.is_claimed:
                self._forget(arrival)

    def sweep(self) -> None:
        """Forget versions that were imported: the tensors that live keep their slots leased."""
        with self._lock:
            for arrival in list(self._arrived.values()):
                if arrival.is_claimed:
                    self._forget(arrival)
            self._arenas.sweep()

    @property
    def is_needed(self) -> bool:
        """Whether a version is here that may yet be imported."""
        return bool(self._arrived)

    def _evict(self) -> None:
        unclaimed = [item for item in self._arrived.values() if not item.is_claimed]
        for arrival in unclaimed[: max(0, len(unclaimed) - _MAX_UNCLAIMED)]:
            self._forget(arrival)

    def _forget(self, arrival: Arrival) -> None:
        arrival.slot.update_id = None
        del self._arrived[arrival.update_id]

    def close(self) -> None:
        """Release everything; tensors keep the memory that they show."""
        with self._lock:
            self._arrived.clear()
            self._passes.clear()
            self._ring.close()
            self._arenas.close()
