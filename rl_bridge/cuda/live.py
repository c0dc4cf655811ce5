"""A live range: fixed addresses at which an engine's versions are exchanged (flip).

In device memory, the allocation at an engine's fixed addresses is exchanged. The addresses never
change, so the engine's tensors and its captured CUDA graphs stay valid. The device is drained
before anything is unmapped; the caller has to see that the engine submits no work meanwhile. Undo
is the flip back. The memory belongs to its publisher, and other engines may map it too, so an
engine can read it and not write to it.
"""

import weakref
from typing import Protocol

from rl_bridge.cuda.owners import AddressRange, Allocation, quietly
from rl_bridge.cuda.views import DeviceView
from rl_bridge.errors import (
    DeadlineExceeded,
    DriverError,
    ProofFailed,
    SegmentError,
    WeightBridgeUnavailableError,
)
from rl_bridge.memory.flip import LiveRange
from rl_bridge.memory.views import Pin

# ---- in device memory ----------------------------------------------------------------------------


class DeviceRange:
    """A range of a device's addresses and the version that lies there now."""

    def __init__(self, view: DeviceView) -> None:
        """Reserve room for versions of the size of `view`'s; nothing lies there yet.

        Raises:
            WeightBridgeUnavailableError: no address space left.

        """
        try:
            self._range = AddressRange(view.allocation.driver, view.allocation.nbytes)
        except DriverError as error:
            raise WeightBridgeUnavailableError(
                f"no addresses for the engine's weights: {error.cause}. Use mode='copy'."
            ) from error
        self.pin = Pin(self._range.address, self._range.nbytes, place=view.place)
        # Whoever of them has the allocation that lies there is the content, and keeps its lease.
        # The range outlives this object for as long as a tensor of the engine looks at it.
        self._held: list[Pin] = []
        weakref.finalize(self.pin.buffer, _let_go, self._range, self._held).atexit = False

    @property
    def address(self) -> int:
        """First byte; never changes."""
        return self._range.address

    @property
    def content(self) -> Pin | None:
        """The version that lies there now.

        Raises:
            TornEngine: a flip was cut off, and what lay there before cannot be put back.

        """
        there = self._range.content
        # The newest first: an update that was installed over itself has two pins.
        found = next((pin for pin in reversed(self._held) if _allocation(pin) is there), None)
        self._held[:] = [] if found is None else [found]
        return found

    def flip(self, new: Pin) -> Pin | None:
        """Map `new`; returns the content before. To undo, flip the returned pin.

        Raises:
            SegmentError: `new` is no such memory, or the driver refuses; nothing changed.
            DeadlineExceeded: the device did not come to rest in time; nothing changed.
            TornEngine: the driver refused half-way and again on the way back.

        """
        allocation = _allocation(new)
        if allocation is None or allocation.nbytes != self._range.nbytes:
            raise SegmentError(
                "a flip needs an update in device memory of the size of the one before; this one "
                "is not. Use mode='copy', or the transport cuda-vmm."
            )
        old = self.content
        self._held.append(new)
        try:
            self._range.swap(allocation, writable=False)
        except DeadlineExceeded:
            self._held.remove(new)
            raise
        except DriverError as error:
            self._held.remove(new)
            raise SegmentError(
                f"the flip failed and changed nothing: {error.cause}. Publish again, or "
                f"use mode='copy'. {error.remedy}"
            ) from error
        return old if self.content is new else None

    def empty(self) -> None:
        """Take the content out, so that only a reservation is left (undo of the first flip).

        Raises:
            DeadlineExceeded: the device did not come to rest in time; it lies there still.
            DriverError: the driver refuses; it lies there still.

        """
        self._range.unmap()
        self._held.clear()

    def shows(self, pin: Pin) -> bool:
        """Whether `pin`'s allocation lies here, in full: the driver is asked as well.

        Raises:
            ProofFailed: it was put here, and the driver says that something else, or nothing, is
                here. Do not read: on a device, where nothing is mapped that ends the process.
            DriverError: the driver does not say.

        """
        allocation = _allocation(pin)
        if allocation is None or self._range.content is not allocation:
            return False
        if not self._range.shows(allocation):
            raise ProofFailed(
                f"the driver took the allocation for {self.address:#x} and does not show it there. "
                "Nothing else may map memory at the engine's weights: use mode='copy'."
            )
        return True


def _allocation(pin: Pin) -> Allocation | None:
    return pin.view.allocation if isinstance(pin.view, DeviceView) else None


def _let_go(place: AddressRange, held: list[Pin]) -> None:
    quietly(place.close)
    held.clear()


# ---- of either kind ------------------------------------------------------------------------------


class Live(Protocol):
    """A range that can be flipped: see `flip.LiveRange`, which is one in memory of the CPU."""

    pin: Pin

    @property
    def content(self) -> Pin | None:
        """The version that lies there now."""

    @property
    def address(self) -> int:
        """First byte; never changes."""

    def flip(self, new: Pin) -> Pin | None:
        """Map `new`; returns the content before. To undo, flip that one."""

    def empty(self) -> None:
        """Take the content out, so that only a reservation is left."""

    def shows(self, pin: Pin) -> bool:
        """Whether the memory of `pin` really lies here."""


def live_range(pin: Pin, arena_nbytes: int) -> Live:
    """Reserve addresses for versions like `pin`'s.

    Raises:
        WeightBridgeUnavailableError: no address space left.

    """
    if isinstance(pin.view, DeviceView):
        return DeviceRange(pin.view)
    return LiveRange(arena_nbytes)
