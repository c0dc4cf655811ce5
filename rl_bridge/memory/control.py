"""The way back: one small control segment per publisher, one record per consumer.

A consumer claims a record by locking it (the kernel tells when it is gone) and writes there what it
did with each update: verified, acknowledged with which proof, rejected why, released. Consumers can
write to the whole segment, so the publisher believes nothing in it: a record is length-checked,
checksummed and parsed into a strict model, and what does not parse is reported as unreadable.
"""

import logging
import os
import struct
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)

from rl_bridge.errors import SegmentError, WeightBridgeUnavailableError
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.memory.holding import Holding
from rl_bridge.memory.segment import (
    OwnedSegment,
    SegmentRef,
    open_segment,
    require_resources,
)

_LOG = logging.getLogger(__name__)

RECORD_NBYTES = 8192
_HEAD = struct.Struct("<IIQ")  # how many times it was written, length, XXH3-64 of the text
_MAGIC = b"rl_bridge.control/1\n"
_KEPT_UPDATES = 6
# Whose reports make room first.
_ROOM = {"rejected": 0, "released": 1}
_MAX_REASON = 400
_READ_TRIES = 64


def legible(text: Any) -> Any:
    """Cut a text to what a record has room for; a lone surrogate could not be read back."""
    if not isinstance(text, str):
        return text
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "..."


def _writable(value: Any) -> Any:
    if value:  # nothing at all can be written
        canonical_json(value)  # a ValueError where it holds NaN, which is no JSON
    return value


Text = Annotated[StrictStr, Field(max_length=512)]


class UpdateReport(BaseModel):
    """What one consumer did with one update.

    Attributes:
        update_id: the update.
        weight_version: its version.
        state: the consumer's fine state.
        reason: why it was rejected.
        proof: the proof, if acknowledged.
        timings_ms: phase -> milliseconds.
        tensors_held: tensors of it are still referenced, so its slot is leased.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    update_id: Text
    weight_version: StrictInt
    state: Text
    reason: Annotated[Text | None, BeforeValidator(legible)] = None
    proof: Annotated[dict[str, Any] | None, AfterValidator(_writable)] = None
    timings_ms: dict[str, Annotated[StrictFloat, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    tensors_held: bool = False


def take_note(updates: dict[str, UpdateReport], report: UpdateReport) -> None:
    """Note a report among a consumer's last few, the newest last.

    A late or replayed manifest is refused as often as it comes. That must not push out what is
    known of an update that is held or active, nor replace what became of one that was acknowledged:
    refusals make room first.

    Args:
        updates: of one consumer, by update; changed.
        report: what is new.

    """
    known = updates.get(report.update_id)
    # (Only an acknowledged update has a proof. Released without one, it may come again.)
    was_acknowledged = known is not None and (
        known.state == "acknowledged" or (known.state == "released" and known.proof is not None)
    )
    if was_acknowledged and report.state == "rejected":
        return
    updates.pop(report.update_id, None)
    updates[report.update_id] = report
    if len(updates) > _KEPT_UPDATES:
        older = list(updates.values())[:-1]
        # (The sort is stable: of those alike, the oldest goes.)
        first = min(older, key=lambda one: (one.tensors_held, _ROOM.get(one.state, len(_ROOM))))
        del updates[first.update_id]


class Record(BaseModel):
    """One consumer: who it is, and what it did with the last few updates.

    Attributes:
        worker: its name.
        rank: its rank.
        pid: its process, as it says.
        updates: oldest first.
        presence: whether the kernel still sees it: ``alive``, ``gone``, or ``unreadable`` content.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: Text
    rank: StrictInt
    pid: StrictInt
    updates: tuple[UpdateReport, ...] = ()
    presence: Literal["alive", "gone", "unreadable"] = "alive"


def control_nbytes(max_consumers: int) -> int:
    """Size of a control segment with room for `max_consumers`: a header and their records."""
    return (1 + max_consumers) * RECORD_NBYTES


