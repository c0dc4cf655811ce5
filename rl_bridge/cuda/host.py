"""Host memory that keeps the rules of CUDA's virtual memory: sealed memfds, mapped by hand.

It stands in for a GPU in tests and in CI. What it shares with CUDA: handles, descriptors and
mappings are references of their own; access begins as none and is granted for whole mappings; a
range that is unmapped stays reserved; what CUDA refuses is refused with CUDA's code. What it cannot
show: a drain, captured graphs, sticky errors. To touch what is not mapped for it is SIGSEGV here.
"""

import errno
import fcntl
import itertools
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import overload

from rl_bridge.cuda.driver import INVALID_VALUE, Device, VMMDriver, driver_error
from rl_bridge.cuda.ipc import IPC_HANDLE_NBYTES, IPCDriver
from rl_bridge.memory import vm
from rl_bridge.memory.holding import Holding
from rl_bridge.memory.segment import process_start_time
from rl_bridge.processes import close_fd, forget_fd_in_children, no_fork

_GRANULARITY = 2 << 20

# shrink, grow, and no other seals after these: nobody can raise SIGBUS in a process that maps it.
_SEALS = 2 | 4 | 1


@dataclass(frozen=True, slots=True)
class Live:
    """How much a driver has given out and not got back."""

    handles: int
    reservations: int
    mappings: int


@dataclass(frozen=True, slots=True)
class _Memory:
    fd: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Reservation:
    nbytes: int
    mappings: dict[int, int] = field(default_factory=dict)  # address -> bytes


