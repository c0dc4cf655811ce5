"""The seam between a version and the way its bytes travel.

A transport has two ends. The publisher's end *carries*: it takes a snapshot of the tensors, digests
it, and says in a JSON handle where it is. The consumer's end *attaches*: from that handle alone it
makes the bytes readable here. Verifying, ordering and acknowledging are the bridge's business and
the same for all. ``docs/how-to/write-a-transport.md`` says how to add one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import Record, UpdateReport
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.places import CPU_PLACE, Place
from rl_bridge.memory.slots import Slot
from rl_bridge.memory.views import Attachment

_MOST_SECONDS = 1e6  # not far below the milliseconds that `poll` takes


def checked_seconds(name: str, value: object) -> float:
    """Check an option that limits waits: every one has an end.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0, or beyond all waits.

    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: expected seconds, such as 30.0.")
    if not 0 < value <= _MOST_SECONDS:
        raise ValueError(
            f"{name}={value!r}: expected seconds above 0, at most {_MOST_SECONDS:.0f}."
        )
    return float(value)


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether something works on this machine.

    Attributes:
        name: of the transport or engine.
        status: ``pass`` or ``blocked``.
        cause: what exactly is missing; empty if nothing is.
        remedy: what the user can do about it.
        is_installed: False where nothing is broken: a package that it needs, or a GPU's driver, is
            not on this machine at all.

    """

    name: str
    status: Literal["pass", "blocked"]
    cause: str = ""
    remedy: str = ""
    is_installed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What the publisher's end made of a set of tensors.

    Attributes:
        digests: 16 bytes per stored tensor, in layout order, of the snapshot.
        handle: JSON; where the consumer's end finds the snapshot.
        timings_ms: phase -> milliseconds.

    """

    digests: bytes
    handle: Mapping[str, JSONValue]
    timings_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartRequest:
    """A part of a version, and what will be read of it.

    A consumer plans once, and gives the same two array objects for every version. A transport may
    therefore keep what it makes of them, and find it again by their identity.

    Attributes:
        manifest: of the part.
        starts: first byte, in the part's arena, of each range that is read: int64, ascending, no
            two of them meet. None: the whole arena.
        nbytes: size of each: int64, above 0. None where `starts` is.
        targets: where each range goes in the arena of a `Landing`, in bytes: int64, in any order,
            no two ranges meet there. None where the transport finds room itself.

    """

    manifest: WeightUpdateManifest
    starts: npt.NDArray[np.int64] | None = None
    nbytes: npt.NDArray[np.int64] | None = None
    targets: npt.NDArray[np.int64] | None = None

    @property
    def room_nbytes(self) -> int:
        """Bytes of memory that the part takes where it is read: its arena, or 0 for no range."""
        is_read = self.starts is None or len(self.starts)
        return self.manifest.table.arena_nbytes if is_read else 0


class Landing(Protocol):
    """An arena of this side's own, which several parts are read into, without a copy between.

    `ConsumerEnd.lands` says which transports can do that. Else a part is read into memory of the
    transport's, and copied from there.
    """

    def reserve(self) -> Slot:
        """Find room, for each attempt anew; it comes back by `abandon`, or in what landed.

        Its `update_id` is `ARRIVING` from before the first byte may land until none can any more.

        Raises:
            WeightBridgeError: there is none.

        """

    def arrived(self, place: int, mark: int) -> None:
        """The first `mark` bytes of the arena of the part at that place of the request are there.

        (Those that were asked for.) Called with rising marks, in one thread; returns at once.
        """

    def abandon(self, slot: Slot) -> None:
        """Take a slot back: nothing can land there any more."""


@dataclass(frozen=True, slots=True)
class Landed:
    """What became of a `Landing`.

    Attributes:
        slot: where the ranges are.
        headers: of each part, what its publisher sealed beside its bytes: see `seal_header`.

    """

    slot: Slot
    headers: Sequence[bytes | None]


