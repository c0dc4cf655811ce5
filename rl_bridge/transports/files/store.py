"""What both ends of ``files`` ask of the place where a run's versions are.

A version has a name, by which versions sort, and files. It is *visible* once it has a marker, which
is written last. `rl_bridge.transports.files.directory` keeps versions in directories,
`rl_bridge.transports.files.objects` in object stores; both promise:

**Durable before visible.** Whoever finds a marker finds all that it stands for. What has no marker
is no version, and is removed by the next publisher of its rank. Versions are ordered as they were
published (`Marker.sequence`): a trainer that begins anew at an earlier step goes on behind what is
there.

**Leased while read.** A version is not removed while somebody holds a lease of it, and not as long
as it is to be kept.

**A group is whole or absent.** Where several ranks publish a version, each of them writes a part.
The first rank's part holds the group's manifest. Each part's marker says when all ranks have
committed the version (`Marker.is_committed`); the first to say so is believed, as the others may
have died. Until then, and if they never do, the parts are no version.
The markers alone tell what is offered, and what is not to stay: see the end of this file.

**Fenced.** One publisher of a rank at a time. Where locks tell that the first one lives, the second
one is refused; elsewhere, or where a lock was lost, the second one takes over, and the first one is
refused from then on.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt, StrictStr, ValidationError

from rl_bridge.errors import SegmentError, VersionNotFound, WeightBridgeUnavailableError
from rl_bridge.manifest.group import group_update_id
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import Record

MARKER, MANIFEST, LISTS, RECORDS = "STABLE", "manifest.json", "lists.bin", "records"
GROUP_MANIFEST, KEPT, LOCK = "group.json", "KEEP", "LOCK"
PART = ".part"
MAX_MARKER_NBYTES = 4096
MAX_RECORD_NBYTES = 1 << 20
_NAME = re.compile(r"^\d{10,19}-[0-9a-f]{12}(?:-(\d+))?$")

FileContent = tuple[str, Sequence[Any]]
"""Name of a file, and buffers with its bytes, one behind the other."""


class Marker(BaseModel):
    """The marker's content.

    Attributes:
        format: names this format.
        sequence: grows with each version of its rank.
        weight_version: the version.
        update_id: its update.
        rank: of its publisher.
        header: digest of the manifest's header, 32 hexadecimal digits; of a part, once its ranks
            have voted, of the group's.
        part: of a part, its place in the group; None: a whole version.
        world_size: of the group.
        is_committed: of a part: all ranks published the version.
        suffix: what the names of the version's files end in, but for its manifests: ``.part`` in a
            part, which no loader then takes for a whole model. (Parts had none before.)

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["rl_bridge.files/1"] = "rl_bridge.files/1"
    sequence: StrictInt
    weight_version: StrictInt
    update_id: StrictStr
    rank: StrictInt
    header: StrictStr
    part: StrictInt | None = None
    world_size: StrictInt = 1
    is_committed: StrictBool = False
    suffix: Literal["", ".part"] = ""

    @classmethod
    def parsed(cls, text: bytes) -> Self | None:
        """The marker that a file holds; None if that is none, or one of a later release."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None

    def to_json(self) -> bytes:
        """The file's content. Where there is no suffix, none is named: earlier builds know none."""
        return self.model_dump_json(exclude=None if self.suffix else {"suffix"}).encode()


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version that is visible.

    Attributes:
        name: of the version.
        marker: what its marker says.

    """

    name: str
    marker: Marker


def version_name(weight_version: int, update_id: str, rank: int) -> str:
    """Name of a version: names sort as the versions do."""
    return f"{weight_version:010d}-{update_id[:12]}" + (f"-{rank}" if rank else "")


def is_version(name: str) -> bool:
    """Whether it is the name of a version."""
    return bool(_NAME.match(name))


def is_of(name: str, update_id: str) -> bool:
    """Whether it is the name of a version of that update."""
    return is_version(name) and name.split("-")[1] == update_id[:12]


def rank_of(name: str) -> int | None:
    """The publisher's rank by the name of a version; None if it is no such name."""
    match = _NAME.match(name)
    return None if match is None else int(match[1] or 0)


class Lease(ABC):
    """Keeps a version as long as it is not closed.

    Attributes:
        marker: what the version's marker says.

    """

    marker: Marker

    @abstractmethod
    def close(self) -> None:
        """Let the version be removed. Idempotent."""

    def drop(self) -> None:
        """The same, for finalizers: it waits for no other machine."""
        self.close()


