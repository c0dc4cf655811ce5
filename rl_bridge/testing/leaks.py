"""Leak checks that do not believe themselves: each one first sees a leak that was planted for it.

What is counted, of this process and its machine: open descriptors, mappings of files and memfds,
other mappings, names in /dev/shm (or another directory), and resident memory.
"""

import ctypes
import gc
import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

SHM = Path("/dev/shm")  # noqa: S108 - looked at; what is planted there has a name of its own
# Allocators and thread stacks map and unmap a little on their own.
_ANONYMOUS_SLACK = 16
_RSS_SLACK = 12 << 20
_NUM_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Holdings:
    """The resources that this process holds right now.

    Attributes:
        descriptors: open descriptors.
        files: mapped file, memfd or device -> number of mappings.
        num_anonymous: mappings of nothing.
        names: what the watched directories contain.
        resident_nbytes: resident memory.

    """

    descriptors: dict[int, str]
    files: Counter[str]
    num_anonymous: int
    names: frozenset[str]
    resident_nbytes: int

    @classmethod
    def now(cls, *directories: Path) -> Self:
        """Look. `directories` are watched beside /dev/shm."""
        gc.collect()
        _give_free_memory_back()
        files: Counter[str] = Counter()
        anonymous = 0
        for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
            parts = line.split(maxsplit=5)
            if parts[4] == "0":
                anonymous += 1
            else:
                files[parts[5] if len(parts) > 5 else parts[4]] += 1
        names = frozenset(
            str(path) for root in (SHM, *directories) if root.exists() for path in root.iterdir()
        )
        return cls(_descriptors(), files, anonymous, names, resident_nbytes())


def _descriptors() -> dict[int, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all that is needed
        try:
            found[int(entry)] = str(Path(f"/proc/self/fd/{entry}").readlink())
        except OSError:
            continue  # the descriptor of this very listing
    return found


def _give_free_memory_back() -> None:
    """Empty the allocator's free lists: a leak served from them would not be seen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not every libc has it
    if trim is not None:
        trim(ctypes.c_size_t(0))


def resident_nbytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * mmap.PAGESIZE


def growth(before: Holdings, after: Holdings, *, rss_slack: int = _RSS_SLACK) -> list[str]:
    """The resources that `after` has more of, in words; empty if nothing leaked."""
    found = [
        f"descriptor {fd} -> {target}"
        for fd, target in after.descriptors.items()
        if before.descriptors.get(fd) != target and len(after.descriptors) > len(before.descriptors)
    ]
    more = after.files - before.files
    # Code that is loaded late is no leak; a segment is never executable.
    found += [f"{count} mappings of {name}" for name, count in more.items() if ".so" not in name]
    if after.num_anonymous - before.num_anonymous > _ANONYMOUS_SLACK:
        found.append(f"{after.num_anonymous - before.num_anonymous} anonymous mappings")
    found += [f"name {name}" for name in sorted(after.names - before.names)]
    grown = after.resident_nbytes - before.resident_nbytes
    if grown > rss_slack:
        found.append(f"{grown} bytes of resident memory")
    return found


# ---- planted leaks ------------------------------------------------------------------------------


@contextmanager
def _descriptor() -> Iterator[None]:
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        os.close(fd)


@contextmanager
def _mapping() -> Iterator[None]:
    fd = os.memfd_create("planted", os.MFD_CLOEXEC)
    os.ftruncate(fd, mmap.PAGESIZE)
    view = mmap.mmap(fd, mmap.PAGESIZE)
    os.close(fd)
    try:
        yield
    finally:
        view.close()


@contextmanager
def _anonymous() -> Iterator[None]:
    # Neighbours of equal protection would be merged into one.
    views = [
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | (mmap.PROT_WRITE if index % 2 else 0))
        for index in range(4 * _ANONYMOUS_SLACK)
    ]
    try:
        yield
    finally:
        for view in views:
            view.close()


@contextmanager
def _name() -> Iterator[None]:
    with tempfile.NamedTemporaryFile(dir=SHM, prefix="planted-"):
        yield


@contextmanager
def _memory() -> Iterator[None]:
    # From the kernel: an allocator might hand out memory that is resident already.
    with mmap.mmap(-1, 2 * _RSS_SLACK) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        yield


LEAKS = {
    "descriptor": _descriptor,
    "mapping": _mapping,
    "anonymous mapping": _anonymous,
    "name": _name,
    "resident memory": _memory,
}
"""One planted leak of each kind: a context in which it exists."""


def planted(kind: str) -> list[str]:
    """The answer of `growth` while a leak of `kind` exists."""
    before = Holdings.now()
    with LEAKS[kind]():
        return growth(before, Holdings.now())


def prove_checks() -> None:
    """Plant a leak of each kind and make sure that each one is seen.

    Raises:
        AssertionError: a check is blind here, so its silence would mean nothing.

    """
    blind = [kind for kind in LEAKS if not planted(kind)]
    if blind:
        raise AssertionError(f"the leak checks do not see these planted leaks: {blind}")


def assert_nothing_leaks(
    cycle: Callable[[], object],
    *directories: Path,
    num_cycles: int = 50,
    num_warm_up: int = 5,
    rss_slack: int = _RSS_SLACK,
) -> None:
    """Run `cycle` many times and compare what is held after with what was held before.

    Growth is only reported if it is seen again in two more rounds.

    Args:
        cycle: acquires and gives back.
        directories: watched beside /dev/shm.
        num_cycles: how often it is run between the two looks.
        num_warm_up: how often before the first look: pools and caches fill then.
        rss_slack: bytes by which resident memory may differ.

    Raises:
        AssertionError: something grew, or a check is blind.

    """
    with _only_new_garbage():
        prove_checks()
        for _ in range(num_warm_up):
            cycle()
        # Others use /dev/shm too, and an allocator may grow once: a leak is there every time, and
        # what leaked at first is there at the end.
        kept: frozenset[str] | None = None
        for _ in range(_NUM_LOOKS):
            before = Holdings.now(*directories)
            for _ in range(num_cycles):
                cycle()
            after = Holdings.now(*directories)
            kept = (after.names - before.names if kept is None else kept) & after.names
            if not kept:
                after = replace(after, names=before.names)
            found = growth(before, after, rss_slack=rss_slack)
            if not found:
                break
        else:
            raise AssertionError(
                f"after {num_cycles} cycles there is more than before: " + "; ".join(found[:8])
            )


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Collect only what is made from now on: modules and their like take most of a collection."""
    if gc.get_freeze_count():  # the caller froze it, and thaws it as well
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
