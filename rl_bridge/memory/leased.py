"""A publisher's slot seen from a consumer: its arena is made readable once, its version is leased.

What comes and goes per version is a *pin*: it holds the lease, and every tensor holds the pin. The
lease ends when the last tensor dies. How the arena is reached is each kind's own affair: see
`views.SegmentView` for memory of the CPU and `vmm.view.DeviceView` for a device's.
"""

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable
from pathlib import Path

from rl_bridge.errors import SegmentError, StaleUpdate
from rl_bridge.memory import leases
from rl_bridge.memory.holding import Holding
from rl_bridge.memory.pins import Pin
from rl_bridge.memory.places import CPU_PLACE, Place
from rl_bridge.memory.segment import SegmentRef, open_segment
from rl_bridge.memory.slots import Stamp, read_stamp

__all__ = ["LeasedView"]


class LeasedView(ABC):
    """A publisher's slot, reached from here; `pin` leases the version that it holds now."""

    place: Place = CPU_PLACE

    def __init__(self, ref: SegmentRef, directory: Path | None) -> None:
        """Open and check the slot's segment, and make its arena readable.

        Raises:
            SegmentError: it is gone, or not what `ref` says.
            WeightBridgeUnavailableError: this process is short of memory or descriptors.

        """
        self.ref = ref
        self.directory = directory
        # A view that an interrupt loses must not keep the slot for as long as the process runs. One
        # that is pinned is not lost: its pins' finalizers hold it.
        held = self._held = Holding()
        self._finalizer = weakref.finalize(self, held.dispose)
        self._finalizer.atexit = False
        self.fd = open_segment(ref, directory=directory, held=held)
        try:
            self.address = self._open()
        except BaseException:
            self._finalizer()  # at once, whoever keeps the exception
            raise
        # Reentrant: a pin's finalizer may run inside any allocation, also under this lock.
        self._lock = threading.RLock()
        # The pins that live. One that dies is taken out by a function in C: no interrupt can leave
        # it in. Nobody looks at a pin to see whether it lives: that takes a reference, which may be
        # the last one by the time it is dropped. The pin would die under this lock, and what it has
        # to tell the publisher waits for a lock whose holder may wait for this one.
        self._pins: list[weakref.ref[object]] = []
        self._is_leased = False
        self._retired = False
        self._is_unmapped = False
        self._pid = os.getpid()

    @property
    def where(self) -> Hashable:
        """What leads here: another one leads to another slot."""
        return self.ref

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Bytes that the arena has room for."""

    @abstractmethod
    def _open(self) -> int:
        """Make the arena readable; returns its first address."""

    def _is_quiet(self) -> bool:
        """Whether nobody reads any more what the last tensor showed. Asked again if not."""
        return True

    def _unmap(self) -> None:  # noqa: B027 - what is noted suffices as a rule
        """Give back what `_open` made, but for what it noted in `_held`."""

    @abstractmethod
    def refresh(self, address: int, nbytes: int) -> bool:
        """Drop this process's own copies of pages, which date from an earlier version.

        Returns:
            Whether there could be any: the caller then reads again.

        """

    @abstractmethod
    def prefault(self, nbytes: int) -> None:
        """Have the first `nbytes` present at the slot's own address.

        Raises:
            WeightBridgeUnavailableError: this process is short of memory.
            SegmentError: a page cannot be read.

        """

    @property
    def is_pinned(self) -> bool:
        """Whether any tensor of this segment lives."""
        return bool(self._pins)

    def pin(self, update_id: str, generation: int, arena_nbytes: int) -> Pin:
        """Lease the version that the segment holds.

        Raises:
            StaleUpdate: the slot holds another version by now, or is being written.
            SegmentError: the segment shrank.

        """
        if arena_nbytes > self.capacity:
            raise SegmentError(self._another_size(update_id, self.capacity, arena_nbytes))
        pin: Pin | None = None
        try:
            with self._lock:
                # Noted as living before the lease is taken and the stamp is read: a finalizer of an
                # older pin, which may run in between, then does not give the lease back.
                pin = self._make_pin(max(arena_nbytes, 1))
                self._lease(update_id)
                pin.header = self._check_stamp(update_id, generation, arena_nbytes).header
                return pin
        except BaseException:
            pin = None  # also for whoever keeps the exception
            self.settle()
            raise

    def _lease(self, update_id: str) -> None:
        self._is_leased = True  # first: an interrupt in between must not lose the lease
        if not leases.try_shared(self.fd):
            raise StaleUpdate(self._overwritten(update_id, "is being overwritten"))

    def _make_pin(self, nbytes: int) -> Pin:
        pin = Pin(self.address, nbytes, self, place=self.place)
        # In this order: when the pin dies, what was registered last is called first.
        weakref.finalize(pin.buffer, self.settle).atexit = False
        self._pins.append(weakref.ref(pin.buffer, self._pins.remove))
        return pin

    def _check_stamp(self, update_id: str, generation: int, arena_nbytes: int) -> Stamp:
        stamp = read_stamp(self.fd, self.ref)
        if (stamp.update_id, stamp.generation) != (update_id, generation):
            raise StaleUpdate(self._overwritten(update_id, f"holds update {stamp.update_id}"))
        if stamp.arena_nbytes != arena_nbytes:
            raise SegmentError(self._another_size(update_id, stamp.arena_nbytes, arena_nbytes))
        return stamp

    @staticmethod
    def _another_size(update_id: str, found: int, expected: int) -> str:
        return (
            f"update {update_id}: its slot holds {found} bytes, the manifest says {expected}. Use "
            "the manifest as it was published, or publish again."
        )

    def _overwritten(self, update_id: str, what: str) -> str:
        return (
            f"update {update_id} is gone: its slot {what}. The publisher released it before this "
            "side imported it. Import the publisher's latest manifest."
        )

    def settle(self) -> None:
        """Give the lease back if no tensor lives; harmless at any time."""
        if os.getpid() != self._pid:
            return  # before the lock: at the fork, another thread of the parent may have held it
        is_over = False
        try:
            with self._lock:
                if self.is_pinned or self._is_unmapped:
                    return
                if self._is_leased:
                    # A signal's handler may import in the middle of the wait, in this very thread.
                    if not self._is_quiet() or self.is_pinned:
                        return
                    leases.unlock(self.fd)
                    self._is_leased = False
                # Whoever notes it ends it, and nobody else: unmapped twice, the addresses may be
                # another's by then. (In one line: no interrupt comes in between.)
                is_over = self._is_unmapped = self._retired
        finally:
            if is_over:
                self._end()

    def retire(self) -> None:
        """Unmap as soon as no tensor needs it any more."""
        self._retired = True
        self.settle()

    def _end(self) -> None:
        # Not under the lock: whoever waits in here may be waited for by one that collects a tensor,
        # whose end waits for this lock.
        try:
            self._unmap()
        finally:
            self._held.dispose()
            self._finalizer.detach()  # behind it: what an interrupt cuts off, the finalizer ends
