"""The trainer's use case: publish a version, watch what becomes of it, release it.

A publication that fails at any step leaves its number free and holds nothing. The number is used
up, and durable if there is a state directory, before the manifest is handed out.
"""

import logging
import operator
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from rl_bridge.bridge.arguments import in_a_child
from rl_bridge.errors import BridgeClosed, MalformedManifest, SuspiciousUpdate, UnknownUpdate
from rl_bridge.interrupts import raise_held_interrupt
from rl_bridge.journal import Journal, not_above
from rl_bridge.lifecycle import Event, Lifecycle, Observer, Role, State
from rl_bridge.manifest.adapter import AdapterSpec
from rl_bridge.manifest.canonical import JSONValue, freeze
from rl_bridge.manifest.compare import Policy, Watch, some
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest, no_tensors
from rl_bridge.manifest.parallel import require_supported
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.control import Record
from rl_bridge.memory.packing import PackPlan, checked_dtype
from rl_bridge.memory.passes import checked_count
from rl_bridge.trainers.state_dict import Source, SourceReader
from rl_bridge.transports.base import PublisherEnd, Transport

_LOG = logging.getLogger(__name__)
_REMEMBERED = 32
_MOST_BITS = 63
_LOOK_S = 0.5
# States in which a consumer does not need an update, if no tensor of it lives there any more.
_WITHOUT = frozenset({"", State.REJECTED, State.RELEASED})


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
        state: the consumer's fine state for it, such as ``verified`` or ``acknowledged``.
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

    @property
    def is_holding(self) -> bool:
        """Whether the consumer lives and still needs the update: it may read it again."""
        has_it = self.state not in _WITHOUT or self.tensors_held
        return self.presence == "alive" and has_it


@dataclass(slots=True)
class _Published:
    manifest: WeightUpdateManifest
    lifecycle: Lifecycle
    timings_ms: Mapping[str, float]
    group_id: str = ""  # the update of several parts that it is one of