class HostDriver(VMMDriver):
    """`VMMDriver` on host memory. Calls may come from any thread."""

    name = "host"
    device = Device("host", None)

    def __init__(self, *, granularity: int = _GRANULARITY) -> None:
        """Start with nothing.

        Args:
            granularity: bytes; a multiple of the page. Tests take small ones.

        Raises:
            ValueError: it is no multiple of the page.

        """
        if granularity <= 0 or granularity % vm.PAGE:
            raise ValueError(
                f"granularity={granularity}: expected a multiple of the page of {vm.PAGE} bytes."
            )
        super().__init__()
        self._granularity = granularity
        self._numbers = itertools.count(1)
        self._memory: dict[int, _Memory] = {}
        self._reserved: dict[int, _Reservation] = {}
        # Reentrant: an owner's finalizer may run inside any call.
        self._lock = threading.RLock()

    def granularity(self) -> int:
        """Bytes, as the constructor took them."""
        return self._granularity

    def live(self) -> Live:
        """Count handles, reservations and mappings: all zero once every owner released its own."""
        with self._lock:
            mappings = sum(len(found.mappings) for found in self._reserved.values())
            return Live(len(self._memory), len(self._reserved), mappings)

    # ---- memory ---------------------------------------------------------------------------------

    def create(self, nbytes: int) -> int:
        """Make a sealed memfd; zero-filled."""
        self._check_size("cuMemCreate", nbytes)
        fd = -1
        try:
            with _as_cuda("cuMemCreate", f"{nbytes} bytes"):
                flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
                with no_fork():  # a child that is forked in between would keep it
                    fd = forget_fd_in_children(os.memfd_create("rl_bridge-vmm", flags))
                os.ftruncate(fd, nbytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            close_fd(fd)
            raise
        return self._keep(fd, nbytes)

    def _keep(self, fd: int, nbytes: int) -> int:
        handle = next(self._numbers)
        self._memory[handle] = _Memory(fd, nbytes)
        return handle

    def release(self, handle: int) -> None:
        """Close the handle's memfd; mappings and descriptors keep the memory."""
        with self._lock:
            memory = self._find_memory("cuMemRelease", handle)
            del self._memory[handle]
        close_fd(memory.fd)  # not under the lock: it waits for another one

    def export_fd(self, handle: int) -> int:
        """Duplicate the handle's memfd."""
        call = "cuMemExportToShareableHandle"
        with self._lock:
            memory = self._find_memory(call, handle)
        # Not under the lock: it waits for another one.
        return _duplicate(call, memory.fd)

    def import_fd(self, fd: int, nbytes: int) -> int:
        """Take a reference to a memfd that is sealed as `create` seals it."""
        call = "cuMemImportFromShareableHandle"
        self._check_size(call, nbytes)
        try:
            found, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            detail = f"descriptor {fd} is no memory of a driver: {error}"
            raise driver_error(call, INVALID_VALUE, detail) from error
        if seals & _SEALS != _SEALS:
            detail = f"descriptor {fd} is not sealed: seals {seals:#x}, expected {_SEALS:#x}"
            raise driver_error(call, INVALID_VALUE, detail)
        if found != nbytes:
            detail = f"descriptor {fd} has {found} bytes, expected {nbytes}"
            raise driver_error(call, INVALID_VALUE, detail)
        return self._keep(_duplicate(call, fd), nbytes)

    # ---- addresses ------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses that nothing is mapped to; touching them is SIGSEGV."""
        call = "cuMemAddressReserve"
        self._check_size(call, nbytes)
        with _as_cuda(call, f"{nbytes} bytes"):
            address = vm.reserve(nbytes)  # aligned as a GPU's are
        self._reserved[address] = _Reservation(nbytes)
        return address

    def free(self, address: int, nbytes: int) -> None:
        """Give back exactly what `reserve` returned."""
        call = "cuMemAddressFree"
        with self._lock:
            self._require_own_process(call)
            found = self._reserved.get(address)
            if found is None or found.nbytes != nbytes:
                detail = f"{_span(address, nbytes)} is no reservation"
                raise driver_error(call, INVALID_VALUE, detail)
            if found.mappings:
                detail = f"{_span(address, nbytes)} holds {len(found.mappings)} mappings"
                raise driver_error(call, INVALID_VALUE, detail)
            del self._reserved[address]
            vm.unmap(address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map a memfd without access."""
        call = "cuMemMap"
        with self._lock:
            memory = self._find_memory(call, handle)
            mappings = self._find_reservation(call, address, nbytes).mappings
            if nbytes != memory.nbytes:
                detail = f"{nbytes} bytes of handle {handle}, which has {memory.nbytes}"
                raise driver_error(call, INVALID_VALUE, detail)
            if address % self._granularity:
                detail = f"address {address:#x} is no multiple of {self._granularity}"
                raise driver_error(call, INVALID_VALUE, detail)
            if any(at < address + nbytes and address < at + size for at, size in mappings.items()):
                detail = f"something is mapped at {_span(address, nbytes)}"
                raise driver_error(call, INVALID_VALUE, detail)
            with _as_cuda(call, f"{nbytes} bytes"):
                vm.map_shared(address, nbytes, memory.fd, prot=0)
                # The memory is this process's: a forked child that touches it must not change it.
                vm.guard_from_fork(address, nbytes)
            mappings[address] = nbytes

    def set_access(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Protect a range of whole mappings."""
        call = "cuMemSetAccess"
        with self._lock:
            mappings = self._find_reservation(call, address, nbytes).mappings
            at = address
            while at < address + nbytes and at in mappings:
                at += mappings[at]
            if at != address + nbytes:
                detail = f"{_span(address, nbytes)} is not made of whole mappings"
                raise driver_error(call, INVALID_VALUE, detail)
            with _as_cuda(call, f"{nbytes} bytes"):
                vm.protect(address, nbytes, writable=writable)

    def unmap(self, address: int, nbytes: int) -> None:
        """Turn a mapping into a reservation again."""
        call = "cuMemUnmap"
        with self._lock:
            mappings = self._find_reservation(call, address, nbytes).mappings
            if mappings.get(address) != nbytes:
                detail = f"{_span(address, nbytes)} is not exactly one mapping"
                raise driver_error(call, INVALID_VALUE, detail)
            with _as_cuda(call, f"{nbytes} bytes"):
                vm.vacate(address, nbytes)
            del mappings[address]

    def shows(self, address: int, nbytes: int, handle: int) -> bool:
        """Ask the kernel which file lies there."""
        with self._lock:
            memory = self._find_memory("cuMemRetainAllocationHandle", handle)
            made = os.fstat(memory.fd)
        found = vm.mapped_file(address)
        if found is None or found.nbytes < nbytes or nbytes != memory.nbytes:
            return False
        return (found.device, found.inode, found.offset) == (made.st_dev, made.st_ino, 0)

    def fence(self) -> None:
        """Wait for nothing: reads and writes of host memory are over when they return."""
        self._require_own_process("cuCtxSynchronize")

    # ---- checks ---------------------------------------------------------------------------------

    def _check_size(self, call: str, nbytes: int) -> None:
        self._require_own_process(call)
        if nbytes <= 0 or nbytes % self._granularity:
            detail = f"{nbytes} bytes, expected a multiple of {self._granularity}"
            raise driver_error(call, INVALID_VALUE, detail)

    def _find_memory(self, call: str, handle: int) -> _Memory:
        self._require_own_process(call)
        memory = self._memory.get(handle)
        if memory is None:
            raise driver_error(call, INVALID_VALUE, f"{handle} is no handle of this driver")
        return memory

    def _find_reservation(self, call: str, address: int, nbytes: int) -> _Reservation:
        self._check_size(call, nbytes)
        for start, found in list(self._reserved.items()):
            if start <= address and address + nbytes <= start + found.nbytes:
                return found
        raise driver_error(call, INVALID_VALUE, f"{_span(address, nbytes)} is not reserved")


def _span(address: int, nbytes: int) -> str:
    return f"[{address:#x}, {address + nbytes:#x})"


def _code(error: OSError) -> str:
    if error.errno in {errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE}:
        return "CUDA_ERROR_OUT_OF_MEMORY"
    return "CUDA_ERROR_OPERATING_SYSTEM"


@contextmanager
def _as_cuda(call: str, what: str) -> Iterator[None]:
    """Have what the kernel refuses refused as CUDA would."""
    try:
        yield
    except OSError as error:
        raise driver_error(call, _code(error), f"{what}: {error}") from error


def _duplicate(call: str, fd: int) -> int:
    with _as_cuda(call, f"descriptor {fd}"), no_fork():
        return forget_fd_in_children(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0))


# ---- Host memory that keeps the rules of CUDA's legacy IPC handles: shared memfds, opened by
# name.
#
# It shares with CUDA: a handle of 64 bytes that names memory and does not keep it, opened in
# another process only, twice at one address, closed as often. Freed memory is overwritten first,
# so that a process that still reads it is found out. It cannot show what a driver does when the
# owner of opened memory dies.

FREED = 0xDD
"""The byte that freed memory is overwritten with."""
_GONE = "CUDA_ERROR_INVALID_HANDLE"
_MAGIC = b"rlb-ipc1"
# Magic; pid and start time of the owner; descriptor, device, inode and size of the memfd.
_HANDLE = struct.Struct("<8s6q8x")


@dataclass(slots=True, eq=False)
class _Mapped:
    held: Holding
    address: int
    nbytes: int
    count: int = 1


class HostIPCDriver(HostDriver, IPCDriver):
    """`HostDriver`, and the calls of legacy IPC on host memory."""

    def __init__(self, *, granularity: int = 2 << 20) -> None:
        """Start with nothing; `granularity` is that of `HostDriver`."""
        super().__init__(granularity=granularity)
        self._plain: dict[int, _Mapped] = {}  # by address
        self._opened: dict[bytes, _Mapped] = {}  # by handle
        self._ipc_lock = threading.RLock()

    def num_plain(self) -> tuple[int, int]:
        """How many allocations and how many openings are out."""
        return len(self._plain), sum(found.count for found in self._opened.values())

    def alloc(self, nbytes: int) -> int:
        """Make a sealed memfd and map it to be written; zero-filled."""
        call = "cuMemAlloc"
        self._check_size(call, nbytes)
        held = Holding()
        try:
            with _as_cuda(call, f"{nbytes} bytes"):
                flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
                fd = held.open(os.memfd_create, "rl_bridge-ipc", flags)
                os.ftruncate(fd, nbytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
                found = self._map_shared(held, nbytes)
        except BaseException:
            held.dispose()
            raise
        self._plain[found.address] = found
        return found.address

    @staticmethod
    def _map_shared(held: Holding, nbytes: int) -> _Mapped:
        address = held.reserve(nbytes)
        with no_fork():
            vm.map_shared(address, nbytes, held.fd)
            vm.guard_from_fork(address, nbytes)
        return _Mapped(held, address, nbytes)

    def dealloc(self, address: int) -> None:
        """Overwrite and unmap; a process that has it open keeps the memory, and not its bytes."""
        call = "cuMemFree"
        self._require_own_process(call)
        found = self._plain.pop(address, None)
        if found is None:
            raise driver_error(call, INVALID_VALUE, f"{address:#x} is no allocation")
        vm.tensor_at(address, found.nbytes).fill_(FREED)
        found.held.dispose()

    def ipc_handle(self, address: int) -> bytes:
        """Say where the memfd is."""
        call = "cuIpcGetMemHandle"
        self._require_own_process(call)
        found = self._plain.get(address)
        if found is None:
            raise driver_error(call, INVALID_VALUE, f"{address:#x} is no allocation")
        pid, status = os.getpid(), os.fstat(found.held.fd)
        start = process_start_time(pid) or 0
        return _HANDLE.pack(
            _MAGIC, pid, start, found.held.fd, status.st_dev, status.st_ino, found.nbytes
        )

    def open_ipc(self, handle: bytes) -> int:
        """Map another process's memfd, to be written too: legacy IPC knows no other way."""
        call = "cuIpcOpenMemHandle"
        self._require_own_process(call)
        if len(handle) != IPC_HANDLE_NBYTES:
            detail = f"a handle of {len(handle)} bytes, expected {IPC_HANDLE_NBYTES}"
            raise driver_error(call, INVALID_VALUE, detail)
        magic, pid, start, *place = _HANDLE.unpack(handle)
        if magic != _MAGIC:
            raise driver_error(call, _GONE, "these 64 bytes are no handle of host memory")
        if pid == os.getpid():
            detail = "a handle that this very process made"
            raise driver_error(call, "CUDA_ERROR_INVALID_CONTEXT", detail)
        if pid <= 0 or process_start_time(pid) != start:
            raise driver_error(call, _GONE, f"its owner, pid {pid}, is gone")
        if (known := self._count_up(handle)) is None:
            # Not under the lock: opening a descriptor waits for forks.
            fresh = self._open(call, pid, place)
            if (known := self._count_up(handle, fresh)) is not fresh:
                fresh.held.dispose()
        return known.address

    @overload
    def _count_up(self, handle: bytes) -> _Mapped | None: ...
    @overload
    def _count_up(self, handle: bytes, fresh: _Mapped) -> _Mapped: ...
    def _count_up(self, handle: bytes, fresh: _Mapped | None = None) -> _Mapped | None:
        with self._ipc_lock:
            found = self._opened.get(handle)
            if found is not None:
                found.count += 1
                return found
            if fresh is not None:
                self._opened[handle] = fresh
            return fresh

    def _open(self, call: str, pid: int, place: list[int]) -> _Mapped:
        fd, device, inode, nbytes = place
        held = Holding()
        try:
            held.open(os.open, f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            _check_file(call, held.fd, (device, inode, nbytes))
            return self._map_shared(held, nbytes)
        except BaseException as error:
            held.dispose()
            if isinstance(error, OSError):
                raise driver_error(call, _GONE, f"descriptor {fd} of pid {pid}: {error}") from error
            raise

    def close_ipc(self, address: int) -> None:
        """Count down; the last one unmaps."""
        call = "cuIpcCloseMemHandle"
        self._require_own_process(call)
        with self._ipc_lock:
            key = next((key for key, it in self._opened.items() if it.address == address), None)
            if key is None:
                raise driver_error(call, INVALID_VALUE, f"nothing is open at {address:#x}")
            found = self._opened[key]
            found.count -= 1
            if found.count:
                return
            del self._opened[key]
        found.held.dispose()

    def size_at(self, address: int) -> int | None:
        """Look it up."""
        found = self._plain.get(address)
        if found is None:
            found = next((it for it in self._opened.values() if it.address == address), None)
        return None if found is None else found.nbytes


def _check_file(call: str, fd: int, expected: tuple[int, int, int]) -> None:
    status = os.fstat(fd)
    found = (status.st_dev, status.st_ino, status.st_size)
    if found != expected or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise driver_error(call, _GONE, f"device, inode and size are {found}, not {expected}")