class PublisherEnd(ABC):
    """The trainer's end of a transport. The bridge calls it under one lock.

    Attributes:
        place: where the tensors that it carries lie.
        columns: whether it carries a column list (`rl_bridge.manifest.columns`), by which a reader
            of some columns reads only those. It costs the publisher up to half of the pass that
            seals a version, so it is worth it where reading is dearer than that.
        shows: whether it has `show`.
        offers: whether it has `offering`.

    """

    place: Place = CPU_PLACE
    columns: bool = False
    shows: ClassVar[bool] = False
    offers: bool = False

    def offering(
        self, weight_version: int, *, is_part: bool, pause: Callable[[float], None]
    ) -> AbstractContextManager[None]:
        """Wait until those are ready who receive a version, which the block publishes.

        Only if `offers`. Where the block raises, nothing was published.

        Args:
            weight_version: the version.
            is_part: it is one rank's part of a group.
            pause: waits for so many seconds, and lets others call this end meanwhile, also `close`;
                it raises if this end was closed.

        Raises:
            WeightBridgeError: nothing was published.

        """
        raise NotImplementedError

    @abstractmethod
    def carry(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str) -> Carried:
        """Take a snapshot of `tensors` that never changes again (G1), and digest it.

        ``plan.pack(tensors, address)`` does both, into ``plan.table.arena_nbytes`` bytes. All of
        them are carried: the lists of the tensors' digests stand behind them.

        Raises:
            WeightBridgeError: nothing was published and nothing is held.

        """

    def seal_header(self, update_id: str, digest: bytes) -> None:  # noqa: B027 - not all can
        """Keep the digest of the manifest's header beside the bytes; called after `carry`.

        The consumer's end gives it back as ``pin.header`` of its attachment. A transport that does
        both says so: `Transport.binds_header`.

        Raises:
            WeightBridgeError: it is gone; nothing was published.

        """

    def show(self, manifest: WeightUpdateManifest, *, is_part: bool) -> None:
        """Let those find a version who look for versions themselves; the last step of publishing.

        Only if `shows`. With `is_part` it is one rank's part of a group: nobody may find it before
        `show_group`.

        Raises:
            WeightBridgeError: nothing was published; nobody finds it.

        """
        raise NotImplementedError

    def join_group(self, update_id: str, group: GroupManifest) -> None:
        """Seal the header of a group's manifest with a part of it, in place of the part's own.

        This rank's vote follows. Where others look for versions themselves, the first rank's end
        also keeps the group's manifest. A part that is released before `show_group` belongs to a
        group that no rank published.

        Raises:
            WeightBridgeError: it is gone; no rank publishes the group.

        """
        self.seal_header(update_id, group.header_digest)

    def show_group(self, update_id: str) -> None:  # noqa: B027 - only where others look themselves
        """Let others find the group that a part belongs to: all ranks have published it.

        The version stands, so nothing is raised: what fails is logged.
        """

    def last_stored(self) -> int | None:
        """The highest version that is stored here, of earlier publishers; None if none is.

        A publisher that was not told a number, and has published nothing, goes on from it.

        Raises:
            WeightBridgeUnavailableError: the store cannot be read.

        """
        return None

    @abstractmethod
    def release(self, update_id: str) -> None:
        """Release an update; readers that hold it keep it. Unknown ids are ignored."""

    @abstractmethod
    def records(self) -> list[Record]:
        """What consumers reported: one `Record` for each, with the updates that it reported.

        ``Record(worker=, rank=, pid=, presence=, updates=)`` takes what the consumer's end was made
        with, its process (0: this one), whether it lives (``alive``, ``gone`` or ``unreadable``),
        and the last report about each of its last few updates, the newest last.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held for published updates; 0 after `close`."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent."""


