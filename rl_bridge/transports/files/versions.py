"""A directory of versions: how one becomes visible, is leased while it is read, and removed.

    run1/
        .writer-0                     held by the publisher of rank 0, as long as it lives
        0000000007-3f1c0a9be2d4/      version 7
            model.safetensors         or model-00001-of-0000N.safetensors and an index
            lists.bin                 digests of the tensors' leaves
            manifest.json
            STABLE                    the marker: version, update, digest of the manifest's header
        records/                      what consumers report

**Durable before visible.** A version's files are written and synced, then its directory, then the
marker, then the directory once more. Whoever finds the marker finds all that it stands for, also
after a crash of the machine. What has no marker is no version, and is removed by the next
publisher of its rank. Versions are ordered as they were published (`Marker.sequence`): a trainer
that begins anew at an earlier step goes on behind what is there.

**Leased while read.** A reader holds a shared lock of the marker, the collector takes an exclusive
one before it removes anything, the marker first. (Locks of `fcntl`, which NFS has as well.)

**Fenced.** A publisher holds an exclusive lock of ``.writer-RANK``: a second one is refused, such
as an older trainer that comes back.
"""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, StrictInt, StrictStr, ValidationError

from rl_bridge.errors import SegmentError, WeightBridgeUnavailableError
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory import segment as leases
from rl_bridge.memory.holding import Holding

MARKER, MANIFEST, LISTS, RECORDS = "STABLE", "manifest.json", "lists.bin", "records"
_FOLDER = re.compile(r"^\d{10,19}-[0-9a-f]{12}(?:-(\d+))?$")
_MAX_MARKER_NBYTES = 4096
_MAX_IOVECS = 1024


class Marker(BaseModel):
    """The marker's content.

    Attributes:
        format: names this format.
        sequence: grows with each version of its rank in the directory.
        weight_version: the version.
        update_id: its update.
        rank: of its publisher.
        header: digest of the manifest's header, 32 hexadecimal digits.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["rl_bridge.files/1"] = "rl_bridge.files/1"
    sequence: StrictInt
    weight_version: StrictInt
    update_id: StrictStr
    rank: StrictInt
    header: StrictStr


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version that is visible.

    Attributes:
        folder: where it is.
        marker: what its marker says.

    """

    folder: Path
    marker: Marker


def folder_name(weight_version: int, update_id: str, rank: int) -> str:
    """Name of a version's directory: they sort as the versions do."""
    return f"{weight_version:010d}-{update_id[:12]}" + (f"-{rank}" if rank else "")


def folder_of(root: Path, update_id: str) -> Path:
    """The directory of an update, whatever its manifest says of its number.

    Raises:
        SegmentError: there is none.
        WeightBridgeUnavailableError: the directory cannot be read.

    """
    try:
        found = [path for path in root.iterdir() if _is_of(path.name, update_id)]
    except OSError as error:
        raise _unusable(root, error) from error
    if not found:
        msg = (
            f"update {update_id} is not in {root}: it was removed, or is not visible here yet. "
            "Import the newest manifest, or give both sides one url."
        )
        raise SegmentError(msg)
    return found[0]


def _is_of(name: str, update_id: str) -> bool:
    return bool(_FOLDER.match(name)) and name.split("-")[1] == update_id[:12]


def folder_rank(name: str) -> int | None:
    """The publisher's rank by the name of a version's directory; None if it is no such name."""
    match = _FOLDER.match(name)
    return None if match is None else int(match[1] or 0)


def visible(root: Path) -> list[StoredVersion]:
    """All versions that have a marker, in the order of their publication.

    Raises:
        WeightBridgeUnavailableError: the directory cannot be read.

    """
    try:
        folders = [path for path in root.iterdir() if _FOLDER.match(path.name)]
    except OSError as error:
        raise _unusable(root, error) from error
    found = []
    for folder in folders:
        marker = read_marker(folder)
        if marker is not None:
            found.append(StoredVersion(folder, marker))
    return sorted(found, key=lambda one: one.marker.sequence)


def read_marker(folder: Path) -> Marker | None:
    """What a directory's marker says; None if it has none that can be read."""
    try:
        with (folder / MARKER).open("rb") as file:
            return Marker.model_validate_json(file.read(_MAX_MARKER_NBYTES))
    except (OSError, ValidationError):
        return None


def stored_manifest(version: StoredVersion) -> WeightUpdateManifest:
    """The manifest beside a marker, which must be the one that the marker was made for.

    Raises:
        SegmentError: it is gone, or another one.
        WeightManifestValidationError: it cannot be read.

    """
    path = version.folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}. Take another version."
        raise SegmentError(msg) from error
    manifest = WeightUpdateManifest.of(text, caller="stored_manifest")
    if manifest.header_digest.hex() != version.marker.header:
        msg = (
            f"{path} is not what version {version.marker.weight_version} was published with: "
            f"expected a header of digest {version.marker.header}, got "
            f"{manifest.header_digest.hex()}. Take another version."
        )
        raise SegmentError(msg)
    return manifest


# ---- writing -------------------------------------------------------------------------------------


