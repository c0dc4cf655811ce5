"""Versions in an object store, such as S3, through fsspec.

    s3://bucket/run1/
        0000000007-3f1c0a9be2d4/...   version 7, as in a directory
        STABLE/0-0000000012           its marker: rank of the publisher, and sequence number
        leases/0000000007-3f1c0a9be2d4/...
        records/                      what consumers report

Such a store has no rename and no locks, but it can create an object only if there is none, in one
request. So **a marker's own name is the commit**: it is created under the next number of its rank,
and a number is taken once. A publisher that begins takes the next number with a *claim*, a marker
of no version. Where an older publisher comes back, the number that it would take next is taken by
that claim: it is refused, however long it slept. For this the highest number of a rank must never
be free again: before the last version is removed, the number behind it is *filled*, and publishers
step over that. Claims stay, one small object for each start of a trainer.

**Leases have a time to live.** A reader writes an object with a counter, and increments it while it
reads; a collector takes a lease for dead whose counter did not change for that time, by the
collector's clock: no two clocks are compared. The time stands behind the counter, because the
collector may have been given a shorter one: the longer of the two counts. A reader writes its lease
and then looks for the marker; a collector removes the marker and then looks for leases. One of them
sees the other. A reader that slept past its lease may find the data gone, but never other data: it
digests all of it.

`ObjectStore.open_writer` tries whether a store creates an object only if there is none. It also
refuses file systems of fsspec that would look whether an object is there and then write it: between
the two, another publisher may write.

**An account that may only read** takes no leases and reports nothing. Its bytes are digested as any
reader's, so the worst is that a version goes while it is read.
"""

import contextlib
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from rl_bridge.errors import VersionNotFound, WeightBridgeUnavailableError
from rl_bridge.memory.control import Record
from rl_bridge.processes import in_forked_children
from rl_bridge.transports.base import checked_seconds
from rl_bridge.transports.files.store import (
    KEPT,
    MARKER,
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
    rank_of,
    version_name,
)

_LOG = logging.getLogger(__name__)

LEASES = "leases"
_NO_UPDATE = ""  # the update of a claim, and of what only fills a number
_CLOSED = b"closed"
_READERS = 16
_FILE_NBYTES = 512 << 20  # what is written at once, from memory
_REPORT_S = 1.0  # the longest that a report is waited for
_SIDE_BY_SIDE = 8  # requests of the thread that renews
_BEATS = 3  # in the time that a lease lives unchanged


