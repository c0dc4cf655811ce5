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
from collections.abc import Callable
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

    def slot_maker(
        self, label: str, ready: Callable[[Slot], object] = lambda _: None
    ) -> Callable[[int], Slot]:
        """Make the function that makes a ring's slots, and calls `ready` with each.

        `label` names the memory in the system's lists.
        """
        numbers = itertools.count(1)

        def make(arena_nbytes: int) -> Slot:
            slot = self.make_slot(f"{label}-{next(numbers)}", arena_nbytes)
            try:
                ready(slot)
            except BaseException:
                slot.close()
                raise
            return slot

        return make

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
            raise WeightBridgeUnavailableError(
                f"no {self.nbytes} bytes on {place.device} for a version: {error}. Free some, or "
                "lower max_slots."
            ) from error

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
class _Layout:
    """A layout, and what was planned for versions of it."""

    table: TensorTable
    arrival: ArrivalPlan | None = None
    reading: Pass | None = None


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

    def __init__(
        self, arenas: Arenas, label: str, ready: Callable[[Slot], object] = lambda _: None
    ) -> None:
        """Start empty; for `label` and `ready` see `Arenas.slot_maker`."""
        self._arenas = arenas
        self._lock = threading.RLock()
        make_slot = arenas.slot_maker(label, ready)
        self._ring = SlotRing(make_slot, limit=_UNLIMITED, name_holders=lambda _: [])
        self._arrived: OrderedDict[str, Arrival] = OrderedDict()
        self._layouts: dict[str, _Layout] = {}

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

    def learn(self, table: TensorTable) -> _Layout:
        """Note a layout, also before its first version arrives."""
        with self._lock:
            found = self._layouts.pop(table.digest, None) or _Layout(table)
            self._layouts[table.digest] = found  # as the newest
            keep_newest(self._layouts, _KEPT_LAYOUTS)
            return found

    def digest_of(
        self, layout_digest: str, slice_nbytes: int, slot: Slot, arena_nbytes: int
    ) -> ArrivalDigest | None:
        """Begin to digest a version while it arrives; None if its layout is not known yet."""
        if self._arenas.place.device.type != "cpu":
            return None
        with self._lock:
            layout = self._layouts.get(layout_digest)
            if layout is None or layout.table.arena_nbytes != arena_nbytes:
                return None  # a longer layout's digest would read beyond the slot
            if layout.arrival is None or layout.arrival.slice_nbytes != slice_nbytes:
                layout.arrival = ArrivalPlan(layout.table, slice_nbytes)
            return layout.arrival.start(slot.address)

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
                raise SegmentError(
                    f"update {update_id} arrived with (bytes, write) {found}, but the manifest "
                    f"says {expected}. Use the manifest as it was published."
                )
            pin = self._arenas.pin(arrival.slot, update_id, arrival.arena_nbytes)
            pin.header = arrival.header
            arrival.is_claimed = True
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
        layout = self.learn(table)
        if layout.reading is None:
            layout.reading = self._arenas.place.plan(table.nbytes_column)
        return layout.reading

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
            self._layouts.clear()
            self._ring.close()
            self._arenas.close()
