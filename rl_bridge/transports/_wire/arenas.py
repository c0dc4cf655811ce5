"""Where versions lie on either side of the wire: slots of sealed memory, or of a GPU's.

Both sides keep a ring of slots that are written again and again. On the CPU a slot is a sealed
segment, as in shared memory: a consumer maps it privately, so that an engine may write to what it
imported, or exchange it by flip. On a GPU the arena is memory of torch's allocator.
"""

import weakref
from abc import ABC, abstractmethod

import torch

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.memory import vm
from rl_bridge.memory.leased import LeasedView
from rl_bridge.memory.pins import Pin
from rl_bridge.memory.places import CPU_PLACE, Place
from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.memory.slots import Slot, slot_segment_nbytes
from rl_bridge.memory.views import ViewCache

__all__ = ["Arenas", "CPUArenas", "DeviceArenas"]


class Arenas(ABC):
    """Makes slots, and makes their versions readable."""

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
            StaleUpdate: the slot holds another one by now.
            SegmentError: the segment shrank.

        """

    @abstractmethod
    def sweep(self) -> None:
        """Let go of views of slots that were given back."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything that no tensor needs."""

    def tensor(self, slot: Slot, arena_nbytes: int) -> torch.Tensor:
        """The arena's bytes, for whoever writes or sends them: uint8, one dimension."""
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
        return self._views.get(slot.segment.ref).pin(update_id, slot.generation, arena_nbytes)

    def sweep(self) -> None:
        """Let go of views of slots that were given back."""
        self._views.sweep()

    def close(self) -> None:
        """Let go of everything that no tensor needs."""
        self._views.close()


class DeviceArenas(Arenas):
    """Memory of one device, by torch's allocator; lease and stamp lie in a segment of one page."""

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
        # No view to flip, nor pages of its own: what an engine writes there stays there.
        pin.view = None
        return pin

    def sweep(self) -> None:
        """Let go of views of slots that were given back."""
        for slot, view in list(self._views.items()):
            view.settle()
            if slot.address == 0 and not view.is_pinned:
                self._views.pop(slot).retire()

    def close(self) -> None:
        """Let go of everything that no tensor needs."""
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
        # The memory, not the slot: tensors outlive the ring.
        self._bytes = slot.arena.bytes
        self._nbytes = slot.arena.nbytes
        super().__init__(slot.segment.ref, None)

    @property
    def capacity(self) -> int:
        return self._nbytes

    def _open(self) -> int:
        return 0 if self._bytes is None else self._bytes.data_ptr()

    def _is_quiet(self) -> bool:
        if self.place.device.type == "cuda":
            # Kernels that read the last tensor may be under way still.
            torch.cuda.synchronize(self.place.device)
        return True

    def _unmap(self) -> None:
        self._bytes = None

    def refresh(self, address: int, nbytes: int) -> bool:
        del address, nbytes
        return False

    def prefault(self, nbytes: int) -> None:
        del nbytes
