"""One owner for each thing that a driver gives out, and one call that undoes it.

`Allocation` owns memory, `Descriptor` what names it for another process, `AddressRange` addresses
and what is mapped there, with the flip: `AddressRange.swap`. An owner is used by one thread at a
time.

An owner's `close` is idempotent, runs when the owner dies too, and does nothing in a forked child
or at the end of the interpreter: there the kernel and CUDA clean up. If an interrupt leaves open
whether something was given back, it counts as given back: to give it back twice would free memory
that another owner has by now.
"""

import itertools
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from rl_bridge.cuda.driver import CAPTURING, INVALID_VALUE, VMMDriver
from rl_bridge.errors import DeadlineExceeded, DriverError, SegmentError, TornEngine
from rl_bridge.processes import close_fd, forget_fd_in_children

# ---- owners of memory and of descriptors ---------------------------------------------------------

_LOG = logging.getLogger(__name__)
# What died while a graph was captured, whose end would have broken the capture, or while the device
# did not come to rest. Tried again by the next owner that is made.
_LATE: list[Callable[[], None]] = []


def quietly(undo: Callable[[], None]) -> None:
    """Run a finalizer. If it cannot undo something now, that waits, or is lost and logged."""
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
    """Undo now what could not be undone before; each new owner tries."""
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
            raise SegmentError(
                f"descriptor {self._fd} was closed already. Export the allocation again."
            )
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
            fd: as `rl_bridge.cuda.broker.fetch_fd` returned it.
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
            raise SegmentError(
                f"an allocation of {self.nbytes} bytes was closed already. Publish again."
            )
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


# ---- owners of addresses -------------------------------------------------------------------------

_TOKENS = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class _Shown:
    """An allocation at an address, with access: whether it may be written to there."""

    allocation: Allocation
    writable: bool

    @property
    def reference(self) -> Reference:
        return self.allocation.reference


class _Unknown:
    """The content after a call that was cut off."""


@dataclass(eq=False, slots=True)
class _Place:
    """A reservation and its content, which is unknown during a call."""

    driver: VMMDriver
    address: int
    nbytes: int
    pid: int
    token: int = field(default_factory=lambda: next(_TOKENS))
    content: _Shown | None = None  # what belongs here
    displaced: _Shown | None = None  # what belonged here before an exchange that failed both ways
    # The content, with access; unknown from before a call until its answer is noted.
    there: _Shown | _Unknown | None = None
    used: list[Reference] = field(default_factory=list)
    is_freed: bool = False

    def clear(self) -> None:
        """Unmap the content."""
        before = self.there
        if before is None:
            return
        self.there = _Unknown()
        try:
            self.driver.unmap(self.address, self.nbytes)
        except DriverError as error:
            # The call that was cut off may have been the unmapping, or one before the mapping.
            if not isinstance(before, _Unknown) or error.code != INVALID_VALUE:
                self.there = before
                raise
        self.there = None

    def show(self, new: _Shown) -> None:
        """Map `new` and grant access; nothing is there."""
        self.used.append(new.reference)
        new.reference.users.add(self.token)
        self.there = _Unknown()
        try:
            self.driver.map(self.address, self.nbytes, new.reference.handle)
        except DriverError:
            self.there = None
            raise
        self.driver.set_access(self.address, self.nbytes, writable=new.writable)
        self.there = new

    def put_back(self) -> None:
        """Have the content at the address again, wherever an exchange was cut off."""
        if self.there is self.content:
            return
        try:
            self.clear()
            if self.content is not None:
                self.show(self.content)
        except DriverError:
            self.displaced, self.content = self.content or self.displaced, None
            raise

    def forget(self) -> None:
        """Release allocations that are neither mapped here nor to be mapped again."""
        kept = [
            shown.reference
            for shown in (self.content, self.displaced, self.there)
            if isinstance(shown, _Shown)
        ]
        for reference in list(self.used):
            if reference not in kept:
                reference.users.discard(self.token)
                quietly(reference.settle)
                self.used.remove(reference)

    def close(self, *, fence: bool = True) -> None:
        """Give everything back."""
        if self.is_freed or os.getpid() != self.pid:
            return
        if self.there is not None:
            if fence:
                self.driver.fence()
            self.clear()
        self.content = self.displaced = None
        self.forget()
        self.is_freed = True
        try:
            self.driver.free(self.address, self.nbytes)
        except DriverError:
            self.is_freed = False
            raise


