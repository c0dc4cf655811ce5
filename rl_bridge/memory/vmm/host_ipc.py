"""Host memory that keeps the rules of CUDA's legacy IPC handles: shared memfds, opened by name.

What it shares with CUDA: a handle of 64 bytes that names memory and does not keep it, opened in
another process only, twice at one address, closed as often. Freed memory is overwritten first, so
that whoever looks at it still is found out. What it cannot show: what a driver does when the owner
of opened memory dies.
"""

import fcntl
import os
import struct
import threading
from dataclasses import dataclass
from typing import overload

from rl_bridge.memory import vm
from rl_bridge.memory.holding import FORKS, SETTLING, Holding
from rl_bridge.memory.segment import process_start_time
from rl_bridge.memory.vmm.driver import INVALID_VALUE, driver_error
from rl_bridge.memory.vmm.host import HostDriver
from rl_bridge.memory.vmm.ipc import IPC_HANDLE_NBYTES, IPCDriver

__all__ = ["FREED", "HostIPCDriver"]

FREED = 0xDD
"""What freed memory is overwritten with."""
_GONE = "CUDA_ERROR_INVALID_HANDLE"
_MAGIC = b"rlb-ipc1"
# Magic; pid and start time of the owner; descriptor, device, inode and size of the memfd.
_HANDLE = struct.Struct("<8s6q8x")
_SEALS = 2 | 4 | 1  # shrink, grow, and no other seals after these


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
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            fd = held.open(os.memfd_create, "rl_bridge-ipc", flags)
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            found = self._map_shared(held, nbytes)
        except BaseException as error:
            held.dispose()
            if isinstance(error, OSError):
                detail = f"{nbytes} bytes: {error}"
                raise driver_error(call, "CUDA_ERROR_OUT_OF_MEMORY", detail) from error
            raise
        self._plain[found.address] = found
        return found.address

    @staticmethod
    def _map_shared(held: Holding, nbytes: int) -> _Mapped:
        address = held.reserve(nbytes)
        with SETTLING, FORKS:
            vm.map_shared(address, nbytes, held.fd)
            vm.guard_from_fork(address, nbytes)
        return _Mapped(held, address, nbytes)

    def dealloc(self, address: int) -> None:
        """Overwrite and unmap; who has it open keeps the memory, but not what lay there."""
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
            # Not under the lock: what is opened waits for forks.
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
