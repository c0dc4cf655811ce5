"""Virtual memory by hand: reserve, map, move, drop and inspect address ranges (Linux).

Python's `mmap` module cannot map at a chosen address, move a mapping or keep it private and
writable over a read-only descriptor. Everything else in `rl_bridge.memory` goes through here, so
this is the only module that knows the C library's signatures. Raw addresses are integers, and what
the kernel refuses is an `OSError`.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections import deque
from collections.abc import Iterable
from ctypes import c_int, c_int64, c_long, c_size_t, c_uint, c_void_p
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import torch

PAGE = mmap.PAGESIZE
_GIB = 1 << 30
_HUGE = 2 << 20

_PROT_NONE = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_DONTNEED = 4
_MADV_FREE = 8
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_SYNC_FILE_RANGE_WRITE = 2
_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_MREMAP_DONTUNMAP = 4
_FAILED = (1 << 64) - 1  # ((void *) -1)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = c_void_p
_libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
_libc.munmap.argtypes = [c_void_p, c_size_t]
_libc.mprotect.argtypes = [c_void_p, c_size_t, c_int]
_libc.madvise.argtypes = [c_void_p, c_size_t, c_int]
_libc.mremap.argtypes = [c_void_p, c_size_t, c_size_t, c_int, c_void_p]
_libc.sync_file_range.argtypes = [c_int, c_int64, c_int64, c_uint]


def round_up(value: int, unit: int = PAGE) -> int:
    """Next multiple of `unit`."""
    return -(-value // unit) * unit


def store(address: int, data: bytes) -> None:
    """Write `data` at an address of this process's own writable mapping."""
    ctypes.memmove(address, data, len(data))


def clear(addresses: Iterable[int], sizes: Iterable[int]) -> None:
    """Zero ranges of this process's own writable mappings."""
    deque(map(ctypes.memset, addresses, repeat(0), sizes), maxlen=0)