def write_durably(path: Path, pieces: Sequence[Any]) -> None:
    """Write a new file, and sync it.

    Raises:
        OSError: it cannot be written; what is there of it stays.

    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        left = [memoryview(one).cast("B") for one in pieces if len(one)]
        while left:
            written = os.writev(fd, left[:_MAX_IOVECS])
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Sync a directory's own entries."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_marker(folder: Path, marker: Marker) -> None:
    """Make a version visible: all of it must be on disk. A marker that is there is replaced."""
    beside = folder / f".{MARKER}"
    with suppress(FileNotFoundError):
        beside.unlink()
    write_durably(beside, [marker.model_dump_json().encode()])
    beside.rename(folder / MARKER)
    sync_folder(folder)


def make_root(root: Path) -> None:
    """Make a run's directory if it is missing, but not what it lies in.

    Raises:
        WeightBridgeUnavailableError: it cannot be made.

    """
    try:
        is_new = not root.exists()
        root.mkdir(exist_ok=True)
        (root / RECORDS).mkdir(exist_ok=True)
        if is_new:
            sync_folder(root)
            sync_folder(root.parent)
    except OSError as error:
        raise _unusable(root, error) from error


class WriterLock:
    """What keeps a second publisher of a rank out of a directory."""

    def __init__(self, root: Path, rank: int) -> None:
        """Take it.

        Raises:
            WeightBridgeUnavailableError: the directory cannot be used; or a publisher has it.

        """
        path = root / f".writer-{rank}"
        self._held = Holding(self)
        try:
            fd = self._held.open(os.open, path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            is_free = leases.try_exclusive(fd)
        except OSError as error:
            self._held.dispose()
            raise _unusable(root, error) from error
        if not is_free:
            self._held.dispose()
            msg = (
                f"{root} has a publisher of rank {rank} already, expected one. Close that bridge, "
                "or end the trainer that comes back, or give this one a directory of its own."
            )
            raise WeightBridgeUnavailableError(msg)

    def close(self) -> None:
        """Let others publish there. Idempotent."""
        self._held.dispose()


def _unusable(root: Path, error: OSError) -> WeightBridgeUnavailableError:
    return WeightBridgeUnavailableError(
        f"url={str(root)!r} cannot hold versions: {error.strerror or error}. Name a directory that "
        "this user may use, in one that exists."
    )


# ---- reading -------------------------------------------------------------------------------------


class Lease:
    """Keeps a version as long as it is not closed: a shared lock of its marker.

    Attributes:
        marker: what the marker says.

    """

    def __init__(self, folder: Path) -> None:
        """Take it.

        Raises:
            SegmentError: the version is gone, or not visible.
            WeightBridgeUnavailableError: the file system has no locks.

        """
        path = folder / MARKER
        self._held = Holding(self)
        try:
            fd = self._held.open(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            msg = (
                f"{folder.name} is gone, or not written yet: {error.strerror}. Import the newest "
                "manifest."
            )
            raise SegmentError(msg) from error
        msg = f"{folder.name} is being removed. Import the newest manifest."
        try:
            # (Removed between the two calls: then it has no name any more.)
            is_there = leases.try_shared(fd) and bool(os.fstat(fd).st_nlink)
            if is_there:
                text = os.pread(fd, _MAX_MARKER_NBYTES, 0)
                self.marker = Marker.model_validate_json(text)
        except ValidationError as error:
            self.close()
            msg = f"{path} is no marker ({error.error_count()} errors). Take another version."
            raise SegmentError(msg) from error
        except OSError as error:
            self.close()
            msg = (
                f"{path} cannot be locked: {error.strerror}. Name a directory on a file system "
                "that has locks, such as NFS with its lock manager."
            )
            raise WeightBridgeUnavailableError(msg) from error
        except BaseException:
            self.close()
            raise
        if not is_there:
            self.close()
            raise SegmentError(msg)

    def close(self) -> None:
        """Let it be removed. Idempotent."""
        self._held.dispose()


@contextmanager
def leased(folder: Path) -> Iterator[Marker]:
    """Keep a version while it is read. See `Lease`."""
    lease = Lease(folder)
    try:
        yield lease.marker
    finally:
        lease.close()


def read_tensors(path: Path, nbytes: int, pieces: Sequence[tuple[int, Any]]) -> None:
    """Read ranges of a file, each into memory.

    Args:
        path: of the file.
        nbytes: which it must have.
        pieces: first byte of each range, ascending, and where it goes.

    Raises:
        SegmentError: it is gone, shorter or longer.

    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        msg = f"{path} cannot be opened: {error.strerror}. Import another version."
        raise SegmentError(msg) from error
    try:
        found = os.fstat(fd).st_size
        if found != nbytes:
            msg = f"{path} has {found} bytes, expected {nbytes}. Import another version."
            raise SegmentError(msg)
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
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}. Import another version."
        raise SegmentError(msg) from error
    finally:
        os.close(fd)


def _read_all(fd: int, path: Path, begin: int, views: list[Any]) -> None:
    left = [memoryview(one).cast("B") for one in views if len(one)]
    while left:
        count = os.preadv(fd, left, begin)
        if not count:
            msg = f"{path} was cut while it was read. Import another version."
            raise SegmentError(msg)
        begin += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


# ---- removing ------------------------------------------------------------------------------------


def is_unmarked(folder: Path) -> bool:
    """Whether a directory has no marker, for certain: a marker that cannot be read is one."""
    try:
        (folder / MARKER).lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def remove(folder: Path) -> bool:
    """Remove a version that nobody reads: the marker first. Returns whether it is gone."""
    try:
        fd = os.open(folder / MARKER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    except OSError:
        return False
    try:
        if not leases.try_exclusive(fd):
            return False
        (folder / MARKER).unlink(missing_ok=True)
        sync_folder(folder)
    except OSError:
        return False
    finally:
        os.close(fd)
    shutil.rmtree(folder, ignore_errors=True)
    return True
