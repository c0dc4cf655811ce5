"""Segments: the memory that two processes share, and how a reader knows that it is the right one.

The first way needs no names: the owner maps a `memfd`, seals it, and says where it is (its pid, the
descriptor's number, the inode). A reader opens ``/proc/<pid>/fd/<n>`` read-only. Sealed means that
nobody can shrink it under a reader (no SIGBUS), nobody else can map it writable, and nothing stays
behind when processes die. The second way, for processes that cannot see each other's ``/proc``, is
a named file in a directory that both share; it needs `sweep`, and cannot be sealed.

A lease is an open-file-description lock (fcntl(2)) on one byte of a segment. A reader holds a
shared lock while any of its tensors lives; the publisher may overwrite only under the exclusive
lock. A reader that is killed loses its lock in the same instant, so there is no heartbeat, no
time-to-live and nothing to clean up.
"""

import errno
import fcntl
import os
import re
import stat
import struct
import weakref
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from rl_bridge.errors import (
    SHORTAGE_NUMBERS,
    BadSegmentName,
    SegmentError,
    WeightBridgeUnavailableError,
)
from rl_bridge.memory import vm
from rl_bridge.memory.holding import Holding
from rl_bridge.processes import no_fork

_F_SEAL_FUTURE_WRITE = 16
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_DATA_SEALS = _SIZE_SEALS | _F_SEAL_FUTURE_WRITE

# Bytes from which on the memory that is left is asked for: that takes a millisecond.
_ASKED_FROM = 64 << 20
_FILE_NAME = re.compile(r"rlb-[0-9a-f]{12}-([0-9]+\.seg|control)")
# The byte whose lock says that a named segment's owner lives: out of the lease's way.
_OWNER_BYTE = 1

Count = Annotated[StrictInt, Field(ge=0, lt=2**63)]

# struct flock on 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi4x")