class RecordFile(ABC):
    """What one consumer reports to one publisher; it lives as long as the consumer."""

    @abstractmethod
    def write(self, record: Record) -> None:
        """Replace it; best effort. It waits for a second at most."""

    @abstractmethod
    def is_removed(self) -> bool:
        """Whether its publisher removed it, at its end."""

    @abstractmethod
    def close(self) -> None:
        """Let others see that the consumer is gone. Idempotent."""


class VersionWriter(ABC):
    """A publisher's right to write versions of its rank.

    Where the store cannot be read or written, a method raises an OSError or a WeightBridgeError.
    """

    @abstractmethod
    def write(self, name: str, files: Iterable[FileContent], marker: Marker) -> Lease:
        """Write a version, and then its marker, which is given the next sequence number.

        Returns:
            a lease of it: other publishers of this rank must not remove it.

        Raises:
            OSError: it cannot be written; nothing of it stays visible.
            WeightBridgeError: the same; or another publisher has taken over.

        """

    @abstractmethod
    def add(self, name: str, file: str, content: bytes) -> None:
        """Write one more small file into a version, durably; it replaces one of that name."""

    @abstractmethod
    def seal_anew(self, name: str, lease: Lease, marker: Marker) -> None:
        """Put another marker in the place of a version's, which this lease of ours keeps."""

    @abstractmethod
    def is_superseded(self) -> bool:
        """Whether a later publisher has taken over; then this one removes nothing more."""

    @abstractmethod
    def sweep(self) -> None:
        """Remove what this rank began and did not finish. Nothing, if several may publish."""

    @abstractmethod
    def close(self) -> None:
        """Let others publish. Idempotent."""


