"""The trainer's use case: publish a version, watch what becomes of it, release it."""

import logging
import operator
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_bridge.bridge.arguments import look_for_suspicion, require_own_process
from rl_bridge.errors import BridgeClosed, MalformedManifest, UnknownUpdate
from rl_bridge.journal import Journal
from rl_bridge.lifecycle import Event, Lifecycle, Observer, Role, State
from rl_bridge.manifest.canonical import JSONValue, freeze
from rl_bridge.manifest.compare import Policy
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.parallel import WeightLayout
from rl_bridge.memory.control import Record
from rl_bridge.memory.packing import PackPlan, pack_plan
from rl_bridge.trainers.state_dict import Source, named_tensors, trainable_names
from rl_bridge.transports.base import PublisherEnd, Transport

__all__ = ["ConsumerReport", "Publisher", "checked_version"]

_LOG = logging.getLogger(__name__)
_REMEMBERED = 32
_MOST_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerReport:
    """What one consumer did with one update, as the publisher sees it.

    Attributes:
        worker: the consumer's name.
        rank: its rank.
        pid: its process; 0 where it is the publisher's own.
        presence: ``alive``, ``gone`` (the kernel dropped its lock) or ``unreadable``.
        update_id: the update; empty if it touched none yet.
        weight_version: its version.
        state: the consumer's fine state for it, such as ``imported`` or ``acknowledged``.
        reason: why it was rejected.
        proof: the proof that the acknowledgement carried.
        timings_ms: phase -> milliseconds on the consumer's side.
        tensors_held: tensors of the update are still referenced there.

    """

    worker: str
    rank: int
    pid: int
    presence: str
    update_id: str = ""
    weight_version: int = -1
    state: str = ""
    reason: str | None = None
    proof: Mapping[str, JSONValue] | None = None
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    tensors_held: bool = False


@dataclass(slots=True)
class _Published:
    manifest: WeightUpdateManifest
    lifecycle: Lifecycle
    timings_ms: Mapping[str, float]


