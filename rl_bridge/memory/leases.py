"""Leases that the kernel keeps: open-file-description locks on one byte of a segment.

A reader holds a shared lock while any of its tensors lives; the publisher may overwrite only under
the exclusive lock. A reader that is killed loses its lock in the same instant, so there is no
heartbeat, no time-to-live and nothing to clean up. (fcntl(2), "Open file description locks".)
"""

import errno
import fcntl
import os
import struct

__all__ = ["is_held", "try_exclusive", "try_shared", "unlock"]

# struct flock on 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi4x")


def _pack(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)


def _try(fd: int, kind: int, start: int, length: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack(kind, start, length))
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            return False
        raise
    return True


def try_shared(fd: int, *, start: int = 0, length: int = 1) -> bool:
    """Take a reader's lock; False if a writer holds the range. Never waits."""
    return _try(fd, fcntl.F_RDLCK, start, length)


def try_exclusive(fd: int, *, start: int = 0, length: int = 1) -> bool:
    """Take the writer's lock; False if anybody else holds the range. Never waits."""
    return _try(fd, fcntl.F_WRLCK, start, length)


def unlock(fd: int, *, start: int = 0, length: int = 1) -> None:
    """Give the range back."""
    _try(fd, fcntl.F_UNLCK, start, length)


def is_held(fd: int, *, start: int = 0, length: int = 1) -> bool:
    """Tell whether another open file description holds the range, in whatever way."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _pack(fcntl.F_WRLCK, start, length))
    return bool(_FLOCK.unpack(answer[: _FLOCK.size])[0] != fcntl.F_UNLCK)