class Publisher:
    """Publishes versions over one transport. Thread-safe: concurrent calls are taken in turn.

    Attributes:
        end: the transport's end.
        publisher_id: names this stream of versions.
        last_version: the version that was used up last, also by a publication that was withdrawn.
        latest: the manifest that was published last.

    """

    def __init__(
        self,
        transport: Transport,
        *,
        source_worker: str,
        source_rank: int,
        state_dir: str | os.PathLike[str] | None = None,
        suspicious: Policy = Policy.WARN,
        nonfinite: Policy = Policy.WARN,
        observer: Observer | None = None,
    ) -> None:
        """Open the transport's publisher end.

        Raises:
            WeightBridgeError: the transport is blocked, or the state directory is in use.

        """
        self._journal = None if state_dir is None else Journal(state_dir)
        journal = self._journal
        self.publisher_id = uuid.uuid4().hex if journal is None else journal.publisher_id
        self.last_version = None if journal is None else journal.last_version
        self._transport_name = transport.name
        try:
            self.end: PublisherEnd = transport.publisher_end(self.publisher_id)
        except BaseException:
            if journal is not None:
                journal.close()
            raise
        self._source_worker = source_worker
        self._source_rank = source_rank
        self._nonfinite = nonfinite
        self._told_non_finite: tuple[str, ...] = ()
        self._watch = Watch(suspicious)
        self._observer = observer
        self._lock = threading.RLock()  # reentrant: an observer may call this publisher
        self._turns = threading.Condition(self._lock)
        self._is_pausing = False  # in the middle of a publication
        self._pid = os.getpid()
        self._reader = SourceReader()
        self._plan: PackPlan | None = None
        self._paired = ""  # the adapter and the layout whose pairs were checked last
        self.latest: WeightUpdateManifest | None = None
        self._updates: OrderedDict[str, _Published] = OrderedDict()
        self._is_closed = False

    @property
    def leaf_list(self) -> bytes:
        """The leaf list of what was published last; empty if it has none."""
        return b"" if self._plan is None else self._plan.leaf_list.tobytes()

    @property
    def next_version(self) -> int:
        """The version of a publication that is not told one: behind all that are known here.

        Raises:
            WeightBridgeUnavailableError: the versions that are stored here cannot be read.

        """
        stored = None if self.latest is not None else self.end.last_stored()
        return 1 + max(-1 if one is None else one for one in (self.last_version, stored))

    def publish(
        self,
        source: Source,
        weight_version: int | None = None,
        *,
        metadata: Mapping[str, JSONValue] | None = None,
        trainable: Iterable[str] | None = None,
        adapter: str | AdapterSpec | None = None,
        merged: bool = False,
        base_root: str = "",
        dtype: torch.dtype | None = None,
        keep: int | None = None,
        is_part: bool = False,
    ) -> WeightUpdateManifest:
        """Take a sealed snapshot of `source` and describe it. See `TensorBridge.publish`.

        With `is_part` it is one rank's part of a group: whether a group's version is suspicious is
        judged of all parts together, and older parts are released when all of them are published
        (`release_older`).
        """
        told = None if weight_version is None else checked_version(weight_version)
        keep, dtype = checked_keep(keep), None if dtype is None else checked_dtype(dtype)
        require_supported(metadata)
        with self._turn():
            weight_version = self._await_turn(told)
            start = time.perf_counter()
            given = self._reader.read(
                source, trainable, adapter=adapter, merged=merged, base_root=base_root
            )
            if not given.tensors and not is_part:
                raise no_tensors()
            plan = self._plan_for(given.tensors, given.trainable, dtype)
            gathered = time.perf_counter()
            # Whatever can be wrong with the input is found before memory is written.
            metadata = freeze(metadata or {})
            if given.spec is not None:
                metadata = freeze(self._adapter_metadata(given.spec, metadata, plan.table))
            # What was held when it was superseded may be free by now: its slot is the next one's.
            self.release_older(keep, given.spec)
            offering: AbstractContextManager[None] = nullcontext()
            if self.end.offers:
                offering = self.end.offering(weight_version, is_part=is_part, pause=self._pause)
            with offering:
                update_id = uuid.uuid4().hex
                carried = self.end.carry(plan, given.tensors, update_id)
                sealed = time.perf_counter()
                try:
                    self._look_at_numbers(plan.non_finite, weight_version, dtype)
                    manifest = WeightUpdateManifest(
                        update_id=update_id,
                        publisher_id=self.publisher_id,
                        source_worker=self._source_worker,
                        source_rank=self._source_rank,
                        weight_version=weight_version,
                        transport=self._transport_name,
                        metadata=metadata,
                        handle=dict(carried.handle),
                        digests=carried.digests,
                        columns=plan.columns_digest,
                        table=plan.table,
                    )
                    self.end.seal_header(update_id, manifest.header_digest)
                    if not is_part:
                        self._watch.judge(manifest)
                    _LOG.info(
                        "publishing version %d: %d tensors, %d bytes, %.1f ms so far, update %s",
                        weight_version,
                        len(plan.table.rows),
                        plan.table.total_nbytes,
                        (time.perf_counter() - start) * 1e3,
                        update_id,
                    )
                    if self._journal is not None:
                        self._journal.reserve(weight_version)
                        self.last_version = weight_version  # it is used up, whatever comes
                    if self.end.shows:
                        self.end.show(manifest, is_part=is_part)
                    lifecycle = Lifecycle(
                        Role.PUBLISHER,
                        update_id=update_id,
                        weight_version=weight_version,
                        observer=self._observer,
                    )
                    timings = {
                        "gather": (gathered - start) * 1e3,
                        **carried.timings_ms,
                        "seal": (time.perf_counter() - sealed) * 1e3,
                        "publish": (time.perf_counter() - start) * 1e3,
                    }
                except BaseException:
                    self.end.release(update_id)
                    raise
                self._updates[update_id] = _Published(manifest, lifecycle, timings)
                self.last_version, self.latest = weight_version, manifest
                if not is_part:
                    self._watch.note(manifest)
                lifecycle.fire(Event.PUBLISH)
                if not is_part:
                    self.release_older(keep, given.spec)
                self._forget_old()
                return manifest

    def release(self, update_id: str) -> None:
        """Let the update's memory be reused once its readers are gone; unknown ids are ignored."""
        with self._turn(may_be_closed=True):
            record = self._updates.get(update_id)
            if record is not None and Event.RELEASE in record.lifecycle.moves:
                self.end.release(update_id)
                record.lifecycle.fire(Event.RELEASE)

    def release_older(self, keep: int | None, adapter: AdapterSpec | None) -> None:
        """Release what is older than the newest `keep` versions, unless a consumer holds it.

        Args:
            keep: None releases nothing.
            adapter: versions of this LoRA adapter; None: those of the model's weights.

        """
        with self._turn():
            name = None if adapter is None else adapter.name
            older = [
                one.manifest.update_id
                for one in self._updates.values()
                if one.lifecycle.state is State.PUBLISHED and _adapter_of(one.manifest) == name
            ][: None if keep is None else -keep]
            if keep is None or not older:
                return
            reports = self.reports()
            if any(report.presence == "unreadable" for report in reports):
                return  # nobody knows what that consumer holds: the next publication asks again
            held = {report.update_id for report in reports if report.is_holding}
            for update_id in older:
                if update_id not in held:
                    self.release(update_id)

    def join_group(self, update_id: str, group: GroupManifest) -> None:
        """Seal the header of a group's manifest with a part of it, in place of the part's own.

        Called before anybody else knows of the group. From then on, a consumer's manifest of the
        group must have this digest, which covers the header of every part and all ranges in it.

        Raises:
            UnknownUpdate: not one of the updates remembered here.

        """
        with self._turn():
            self.manifest(update_id)
            self._updates[update_id].group_id = group.update_id
            self.end.join_group(update_id, group)

    def show_group(self, update_id: str) -> None:
        """Let those find a group who look for versions themselves: all ranks have published it."""
        with self._turn():
            self.end.show_group(update_id)

    def own_id(self, update_id: str) -> str:
        """The id by which an update was published here: of one of several parts, its own part's."""
        with self._turn(may_be_closed=True):
            known = self._updates.items()
            return next((own for own, one in known if one.group_id == update_id), update_id)

    def state(self, update_id: str) -> State | None:
        """Fine state of an update; None if it is not one of those remembered here."""
        record = self._updates.get(update_id)
        return None if record is None else record.lifecycle.state

    def manifest(self, update_id: str) -> WeightUpdateManifest:
        """The manifest of an update."""
        record = self._updates.get(update_id)
        if record is None:
            raise UnknownUpdate(
                f"unknown weight update {update_id}: this publisher did not publish it."
            )
        return record.manifest

    def timings_ms(self, update_id: str) -> dict[str, float]:
        """Phase -> milliseconds of an update's publication; empty if it is unknown."""
        record = self._updates.get(update_id)
        return {} if record is None else dict(record.timings_ms)

    def reports(self, update_id: str | None = None) -> list[ConsumerReport]:
        """What consumers did: one entry per consumer and update, or only those of one update."""
        with self._turn():
            records = self.end.records()
        found = [report for record in records for report in _flatten(record)]
        return found if update_id is None else [r for r in found if r.update_id == update_id]

    def close(self) -> None:
        """Give all memory back; consumers keep what they imported. Idempotent."""
        if os.getpid() != self._pid:
            return  # before the lock: at the fork, another thread may have held it
        with self._lock:
            self._is_closed = True
            self._turns.notify_all()
            try:
                self.end.close()
            finally:
                if self._journal is not None:
                    self._journal.close()
                self._plan = None

    def _plan_for(
        self,
        tensors: dict[str, torch.Tensor],
        trainable: frozenset[str] | None,
        dtype: torch.dtype | None,
    ) -> PackPlan:
        if self._plan is None or not self._plan.fits(tensors, trainable, dtype):
            self._plan = PackPlan(
                tensors,
                trainable,
                place=self.end.place,
                columns=self.end.columns,
                looks=self._nonfinite is not Policy.OFF,
                dtype=dtype,
            )
        return self._plan

    def _look_at_numbers(
        self, found: tuple[str, ...], weight_version: int, dtype: torch.dtype | None
    ) -> None:
        """Refuse NaN and Inf, or log them where the version before had them in other tensors."""
        if found and (found != self._told_non_finite or self._nonfinite is Policy.REJECT):
            cast = ""
            if dtype is not None:
                cast = (
                    f"They were looked at behind the cast: numbers above "
                    f"{torch.finfo(dtype).max:g} are Inf in {dtype}, for which another dtype= "
                    "helps. If they were so before: "
                )
            msg = (
                f"version {weight_version}: {len(found)} tensors hold NaN or Inf, expected finite "
                f"numbers: {some(found)}. {cast}Restore a checkpoint, and look at the loss and the "
                "gradients of the last steps. To publish it all the same, such as a mask of -inf, "
                "make the bridge with nonfinite='off'."
            )
            if self._nonfinite is Policy.REJECT:
                raise SuspiciousUpdate(msg)
            _LOG.warning("suspicious update: %s", msg)
        self._told_non_finite = found

    def _adapter_metadata(
        self, spec: AdapterSpec, metadata: Mapping[str, JSONValue], table: TensorTable
    ) -> dict[str, JSONValue]:
        if self._paired != spec.digest + table.digest:
            spec.pairs({name: table.shapes[row] for name, row in table.rows.items()})
            self._paired = spec.digest + table.digest
        return spec.to_metadata(metadata)

    def _forget_old(self) -> None:
        """Keep the records bounded: the oldest released updates go first."""
        surplus = len(self._updates) - _REMEMBERED
        for update_id in list(self._updates) if surplus > 0 else ():
            if surplus > 0 and self._updates[update_id].lifecycle.state is State.RELEASED:
                del self._updates[update_id]
                surplus -= 1

    def _await_turn(self, weight_version: int | None) -> int:
        """Let a publication end that waits for its receivers; the version must be a later one."""
        while self._is_pausing:
            self._turns.wait(_LOOK_S)
            self._check_open()
        if weight_version is None:
            return checked_version(self.next_version)
        if self.last_version is not None and weight_version <= self.last_version:
            raise not_above(weight_version, self.last_version, self.publisher_id)
        return weight_version

    def _pause(self, seconds: float) -> None:
        """Let others have their turn meanwhile, but for another publication."""
        self._is_pausing = True
        try:
            self._turns.wait(seconds)
        finally:
            self._is_pausing = False
        raise_held_interrupt()  # nothing is half-way: what was offered is taken back
        self._check_open()

    @contextmanager
    def _turn(self, *, may_be_closed: bool = False) -> Iterator[None]:
        """One call at a time; if it `may_be_closed`, also after the end of this publisher."""
        if os.getpid() != self._pid:
            raise in_a_child("publisher")
        with self._lock:
            if not may_be_closed:
                self._check_open()
            yield

    def _check_open(self) -> None:
        if self._is_closed:
            raise BridgeClosed("this publisher is closed. Make a new bridge.")


def checked_version(given: object) -> int:
    """The version as a plain int, also where it came out of numpy or torch."""
    try:
        version = -1 if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        version = -1
    if version < 0 or version.bit_length() > _MOST_BITS:
        # (Python refuses to write integers of some thousand digits.)
        shown = repr(given) if version.bit_length() < 2 * _MOST_BITS else "of too many digits"
        raise MalformedManifest(
            f"weight_version {shown}: expected an int of 0 or more, below 2**{_MOST_BITS}."
        )
    return version


def checked_keep(keep: object) -> int | None:
    """How many of the newest versions stay published; None: all that are not released.

    Raises:
        TypeError: it is no integer.
        ValueError: it is below 1.

    """
    return None if keep is None else checked_count("keep", keep)


def _adapter_of(manifest: WeightUpdateManifest) -> str | None:
    return None if manifest.adapter is None else manifest.adapter.name


def _flatten(record: Record) -> list[ConsumerReport]:
    of_consumer = {name: getattr(record, name) for name in ("worker", "rank", "pid", "presence")}
    reports = [dict(report) for report in record.updates] or [{}]
    return [ConsumerReport(**of_consumer, **report) for report in reports]
