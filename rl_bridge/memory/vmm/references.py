"""Owners of memory and of descriptors: what `rl_bridge.memory.vmm.owners` is built on.

An owner's `close` is idempotent, runs when the owner dies too, and does nothing in a forked child
or at the end of the interpreter: there the kernel and CUDA clean up. Where an interrupt leaves open
whether something was given back, it counts as given back: twice would free what is another's now.
"""

import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from rl_bridge.errors import DeadlineExceeded, DriverError, SegmentError
from rl_bridge.memory.holding import close_fd, forget_fd_in_children
from rl_bridge.memory.vmm.driver import CAPTURING, VMMDriver

__all__ = ["Allocation", "Descriptor", "Reference", "put_off", "quietly", "settle_late"]

_LOG = logging.getLogger(__name__)
# What died while a graph was captured, whose end would have broken the capture, or while the device
# did not come to rest. Tried again by the next owner that is made.
_LATE: list[Callable[[], None]] = []


def quietly(undo: Callable[[], None]) -> None:
    """Run a finalizer: what cannot be undone now waits, or is lost and told."""
    try:
        undo()
    except (DeadlineExceeded, DriverError) as error:
        if isinstance(error, DeadlineExceeded) or error.code == CAPTURING:
            _LATE.append(undo)
        else:
            # As text: a log that keeps the error would keep the frames, and their memory, as well.
            _LOG.warning("memory of a driver could not be given back and is lost: %s", str(error))


def put_off(undo: Callable[[], None]) -> None:
    """Keep what cannot be undone now; the next owner that is made tries it again."""
    _LATE.append(undo)


def settle_late() -> None:
    """Try again what could not be undone before; each new owner does."""
    for _ in range(len(_LATE)):
        try:
            undo = _LATE.pop(0)
        except IndexError:
            return  # another thread was faster
        quietly(undo)


def _close(pid: int, fd: int) -> None:
    # In a forked child the number may be that of another descriptor by now.
    if os.getpid() == pid:
        close_fd(fd)


class Descriptor:
    """Owns a descriptor; forked children do not keep it."""

    def __init__(self, fd: int) -> None:
        """Take over `fd`."""
        self._fd = forget_fd_in_children(fd)
        self._finalizer = weakref.finalize(self, _close, os.getpid(), fd)
        self._finalizer.atexit = False

    @property
    def fd(self) -> int:
        """The descriptor.

        Raises:
            SegmentError: it was closed.

        """
        if not self._finalizer.alive:
            msg = f"descriptor {self._fd} was closed already. Export the allocation again."
            raise SegmentError(msg)
        return self._fd

    def close(self) -> None:
        """Close it. Idempotent."""
        self._finalizer()


@dataclass(eq=False, slots=True)
class Reference:
    """The core of an `Allocation`: its handle, and which ranges may still have to map it."""

    driver: VMMDriver
    handle: int
    pid: int
    users: set[int] = field(default_factory=set)
    is_closed: bool = False
    is_released: bool = False

    def close(self) -> None:
        """Give it back as soon as no range needs it."""
        self.is_closed = True
        self.settle()

    def settle(self) -> None:
        """Give it back if it was closed and no range needs it; harmless at any time."""
        if not self.is_closed or self.users or self.is_released or os.getpid() != self.pid:
            return
        self.is_released = True
        try:
            self.driver.release(self.handle)
        except DriverError:
            self.is_released = False  # refused: nothing happened
            raise


class Allocation:
    """Owns one reference to memory, made here or received. It need not be mapped anywhere."""

    def __init__(self, driver: VMMDriver, handle: int, nbytes: int) -> None:
        """Take over `handle`. Use `create` or `received`."""
        self.driver = driver
        self.nbytes = nbytes
        self.reference = Reference(driver, handle, os.getpid())
        weakref.finalize(self, quietly, self.reference.close).atexit = False

    @classmethod
    def create(cls, driver: VMMDriver, nbytes: int) -> Self:
        """Allocate at least `nbytes`: rounded up to the driver's granularity.

        Raises:
            DriverError: no memory.

        """
        settle_late()
        nbytes = driver.round_up(nbytes)
        return cls(driver, driver.create(nbytes), nbytes)

    @classmethod
    def received(cls, driver: VMMDriver, fd: int, nbytes: int) -> Self:
        """Import memory of another process; takes over `fd`, and closes it whatever happens.

        Args:
            driver: of the device that the memory is on.
            fd: as `rl_bridge.memory.broker.fetch_fd` returned it.
            nbytes: the allocation's size.

        Raises:
            DriverError: the descriptor is no such memory.

        """
        descriptor = Descriptor(fd)
        try:
            settle_late()
            return cls(driver, driver.import_fd(fd, nbytes), nbytes)
        finally:
            descriptor.close()

    @property
    def handle(self) -> int:
        """The driver's handle.

        Raises:
            SegmentError: it was closed.

        """
        if self.is_closed:
            msg = f"an allocation of {self.nbytes} bytes was closed already. Publish again."
            raise SegmentError(msg)
        return self.reference.handle

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called; ranges that map it may keep the handle a while longer."""
        return self.reference.is_closed

    def export(self) -> Descriptor:
        """Make a descriptor for other processes; it keeps the memory for as long as it is open.

        Raises:
            DriverError: the device or sandbox does not export.
            SegmentError: the allocation was closed.

        """
        return Descriptor(self.driver.export_fd(self.handle))

    def close(self) -> None:
        """Give the reference back; while a range maps it, as soon as it does not. Idempotent.

        Raises:
            DriverError: the driver refuses; it can be tried again.

        """
        self.reference.close()