def num_records(nbytes: int) -> int:
    """How many consumers a control segment of `nbytes` has room for."""
    return max(0, nbytes // RECORD_NBYTES - 1)


def _start(index: int) -> int:
    return (1 + index) * RECORD_NBYTES


def _header(publisher_id: str) -> bytes:
    return _MAGIC + publisher_id.encode("ascii")


def read_records(fd: int, nbytes: int) -> list[Record]:
    """Read every record of a control segment of `nbytes`; nothing is locked or written.

    Raises:
        SegmentError: the segment is shorter than that.

    """
    found = []
    for start in map(_start, range(num_records(nbytes))):
        alive = leases.is_held(fd, start=start, length=RECORD_NBYTES)
        record = _read(fd, start, nbytes)
        if record is None:
            continue
        if record.presence == "alive" and not alive:
            record = record.model_copy(update={"presence": "gone"})
        found.append(record)
    return found


def _read(fd: int, start: int, nbytes: int) -> Record | None:
    for _ in range(_READ_TRIES):
        # By read and not by mapping: a named file that somebody cut off must not kill us.
        raw = os.pread(fd, RECORD_NBYTES, start)
        if len(raw) != RECORD_NBYTES:
            raise SegmentError(
                f"the control segment ended after {start + len(raw)} of {nbytes} bytes: it was "
                "truncated, and consumers' reports are lost. Make a new bridge."
            )
        sequence, length, checksum = _HEAD.unpack_from(raw)
        if sequence == 0:
            return None
        text = raw[_HEAD.size : _HEAD.size + length]
        if len(text) != length or xxhash.xxh3_64_intdigest(text) != checksum:
            os.sched_yield()  # its writer may wait for this core, half-way
            continue  # being written at this moment, or damaged: the tries decide
        try:
            return Record.model_validate_json(text)
        except ValidationError:
            break
    return Record(worker="?", rank=-1, pid=-1, presence="unreadable")


class ControlReader:
    """The publisher's end: owns the segment, reads the records."""

    def __init__(self, segment: OwnedSegment, publisher_id: str) -> None:
        """Read from a segment that this process made with ``writers=True``, and head it."""
        self.segment = segment
        vm.store(segment.address, _header(publisher_id))

    def records(self) -> list[Record]:
        """Read everybody's record; those that are gone stay until their place is reused."""
        return read_records(self.segment.fd, self.segment.nbytes)

    def close(self) -> None:
        """Give the segment back."""
        self.segment.close()


class ControlWriter:
    """A consumer's end: one locked record."""

    def __init__(
        self,
        ref: SegmentRef,
        publisher_id: str,
        *,
        worker: str,
        rank: int,
        directory: Path | None,
    ) -> None:
        """Open the publisher's control segment and claim a free record.

        Raises:
            SegmentError: it is gone, or not that publisher's control segment.
            WeightBridgeUnavailableError: as many consumers as the publisher has room for.

        """
        self.ref = ref
        self._identity = {"worker": legible(worker), "rank": rank, "pid": os.getpid()}
        self._updates: dict[str, UpdateReport] = {}
        self._sequence = 0
        self._pid = os.getpid()
        self._is_closed = False
        self._held = Holding(self)
        self._fd = open_segment(ref, directory=directory, writable=True, held=self._held)
        try:
            self._check_header(publisher_id)
            self._start = self._claim(num_records(ref.nbytes))
            self._write()
        except OSError as error:
            self._held.dispose()
            require_resources(error)
            raise SegmentError(
                f"the control segment of publisher {publisher_id} cannot be written or read: "
                f"{error}. Use the manifest as it was published, or publish again."
            ) from error
        except BaseException:
            self._held.dispose()
            raise

    def _check_header(self, publisher_id: str) -> None:
        header = _header(publisher_id)
        if os.pread(self._fd, len(header), 0) != header:
            # A manifest must not be able to make us write into memory of somebody else's.
            raise SegmentError(
                f"segment inode {self.ref.inode} of pid {self.ref.pid} is no control segment of "
                f"publisher {publisher_id}. Use the manifest as it was published."
            )

    def _claim(self, count: int) -> int:
        """Lock a record: one that was never used, or else one whose consumer is gone."""
        starts = [_start(index) for index in range(count)]
        unused = bytes(_HEAD.size)
        # What a consumer that is gone said last stays readable for as long as there is other room.
        starts.sort(key=lambda start: os.pread(self._fd, _HEAD.size, start) != unused)
        for start in starts:
            if leases.try_exclusive(self._fd, start=start, length=RECORD_NBYTES):
                return start
        raise WeightBridgeUnavailableError(
            f"the publisher (pid {self.ref.pid}) has room for {count} consumers and all are taken. "
            "Close bridges that are not used, or raise max_consumers on the publisher."
        )

    def report(self, report: UpdateReport) -> None:
        """Write what became of an update; the publisher sees the last few of each consumer.

        One call at a time: a consumer reports in its own turn, and its finalizers' reports follow.
        """
        if os.getpid() != self._pid or self._is_closed:
            return
        take_note(self._updates, report)
        try:
            self._write()
        except OSError as error:
            _LOG.warning("the publisher will not hear of %s: %s", report.update_id, error)

    def close(self) -> None:
        """Release the record; the publisher sees this consumer as gone."""
        if os.getpid() == self._pid:
            self._is_closed = True
            self._held.dispose()

    def _write(self) -> None:
        while True:
            updates = tuple(self._updates.values())
            record = Record.model_construct(**self._identity, updates=updates)
            text = record.model_dump_json().encode()
            if len(text) <= RECORD_NBYTES - _HEAD.size or not self._updates:
                break
            # The oldest goes. The newest is reported in any case, if need be without details.
            oldest, *others = self._updates
            report = self._updates.pop(oldest)
            plain = report.model_copy(update={"proof": None, "timings_ms": {}, "reason": None})
            if not others and plain != report:
                self._updates[oldest] = plain
        # All in one write: between two, another thread could run for as long as it likes. A reader
        # that meets the middle of it finds a checksum that does not fit, and reads again.
        self._sequence += 1
        head = _HEAD.pack(self._sequence, len(text), xxhash.xxh3_64_intdigest(text))
        os.pwrite(self._fd, head + text, self._start)