def tensor_at(address: int, nbytes: int) -> torch.Tensor:
    """Make a uint8 tensor over raw memory; the caller keeps the memory mapped while it lives."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def read_into(fd: int, address: int, nbytes: int) -> int:
    """Read the first `nbytes` of a file to an address; returns how many there were."""
    buffer = memoryview((ctypes.c_char * max(nbytes, 1)).from_address(address)).cast("B")
    done = 0
    while done < nbytes:
        got = os.preadv(fd, [buffer[done:nbytes]], done)
        if got == 0:
            break
        done += got
    return done


def begin_writeback(fd: int, begin: int, nbytes: int) -> None:
    """Have the kernel begin to bring a range of a file to its disk, without waiting.

    It is a hint: a file system that takes none writes when the file is synced.
    """
    _libc.sync_file_range(fd, begin, nbytes, _SYNC_FILE_RANGE_WRITE)


def _os_error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")


def _mmap(address: int | None, nbytes: int, prot: int, flags: int, fd: int = -1) -> int:
    found = _libc.mmap(address, nbytes, prot, flags, fd, 0)
    if found is None or found == _FAILED:
        raise _os_error(f"mmap of {nbytes} bytes")
    return int(found)


def reserve(nbytes: int) -> int:
    """Reserve `nbytes` of addresses that nothing is mapped to; touching them faults.

    The range is aligned to 1 GiB where it is that large, else to 2 MiB: the kernel then moves whole
    page tables in `move` instead of single entries.
    """
    alignment = _GIB if nbytes >= _GIB else _HUGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    whole = nbytes + alignment
    start = _mmap(None, whole, _PROT_NONE, flags)
    address = round_up(start, alignment)
    if address > start:
        unmap(start, address - start)
    if start + whole > address + nbytes:
        unmap(address + nbytes, start + whole - address - nbytes)
    return address


def map_fixed(address: int, nbytes: int, fd: int) -> None:
    """Map `fd` privately (reads share the file's pages, writes stay here) over a reserved range."""
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    _mmap(address, nbytes, _READ_WRITE, flags, fd)


def map_anonymous(nbytes: int) -> int:
    """Map fresh zero-filled memory of this process, anywhere; returns the address."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return _mmap(None, nbytes, _READ_WRITE, flags)


def map_shared(address: int, nbytes: int, fd: int, *, prot: int = _READ_WRITE) -> None:
    """Map `fd` shared over a reserved range."""
    _mmap(address, nbytes, prot, mmap.MAP_SHARED | _MAP_FIXED, fd)


def protect(address: int, nbytes: int, *, writable: bool) -> None:
    """Let mappings be read, and written to if `writable`."""
    if _libc.mprotect(address, nbytes, _READ_WRITE if writable else mmap.PROT_READ):
        raise _os_error(f"mprotect of {nbytes} bytes")


def vacate(address: int, nbytes: int) -> None:
    """Unmap what lies there; the addresses stay reserved."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    _mmap(address, nbytes, _PROT_NONE, flags)


def unmap(address: int, nbytes: int) -> None:
    """Give a range back."""
    if _libc.munmap(address, nbytes):
        raise _os_error(f"munmap of {nbytes} bytes")


def move(source: int, nbytes: int, target: int) -> None:
    """Move a mapping to `target`, replacing what is there; `source` stays mapped, without pages.

    Pages already present move with their page tables: nothing is copied and nothing faults later.
    Leaving the source mapped means that no hole opens into which another thread's mmap could fall.

    Raises:
        OSError: the kernel refuses (before Linux 5.13 for files).

    """
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    if _libc.mremap(source, nbytes, nbytes, flags, target) == _FAILED:
        raise _os_error(f"mremap of {nbytes} bytes")


def _advise(address: int, nbytes: int, advice: int, what: str) -> None:
    if nbytes and _libc.madvise(address, nbytes, advice):
        raise _os_error(f"madvise({what}) of {nbytes} bytes")


def populate(address: int, nbytes: int) -> None:
    """Fault a range in for reading.

    Raises:
        OSError: EFAULT where touching a page would have raised SIGBUS (the file is shorter).

    """
    _advise(address, nbytes, _MADV_POPULATE_READ, "POPULATE_READ")


def prefault(address: int, nbytes: int) -> None:
    """Have every page of a file's mapping present, so that reading it faults no more.

    Where all are there already this costs next to nothing: the page tables are looked through.
    """
    absent = absent_ranges(address, nbytes)
    for start, size in [(address, nbytes)] if absent is None else absent:
        try:
            populate(start, size)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return  # before Linux 5.14: they fault in when they are read


def drop_pages(address: int, nbytes: int) -> None:
    """Forget a private mapping's own pages: the file's bytes show through again."""
    _advise(address, nbytes, _MADV_DONTNEED, "DONTNEED")


def guard_from_fork(address: int, nbytes: int) -> None:
    """Keep a mapping out of forked children, which could otherwise write through it."""
    _advise(address, nbytes, _MADV_DONTFORK, "DONTFORK")


class MappedFile(NamedTuple):
    """What the kernel says is mapped at an address: `nbytes` of a file, from `offset` on."""

    device: int
    inode: int
    offset: int
    nbytes: int


def mapped_file(address: int) -> MappedFile | None:
    """Ask the kernel (``/proc/self/maps``) which file lies at `address`; None if none does."""
    with Path("/proc/self/maps").open("rb") as maps:
        for line in maps:
            span, _, offset, device, inode = line.split(maxsplit=5)[:5]
            low, high = (int(part, 16) for part in span.split(b"-"))
            if low <= address < high:
                if inode == b"0":
                    return None
                major, minor = (int(part, 16) for part in device.split(b":"))
                return MappedFile(
                    device=os.makedev(major, minor),
                    inode=int(inode),
                    offset=int(offset, 16) + address - low,
                    nbytes=high - address,
                )
            if low > address:
                break
    return None


# ioctl(PAGEMAP_SCAN), Linux 6.7; see Documentation/admin-guide/mm/pagemap.rst.
_PAGEMAP_SCAN = 0xC0606610
_SCAN_ARGS = struct.Struct("=12Q")
_REGION = struct.Struct("=3Q")
_IS_FILE = 1 << 2
_IS_PRESENT = 1 << 3
_IS_SWAPPED = 1 << 4
_MAX_REGIONS = 256
# Kept: `ctypes` makes an array's type anew, which takes long, once it is no longer referenced.
_Regions = ctypes.c_char * (_REGION.size * _MAX_REGIONS)


def private_ranges(address: int, nbytes: int) -> list[tuple[int, int]] | None:
    """Ranges (address, bytes) whose pages are this process's own copies: somebody wrote there.

    Returns:
        The ranges, page by page merged; None where the kernel cannot tell (before Linux 6.7).

    """
    there = _IS_PRESENT | _IS_SWAPPED
    return _scan(address, nbytes, inverted=_IS_FILE, needed=_IS_FILE, some=there)


def absent_ranges(address: int, nbytes: int) -> list[tuple[int, int]] | None:
    """Ranges (address, bytes) whose pages are not there: reading one would fault.

    Returns:
        The ranges, page by page merged; None where the kernel cannot tell (before Linux 6.7).

    """
    return _scan(address, nbytes, inverted=_IS_PRESENT, needed=_IS_PRESENT, some=0)


def _scan(
    address: int, nbytes: int, *, inverted: int, needed: int, some: int
) -> list[tuple[int, int]] | None:
    """Find pages with every flag of `needed` and one of `some`; `inverted` ones must be absent."""
    regions = _Regions()
    rest = ctypes.addressof(regions), _MAX_REGIONS, 0, inverted, needed, some, needed | some
    found: list[tuple[int, int]] = []
    end = address + nbytes
    try:
        with open("/proc/self/pagemap", "rb", 0) as pagemap:  # noqa: PTH123 - for each update
            while address < end:
                head = _SCAN_ARGS.size, 0, address, end, 0
                arguments = bytearray(_SCAN_ARGS.pack(*head, *rest))
                count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, arguments, True)  # noqa: FBT003
                for index in range(count):
                    low, high, _ = _REGION.unpack_from(regions, index * _REGION.size)
                    found.append((low, high - low))
                walked = _SCAN_ARGS.unpack(arguments)[4]
                if walked <= address:
                    return None  # of what is left nothing is known
                address = walked
    except OSError:
        return None
    return found


