"""Files that are on disk when the call returns, after a crash of the machine, too."""

import itertools
import os
import secrets
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rl_bridge.memory import vm

__all__ = ["replace_durably", "sync_folder", "whole_directory", "write_beside", "write_durably"]

_MAX_IOVECS = 1024
_WRITE_NBYTES = 8 << 20


def write_durably(path: Path, pieces: Sequence[Any], *, mode: int = 0o644) -> None:
    """Write a new file, and sync it.

    Raises:
        OSError: it cannot be written; what is there of it stays.

    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        left = deque(memoryview(one).cast("B") for one in pieces if len(one))
        begin = 0
        while left:
            written = os.writev(fd, _first(left, _WRITE_NBYTES))
            # The disk works while the next bytes are copied, instead of all at once in the end.
            vm.begin_writeback(fd, begin, written)
            begin += written
            while left and written >= len(left[0]):
                written -= len(left.popleft())
            if written:
                left[0] = left[0][written:]
        os.fsync(fd)
    finally:
        os.close(fd)


def _first(pieces: Iterable[memoryview], nbytes: int) -> list[memoryview]:
    """The first so many bytes of buffers, or a little less."""
    found: list[memoryview] = []
    for one in itertools.islice(pieces, _MAX_IOVECS):
        found.append(one[:nbytes])
        nbytes -= len(found[-1])
        if not nbytes:
            break
    return found


def sync_folder(folder: Path) -> None:
    """Sync a directory's own entries."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_durably(folder: Path, name: str, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file in one step: whoever looks sees all of it, or what was there before.

    Raises:
        OSError: it cannot be written; what was there before stays.

    """
    write_beside(folder, name, content, mode=mode).rename(folder / name)
    sync_folder(folder)


def write_beside(folder: Path, name: str, content: bytes, *, mode: int = 0o644) -> Path:
    """Write a file under a hidden name, to be renamed.

    Raises:
        OSError: it cannot be written.

    """
    beside = folder / f".{name}"
    with suppress(FileNotFoundError):
        beside.unlink()
    write_durably(beside, [content], mode=mode)
    return beside


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Make a directory that is there with all its files, or not at all.

    Yields the directory to write into, under a hidden name; its files are to be synced. It takes
    the place of an empty one.

    Raises:
        OSError: it cannot be made.

    """
    made = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    made.mkdir()
    try:
        yield made
        sync_folder(made)
        made.rename(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    sync_folder(target.parent)
