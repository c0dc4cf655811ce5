"""Versions in directories, on a local disk or a network's.

    run1/
        .writer-0                     held by the publisher of rank 0, as long as it lives; its name
        0000000007-3f1c0a9be2d4/      version 7
            model.safetensors         or model-00001-of-0000N.safetensors and an index
            lists.bin                 digests of the tensors' leaves
            manifest.json
            group.json                of rank 0's part of a group: the group's manifest
            KEEP                      if somebody said that the version is to stay
            LOCK                      locked by those who read the version
            STABLE                    the marker: version, update, digest of the manifest's header
        records/                      what consumers report
        step_7                        for others: see `rl_bridge.transports.files.steps`

A version's files are written and synced, then its directory, then the marker, then the directory
once more; that holds after a crash of the machine, too. A reader holds a shared lock of ``LOCK``,
the collector takes an exclusive one before it removes anything. A publisher holds an exclusive lock
of ``.writer-RANK``, several of one rank a shared one. (Locks of `fcntl`, which NFS has as well.) A
lock may be lost, with its file or by a server of NFS that starts anew. So a publisher also writes
its own name into that file, and looks for it there before it writes a marker or removes anything.
"""

import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rl_bridge.errors import (
    SegmentError,
    VersionNotFound,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.memory import segment as leases
from rl_bridge.memory.control import Record
from rl_bridge.memory.durable import (
    replace_durably,
    sync_folder,
    write_durably,
)
from rl_bridge.memory.holding import Holding
from rl_bridge.transports.files.steps import take_back_of
from rl_bridge.transports.files.store import (
    KEPT,
    LOCK,
    MARKER,
    MAX_MARKER_NBYTES,
    MAX_RECORD_NBYTES,
    RECORDS,
    FileContent,
    Lease,
    Marker,
    RecordFile,
    StoredVersion,
    VersionStore,
    VersionWriter,
    is_of,
    is_version,
    rank_of,
)

_MAX_IOVECS = 1024
_STALE_TRIES = 3
# What a file system says of a file that is gone, and of something else in its place. All else, such
# as EIO, EMFILE or EACCES, says nothing of the version: an older one must not take its place.
_ABSENT = {errno.ENOENT, errno.ESTALE}
_DAMAGED = {errno.ENOTDIR, errno.ELOOP, errno.EISDIR}
_BEGUN = re.compile(r"^\.(\d+)-[0-9a-f]{32}$")


class DirectoryStore(VersionStore):
    """A run's directory.

    Attributes:
        root: the directory.

    """

    def __init__(self, root: Path) -> None:
        """Keep versions below `root`; nothing is opened."""
        self.root = self.directory = root

    def __str__(self) -> str:
        """The directory."""
        return str(self.root)

    def visible(self) -> list[StoredVersion]:
        """See `VersionStore.visible`."""
        found = []
        for name in self.names():
            marker = _read_marker(self.root / name)
            if marker is not None:
                found.append(StoredVersion(name, marker))
        # Two ranks that could not see each other's markers may have used one number.
        return sorted(found, key=lambda one: (one.marker.sequence, one.name))

    def damaged(self) -> list[str]:
        """See `VersionStore.damaged`."""
        return sorted(
            name
            for name in self.names()
            if _marker_text(self.root / name) is not None and _read_marker(self.root / name) is None
        )

    def find(self, update_id: str) -> str:
        """See `VersionStore.find`."""
        for name in self.names():
            if is_of(name, update_id):
                return name
        raise self.not_found(update_id)

    def names(self) -> list[str]:
        """Names of all versions, whatever their markers say."""
        try:
            return [path.name for path in self.root.iterdir() if is_version(path.name)]
        except OSError as error:
            raise _unusable(self.root, error) from error

    def lease(self, name: str) -> Lease:
        """See `VersionStore.lease`."""
        return _VersionLock(self.root / name)

    def files(self, name: str) -> dict[str, int]:
        """See `VersionStore.files`."""
        folder = self.root / name
        try:
            found = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
        except OSError as error:
            raise _unreadable(folder, error) from error
        return {file: facts.st_size for file, facts in found if stat.S_ISREG(facts.st_mode)}

    def read_small(self, name: str, file: str) -> bytes:
        """See `VersionStore.read_small`."""
        path = self.root / name / file
        try:
            return path.read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from error

    def read(self, name: str, file: str, nbytes: int, pieces: Sequence[tuple[int, Any]]) -> None:
        """See `VersionStore.read`."""
        path = self.root / name / file
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            found = os.fstat(fd).st_size
            if found != nbytes:
                raise self.wrong_size(name, file, found, nbytes)
            _read_ranges(fd, path, pieces)
        except OSError as error:
            raise _unreadable(path, error) from error
        finally:
            os.close(fd)

    def open_writer(self, rank: int, *, fenced: bool) -> "VersionWriter":
        """See `VersionStore.open_writer`; what the directory lies in must be there."""
        try:
            is_new = not self.root.exists()
            self.root.mkdir(exist_ok=True)
            (self.root / RECORDS).mkdir(exist_ok=True)
            if is_new:
                sync_folder(self.root)
                sync_folder(self.root.parent)
        except OSError as error:
            raise _unusable(self.root, error) from error
        return _Writer(self, rank, fenced=fenced)

    def remove(self, name: str) -> bool:
        """See `VersionStore.remove`."""
        return _remove(self.root / name)

    def keep(self, name: str, *, is_kept: bool) -> None:
        """See `VersionStore.keep`; the lease that is held meanwhile keeps the collector out."""
        folder = self.root / name
        with self.leased(name):
            try:
                if is_kept:
                    replace_durably(folder, KEPT, b"")
                else:
                    (folder / KEPT).unlink(missing_ok=True)
                    sync_folder(folder)
            except OSError as error:
                said = "kept" if is_kept else "let go"
                raise WeightBridgeUnavailableError(
                    f"{name} in {self} cannot be {said}: {error.strerror}. Use an account that may "
                    "write there."
                ) from error

    def is_kept(self, name: str) -> bool:
        """See `VersionStore.is_kept`."""
        return not _is_absent(self.root / name / KEPT)

    def is_leased(self, name: str) -> bool:
        """See `VersionStore.is_leased`."""
        try:
            fd = os.open(self.root / name / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return leases.is_held(fd)
        except OSError:
            return False
        finally:
            os.close(fd)

    def unfinished(self) -> dict[str, int]:
        """See `VersionStore.unfinished`."""
        found: dict[str, int] = {}
        try:
            for path in sorted(self.root.iterdir()):
                rank = rank_of(path.name)
                if rank is not None and _is_absent(path / MARKER):
                    found[path.name] = rank
                elif begun := _BEGUN.match(path.name):
                    found[path.name] = int(begun[1])
        except OSError as error:
            raise _unusable(self.root, error) from error
        return found

    def discard(self, name: str) -> None:
        """See `VersionStore.discard`."""
        shutil.rmtree(self.root / name, ignore_errors=True)

    @contextmanager
    def without_publisher(self, rank: int) -> Iterator[bool]:
        """See `VersionStore.without_publisher`: each one that lives holds a lock."""
        held = Holding(self)
        path = self.root / f".writer-{rank}"
        try:
            try:
                fd = held.open(os.open, path, os.O_RDWR | os.O_CLOEXEC)
                is_free = leases.try_exclusive(fd)
            except FileNotFoundError:  # none ever published
                yield False
                return
            except OSError as error:
                raise _unusable(self.root, error) from error
            if not is_free:
                raise WeightBridgeUnavailableError(
                    f"{self} has a publisher of rank {rank}, which removes older versions itself. "
                    "Let it, or close that bridge first."
                )
            yield True
        finally:
            held.dispose()

    def open_record(self, name: str) -> RecordFile:
        """See `VersionStore.open_record`."""
        return _Record(self.root / RECORDS / f"{name}.record")

    def records(self, prefix: str) -> list[Record]:
        """What consumers wrote; a lock on the file says that its writer lives."""
        found = []
        for path in sorted((self.root / RECORDS).glob(f"{prefix}*.record")):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                text = os.pread(fd, MAX_RECORD_NBYTES, 0)
                record = Record.model_validate_json(text)
                presence = "alive" if leases.is_held(fd) else "gone"
            except ValidationError:
                record, presence = Record(worker="?", rank=-1, pid=-1), "unreadable"
            except OSError:
                continue  # the consumer is gone, with its host
            finally:
                os.close(fd)
            found.append(record.model_copy(update={"presence": presence}))
        return found

    def remove_records(self, prefix: str, *, but: str = "") -> None:
        """See `VersionStore.remove_records`."""
        for path in (self.root / RECORDS).glob(f"{prefix}*.record"):
            if not but or not path.name.startswith(but):
                path.unlink(missing_ok=True)


def _unusable(root: Path, error: OSError) -> WeightBridgeUnavailableError:
    return WeightBridgeUnavailableError(
        f"url={str(root)!r} cannot hold versions: {error.strerror or error}. Name a directory that "
        "this user may use, in one that exists."
    )


def _read_marker(folder: Path) -> Marker | None:
    """A version's marker; None if it has none, or what is there is none."""
    text = _marker_text(folder)
    return None if text is None else Marker.parsed(text)


def _marker_text(folder: Path, *, num_tries: int = _STALE_TRIES) -> bytes | None:
    """What a marker's file holds; None if it is certain that there is none.

    Raises:
        WeightBridgeUnavailableError: it cannot be read. Without it nobody knows which version is
            the newest.

    """
    path = folder / MARKER
    try:
        with path.open("rb") as file:
            return file.read(MAX_MARKER_NBYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        # (Where NFS had the file that was there before, it finds the new one when it opens again.)
        if error.errno == errno.ESTALE and num_tries > 1:
            return _marker_text(folder, num_tries=num_tries - 1)
        raise _refused(path, error) from error


def _unreadable(path: Path, error: OSError) -> WeightBridgeError:
    """The error of a version's file. Only some say anything of the version: see `_DAMAGED`."""
    if error.errno in _ABSENT:
        return VersionNotFound(f"{path} is not there: {error.strerror}. Import another version.")
    if error.errno in _DAMAGED:
        return SegmentError(f"{path} cannot be read: {error.strerror}. Import another version.")
    return _refused(path, error)


def _refused(path: Path, error: OSError) -> WeightBridgeUnavailableError:
    return WeightBridgeUnavailableError(
        f"{path} cannot be read: {error.strerror or error}. See to the file system and to this "
        "user's rights there, then try again."
    )


# ---- writing -------------------------------------------------------------------------------------


class _Writer(VersionWriter):
    """What keeps a second publisher of a rank out of a directory."""

    def __init__(self, store: DirectoryStore, rank: int, *, fenced: bool) -> None:
        self._store, self._rank, self._is_fenced = store, rank, fenced
        self._held = Holding(self)
        self._path = path = store.root / f".writer-{rank}"
        self._token = uuid.uuid4().hex.encode()
        self._last = 0  # the sequence number of the version that was written last
        # Sequence numbers of versions by their names: of those that this writer wrote, or read.
        self._known: dict[str, int] = {}
        lock = leases.try_exclusive if fenced else leases.try_shared
        try:
            fd = self._held.open(os.open, path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            is_free = lock(fd)
            if is_free and fenced:
                os.pwrite(fd, self._token, 0)
                os.ftruncate(fd, len(self._token))
                os.fsync(fd)
        except OSError as error:
            self._held.dispose()
            raise _unusable(store.root, error) from error
        if not is_free:
            self._held.dispose()
            raise WeightBridgeUnavailableError(
                f"{store} has a publisher of rank {rank} already, expected one. Close that bridge, "
                "or end the trainer that comes back, or give this one a directory of its own; or "
                "open all of them with fenced=False."
            )

    def write(self, name: str, files: Iterable[FileContent], marker: Marker) -> Lease:
        root = self._store.root
        folder, made = root / name, root / f".{self._rank}-{marker.update_id}"
        lease: _VersionLock | None = None
        try:
            made.mkdir()
            (made / LOCK).touch(exist_ok=False)
            for file, pieces in files:
                write_durably(made / file, pieces)
            sync_folder(made)
            made.rename(folder)
            sync_folder(root)
            sequence = self._next_sequence()
            marker = marker.model_copy(update={"sequence": sequence})
            # Leased before anybody sees it: no collector comes in between.
            lease = _VersionLock(folder, marker)
            self._require_place()
            replace_durably(folder, MARKER, marker.to_json())
            self._known[name] = self._last = sequence
        except BaseException:
            if lease is not None:
                lease.close()
            shutil.rmtree(made, ignore_errors=True)
            self._store.remove(name)
            raise
        return lease

    def _next_sequence(self) -> int:
        """The number behind all versions of this rank.

        Raises:
            WeightBridgeUnavailableError: the marker of one that may be the last cannot be read.

        """
        for name in self._store.names():
            if rank_of(name) == self._rank and name not in self._known:
                marker = _read_marker(self._store.root / name)
                if marker is not None:
                    self._known[name] = marker.sequence
        return max([self._last, *self._known.values()]) + 1

    def add(self, name: str, file: str, content: bytes) -> None:
        replace_durably(self._store.root / name, file, content)

    def seal_anew(self, name: str, lease: Lease, marker: Marker) -> None:
        self._require_place()
        replace_durably(self._store.root / name, MARKER, marker.to_json())
        lease.marker = marker

    def is_superseded(self) -> bool:
        if not self._is_fenced:
            return False
        try:
            return self._path.read_bytes() != self._token
        except FileNotFoundError:  # then a later publisher may come at any time
            return True
        except OSError as error:
            raise _unusable(self._store.root, error) from error

    def _require_place(self) -> None:
        if self.is_superseded():
            raise self._store.taken_over(self._rank)

    def sweep(self) -> None:
        if not self._is_fenced or self.is_superseded():
            return
        for name, rank in self._store.unfinished().items():
            if rank == self._rank:
                self._store.discard(name)

    def close(self) -> None:
        self._held.dispose()


# ---- reading -------------------------------------------------------------------------------------


class _VersionLock(Lease):
    """A shared lock of a version's file for locks, which is never replaced, as its marker is."""

    def __init__(self, folder: Path, marker: Marker | None = None) -> None:
        """Lease a version; `marker` is what it is given next, None: it must have one."""
        self._held = Holding(self)
        path = folder / LOCK
        try:
            fd = self._held.open(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _gone(folder, error.strerror or str(error)) from error
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            is_free = leases.try_shared(fd)
        except OSError as error:
            self.close()
            raise WeightBridgeUnavailableError(
                f"{path} cannot be locked: {error.strerror}. Name a directory on a file system "
                "that has locks, such as NFS with its lock manager."
            ) from error
        if not is_free:
            self.close()
            raise _gone(folder, "it is being removed")
        try:
            self.marker = _leased_marker(folder) if marker is None else marker
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._held.dispose()


def _leased_marker(folder: Path) -> Marker:
    text = _marker_text(folder)
    if text is None:
        raise _gone(folder, f"it has no {MARKER}")
    marker = Marker.parsed(text)
    if marker is None:
        raise VersionNotFound(
            f"{folder / MARKER} is no marker, or not all of it is visible here yet. Take another "
            "version."
        )
    return marker


def _gone(folder: Path, cause: str) -> VersionNotFound:
    return VersionNotFound(
        f"{folder.name} is gone, or not written yet: {cause}. Import the newest manifest."
    )


def _read_ranges(fd: int, path: Path, pieces: Sequence[tuple[int, Any]]) -> None:
    at = 0
    while at < len(pieces):
        run, views = at, list[Any]()
        begin = end = pieces[at][0]
        while run < len(pieces) and len(views) < _MAX_IOVECS and pieces[run][0] == end:
            views.append(pieces[run][1])
            end += len(views[-1])
            run += 1
        _read_all(fd, path, begin, views)
        at = run


def _read_all(fd: int, path: Path, begin: int, views: list[Any]) -> None:
    left = [memoryview(one).cast("B") for one in views if len(one)]
    while left:
        count = os.preadv(fd, left, begin)
        if not count:
            raise VersionNotFound(f"{path} was cut while it was read. Import another version.")
        begin += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


class _Record(RecordFile):
    """A file that its consumer has locked."""

    def __init__(self, path: Path) -> None:
        self._held = Holding(self)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            leases.try_exclusive(self._held.open(os.open, path, flags, 0o644))
        except OSError:
            self._held.dispose()
            path.unlink(missing_ok=True)
            raise

    def write(self, record: Record) -> None:
        text = record.model_dump_json().encode()
        with suppress(OSError):  # the publisher is gone, or the disk is full: the update stands
            os.pwrite(self._held.fd, text, 0)
            os.ftruncate(self._held.fd, len(text))

    def is_removed(self) -> bool:
        try:
            return not os.fstat(self._held.fd).st_nlink
        except OSError:  # so does NFS say it
            return True

    def close(self) -> None:
        self._held.dispose()


# ---- removing ------------------------------------------------------------------------------------


def _is_absent(path: Path) -> bool:
    """Whether a file is not there, for certain: one that cannot be looked at is."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _remove(folder: Path) -> bool:
    """Remove a version that nobody reads or keeps: the marker first. Returns whether it is gone."""
    held = Holding()
    try:
        with suppress(FileNotFoundError):  # then nobody can read it
            fd = held.open(os.open, folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            if not leases.try_exclusive(fd):
                return False
        if not _is_absent(folder / KEPT):
            return False
        if not _is_absent(folder / MARKER):
            take_back_of(folder.parent, folder.name)
            (folder / MARKER).unlink(missing_ok=True)
            sync_folder(folder)
    except OSError:
        return False
    finally:
        held.dispose()
    shutil.rmtree(folder, ignore_errors=True)
    return True