def spare_pages(address: int, nbytes: int) -> None:
    """Let the kernel take anonymous pages when it is short of memory; their bytes may be gone then.

    A later write to pages that were not taken causes no page fault. Locked memory (mlockall) is
    never taken: it stays as it is.
    """
    try:
        _advise(address, nbytes, _MADV_FREE, "FREE")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def huge_pages(address: int, nbytes: int) -> bool:
    """Let the kernel use huge pages for an anonymous range; call it before it is written to.

    They are touched in a third of the time, and after `spare_pages` written to again as if nothing
    had been: small ones take as long for that as for the bytes themselves.

    Returns:
        Whether the kernel has them.

    """
    return not _libc.madvise(address, nbytes, _MADV_HUGEPAGE)


_CGROUPS = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Bytes that this process may still take, by the kernel and its cgroups; None if unknown.

    Swap space counts as available, and so do files that the kernel merely caches.
    """
    machine = _numbers(Path("/proc/meminfo"))
    if "MemAvailable:" not in machine:
        return None
    swap = 1024 * machine.get("SwapFree:", 0)
    rooms = [1024 * machine["MemAvailable:"]]
    for group in _memory_cgroups():
        limit = _number(group, "memory.max", "memory.limit_in_bytes")
        used = _number(group, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            stat = _numbers(group / "memory.stat")
            cached = sum(
                stat.get(f"total_{name}", stat.get(name, 0))
                for name in ("active_file", "inactive_file")
            )
            rooms.append(max(0, limit - used + cached))
    return min(rooms) + swap


def _memory_cgroups() -> list[Path]:
    """The cgroup that limits this process's memory, and those that it lies in."""
    try:
        lines = Path("/proc/self/cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in {"", "memory"}:
            root = _CGROUPS / controllers
            inner = root / path.lstrip("/")
            found += [inner, *(outer for outer in inner.parents if outer.is_relative_to(root))]
    return found


def _number(directory: Path, *names: str) -> int | None:
    for name in names:
        try:
            return int((directory / name).read_text("ascii"))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return None


def _numbers(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}