class ObjectStore(VersionStore):
    """A prefix of an object store."""

    num_readers = _READERS
    file_nbytes = _FILE_NBYTES

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, object],
        request_timeout_s: float,
        lease_s: float,
    ) -> None:
        """Open it by fsspec.

        Args:
            url: such as ``s3://bucket/run1``.
            storage_options: for fsspec's file system, such as ``endpoint_url``.
            request_timeout_s: the longest wait for one request.
            lease_s: how long a lease lives whose reader says nothing.

        Raises:
            WeightBridgeUnavailableError: fsspec, or the package for this kind of url, is missing.
            ValueError: no url of fsspec's.

        """
        self._url, self._timeout_s = url, request_timeout_s
        try:
            from fsspec.asyn import AsyncFileSystem
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(
                url, use_listings_cache=False, skip_instance_cache=True, **storage_options
            )
        except ImportError as error:
            raise WeightBridgeUnavailableError(
                f"url={url!r} is read by a package that is missing here: {error}. Install "
                "rl_bridge[files], and the package of fsspec for this kind of url, such as s3fs."
            ) from error
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"url={url!r}, storage_options={dict(storage_options)!r}: {error}. Name a "
                "directory, or a url that fsspec knows, such as s3://bucket/run1."
            ) from error
        self._root = self._root.rstrip("/")
        self.lease_s: float = lease_s
        self._is_bucket_there = False  # as far as anybody asked
        self._is_denied = False  # this account may not write, and that was said
        # Markers that were read, and what the listing said of them then.
        self._known: dict[str, tuple[_Stamp, bytes]] = {}
        self._has_timeouts = isinstance(self._fs, AsyncFileSystem)
        self._seen = _Counters(lease_s)
        self.keeper = _Keeper(lease_s / _BEATS)  # in time for what lives `lease_s`
        # A request that hangs must not cost other leases their time.
        self.beat_timeout_s = min(request_timeout_s, lease_s / _BEATS)

    def __str__(self) -> str:
        """The url."""
        return self._url

    # ---- requests

    def call(
        self, method: str, *arguments: Any, timeout_s: float | None = None, **options: Any
    ) -> Any:
        """One request, with a deadline where fsspec's file system has them.

        Raises:
            FileNotFoundError: there is no such object.
            FileExistsError: it is there already, and was to be created.
            WeightBridgeUnavailableError: anything else.

        """
        if self._has_timeouts:
            options["timeout"] = timeout_s or self._timeout_s
        try:
            return getattr(self._fs, method)(*arguments, **options)
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            # File systems raise errors of their own packages, which have no base in common.
            said = str(error) or type(error).__name__
            raise WeightBridgeUnavailableError(
                f"{self._url}: {method} of {arguments[0]} failed: {type(error).__name__}: {said}. "
                "See to the network, the credentials and the rights there, or raise "
                "request_timeout_s, then try again."
            ) from error

    def path(self, *parts: str) -> str:
        """Path of an object, for `call`."""
        return "/".join([self._root, *parts])

    def listed(self, *parts: str) -> list[str]:
        """Last parts of the names below a prefix."""
        try:
            found = self.call("ls", self.path(*parts), detail=False)
        except FileNotFoundError:
            return []
        return sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in found)

    def objects(self, *parts: str) -> dict[str, Mapping[str, Any]]:
        """Name of each object right below a prefix, and what the listing says of it."""
        prefix = self.path(*parts)
        try:
            found = self.call("ls", prefix, detail=True)
        except FileNotFoundError:
            return {}
        # (Consoles make an object of no bytes for a folder, of the folder's name.)
        return {
            one["name"].rsplit("/", 1)[-1]: one
            for one in found
            if one["type"] == "file" and one["name"].rstrip("/") != prefix
        }

    def contents(self, *parts: str) -> dict[str, bytes]:
        """Name and content of all objects below a prefix, but for what goes meanwhile."""
        return self._fetched(parts, self.objects(*parts))

    def _fetched(
        self, parts: Sequence[str], objects: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, bytes]:
        # (Stores refuse to give a range of an object that has no bytes.)
        texts = {name: b"" for name, one in objects.items() if not one["size"]}
        names = sorted(objects.keys() - texts.keys())
        if not names:
            return texts
        paths = [self.path(*parts, name) for name in names]
        found = self.call("cat_ranges", paths, 0, MAX_RECORD_NBYTES, on_error="return")
        for name, text in zip(names, found, strict=True):
            if isinstance(text, FileNotFoundError):
                continue
            if not isinstance(text, bytes):
                raise WeightBridgeUnavailableError(
                    f"{name} in {self} cannot be read: {text}. See to the network, try again."
                ) from text
            texts[name] = text
        return texts

    def text_at(self, path: str) -> bytes | None:
        """Content of a small object; None if it is not there."""
        try:
            if not self.call("info", path)["size"]:
                return b""
            return bytes(self.call("cat_file", path, start=0, end=MAX_RECORD_NBYTES))
        except FileNotFoundError:
            return None

    def has(self, path: str, *, timeout_s: float | None = None) -> bool:
        """Whether an object is there."""
        try:  # (fsspec's own `exists` may say no where it could not ask)
            self.call("info", path, timeout_s=timeout_s)
        except FileNotFoundError:
            return False
        return True

    def is_denied(self, error: WeightBridgeUnavailableError) -> bool:
        """Whether a write failed because this account may only read; the first is warned of."""
        cause = error.__cause__
        # (gcsfs has no type of its own for this answer.)
        if not isinstance(cause, PermissionError) and not str(cause).startswith("Forbidden"):
            return False
        if not self._is_denied:
            self._is_denied = True
            _LOG.warning(
                "this account may not write in %s: versions are read without a lease, so one may "
                "be removed meanwhile, and publishers hear of no import (%s)",
                self,
                error,
            )
        return True

    def _require_bucket(self) -> None:
        """Tell a bucket that is missing from one without versions."""
        bucket = self._root.partition("/")[0]
        if self._is_bucket_there or not bucket:
            return
        try:
            self._is_bucket_there = self.has(bucket)
        except WeightBridgeUnavailableError:
            return  # not every account may ask
        if not self._is_bucket_there:
            raise WeightBridgeUnavailableError(
                f"the bucket of {self} is not there. Make it, or see to the url, then try again."
            )

    # ---- reading

    def _markers(self) -> dict[str, bytes]:
        """Name and content of what is below ``STABLE``; only what is new is fetched."""
        objects = self.objects(MARKER)
        if not objects:
            self._require_bucket()
        stamps = {name: _stamp(one) for name, one in objects.items()}
        texts = {
            name: text for name, (stamp, text) in self._known.items() if stamp == stamps.get(name)
        }
        new = {name: one for name, one in objects.items() if name not in texts}
        texts |= self._fetched([MARKER], new)
        self._known = {
            name: (stamp, texts[name])
            for name, stamp in stamps.items()
            if stamp is not None and name in texts
        }
        return texts

    def entries(self) -> list[Marker]:
        """All markers, of versions and claims, in the order of their numbers."""
        found = map(Marker.parsed, self._markers().values())
        return sorted(filter(None, found), key=lambda one: (one.sequence, one.rank))

    def visible(self) -> list[StoredVersion]:
        """See `VersionStore.visible`."""
        return [
            StoredVersion(_name(one), one) for one in self.entries() if one.update_id != _NO_UPDATE
        ]

    def damaged(self) -> list[str]:
        """See `VersionStore.damaged`: a marker's own name, as it does not say its version's."""
        return [
            f"{MARKER}/{name}"
            for name, text in self._markers().items()
            if text and Marker.parsed(text) is None
        ]

    def find(self, update_id: str) -> str:
        """See `VersionStore.find`."""
        for version in self.visible():
            if is_of(version.name, update_id):
                return version.name
        raise self.not_found(update_id)

    def _marker(self, name: str) -> Marker:
        for version in self.visible():
            if version.name == name:
                return version.marker
        raise VersionNotFound(
            f"{name} is gone from {self}, or not written yet. Import the newest manifest."
        )

    def lease(self, name: str) -> Lease:
        """See `VersionStore.lease`."""
        lease: Lease
        try:
            lease = _ObjectLease(self, name)
        except WeightBridgeUnavailableError as error:
            if not self.is_denied(error):
                raise
            lease = _NoLease()
        try:
            lease.marker = self._marker(name)  # after the lease is there: see the module
        except BaseException:
            lease.close()
            raise
        return lease

    def is_leased(self, name: str) -> bool:
        """See `VersionStore.is_leased`: by somebody who lives, as far as this process saw."""
        asked_at, is_leased = time.monotonic(), False
        for lease, text in self.contents(LEASES, name).items():
            at_least_s = _stated_s(text)
            if self._seen.is_fresh(f"{name}/{lease}", text, asked_at, at_least_s=at_least_s):
                is_leased = True
            else:
                self.delete(self.path(LEASES, name, lease))
        return is_leased

    def longest_lease_s(self, names: Iterable[str]) -> float:
        """See `VersionStore.longest_lease_s`."""
        texts = [text for name in names for text in self.contents(LEASES, name).values()]
        return max([self.lease_s, *map(_stated_s, texts)])

    def files(self, name: str) -> dict[str, int]:
        """See `VersionStore.files`."""
        found = {file: int(one["size"]) for file, one in self.objects(name).items()}
        if not found:
            raise VersionNotFound(f"{name} is not there, in {self}. Import another version.")
        return found

    def read_small(self, name: str, file: str) -> bytes:
        """See `VersionStore.read_small`."""
        with self._of_file(name, file):
            return bytes(self.call("cat_file", self.path(name, file)))

    def read(self, name: str, file: str, nbytes: int, pieces: Sequence[tuple[int, Any]]) -> None:
        """See `VersionStore.read`; a request takes from the first piece to the end of the last."""
        if not pieces:
            return
        begin, last = pieces[0][0], pieces[-1]
        end = last[0] + len(last[1])
        if begin == end:
            return
        with self._of_file(name, file):
            text = memoryview(self.call("cat_file", self.path(name, file), start=begin, end=end))
        if len(text) != end - begin:
            raise self.wrong_size(name, file, begin + len(text), nbytes)
        for at, memory in pieces:
            memory[:] = text[at - begin : at - begin + len(memory)]

    @contextmanager
    def _of_file(self, name: str, file: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise VersionNotFound(
                f"{file} of {name} is not there, in {self}. Import another version."
            ) from error

    # ---- publishing

    def open_writer(self, rank: int, *, fenced: bool) -> VersionWriter:
        """See `VersionStore.open_writer`; the bucket must be there.

        Raises:
            WeightBridgeUnavailableError: also if the store creates an object that is there.

        """
        try:
            self._require_exclusive_creation()
        except FileNotFoundError as error:
            raise WeightBridgeUnavailableError(
                f"the bucket of {self} is not there: {error}. Make it, then try again."
            ) from error
        return _ObjectWriter(self, rank, fenced=fenced)

    def _require_exclusive_creation(self) -> None:
        if _creates_by_looking(self._fs):
            raise WeightBridgeUnavailableError(
                f"{self} is written by {type(self._fs).__name__} of fsspec, which looks whether an "
                "object is there and then writes it: two trainers could take one version's "
                "place. Name a store with conditional writes, such as S3, or a directory."
            )
        path = self.path(f".probe-{uuid.uuid4().hex}")
        self.create(path, b"1")
        try:
            self.create(path, b"2")
        except FileExistsError:
            return
        finally:
            self.delete(path)
        raise WeightBridgeUnavailableError(
            f"{self} replaces objects that were to be created only if there is none: two trainers "
            "could take one version's place. Name a store with conditional writes, such as S3, "
            "or a directory."
        )

    def create(self, path: str, content: bytes) -> None:
        """Create an object.

        Raises:
            FileExistsError: it is there.

        """
        self.call("pipe_file", path, content, mode="create")

    def put(self, path: str, content: bytes, *, timeout_s: float | None = None) -> None:
        """Write an object, whether it is there or not."""
        self.call("pipe_file", path, content, timeout_s=timeout_s)

    def delete(self, *paths: str, timeout_s: float | None = None) -> bool:
        """Remove objects; returns whether they are gone."""
        try:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self.call("rm_file", path, timeout_s=timeout_s)
        except WeightBridgeUnavailableError:
            return False
        return True

    def remove(self, name: str) -> bool:
        """See `VersionStore.remove`."""
        if self.is_kept(name) or self.is_leased(name):
            return False
        entries = self.entries()
        for marker in [one for one in entries if one.update_id and _name(one) == name]:
            if marker == [one for one in entries if one.rank == marker.rank][-1]:
                with contextlib.suppress(FileExistsError):
                    self.fill(marker.rank, marker.sequence + 1)
            if not self.delete(self.path(MARKER, marker_name(marker))):
                return False
            if self.is_kept(name):  # somebody was faster who keeps it
                with contextlib.suppress(FileExistsError):
                    self.mark(marker)
                return False
            if self.is_leased(name):  # its reader was faster, and reads: a later sweep removes it
                return False
        return self.remove_data(name)

    def remove_data(self, name: str) -> bool:
        """Remove the files of a version that has no marker; returns whether they are gone."""
        return self.delete(*(self.path(name, file) for file in self.listed(name)))

    def fill(self, rank: int, sequence: int, *, publisher: str = "") -> None:
        """Take a number for no version; with a publisher it is that one's claim.

        Raises:
            FileExistsError: it is taken.

        """
        self.mark(_filling(rank, sequence, publisher))

    def mark(self, marker: Marker) -> None:
        """Create a marker.

        Raises:
            FileExistsError: its number is taken.

        """
        path, text = self.path(MARKER, marker_name(marker)), marker.to_json()
        try:
            self.create(path, text)
        except (FileExistsError, WeightBridgeUnavailableError):
            # The answer to a request may be lost, and fsspec sends some again: look what is there.
            if self.text_at(path) != text:
                raise

    def keep(self, name: str, *, is_kept: bool) -> None:
        """See `VersionStore.keep`: `remove` looks for this object when the marker is gone."""
        with self.leased(name) as marker:
            if is_kept:
                self.put(self.path(name, KEPT), b"")
                with contextlib.suppress(FileExistsError):
                    self.mark(
                        marker
                    )  # which `remove` may have removed before this object was there
            elif not self.delete(self.path(name, KEPT)):
                raise WeightBridgeUnavailableError(
                    f"{name} in {self} cannot be let go. See to the network, then try again."
                )

    def is_kept(self, name: str) -> bool:
        """See `VersionStore.is_kept`."""
        return self.has(self.path(name, KEPT))

    def unfinished(self) -> dict[str, int]:
        """See `VersionStore.unfinished`."""
        ranks = {name: rank for name in self.listed() if (rank := rank_of(name)) is not None}
        if not ranks:
            return {}
        markers = [name for name, one in self.objects(MARKER).items() if one["size"]]
        entries = self.entries()
        if len(entries) < len(markers):
            return {}  # whose files a marker vouches for that cannot be read here is not known
        visible = {_name(one) for one in entries if one.update_id != _NO_UPDATE}
        return {name: rank for name, rank in ranks.items() if name not in visible}

    def discard(self, name: str) -> None:
        """See `VersionStore.discard`."""
        if not self.is_leased(name) and not self.is_kept(name):
            self.remove_data(name)

    def forget_leases(self, names: Collection[str]) -> None:
        """Remove dead leases of versions that are gone; `names` are those that are there."""
        for name in self.listed(LEASES):
            if name not in names:
                self.is_leased(name)

    # ---- what consumers report

    def open_record(self, name: str) -> RecordFile:
        """See `VersionStore.open_record`."""
        return _ObjectRecord(self, name)

    def records(self, prefix: str) -> list[Record]:
        """What consumers wrote; one is alive whose counter changed within `lease_s`."""
        asked_at, found = time.monotonic(), []
        for name, text in self.contents(RECORDS).items():
            if not name.startswith(prefix):
                continue
            try:
                record = Record.model_validate_json(text.partition(b"\n")[2])
                is_fresh = self._seen.is_fresh(f"{RECORDS}/{name}", text, asked_at)
                is_open = not text.startswith(_CLOSED)
                presence = "alive" if is_fresh and is_open else "gone"
            except ValidationError:
                record, presence = Record(worker="?", rank=-1, pid=-1), "unreadable"
            found.append(record.model_copy(update={"presence": presence}))
        return found

    def remove_records(self, prefix: str, *, but: str = "") -> None:
        """See `VersionStore.remove_records`."""
        for name in self.listed(RECORDS):
            if name.startswith(prefix) and not (but and name.startswith(but)):
                self.delete(self.path(RECORDS, name))


_Stamp = tuple[object, ...] | None


def _stamp(listed: Mapping[str, Any]) -> _Stamp:
    """What a listing says that changes with an object's content; None if nothing is sure to."""
    tag = listed.get("ETag") or listed.get("etag")
    changed_at = listed.get("LastModified") or listed.get("updated") or listed.get("last_modified")
    return (tag, changed_at, listed["size"]) if tag else None


def _creates_by_looking(fs: Any) -> bool:
    """Whether a file system of fsspec has only the general way to create a file: look, and write.

    What passes calls on to another file system is as good as that one.
    """
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    kind, general, method = type(fs), AbstractFileSystem, "pipe_file"
    if issubclass(kind, AsyncFileSystem) and kind.pipe_file is AbstractFileSystem.pipe_file:
        general, method = AsyncFileSystem, "_pipe_file"  # which does it then
    is_general = getattr(kind, method) is getattr(general, method)
    inner = vars(fs).get("fs")
    return is_general or (isinstance(inner, AbstractFileSystem) and _creates_by_looking(inner))


def marker_name(marker: Marker) -> str:
    """Name of a marker below ``STABLE``."""
    return f"{marker.rank}-{marker.sequence:010d}"


def _filling(rank: int, sequence: int, publisher: str) -> Marker:
    """A marker of no version: a publisher's claim, or one that only fills a number."""
    return Marker(
        sequence=sequence, weight_version=0, update_id=_NO_UPDATE, rank=rank, header=publisher
    )


def _is_filling(marker: Marker | None) -> bool:
    return marker is not None and marker.update_id == _NO_UPDATE and not marker.header


def _number(name: str) -> tuple[int, int]:
    """Rank and number of a marker by its name; (-1, 0) if it is no such name."""
    rank, _, number = name.partition("-")
    return (int(rank), int(number)) if rank.isdecimal() and number.isdecimal() else (-1, 0)


def _name(marker: Marker) -> str:
    return version_name(marker.weight_version, marker.update_id, marker.rank)


def _stated_s(lease: bytes) -> float:
    """How long a lease lives unchanged, as its reader wrote; 0 where it did not say so."""
    try:  # (Readers of earlier builds wrote a counter alone.)
        return checked_seconds("lease_s", float(lease.partition(b" ")[2]))
    except ValueError:
        return 0.0


class _Counters:
    """Contents that were seen, and since when they are what they are."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._known: dict[str, tuple[bytes, float]] = {}

    def is_fresh(
        self, name: str, content: bytes, asked_at: float, *, at_least_s: float = 0.0
    ) -> bool:
        """Whether it changed, between answers and questions that are so far apart."""
        known = self._known.get(name)
        if known is None or known[0] != content:
            self._known[name] = content, time.monotonic()
            return True
        if asked_at - known[1] < max(self._lease_s, at_least_s):
            return True
        self._known.pop(name, None)
        return False


_Beat = Callable[[], None]


class _Keeper:
    """One thread that calls functions (beats), every so often; it runs while there are any."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.begin()
        _KEEPERS.add(self)

    def begin(self) -> None:
        """Have no beats and no thread. So begins a forked child, in which the lock may be taken."""
        self._changed = threading.Condition()
        self._beats: list[_Beat] = []
        self._due: list[_Beat] = []
        self._thread: threading.Thread | None = None

    def add(self, beat: _Beat) -> None:
        with self._changed:
            self._beats.append(beat)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="rl_bridge-leases", daemon=True)
                thread.start()
                self._thread = thread

    def soon(self, beat: _Beat) -> None:
        """Have it called now, in the keeper's thread."""
        with self._changed:
            if beat not in self._due:
                self._due.append(beat)
            self._changed.notify()

    def remove(self, beat: _Beat) -> None:
        with self._changed:
            self._beats = [one for one in self._beats if one != beat]
            self._due = [one for one in self._due if one != beat]
            self._changed.notify()

    def _run(self) -> None:
        next_at = time.monotonic() + self._every_s
        while True:
            with self._changed:
                while self._beats and not self._due:
                    left = next_at - time.monotonic()
                    if left <= 0:
                        next_at += self._every_s
                        self._due = list(self._beats)
                        break
                    self._changed.wait(left)
                if not self._beats:
                    self._thread = None
                    return
                due, self._due = self._due, []
            for error in _called(due):
                if error is not None:
                    _LOG.warning("a lease or a record was not renewed, and will be: %s", error)