class VersionStore(ABC):
    """Where a run's versions are; ``str(store)`` is its url.

    A method raises WeightBridgeUnavailableError where the store cannot be read or written: that
    says nothing of the version.

    Attributes:
        num_readers: how many threads read well beside each other; None: as many as cores.
        file_nbytes: the largest size of a file that is good here, unless a tensor is larger.
        directory: where versions are directories, what they are in; changes there may be told.
        lease_s: where leases end by themselves, how many seconds one lives whose reader says
            nothing; None: leases end with their process.

    """

    num_readers: int | None = None
    file_nbytes: int = 5 << 30
    directory: Path | None = None
    lease_s: float | None = None

    # ---- reading

    @abstractmethod
    def visible(self) -> list[StoredVersion]:
        """All versions that have a marker, in the order of their publication."""

    @abstractmethod
    def damaged(self) -> list[str]:
        """Names of what has a marker that is none, so that nobody can say which version it is."""

    @abstractmethod
    def find(self, update_id: str) -> str:
        """Name of an update's version, whatever its manifest says of its number.

        Raises:
            VersionNotFound: there is none.

        """

    def not_found(self, update_id: str) -> VersionNotFound:
        """The error of an update that `find` does not find."""
        return VersionNotFound(
            f"update {update_id} is not in {self}: it was removed, or is not visible here yet. "
            "Import the newest manifest, or give both sides one url."
        )

    def taken_over(self, rank: int) -> WeightBridgeUnavailableError:
        """The error of a publisher that comes back when a later one has its place."""
        return WeightBridgeUnavailableError(
            f"{self}: another publisher of rank {rank} has taken over, or somebody removed what "
            "this one held its place by. End this trainer, or give it a url of its own."
        )

    def wrong_size(self, name: str, file: str, found: int, nbytes: int) -> SegmentError:
        """The error of a file that has another size; of one that is shorter, more may yet come."""
        is_short = found < nbytes
        said = "it was cut, or is not all visible here yet" if is_short else "it is another file"
        return (VersionNotFound if is_short else SegmentError)(
            f"{file} of {name} in {self} has {found} bytes, expected {nbytes}: {said}. Import "
            "another version."
        )

    @abstractmethod
    def lease(self, name: str) -> Lease:
        """Keep a version.

        Raises:
            VersionNotFound: it is gone, or not visible, or its marker is none.

        """

    @abstractmethod
    def files(self, name: str) -> dict[str, int]:
        """Names of all files of a version, or of something `unfinished`, and their sizes.

        Raises:
            VersionNotFound: it is gone.
            SegmentError: something else is in its place.

        """

    @abstractmethod
    def read_small(self, name: str, file: str) -> bytes:
        """Content of a small file of a version.

        Raises:
            VersionNotFound: it is not there.
            SegmentError: something else is in its place.

        """

    def require_sizes(self, name: str, expected: Mapping[str, int]) -> None:
        """See to it that a version has these files, of these sizes.

        Raises:
            VersionNotFound: one is not there, or not all of it.
            SegmentError: one is longer, or something else is in its place.

        """
        found = self.files(name)
        for file, nbytes in expected.items():
            if file not in found:
                raise VersionNotFound(
                    f"{file} of {name} is not there, in {self}. Import another version."
                )
            if found[file] != nbytes:
                raise self.wrong_size(name, file, found[file], nbytes)

    @abstractmethod
    def read(self, name: str, file: str, nbytes: int, pieces: Sequence[tuple[int, Any]]) -> None:
        """Read ranges of a file, each into memory.

        Args:
            name: of the version.
            file: of the version.
            nbytes: size that the file must have.
            pieces: first byte of each range, ascending, and where it goes.

        Raises:
            VersionNotFound: it is gone, or not all of it is there.
            SegmentError: it is longer, or something else is in its place.

        """

    @contextmanager
    def leased(self, name: str) -> Iterator[Marker]:
        """Keep a version while it is read. See `lease`."""
        lease = self.lease(name)
        try:
            yield lease.marker
        finally:
            lease.close()

    def manifest(self, version: StoredVersion) -> WeightUpdateManifest:
        """The manifest beside a marker, which must be the one that the marker was made for.

        Beside the marker of a group's first part it is the group's manifest.

        Raises:
            SegmentError: it is gone, another one, or no text.
            WeightManifestValidationError: it cannot be read.

        """
        file = MANIFEST if version.marker.part is None else GROUP_MANIFEST
        try:
            text = self.read_small(version.name, file).decode()
        except UnicodeDecodeError as error:
            raise SegmentError(
                f"{file} of {version.name} in {self} is damaged: expected text in UTF-8, got "
                f"byte {error.object[error.start]:#04x} at {error.start}. Take another version, or "
                "publish this one again."
            ) from error
        manifest = WeightUpdateManifest.of(text, caller="VersionStore.manifest")
        if manifest.header_digest.hex() != version.marker.header:
            raise SegmentError(
                f"{file} of {version.name} in {self} is not what version "
                f"{version.marker.weight_version} was published with: expected a header of digest "
                f"{version.marker.header}, got {manifest.header_digest.hex()}. Take another "
                "version."
            )
        return manifest

    def numbers(self) -> set[int]:
        """Numbers of all versions, of whichever rank.

        What has a damaged marker counts, as that may come back: its name has the number, but for
        a bucket's.
        """
        found = {one.marker.weight_version for one in self.visible()}
        return found.union(
            int(name.partition("-")[0]) for name in self.damaged() if is_version(name)
        )

    def last_number(self) -> int | None:
        """The highest of `numbers`.

        Raises:
            WeightBridgeUnavailableError: it is unknown, since a bucket's marker is damaged; or the
                store cannot be read.

        """
        for name in self.damaged():
            if not is_version(name):
                raise WeightBridgeUnavailableError(
                    f"{name} in {self} is damaged, so nobody knows which version is the next. Give "
                    "the version a number that was never published."
                )
        return max(self.numbers(), default=None)

    # ---- publishing

    @abstractmethod
    def open_writer(self, rank: int, *, fenced: bool) -> VersionWriter:
        """Make the store if it is missing, and take the right to publish as that rank.

        Args:
            rank: of the publisher.
            fenced: there is one at a time. False lets several publish.

        Raises:
            WeightBridgeUnavailableError: the store cannot be used; or a publisher has it.

        """

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Remove a version that nobody reads or keeps: the marker first.

        Returns whether it is gone.
        """

    @abstractmethod
    def keep(self, name: str, *, is_kept: bool) -> None:
        """Have a version stay until it is said to be kept no more: `remove` leaves it alone.

        Raises:
            VersionNotFound: it is gone.

        """

    @abstractmethod
    def is_kept(self, name: str) -> bool:
        """Whether somebody said to keep a version; False of one that is gone."""

    @abstractmethod
    def is_leased(self, name: str) -> bool:
        """Whether somebody reads a version now; False of one that is gone."""

    def longest_lease_s(self, names: Iterable[str]) -> float:
        """How long somebody must look at leases of these versions to know which are dead."""
        del names
        return 0.0  # leases end with their process

    @abstractmethod
    def unfinished(self) -> dict[str, int]:
        """What was begun and has no marker: its name, and the rank of its publisher.

        A publisher that lives may be writing it.
        """

    @abstractmethod
    def discard(self, name: str) -> None:
        """Remove something `unfinished`; best effort."""

    @contextmanager
    def without_publisher(self, rank: int) -> Iterator[bool]:
        """Keep publishers of a rank out meanwhile, as far as that is possible here.

        Yields:
            whether it is certain that none lives; then what is unfinished may be removed.

        Raises:
            WeightBridgeUnavailableError: one lives.

        """
        del rank
        yield False

    # ---- what consumers report

    @abstractmethod
    def open_record(self, name: str) -> RecordFile:
        """Begin a record."""

    @abstractmethod
    def records(self, prefix: str) -> list[Record]:
        """All records whose name begins so; best effort."""

    @abstractmethod
    def remove_records(self, prefix: str, *, but: str = "") -> None:
        """Remove those, but for what begins with `but`; best effort."""


# ---- which versions are offered, and which are not to stay ---------------------------------------
#
# A version that one publisher published whole is offered once it is visible. One that several ranks
# published is offered once the marker of any part says that all ranks have, as long as all parts
# are there: each part's marker has the group's header.


def committed_headers(visible: Iterable[StoredVersion]) -> set[str]:
    """The headers of groups that all ranks published."""
    return {one.marker.header for one in visible if one.marker.is_committed}


def offered(visible: Iterable[StoredVersion]) -> list[StoredVersion]:
    """Those that can be imported, in the given order; a group's first part stands for the group."""
    visible = list(visible)
    committed = committed_headers(visible)

    def is_whole(group: Marker, first: StoredVersion) -> bool:
        return group.header in committed and len(parts_of(first, visible)) == group.world_size

    return [
        one
        for one in visible
        if one.marker.part is None or (one.marker.part == 0 and is_whole(one.marker, one))
    ]