class AddressRange:
    """Owns a range of addresses, at which one allocation lies at a time.

    The addresses never change, so tensors over them, and captured CUDA graphs, see what `swap` puts
    there. Whoever makes such tensors keeps this object alive for as long as they live. What lies
    there is kept: its `Allocation.close` takes effect when it is taken out.
    """

    def __init__(self, driver: VMMDriver, nbytes: int) -> None:
        """Reserve room for an allocation of `nbytes`; nothing lies there yet.

        Args:
            driver: whose addresses.
            nbytes: size, rounded up to the driver's granularity.

        Raises:
            DriverError: no addresses left.

        """
        settle_late()
        self.driver = driver
        self.nbytes = driver.round_up(nbytes)
        address = driver.reserve(self.nbytes)
        self._place = _Place(driver, address, self.nbytes, os.getpid())
        weakref.finalize(self, quietly, self._place.close).atexit = False

    @property
    def address(self) -> int:
        """First byte."""
        return self._place.address

    @property
    def content(self) -> Allocation | None:
        """The allocation that is mapped. If an exchange was cut off half-way, it is undone first.

        Raises:
            TornEngine: that failed; `displaced` has what lay there.

        """
        self._settle()
        shown = self._place.content
        return None if shown is None else shown.allocation

    @property
    def displaced(self) -> Allocation | None:
        """The content before an exchange that failed both ways: `swap` it in to mend that."""
        shown = self._place.displaced
        return None if shown is None else shown.allocation

    def shows(self, allocation: Allocation) -> bool:
        """Whether `allocation` is mapped: by this object's notes, and by the driver's answer.

        Raises:
            DriverError: the driver does not say.

        """
        if allocation.is_closed or self.content is not allocation:
            return False
        if self.driver.shows(self.address, self.nbytes, allocation.handle):
            return True
        self._place.there = _Unknown()  # whatever comes next mends that first
        return False

    def map(self, allocation: Allocation, *, writable: bool) -> None:
        """Map an allocation into the empty range, all or nothing; does not wait for kernels.

        Raises:
            DriverError: the driver refuses; nothing lies there.
            SegmentError: something lies there; or another driver's, of another size, or closed.

        """
        new = self._checked(allocation, writable=writable)
        if self.content is not None:
            raise SegmentError(
                f"an allocation lies at {self.address:#x} already. Use swap, or unmap it first."
            )
        self._exchange(new)

    def swap(self, allocation: Allocation, *, writable: bool) -> Allocation | None:
        """Exchange the content: drain the device, unmap, map, grant access.

        New work must not be submitted meanwhile (pause the engine); what runs is waited for. An
        interrupt leaves the old or the new one there: `content` says which. To undo, swap back.

        Returns:
            What lay there before; it is still to be closed by whom it belongs to.

        Raises:
            DeadlineExceeded: the device did not come to rest in time; nothing was touched.
            DriverError: the driver refuses; what lay there before lies there again.
            SegmentError: another driver's, of another size, or closed; nothing was touched.
            TornEngine: the driver refused, and again on the way back: nothing lies there.

        """
        new = self._checked(allocation, writable=writable)
        old = self.content
        self.driver.fence()
        self._exchange(new)
        return old

    def unmap(self, *, fence: bool = True) -> Allocation | None:
        """Unmap the content; returns it.

        Args:
            fence: drain the device first. Without it, the caller has waited for every kernel that
                uses this range.

        Raises:
            DriverError: the driver refuses; what lay there lies there.

        """
        place = self._place
        if place.there is not None and fence:
            self.driver.fence()
        place.clear()
        old, place.content = place.content, None
        place.forget()
        return None if old is None else old.allocation

    def close(self, *, fence: bool = True) -> None:
        """Drain the device, unmap the content, give the addresses back. Idempotent.

        Args:
            fence: as `unmap` takes it.

        Raises:
            DriverError: the driver refuses; it can be tried again.

        """
        self._place.close(fence=fence)

    def _checked(self, allocation: Allocation, *, writable: bool) -> _Shown:
        if self._place.is_freed or allocation.is_closed:
            what = "the range" if self._place.is_freed else "the allocation"
            raise SegmentError(f"{what} for {self.address:#x} was closed already. Make a new one.")
        if allocation.driver is not self.driver or allocation.nbytes != self.nbytes:
            raise SegmentError(
                f"an allocation of {allocation.nbytes} bytes of driver {allocation.driver.name!r} "
                f"does not fit a range of {self.nbytes} bytes of {self.driver.name!r}. Use one "
                "driver object, and publish the layout that the engine runs."
            )
        return _Shown(allocation, writable)

    def _settle(self) -> None:
        """End an exchange that was cut off, and its undoing with it."""
        place = self._place
        had = place.content
        if place.there is had:
            return
        try:
            self.driver.fence()
            place.put_back()
        except DriverError as error:
            if had is not None and place.content is None:
                raise self._torn(error, "it was interrupted") from error
            raise
        place.forget()

    def _exchange(self, new: _Shown) -> None:
        """Map `new` in place of the content; if that fails, map the content again."""
        place = self._place
        had = place.content
        try:
            place.clear()
            place.show(new)
            place.content, place.displaced = new, None
        except BaseException as cause:
            try:
                place.put_back()
            except DriverError as second:
                if had is not None and isinstance(cause, DriverError):
                    raise self._torn(second, str(cause)) from cause
                cause.add_note(f"What lay at {self.address:#x} cannot be put back: {second}")
            place.forget()
            raise
        place.forget()

    def _torn(self, error: DriverError, why: str) -> TornEngine:
        return TornEngine(
            f"the exchange at {self.address:#x} failed ({why}) and so did the way back ({error}). "
            "Swap in what is displaced, or a later version."
        )