_KEEPERS: weakref.WeakSet[_Keeper] = weakref.WeakSet()


def _begin_all() -> None:
    for one in list(_KEEPERS):
        one.begin()


in_forked_children(_begin_all)


def _called(due: list[_Beat]) -> list[Exception | None]:
    if len(due) > 1:
        try:
            with ThreadPoolExecutor(min(len(due), _SIDE_BY_SIDE)) as pool:
                return list(pool.map(_call, due))
        except RuntimeError:  # no thread can be started, such as while the interpreter ends
            _LOG.debug("leases are renewed one after the other")
    return [_call(beat) for beat in due]


def _call(beat: _Beat) -> Exception | None:
    try:
        beat()
    except (WeightBridgeUnavailableError, OSError) as error:
        return error
    return None


class _ObjectLease(Lease):
    """An object with a counter, which its reader increments."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store, self._pid = store, os.getpid()
        self._path = store.path(LEASES, name, uuid.uuid4().hex)
        self._writing, self._count, self._is_closed = threading.Lock(), 0, False
        self._is_removed = False
        self._write()
        store.keeper.add(self._write)

    def _write(self) -> None:
        with self._writing:
            if not self._is_closed:
                timeout_s = self._store.beat_timeout_s if self._count else None
                self._count += 1
                text = f"{self._count} {self._store.lease_s!r}".encode()
                self._store.put(self._path, text, timeout_s=timeout_s)
            elif not self._is_removed:
                self._store.keeper.remove(self._write)
                timeout_s = self._store.beat_timeout_s
                self._is_removed = self._store.delete(self._path, timeout_s=timeout_s)

    def close(self) -> None:
        if os.getpid() != self._pid:  # a forked child does not end its parent's leases
            return
        self._is_closed = True
        self._write()

    def drop(self) -> None:
        if os.getpid() == self._pid:
            self._is_closed = True
            self._store.keeper.soon(self._write)  # whose thread removes the object


class _NoLease(Lease):
    """What a reader has that may not write."""

    def close(self) -> None:
        """Nothing is held."""


class _ObjectRecord(RecordFile):
    """An object with a counter, which its consumer increments; its beat writes it."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store, self._path = store, store.path(RECORDS, f"{name}.record")
        self._pid, self._writing = os.getpid(), threading.Lock()
        self._count, self._text, self._written = 0, b"", b""
        self._is_current = threading.Event()
        self._is_removed = self._is_closed = False
        store.keeper.add(self._write)

    def write(self, record: Record) -> None:
        self._is_current.clear()
        self._text = record.model_dump_json().encode()
        self._store.keeper.soon(self._write)
        self._is_current.wait(_REPORT_S)  # a store that hangs gets it later, or not at all

    def _write(self) -> None:
        with self._writing:
            text = self._text
            if self._is_removed or not text:
                return
            timeout_s = self._store.beat_timeout_s
            if text == self._written and not self._store.has(self._path, timeout_s=timeout_s):
                self._is_removed = True
                return
            self._count += 1
            mark = _CLOSED if self._is_closed else str(self._count).encode()
            try:
                self._store.put(self._path, mark + b"\n" + text, timeout_s=timeout_s)
            except WeightBridgeUnavailableError as error:
                if not self._store.is_denied(error):
                    raise
                self._is_current.set()  # nobody need wait for it
                return
            self._written = text
            if text == self._text:
                self._is_current.set()

    def is_removed(self) -> bool:
        return self._is_removed

    def close(self) -> None:
        if os.getpid() != self._pid or self._is_closed:
            return
        self._store.keeper.remove(self._write)
        self._is_closed = True
        with contextlib.suppress(WeightBridgeUnavailableError, OSError):  # reports are best effort
            self._write()