class ConsumerEnd(ABC):
    """The engine's end of a transport. The bridge calls it under one lock.

    Attributes:
        lands: whether it has `read_into`.

    """

    lands: ClassVar[bool] = False

    @property
    def place(self) -> Place:
        """Where bytes arrive that a publisher has on the CPU."""
        return CPU_PLACE

    @abstractmethod
    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        """Make an update's bytes readable here, and lease them.

        Raises:
            WeightManifestValidationError: the handle is not one of this transport's.
            SegmentError: the bytes are gone or not what the handle says.
            StaleUpdate: another version is there by now.

        """

    def lease(self, manifest: WeightUpdateManifest) -> Attachment:
        """Hold an update that others read, with the header that was sealed with it.

        This one attaches it. A transport that reads from far away overrides it, to read nothing:
        such an attachment is made with `is_part`.

        Raises:
            WeightBridgeError: what `attach` raises.

        """
        return self.attach(manifest)

    def attach_parts(self, parts: Sequence[PartRequest]) -> list[Attachment]:
        """Attach parts of one version, in that order: all of them, or none.

        This one attaches one after the other. A transport that reads from far away overrides it, to
        read from all owners at once and only the ranges that are asked for: the bytes outside of
        them are undefined, so `Attachment.digests` says nothing there. Such an attachment is made
        with `is_part`: if more of it is wanted, it is attached once more.

        Raises:
            WeightBridgeError: what `attach` raises; nothing stays attached.

        """
        attached: list[Attachment] = []
        try:
            for part in parts:
                attached.append(self.attach(part.manifest))  # noqa: PERF401 - a failure releases the first
        except BaseException:
            # A caller that keeps the exception must not keep the publishers' memory.
            for one in attached:
                one.tensors.forget()
            raise
        return attached

    def read_into(self, parts: Sequence[PartRequest], landing: Landing) -> Landed:
        """Read ranges of parts, each by another publisher, into an arena of the caller's.

        Only if `lands`. What arrived is not verified: the caller does that.

        Raises:
            WeightBridgeError: what `attach` raises; the slot was abandoned, or will be as soon as
                nothing can land there any more.

        """
        raise NotImplementedError

    def look(self, manifest: WeightUpdateManifest) -> Attachment:
        """Attach, and leave no trace at the publisher: for a look from outside.

        Raises:
            WeightBridgeError: what `attach` raises.

        """
        return self.attach(manifest)

    def meet(self, manifests: Sequence[WeightUpdateManifest]) -> None:  # noqa: B027 - most need not
        """Make ready to report to publishers of whose parts nothing is attached; best effort.

        Where a report needs a connection, this is when it is made: `report` never waits.
        """

    @abstractmethod
    def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
        """Tell the publisher; best effort where it is gone, never waits."""

    in_one_go: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """A method: inside, reports may wait for each other, to reach each publisher as one message.

    Each message wakes a process, which may want the core of its sender.
    """

    @abstractmethod
    def settle(self) -> None:
        """Called after a release: release what is no longer needed."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that no tensor needs. Idempotent."""


class Transport(ABC):
    """A way for bytes to travel: a factory of its two ends.

    Its boolean attributes are its capabilities, of the class or, where an option decides, of the
    object; the conformance suite tests each one that is claimed.
    """

    name: ClassVar[str]
    crosses_processes: bool
    zero_copy_import: bool
    writable_import: bool = True
    """Whether a consumer may write to what it imported: only it sees that. Else a write faults."""
    binds_header: bool = False
    """Whether a manifest whose header was changed on the way is refused: see `seal_header`."""

    @classmethod
    @abstractmethod
    def probe(cls) -> Availability:
        """Whether it works on this machine; touches nothing that stays."""

    @abstractmethod
    def publisher_end(self, publisher_id: str) -> PublisherEnd:
        """Open the trainer's end."""

    @abstractmethod
    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        """Open the engine's end."""

    @classmethod
    def create(cls, **options: object) -> Self:
        """Make one from keyword options; an unknown option is a `TypeError` that names it."""
        return cls(**options)
