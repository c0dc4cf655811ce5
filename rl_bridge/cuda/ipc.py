"""Owners of plain device memory that other processes open by a legacy IPC handle of 64 bytes.

The handle names memory and does not keep it: an owner that frees it while another process has it
open leaves that process with memory of another owner. So an importer announces itself by a lock,
which the kernel keeps, on a byte of the segment that came with the handle; memory that was given up
is freed once nobody holds that lock. In the owner's own process the handle cannot be opened: there
the pointer is used, under the same lock.
"""

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from rl_bridge.cuda.driver import Device
from rl_bridge.cuda.owners import put_off, quietly, settle_late
from rl_bridge.errors import DriverError, SegmentError
from rl_bridge.memory import segment as leases
from rl_bridge.memory.holding import Holding
from rl_bridge.memory.segment import SegmentRef, open_segment, still_there

IPC_HANDLE_NBYTES = 64
IPC_UNIT = 2 << 20
"""Sizes are multiples of this many bytes: less shares a block with other memory of the owner."""
# The first byte of a slot's segment is that of its version's lease.
_USERS_BYTE = 1


class IPCDriver(ABC):
    """The calls of legacy IPC, by CUDA's rules. Every call may raise `DriverError`.

    Attributes:
        name: ``cuda`` or ``host``.
        device: where its memory is.

    """

    name: str
    device: Device

    @abstractmethod
    def alloc(self, nbytes: int) -> int:
        """Allocate plain device memory, which `ipc_handle` can name; returns its address.

        Use a multiple of `IPC_UNIT`.
        """

    @abstractmethod
    def dealloc(self, address: int) -> None:
        """Free what `alloc` returned, after every importer closed it.

        An importer that did not close it would read undefined bytes.
        """

    @abstractmethod
    def ipc_handle(self, address: int) -> bytes:
        """Name memory of `alloc` for other processes: 64 bytes.

        Raises:
            DriverError: CUDA_ERROR_INVALID_VALUE for memory of `create`, which needs `export_fd`.

        """

    @abstractmethod
    def open_ipc(self, handle: bytes) -> int:
        """Map another process's memory; returns an address, which `close_ipc` takes.

        Opening a handle twice gives the same address and counts: close it twice.

        Raises:
            DriverError: not 64 bytes, gone, of another GPU, or made by this very process.

        """

    @abstractmethod
    def close_ipc(self, address: int) -> None:
        """Give back one `open_ipc`."""

    @abstractmethod
    def fence(self) -> None:
        """Wait until every kernel of this process on this device has ended.

        Raises:
            DeadlineExceeded: they did not end in time, and may still run.

        """

    @abstractmethod
    def size_at(self, address: int) -> int | None:
        """Size of the memory that begins at `address`; None where the driver cannot tell."""

    def probe_ipc(self) -> None:
        """Allocate a little memory, name it, and free it.

        Whether another process can open it, only another process can tell.

        Raises:
            DriverError: with the precise cause why this device, or sandbox, cannot.

        """
        address = self.alloc(IPC_UNIT)
        try:
            self.ipc_handle(address)
        finally:
            self.dealloc(address)


@dataclass(slots=True, eq=False)
class Core:
    """An address that a driver gave out, and what is held with it, in the process that asked."""

    driver: IPCDriver
    held: Holding = field(default_factory=Holding)
    address: int = 0

    def give_back(self, call: Callable[[int], None]) -> None:
        """Give the address back by a call of the driver; if it refuses, it can be tried again."""
        address, self.address = self.address, 0
        try:
            call(address)
        except DriverError:
            self.address = address
            raise


class _Plain(Core):
    """The core of a `PlainMemory`."""

    def close(self) -> None:
        """Free it, or have that tried again later if somebody has it open."""
        if os.getpid() != self.held.pid:
            return
        if self.address:
            if not leases.try_exclusive(self.held.fd, start=_USERS_BYTE):
                put_off(self.close)
                return
            self.give_back(self.driver.dealloc)
        self.held.dispose()


class PlainMemory:
    """Owns plain memory of a device, and frees it when no other process has it open."""

    def __init__(self, driver: IPCDriver, nbytes: int, segment_fd: int) -> None:
        """Allocate.

        Args:
            driver: of which device.
            nbytes: how many, a multiple of 2 MiB.
            segment_fd: descriptor of the segment whose reference travels with the handle.

        Raises:
            DriverError: no memory, or none that can be named.

        """
        settle_late()
        core = self._core = _Plain(driver)
        self._finalizer = weakref.finalize(self, quietly, core.close)
        self._finalizer.atexit = False
        try:
            core.held.open(os.dup, segment_fd)
            core.address = driver.alloc(nbytes)
            self.nbytes = nbytes
            self.handle = driver.ipc_handle(core.address)
        except BaseException:
            self.close()  # at once: somebody may keep the exception
            raise
        _OWN[self.handle] = self

    @property
    def address(self) -> int:
        """First byte; 0 once it is freed."""
        return self._core.address

    def lies_behind(self, segment: SegmentRef) -> bool:
        """Whether it is this process's, not its parent's, and that segment travels with it."""
        if self._core.held.pid != os.getpid() or not self.address:
            return False
        status = os.fstat(self._core.held.fd)
        return (status.st_dev, status.st_ino) == (segment.device, segment.inode)

    def close(self) -> None:
        """Free it as soon as nobody has it open. Idempotent."""
        self._finalizer()


_OWN: "weakref.WeakValueDictionary[bytes, PlainMemory]" = weakref.WeakValueDictionary()


class _Opened(Core):
    """The core of an `Opening`."""

    def close(self) -> None:
        """Close the handle, and only then the lock that keeps its memory."""
        if os.getpid() != self.held.pid:
            return
        if self.address:
            # A copy that was given up may still be read from there: closing does not wait for it.
            self.driver.fence()
            self.give_back(self.driver.close_ipc)
        self.held.dispose()


class Opening:
    """Owns one opening of a handle; its memory is not freed meanwhile, if its owner lives.

    Attributes:
        address: first byte, here.
        is_pointer: whether the memory is this process's own, and its pointer was taken.

    """

    def __init__(self, driver: IPCDriver, handle: bytes, segment: SegmentRef) -> None:
        """Open.

        Args:
            driver: of the device that the memory is on.
            handle: from `PlainMemory.handle`, of whatever process.
            segment: what travelled with it.

        Raises:
            SegmentError: the owner is gone, or gave it up.
            DriverError: the driver refuses.

        """
        settle_late()
        core = self._core = _Opened(driver)
        self._finalizer = weakref.finalize(self, quietly, core.close)
        self._finalizer.atexit = False
        try:
            fd = open_segment(segment, held=core.held)
            _begin_use(fd, segment)
            own = _OWN.get(handle)
            if own is not None and own.lies_behind(segment):
                self.address, self.is_pointer = own.address, True
            else:
                self.address = core.address = driver.open_ipc(handle)
                self.is_pointer = False
        except BaseException:
            self.close()  # at once: somebody may keep the exception
            raise

    def close(self) -> None:
        """Close it. Idempotent."""
        self._finalizer()


def _begin_use(fd: int, segment: SegmentRef) -> None:
    # In this order: an owner that gives the memory up closes the segment first, and asks for the
    # lock then.
    if not leases.try_shared(fd, start=_USERS_BYTE) or not still_there(segment):
        raise SegmentError(
            "the publisher freed the memory of this update. Import its latest manifest."
        )