def _try(fd: int, kind: int, start: int, length: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            return False
        raise
    return True


def try_shared(fd: int, *, start: int = 0) -> bool:
    """Take a reader's lock on a byte; False if a writer holds it. Never waits."""
    return _try(fd, fcntl.F_RDLCK, start, 1)


def try_exclusive(fd: int, *, start: int = 0, length: int = 1) -> bool:
    """Take the writer's lock; False if anybody else holds the range. Never waits."""
    return _try(fd, fcntl.F_WRLCK, start, length)


def unlock(fd: int) -> None:
    """Give the lock of the first byte back."""
    _try(fd, fcntl.F_UNLCK, 0, 1)


def is_held(fd: int, *, start: int = 0, length: int = 1) -> bool:
    """Tell whether another open file description holds the range, in whatever way."""
    answer = fcntl.fcntl(
        fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    )
    return bool(_FLOCK.unpack(answer[: _FLOCK.size])[0] != fcntl.F_UNLCK)


def has_owner(fd: int) -> bool:
    """Tell whether the owner of a named segment lives."""
    return is_held(fd, start=_OWNER_BYTE)


class SegmentRef(BaseModel):
    """Where a segment is, as it travels in a manifest. What it says is checked, never believed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["memfd", "file"]
    device: Count
    inode: Count
    nbytes: Count
    pid: Count
    start_time: Count
    fd: Count = 0
    name: StrictStr = ""


def require_resources(error: OSError) -> None:
    """Tell this process's own shortage from a segment that is gone."""
    if error.errno in SHORTAGE_NUMBERS:
        raise WeightBridgeUnavailableError(
            f"this process cannot open or map shared memory now: {error}. Free some and try again."
        ) from error


def process_start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if there is none, or it has ended.

    A process that ended keeps its pid, but no file, until its parent asks for its end. Together
    with the pid this names a process for good: pids are reused, this pair is not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError as error:
        require_resources(error)
        return None
    # The command name may hold spaces and brackets; fields 3 and 22 count from after the last one.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


class OwnedSegment:
    """A segment that this process made: mapped shared and writable, by nobody else."""

    def __init__(self, name: str, nbytes: int, *, directory: Path | None, seals: int) -> None:
        """Make, map and seal it. Use `make`."""
        self.nbytes = nbytes
        held = self._held = Holding(self)
        weakref.finalize(self, held.unlink)  # also at exit: the kernel unlinks no names
        try:
            self.fd = self._open(held, name, directory)
            self.address = held.reserve(nbytes)
            with no_fork():
                vm.map_shared(self.address, nbytes, self.fd)
                vm.guard_from_fork(self.address, nbytes)
            if directory is None:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
            status = os.fstat(self.fd)
            start_time = process_start_time(held.pid)
            self.ref = SegmentRef(
                kind="memfd" if directory is None else "file",
                device=status.st_dev,
                inode=status.st_ino,
                nbytes=nbytes,
                pid=held.pid,
                start_time=start_time or 0,
                fd=self.fd if directory is None else 0,
                name="" if directory is None else name,
            )
            if directory is None and (start_time is None or not still_there(self.ref)):
                self._refuse_invisible()
        except BaseException:
            self.close()  # at once: a caller may keep the exception
            raise

    def _open(self, held: Holding, name: str, directory: Path | None) -> int:
        if directory is None:
            fd = held.open(os.memfd_create, name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, self.nbytes)
            return fd
        # Without a name first: a sweep must never see the file before its owner's lock.
        fd = held.open(os.open, directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try_exclusive(fd, start=_OWNER_BYTE)
        os.ftruncate(fd, self.nbytes)
        # A full file system must say so here, and not by SIGBUS in the middle of a copy.
        os.posix_fallocate(fd, 0, self.nbytes)
        held.path = directory / name
        # The directory descriptor makes Python call linkat, which alone follows the link of /proc
        # to the unnamed file; with an absolute path the kernel ignores it.
        os.link(f"/proc/self/fd/{fd}", held.path, src_dir_fd=fd, follow_symlinks=True)
        return fd

    def _refuse_invisible(self) -> NoReturn:
        raise SegmentError(
            f"/proc does not show this process (pid {self.ref.pid}), so no other one could open "
            "its memory. Give it a /proc: mount that of this process's own pid namespace."
        )

    @classmethod
    def make(
        cls, name: str, nbytes: int, *, directory: Path | None = None, writers: bool = False
    ) -> Self:
        """Make a zero-filled segment of `nbytes` (rounded up to pages).

        Args:
            name: label of a memfd, or file name in `directory`.
            nbytes: size.
            directory: None for a memfd, else where the file goes.
            writers: whether readers may map it writable too (the control segment).

        Raises:
            SegmentError: there is not as much memory or space, or the kernel refuses.

        """
        nbytes = vm.round_up(max(nbytes, 1))
        if directory is None:
            _require_memory(name, nbytes)
        try:
            seals = _SIZE_SEALS if writers else _DATA_SEALS
            return cls(name, nbytes, directory=directory, seals=seals)
        except (OSError, WeightBridgeUnavailableError) as error:
            if getattr(error, "errno", None) in {errno.EMFILE, errno.ENFILE}:
                remedy = "Close files, or raise the limit of this process (ulimit -n)"
            elif directory is None:
                remedy = "Free memory"
            else:
                remedy = "Choose a directory= on a tmpfs with room"
            raise SegmentError(
                f"cannot make shared memory {name!r} of {nbytes} bytes: {error}. {remedy}, or "
                "lower max_slots."
            ) from error

    @property
    def is_whole(self) -> bool:
        """Whether it has its size and its name still: a named file can be cut off or removed."""
        found = os.fstat(self.fd)
        return found.st_size == self.nbytes and (self.ref.kind != "file" or found.st_nlink > 0)

    def close(self) -> None:
        """Unmap and close; the memory goes with its last reader."""
        self._held.dispose()


def _require_memory(name: str, nbytes: int) -> None:
    """Refuse what would not fit: a memfd is made at any size, and kills when it is written to."""
    if nbytes < _ASKED_FROM:
        return
    available = vm.available_memory()
    if available is not None and nbytes > available:
        raise SegmentError(
            f"shared memory {name!r} needs {nbytes} bytes, and {available} are available to this "
            "process. Free memory, publish less (an expanded tensor takes its full size), lower "
            "max_slots, or raise the memory limit of its cgroup."
        )


def open_segment(
    ref: SegmentRef,
    *,
    directory: Path | None = None,
    writable: bool = False,
    held: Holding | None = None,
) -> int:
    """Open another process's segment and make sure that it is the one that `ref` names.

    Args:
        ref: which one.
        directory: where named segments are looked for.
        writable: to write to it, as consumers do to the control segment.
        held: what owns the descriptor from its first moment; without it, the caller does once it is
            returned.

    Returns:
        A descriptor, closed in forked children; dispose of `held`, or close it with `close_fd`.

    Raises:
        BadSegmentName: the name is not a plain segment name.
        SegmentError: gone, replaced, of another size, or not sealed.
        WeightBridgeUnavailableError: this process may not open it, or is short of something.

    """
    held = Holding() if held is None else held
    # O_NONBLOCK: a pipe in the segment's place must not make the opener wait for a writer.
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    if ref.kind == "file":
        _check_name(ref, directory)
        flags |= os.O_NOFOLLOW  # entries of /proc/<pid>/fd are links by nature
    where = _path_of(ref, directory)
    if ref.kind == "memfd":
        _check_owner(ref, where)
    try:
        # Looked at before it is opened: opening a terminal or a device is an act.
        _check_file(os.stat(where), ref, where)  # noqa: PTH116 - a link of /proc, by nature
        fd = held.open(os.open, where, flags)
    except PermissionError as error:
        raise WeightBridgeUnavailableError(_denied(ref, where, error)) from error
    except OSError as error:
        require_resources(error)
        hint = (
            "It was released, or its publisher's bridge was closed or dropped: publish again."
            if ref.kind == "memfd"
            else "It was released, its publisher died, or the publisher's bridge was closed or "
            "dropped: publish again. Or directory= is not the publisher's: give both the same."
        )
        raise SegmentError(f"segment {where} cannot be opened: {error}. {hint}") from error
    try:
        _check_identity(fd, ref, where, writable=writable)
    except BaseException:
        held.dispose()  # at once: a caller may keep the exception
        raise
    return fd


def _path_of(ref: SegmentRef, directory: Path | None) -> str:
    if ref.kind == "memfd":
        return f"/proc/{ref.pid}/fd/{ref.fd}"
    return str(directory / ref.name) if directory else ""


def _check_name(ref: SegmentRef, directory: Path | None) -> None:
    if not _FILE_NAME.fullmatch(ref.name):
        raise BadSegmentName(
            f"segment name {ref.name!r} is no plain segment name of this transport. Use the "
            "manifest as it was published."
        )
    if directory is None:
        raise SegmentError(
            f"segment {ref.name!r} lies in a directory that the publisher chose. "
            "Give this side the same directory=."
        )


def _check_owner(ref: SegmentRef, where: str) -> None:
    started = process_start_time(ref.pid)
    if started is None and _is_another_users(ref.pid):
        raise WeightBridgeUnavailableError(_denied(ref, where, "its process is hidden"))
    if started != ref.start_time:
        raise SegmentError(
            f"the publisher (pid {ref.pid}) is gone or not visible from this process, so its "
            "memory cannot be opened. Publish again; between containers, give both sides a "
            "shared directory=."
        )


def _is_another_users(pid: int) -> bool:
    """Whether there is such a process, and this one may not even signal it."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):  # the pid is somebody's word
        pass
    return False


def _denied(ref: SegmentRef, where: str, error: object) -> str:
    remedy = "Run both sides as one user."
    if ref.kind == "memfd":
        remedy += " If their user namespaces differ, as in containers, give both sides directory=."
    return (
        f"this process (user {os.geteuid()}) may not open the publisher's memory {where}: {error}. "
        f"The publisher runs as another user, or in another user namespace. {remedy}"
    )


def _check_identity(fd: int, ref: SegmentRef, where: str, *, writable: bool) -> None:
    status = os.fstat(fd)
    _check_file(status, ref, where)
    if status.st_size != ref.nbytes:
        raise SegmentError(
            f"segment {where} has {status.st_size} bytes, the manifest says {ref.nbytes}: it was "
            "truncated or altered. Publish again."
        )
    if ref.kind == "memfd":
        needed = _SIZE_SEALS if writable else _DATA_SEALS
        seals = _seals(fd)
        if seals & needed != needed:
            raise SegmentError(
                f"segment {where} is not sealed (seals {seals:#x}, expected {needed:#x}): its "
                "owner could change it. Use the manifest as it was published."
            )


def _check_file(status: os.stat_result, ref: SegmentRef, where: str) -> None:
    found = (status.st_dev, status.st_ino)
    if found != (ref.device, ref.inode) or not stat.S_ISREG(status.st_mode):
        raise SegmentError(
            f"segment {where} was replaced: expected device and inode {(ref.device, ref.inode)}, "
            f"found {found}. The update is gone: publish again."
        )


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0  # no memfd at all


def still_there(ref: SegmentRef, *, directory: Path | None = None) -> bool:
    """Tell whether the owner still offers this segment: otherwise nobody will write to it again."""
    try:
        status = os.stat(_path_of(ref, directory))  # noqa: PTH116 - it may be a link of /proc
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (ref.device, ref.inode)


def sweep(directory: Path, *, dry_run: bool = False) -> list[tuple[str, int]]:
    """Remove the named segments whose owner is dead.

    Returns:
        Name and size in bytes of each one (to be) removed.

    """
    swept: list[tuple[str, int]] = []
    for path in sorted(directory.glob("rlb-*")):
        if not _FILE_NAME.fullmatch(path.name):
            continue
        held = Holding()
        try:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = held.open(os.open, path, flags)
        except OSError:
            continue  # removed meanwhile, or another user's: not ours to sweep
        else:
            if has_owner(fd):
                continue
            swept.append((path.name, os.fstat(fd).st_size))
            if not dry_run:
                path.unlink(missing_ok=True)
        finally:
            held.dispose()
    return swept