def parts_of(version: StoredVersion, visible: Iterable[StoredVersion]) -> list[StoredVersion]:
    """The versions that hold the bytes of an offered one: its parts, by rank, or itself."""
    marker = version.marker
    if marker.part is None:
        return [version]
    found = {
        one.marker.part: one
        for one in visible
        if one.marker.part is not None and one.marker.header == marker.header
    }
    return [found[place] for place in range(marker.world_size) if place in found]


def update_id_of(version: StoredVersion, visible: Iterable[StoredVersion]) -> str:
    """The update that an offered version is of: a group's, where it stands for one."""
    if version.marker.part is None:
        return version.marker.update_id
    return group_update_id(one.marker.update_id for one in parts_of(version, visible))


def orphans(visible: Iterable[StoredVersion], unmarked: Iterable[str] = ()) -> list[StoredVersion]:
    """Parts of groups whose first part is not there: nothing can be made of them any more.

    For the publisher of first parts. A part that is being published is among them until the first
    one is there; it is leased.

    Args:
        visible: all versions of the store.
        unmarked: names of what has no marker, or none that is seen here yet. Where a first part of
            a version's number is among them, its other parts are no orphans.

    """
    visible = list(visible)
    firsts = {one.marker.header for one in visible if one.marker.part == 0}
    numbers = {int(name.partition("-")[0]) for name in unmarked if rank_of(name) == 0}
    return [
        one
        for one in visible
        if one.marker.part
        and one.marker.header not in firsts
        and one.marker.weight_version not in numbers
    ]


def surplus(
    visible: Iterable[StoredVersion],
    rank: int,
    *,
    keep_last: int,
    keep_every: int | None,
    joined: Collection[str] = (),
) -> list[StoredVersion]:
    """Versions of a rank that are not to stay.

    Ranks that are given the same numbers find the same versions. Parts of groups that were not
    published are among them, and do not count.

    Args:
        visible: all versions of the store, in the order of their publication.
        rank: the publisher's.
        keep_last: how many of the newest stay.
        keep_every: versions that are multiples of it stay.
        joined: updates of parts whose groups are known to be published, whatever markers say yet.

    """
    visible = list(visible)
    committed = committed_headers(visible)
    whole = {one.marker.header for one in offered(visible)}
    published: list[StoredVersion] = []
    counted: list[StoredVersion] = []
    found: list[StoredVersion] = []
    for one in visible:
        marker = one.marker
        if marker.rank == rank:
            is_joined = marker.part is None or marker.update_id in joined
            is_published = is_joined or marker.header in committed
            (published if is_published else found).append(one)
            # A group of which a part is lost must not take the place of one that can be read.
            if is_joined or marker.header in whole:
                counted.append(one)
    newest = counted[-keep_last:] if keep_last else []
    since = newest[0].marker.sequence if newest else math.inf
    return found + [
        one
        for one in published
        if one.marker.sequence < since
        and (not keep_every or one.marker.weight_version % keep_every)
    ]