class Publisher:
    """Publishes versions over one transport. Thread-safe: concurrent calls are taken in turn."""

    def __init__(
        self,
        transport: Transport,
        *,
        source_worker: str,
        source_rank: int,
        state_dir: str | os.PathLike[str] | None = None,
        suspicious: Policy = Policy.WARN,
        observer: Observer | None = None,
    ) -> None:
        """Open the transport's publisher end.

        Raises:
            WeightBridgeError: the transport is blocked, or the state directory is in use.

        """
        self._journal = Journal(state_dir)
        self._transport_name = transport.name
        try:
            self._end: PublisherEnd = transport.publisher_end(self._journal.publisher_id)
        except BaseException:
            self._journal.close()
            raise
        self._source_worker = source_worker
        self._source_rank = source_rank
        self._suspicious = suspicious
        self._observer = observer
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._plan: PackPlan | None = None
        self._latest: WeightUpdateManifest | None = None
        self._updates: OrderedDict[str, _Published] = OrderedDict()
        self._is_closed = self._is_given_back = False

    @property
    def publisher_id(self) -> str:
        """Names this stream of versions."""
        return self._journal.publisher_id

    @property
    def latest(self) -> WeightUpdateManifest | None:
        """The manifest that was published last."""
        return self._latest

    @property
    def suspicious(self) -> Policy:
        """What to do about a suspicious update."""
        return self._suspicious

    @property
    def last_version(self) -> int | None:
        """The version that was used up last, also by a publication that was withdrawn."""
        return self._journal.last_version

    @property
    def nbytes(self) -> int:
        """Bytes of memory that published updates take."""
        return self._end.nbytes

    def publish(
        self,
        source: Source,
        *,
        weight_version: int,
        metadata: Mapping[str, JSONValue] | None = None,
        trainable: Iterable[str] | None = None,
        is_part: bool = False,
    ) -> WeightUpdateManifest:
        """Take a sealed snapshot of `source` and describe it. See `TensorBridge.publish`.

        With `is_part` it is one rank's part of a group: whether a group's version is suspicious is
        judged of all parts together.
        """
        weight_version = checked_version(weight_version)
        layout = WeightLayout.from_metadata(metadata)
        layout.validate_supported()
        self._check_process()
        with self._lock:
            self._check_open()
            start = time.perf_counter()
            tensors = named_tensors(source)
            plan = self._plan_for(tensors, trainable_names(source, tensors, trainable))
            gathered = time.perf_counter()
            # Whatever can be wrong with the input is found before memory is written.
            checked = freeze({**(metadata or {}), "layout": layout.to_metadata()})
            self._journal.check(weight_version)
            update_id = uuid.uuid4().hex
            before = self._latest
            lifecycle = Lifecycle(
                Role.PUBLISHER,
                update_id=update_id,
                weight_version=weight_version,
                observer=self._observer,
            )
            try:
                carried = self._end.carry(plan, tensors, update_id)
                sealed = time.perf_counter()
                manifest = WeightUpdateManifest(
                    update_id=update_id,
                    publisher_id=self.publisher_id,
                    source_worker=self._source_worker,
                    source_rank=self._source_rank,
                    weight_version=weight_version,
                    transport=self._transport_name,
                    metadata=checked,
                    handle=dict(carried.handle),
                    digests=carried.digests,
                    table=plan.table,
                )
                self._end.seal_header(update_id, manifest.header_digest)
                look_for_suspicion(self._suspicious, self._latest, manifest, is_part=is_part)
                # Before the number is used up: a filter of the user's logging may raise.
                _LOG.info(
                    "publishing version %d: %d tensors, %d bytes, %.1f ms so far, update %s",
                    weight_version,
                    manifest.tensor_count,
                    manifest.total_nbytes,
                    (time.perf_counter() - start) * 1e3,
                    update_id,
                )
                # Last: a publication that failed leaves its number free, and one that is handed
                # out has used it up for good.
                self._journal.reserve(weight_version)
                lifecycle.fire(Event.PUBLISH)
                timings = {
                    "gather": (gathered - start) * 1e3,
                    **carried.timings_ms,
                    "seal": (time.perf_counter() - sealed) * 1e3,
                    "publish": (time.perf_counter() - start) * 1e3,
                }
                self._updates[update_id] = _Published(manifest, lifecycle, timings)
                self._latest = manifest
                self._forget()
                return manifest  # noqa: TRY300 - an interrupt up to here must find the handler
            except BaseException:
                # Also for an interrupt right behind the last step: nobody got the manifest. Twice,
                # for one that comes in here: nobody else has the id that the slot goes by.
                try:
                    self._end.release(update_id)
                finally:
                    self._latest = before
                    self._updates.pop(update_id, None)
                    self._end.release(update_id)
                raise

    def release(self, update_id: str) -> bool:
        """Let the update's memory be reused once its readers are gone; False if unknown here."""
        self._check_process()
        with self._lock:
            record = self._updates.get(update_id)
            if record is None:
                return False
            if record.lifecycle.allows(Event.RELEASE):
                self._end.release(update_id)
                record.lifecycle.fire(Event.RELEASE)
            return True

    def join_group(self, update_id: str, digest: bytes) -> None:
        """Seal the header of a group's manifest with a part of it, in place of the part's own.

        Called before anybody else knows of the group: what a consumer holds against it is the
        group's manifest from then on, every part's header and the ranges in it included.

        Raises:
            UnknownUpdate: not one of the updates remembered here.

        """
        self._check_process()
        with self._lock:
            self._check_open()
            self._record(update_id)
            self._end.seal_header(update_id, digest)

    def state(self, update_id: str) -> State:
        """Fine state of an update of this publisher.

        Raises:
            UnknownUpdate: not one of the updates remembered here.

        """
        return self._record(update_id).lifecycle.state

    def manifest(self, update_id: str) -> WeightUpdateManifest:
        """The manifest of an update.

        Raises:
            UnknownUpdate: not one of the updates remembered here.

        """
        return self._record(update_id).manifest

    def timings_ms(self, update_id: str) -> Mapping[str, float]:
        """Phase -> milliseconds of an update's publication.

        Raises:
            UnknownUpdate: not one of the updates remembered here.

        """
        return dict(self._record(update_id).timings_ms)

    def knows(self, update_id: str) -> bool:
        """Whether the update was published here (and is remembered)."""
        return update_id in self._updates

    def reports(self, update_id: str | None = None) -> list[ConsumerReport]:
        """Who did what: one entry per consumer and update, or only those of one update."""
        self._check_process()
        with self._lock:
            self._check_open()
            records = self._end.records()
        found = [report for record in records for report in _flatten(record)]
        return found if update_id is None else [r for r in found if r.update_id == update_id]

    def close(self) -> None:
        """Give all memory back; consumers keep what they imported. Idempotent."""
        if os.getpid() != self._pid:
            return  # before the lock: at the fork, another thread may have held it
        with self._lock:
            if not self._is_given_back:
                self._is_closed = True
                try:
                    self._end.close()
                finally:
                    self._journal.close()
                self._plan = None
                self._is_given_back = True  # last: what an interrupt cut off, the next call ends

    def _plan_for(
        self, tensors: dict[str, torch.Tensor], trainable: frozenset[str] | None
    ) -> PackPlan:
        if self._plan is None or not self._plan.fits(tensors, trainable):
            self._plan = pack_plan(tensors, trainable, place=self._end.place)
        return self._plan

    def _record(self, update_id: str) -> _Published:
        record = self._updates.get(update_id)
        if record is None:
            msg = f"unknown weight update {update_id}: this publisher did not publish it."
            raise UnknownUpdate(msg)
        return record

    def _forget(self) -> None:
        """Keep the books bounded: the oldest released updates go first."""
        surplus = len(self._updates) - _REMEMBERED
        for update_id in list(self._updates) if surplus > 0 else ():
            if surplus > 0 and self._updates[update_id].lifecycle.state is State.RELEASED:
                del self._updates[update_id]
                surplus -= 1

    def _check_open(self) -> None:
        if self._is_closed:
            msg = "this publisher is closed. Make a new bridge."
            raise BridgeClosed(msg)

    def _check_process(self) -> None:
        require_own_process(self._pid, "publisher")


def checked_version(given: object) -> int:
    """The version as a plain int, also where it came out of numpy or torch."""
    try:
        version = -1 if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        version = -1
    if version < 0 or version.bit_length() > _MOST_BITS:
        # (Python refuses to write integers of some thousand digits.)
        shown = repr(given) if version.bit_length() < 2 * _MOST_BITS else "of too many digits"
        msg = f"weight_version {shown}: expected an int of 0 or more, below 2**{_MOST_BITS}."
        raise MalformedManifest(msg)
    return version


def _flatten(record: Record) -> list[ConsumerReport]:
    who: dict[str, Any] = {
        "worker": record.worker,
        "rank": record.rank,
        "pid": record.pid,
        "presence": record.presence,
    }
    if not record.updates:
        return [ConsumerReport(**who)]
    return [
        ConsumerReport(
            **who,
            update_id=report.update_id,
            weight_version=report.weight_version,
            state=report.state,
            reason=report.reason,
            proof=report.proof,
            timings_ms=report.timings_ms,
            tensors_held=report.tensors_held,
        )
        for report in record.updates
    ]