class _ObjectWriter(VersionWriter):
    """Creates markers under the numbers of its rank."""

    def __init__(self, store: ObjectStore, rank: int, *, fenced: bool) -> None:
        self._store, self._rank, self._is_fenced = store, rank, fenced
        self._last = 0  # the number that this publisher took last
        self._claim = 0  # and the first one, if it is fenced
        self._tried: set[bytes] = set()  # markers of which it is unknown whether they came to be
        if fenced:  # whoever published before is refused from here on
            self._last = self._highest()
            while not self._claim:
                self._last += 1
                with contextlib.suppress(FileExistsError):  # somebody published meanwhile
                    store.fill(rank, self._last, publisher=uuid.uuid4().hex)
                    self._claim = self._last

    def write(self, name: str, files: Iterable[FileContent], marker: Marker) -> Lease:
        store = self._store
        lease = _ObjectLease(store, name)  # before the files: an earlier publisher may sweep yet
        try:
            for file, pieces in files:
                store.put(store.path(name, file), b"".join(pieces))
            if self._tried:
                self._forget_tried()
            if not self._is_fenced:
                self._last = max(self._last, self._highest())
            while True:
                lease.marker = marker.model_copy(update={"sequence": self._last + 1})
                if self._is_taken_by(lease.marker):
                    return lease
        except BaseException:
            with contextlib.suppress(WeightBridgeUnavailableError):
                lease.close()
                store.remove(name)
            raise

    def _forget_tried(self) -> None:
        """After a failure: whether this publisher goes on, and behind which number, is listed."""
        highest, own = self._highest(), self._own()
        if self._is_superseded(own):
            raise self._store.taken_over(self._rank)
        for one in own:
            if one.to_json() in self._tried:  # its version was removed
                self._fill_over(one)
        self._last = max(self._last, highest)

    def _fill_over(self, marker: Marker) -> None:
        fill = _filling(marker.rank, marker.sequence, "")
        path = self._store.path(MARKER, marker_name(marker))
        self._store.put(path, fill.to_json())

    def _is_taken_by(self, marker: Marker) -> bool:
        """Create a marker under the next number; False if that was filled, and is stepped over."""
        store, text = self._store, marker.to_json()
        try:
            store.mark(marker)
        except FileExistsError:
            path = store.path(MARKER, marker_name(marker))
            there = store.text_at(path) or b""
            if there in self._tried:  # it came late, and its version was removed
                self._fill_over(marker)
            elif self._is_fenced and there and not _is_filling(Marker.parsed(there)):
                raise self._store.taken_over(self._rank) from None
            self._last = marker.sequence
            return False
        except BaseException:
            self._tried.add(text)
            raise
        self._last = marker.sequence
        self._tried.clear()
        return True

    def _is_superseded(self, own: list[Marker]) -> bool:
        claims = (one for one in own if one.update_id == _NO_UPDATE and one.header)
        return self._is_fenced and any(one.sequence > self._claim for one in claims)

    def add(self, name: str, file: str, content: bytes) -> None:
        self._store.put(self._store.path(name, file), content)

    def seal_anew(self, name: str, lease: Lease, marker: Marker) -> None:
        own = self._own()
        if self._is_superseded(own):
            raise self._store.taken_over(self._rank)
        if lease.marker.update_id not in {one.update_id for one in own}:
            raise VersionNotFound(f"{name} is gone from {self._store}. Publish it again.")
        self._store.put(self._store.path(MARKER, marker_name(marker)), marker.to_json())
        lease.marker = marker

    def is_superseded(self) -> bool:
        return self._is_superseded(self._own())

    def sweep(self) -> None:
        own = self._own()
        if not self._is_fenced or self._is_superseded(own):
            return
        store = self._store
        for name, rank in store.unfinished().items():
            if rank == self._rank:
                store.discard(name)
        store.forget_leases(store.listed())
        for one in own:  # what was filled up to the claim keeps earlier publishers out
            if _is_filling(one) and self._claim < one.sequence < self._last:
                store.delete(store.path(MARKER, marker_name(one)))

    def close(self) -> None:
        """Nothing is held: a later publisher takes over by its claim."""

    def _own(self) -> list[Marker]:
        return [one for one in self._store.entries() if one.rank == self._rank]

    def _highest(self) -> int:
        numbers = [_number(name) for name in self._store.listed(MARKER)]
        return max([0, *(number for rank, number in numbers if rank == self._rank)])
