"""The engine's use case: import a version, verify every byte, report what became of it.

A consumer keeps one record for each of the last updates that it met: its lifecycle, and its bytes
for as long as they are held. Versions are ordered within each publisher's stream: what is older
than the last acknowledged version, or was rejected, never gets in again (`Order`).

Calls are taken in turn (`Consumer.turn`). The last tensor of an update may die at any point of any
thread, in the middle of a call or under somebody else's lock. Its finalizer therefore only notes
that in a queue, which is emptied where no call is under way: at the end of a turn, or at once.
"""

import gc
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Self

import torch

from rl_bridge.assembly.end import GroupEnd
from rl_bridge.assembly.wanted import ReadScope, Wanted, WantedLayout
from rl_bridge.bridge.arguments import (
    UpdateRef,
    WeightConsumer,
    in_a_child,
    require_transport,
)
from rl_bridge.errors import (
    BridgeClosed,
    ChecksumMismatch,
    DigestMismatch,
    StaleUpdate,
    UnknownUpdate,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
    describe,
    is_shortage,
)
from rl_bridge.lifecycle import OVER, Event, Lifecycle, Observer, Role, State
from rl_bridge.manifest.canonical import JSONValue, plain
from rl_bridge.manifest.compare import mismatch
from rl_bridge.manifest.digest import DIGEST_NBYTES, LEAF_NBYTES, tensor_digest
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import UpdateReport, legible
from rl_bridge.memory.parts import PartNeeds, Scope, leaf_list
from rl_bridge.memory.places import CPU_PLACE
from rl_bridge.memory.views import Attachment, ImportedTensors, Pin
from rl_bridge.transports.base import ConsumerEnd, PartRequest, Transport

_LOG = logging.getLogger(__name__)

# Each remembered update keeps its manifest: with 40,000 tensors that is a megabyte.
REMEMBERED = 32
# Ids that were rejected before any manifest of theirs came: their publisher is unknown, so no
# later version can make them superfluous. The oldest go when there are more.
UNSEEN = 4096
_ANY = b""
_REPORTED = frozenset({Event.VERIFY, Event.TEAR})
# How often garbage is collected for the sake of a rejected update whose tensors live on.
_COLLECTIONS = 2


class Order:
    """Which updates are let in: the last acknowledged one of each publisher is the floor.

    This outlives the records of single updates, which are forgotten after a while: what was decided
    here holds for as long as the consumer lives.
    """

    def __init__(self) -> None:
        self._floors: dict[str, tuple[int, str]] = {}
        # Rejected above the floor, by id and header. An update of which only an altered manifest
        # was seen is rejected under that header alone; the empty header stands for any.
        self._rejected: dict[tuple[str, bytes], tuple[str, int]] = {}
        self._unseen: dict[str, None] = {}

    def check(self, manifest: WeightUpdateManifest, *, reason: str | None) -> None:
        """Refuse what must not be imported.

        Args:
            manifest: the update's.
            reason: why it was rejected, if that is still known.

        """
        name = f"update {manifest.update_id} (version {manifest.weight_version})"
        if self.has_rejected(manifest):
            because = f": {reason}" if reason else ""
            raise WeightUpdateRejectedError(
                f"weight {name} was rejected{because}. Publish again under a new version."
            )
        # The floor itself may come again once it was released: after a loss, into a fresh engine.
        if self._is_below_floor(manifest):
            raise StaleUpdate(
                f"{name} is stale: version {self._floors[manifest.publisher_id][0]} of publisher "
                f"{manifest.publisher_id} was acknowledged here already. A late or replayed "
                "manifest is never installed: get the publisher's latest one."
            )

    def check_newest(self, manifest: WeightUpdateManifest) -> None:
        """Refuse to acknowledge an update that a later one has overtaken since its import."""
        if self._is_below_floor(manifest):
            raise StaleUpdate(
                f"cannot acknowledge version {manifest.weight_version}: version "
                f"{self._floors[manifest.publisher_id][0]} of publisher {manifest.publisher_id} "
                "was acknowledged already, and versions only grow. Reject or release it."
            )

    def _is_below_floor(self, manifest: WeightUpdateManifest) -> bool:
        floor = self._floors.get(manifest.publisher_id)
        return (
            floor is not None
            and manifest.weight_version <= floor[0]
            and (manifest.weight_version, manifest.update_id) != floor
        )

    def has_rejected(self, manifest: WeightUpdateManifest) -> bool:
        """Whether `check` refuses it because it was rejected here."""
        update_id = manifest.update_id
        return (
            update_id in self._unseen
            or (update_id, _ANY) in self._rejected
            # (The header is digested only if that decides: it takes a while.)
            or (bool(self._rejected) and (update_id, manifest.header_digest) in self._rejected)
        )

    def acknowledged(self, manifest: WeightUpdateManifest) -> None:
        """Let in only what is above this update, or this update again, from now on."""
        version = manifest.weight_version
        self._floors[manifest.publisher_id] = (version, manifest.update_id)
        # What the floor has passed is stale: it need not be known by its id any more.
        self._rejected = {
            key: (publisher_id, rejected)
            for key, (publisher_id, rejected) in self._rejected.items()
            if publisher_id != manifest.publisher_id or rejected > version
        }

    def rejected_copy(self, manifest: WeightUpdateManifest) -> None:
        """Never let this very manifest in again; its update may come with another header."""
        key = (manifest.update_id, manifest.header_digest)
        self._rejected[key] = (manifest.publisher_id, manifest.weight_version)

    def rejected(self, update_id: str, manifest: WeightUpdateManifest | None) -> None:
        """Never let this update in again; `manifest` is None for an id that came without one."""
        if manifest is not None:
            self._rejected[update_id, _ANY] = (manifest.publisher_id, manifest.weight_version)
            return
        self._unseen.pop(update_id, None)
        self._unseen[update_id] = None
        while len(self._unseen) > UNSEEN:
            del self._unseen[next(iter(self._unseen))]


@dataclass(slots=True)
class _Update:
    """One update on the consumer's side.

    Attributes:
        update_id: the update.
        manifest: as it was imported; None for an id that was rejected unseen.
        lifecycle: its state and history.
        attachment: its bytes, while they are held.
        proof: what the acknowledgement carried.
        timings_ms: phase -> milliseconds.
        scope: what of it is read here.
        buffers: the memory of what was released here; it lives on with tensors of the update.
        is_of_a_copy: what was refused is one manifest, which may have been changed on its way; the
            update itself may come.
        is_reported_held: the publisher was told that tensors of it are still referenced.
        collections_left: how often garbage is still collected for its sake.

    """

    update_id: str
    manifest: WeightUpdateManifest | None
    lifecycle: Lifecycle
    attachment: Attachment | None = None
    proof: dict[str, JSONValue] | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)
    scope: ReadScope = Scope.ALL
    buffers: list[weakref.ref[object]] = field(default_factory=list)
    is_of_a_copy: bool = False
    is_reported_held: bool = False
    collections_left: int = _COLLECTIONS

    @property
    def living_buffers(self) -> list[weakref.ref[object]]:
        """Those of `buffers` that tensors still hold."""
        return [buffer for buffer in self.buffers if buffer() is not None]


class Consumer:
    """Imports versions over one transport. Thread-safe: concurrent calls are taken in turn.

    Attributes:
        end: the transport's end.
        order: which updates are let in.

    """

    def __init__(
        self,
        transport: Transport,
        *,
        source_worker: str,
        source_rank: int,
        observer: Observer | None = None,
        wanted: Wanted | WantedLayout | None = None,
        max_slots: int = 4,
        num_threads: int | None = None,
    ) -> None:
        """Open the transport's consumer end.

        Args:
            transport: by which versions come, or the parts of a version.
            source_worker: this worker's name.
            source_rank: its rank.
            observer: called with every lifecycle transition.
            wanted: what is assembled of a version of several parts; None: every tensor, whole.
            max_slots: most versions that were assembled here and are held at a time.
            num_threads: threads that assemble it; None takes the usable cores, at most 8.

        Raises:
            TransportUnavailable: the transport is blocked here.

        """
        self.end: ConsumerEnd = transport.consumer_end(source_worker, source_rank)
        self.order = Order()
        self._transport_name = transport.name
        self._binds_header = transport.binds_header
        self._is_group_bridge = isinstance(self.end, GroupEnd)
        # Of versions in several parts; of a bridge of one transport, opened with the first of them.
        self._group_end = self.end if isinstance(self.end, GroupEnd) else None
        self._open_group_end = partial(
            GroupEnd, wanted=wanted, max_slots=max_slots, num_threads=num_threads
        )
        self._observer = observer
        self._updates: OrderedDict[str, _Update] = OrderedDict()
        self._active: _Update | None = None  # acknowledged last
        self._is_closed = False
        self._pid = os.getpid()
        # Reentrant: an observer may call this consumer in the middle of a step.
        self._lock = threading.RLock()
        self._depth = 0
        self._died: deque[str] = deque()

    # ---- turns ----------------------------------------------------------------------------------

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold this consumer for several calls; nobody else's comes in between.

        Raises:
            BridgeClosed: this process is a forked child of the consumer's.

        """
        if os.getpid() != self._pid:
            raise in_a_child("consumer")
        try:
            with self._lock:
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
        finally:
            if self._died:
                self.report_deaths()

    def report_deaths(self) -> None:
        """Tell publishers which updates have lost their last tensor, if no call is under way.

        If one is, its turn does this at its end: a finalizer must wait for nobody.
        """
        while self._died and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return
                record = self._updates.get(self._died.popleft())
                if record is not None and record.is_reported_held:
                    self._report(record)
            finally:
                self._lock.release()

    def note_death(self, update_id: str) -> None:
        """What a finalizer calls: the last tensor of an update that is over here has died."""
        if os.getpid() == self._pid:
            self._died.append(update_id)
            self.report_deaths()

    # ---- what is known of updates ---------------------------------------------------------------

    @property
    def active_weight_version(self) -> int | None:
        """Version of the update that was acknowledged last; None before the first."""
        active = self._active
        return None if active is None or active.manifest is None else active.manifest.weight_version

    @property
    def active_update_id(self) -> str | None:
        """The update that was acknowledged last; None before the first and after its release."""
        active = self._active
        is_released = active is None or active.lifecycle.state is not State.ACKNOWLEDGED
        return None if active is None or is_released else active.update_id

    def state(self, update_id: str) -> State | None:
        """Fine state of an update; None if nothing is known of it here."""
        record = self._updates.get(update_id)
        return None if record is None else record.lifecycle.state

    def reason(self, update_id: str) -> str | None:
        """Why an update was rejected or torn; None if it was not, or is unknown."""
        record = self._updates.get(update_id)
        return None if record is None else record.lifecycle.reason

    def timings_ms(self, update_id: str) -> dict[str, float]:
        """Phase -> milliseconds on this side; empty if the update is unknown."""
        record = self._updates.get(update_id)
        return {} if record is None else dict(record.timings_ms)

    def has_acknowledged(self, update_id: str) -> bool:
        """Whether an update was acknowledged here; it may be released by now."""
        record = self._updates.get(update_id)
        return record is not None and record.lifecycle.has_taken(Event.ACKNOWLEDGE)

    # ---- importing ------------------------------------------------------------------------------

    def _end_for(self, manifest: WeightUpdateManifest) -> ConsumerEnd:
        """The end that a version comes by.

        Raises:
            ForeignTransport: it, or a part of it, travels by another transport.

        """
        if isinstance(manifest, GroupManifest):
            return self._end_for_group(manifest)
        is_foreign = manifest.transport != self._transport_name or self._is_group_bridge
        if is_foreign:
            require_transport(manifest, self._transport_name)
        return self.end

    def _end_for_group(self, group: GroupManifest) -> GroupEnd:
        """The end that a version of several parts comes by."""
        if not self._is_group_bridge:
            for part in group.parts:
                require_transport(part, self._transport_name)
        if self._group_end is None:
            own = self.end, self._binds_header  # (and no reference to this consumer)
            self._group_end = self._open_group_end(lambda _: own)
        return self._group_end

    def import_update(
        self, manifest: WeightUpdateManifest, *, scope: ReadScope = Scope.ALL
    ) -> ImportedTensors:
        """Make an update's tensors readable here and verify every byte. See `TensorBridge`.

        With `PartNeeds`, which must be of the same layout, only these ranges are read and verified,
        unless the bytes arrive on a device, where they are digested as a whole; of a version of
        several parts, a `WantedLayout` is assembled. With `Scope.LEASE`, the caller has the update
        verified elsewhere and then takes `Event.VERIFY`.
        """
        with self.turn():
            self.check_open()
            end = self._end_for(manifest)
            if not isinstance(scope, Scope) and end.place is not CPU_PLACE:
                scope = Scope.ALL
            with end.in_one_go():
                known = self._updates.get(manifest.update_id)
                self._check_acceptable(manifest, known)
                if known is not None and known.attachment is not None:
                    if known.lifecycle.has_taken(Event.VERIFY):
                        return self._import_again(known, known.attachment, manifest, scope)
                    # An interrupt cut its import off: it begins anew.
                    known.attachment, known = None, None
                self._collect_garbage()
                return self._import(manifest, known, scope)

    def _import(
        self, manifest: WeightUpdateManifest, known: _Update | None, scope: ReadScope
    ) -> ImportedTensors:
        record = self._announce(manifest.update_id, manifest)
        record.scope = scope
        try:
            start = time.perf_counter()
            attachment = record.attachment = self._attach(manifest, scope)
            phase = "attach" if attachment.tensors.manifest is None else "assemble"
            record.timings_ms[phase] = (time.perf_counter() - start) * 1e3
            record.lifecycle.fire(Event.IMPORT)
            if scope is Scope.LEASE:
                # A version of several parts is compared with their headers where they are read.
                if isinstance(manifest, GroupManifest) or (
                    _sealed_header(attachment) == manifest.header_digest
                ):
                    return self._tensors_of(record, manifest, attachment)
                # All of its bytes tell what is wrong with it.
                attachment = self._attach_rest(record, manifest, attachment)
            self._verify(manifest, record, attachment)
            record.lifecycle.fire(Event.VERIFY)
        except BaseException as error:
            self._import_failed(record, manifest, error, known)
            raise
        self._report(record)
        return self._tensors_of(record, manifest, attachment)

    def _attach(self, manifest: WeightUpdateManifest, scope: ReadScope) -> Attachment:
        end = self._end_for(manifest)
        if scope is Scope.LEASE:
            return end.lease(manifest)
        if isinstance(scope, WantedLayout):
            assert isinstance(end, GroupEnd)  # whose manifests are assembled
            return end.assemble(manifest, scope)
        if isinstance(scope, PartNeeds):
            assert not isinstance(end, GroupEnd)  # of a group, a reader wants a layout
            ranges = {"starts": scope.read_starts, "nbytes": scope.read_nbytes}
            return end.attach_parts([PartRequest(manifest=manifest, **ranges)])[0]
        return end.attach(manifest)

    def _attach_rest(
        self, record: _Update, manifest: WeightUpdateManifest, attachment: Attachment
    ) -> Attachment:
        """All of an update of which nothing was read here before."""
        if attachment.is_part:
            attachment = record.attachment = self._attach(manifest, Scope.ALL)
        record.scope = Scope.ALL
        return attachment

    def _tensors_of(
        self, record: _Update, manifest: WeightUpdateManifest, attachment: Attachment
    ) -> ImportedTensors:
        if record.scope is Scope.LEASE:
            return LazyTensors(manifest, attachment, weakref.ref(self))
        if isinstance(record.scope, PartNeeds):
            return ImportedShare(manifest, attachment, record.scope)
        return attachment.tensors

    def read_late(self, manifest: WeightUpdateManifest) -> Attachment:
        """Fetch and verify what was imported with `Scope.LEASE`.

        Raises:
            StaleUpdate: it was released meanwhile, here or by its publisher.
            WeightBridgeError: what an import raises; the update is held as before.

        """
        with self.turn():
            self.check_open()
            record = self._updates.get(manifest.update_id)
            held = None if record is None else record.attachment
            if record is None or held is None or not isinstance(record.scope, Scope):
                raise StaleUpdate(
                    f"version {manifest.weight_version} (update {manifest.update_id}) was released "
                    "here before its bytes were asked for: only the engine's own processes have "
                    "read it. Import the publisher's latest manifest."
                )
            scope = record.scope
            attachment = self._attach_rest(record, manifest, held)
            try:
                _require_bytes(manifest, attachment)
                require_header(manifest, attachment, binds_header=self._binds_header)
            except BaseException:
                if attachment is not held:
                    attachment.tensors.forget()
                record.scope, record.attachment = scope, held
                raise
            return attachment

    def _import_again(
        self,
        known: _Update,
        attachment: Attachment,
        manifest: WeightUpdateManifest,
        scope: ReadScope,
    ) -> ImportedTensors:
        """An update that is held: what was read of it is read again."""
        is_it, held = known.manifest == manifest, known.scope
        if not is_it or not (
            held == scope or (isinstance(held, Scope) and isinstance(scope, Scope))
        ):
            what = "another part of it" if is_it else "from another manifest"
            raise WeightUpdateRejectedError(
                f"update {manifest.update_id} is imported already, {what}. "
                "Import the one that its publisher sent, or release the update first."
            )
        if held is Scope.LEASE:
            if scope is Scope.LEASE:
                return self._tensors_of(known, manifest, attachment)
            attachment = self._attach_rest(known, manifest, attachment)
        try:
            self._verify(manifest, known, attachment)
        except ChecksumMismatch as error:
            if attachment.tensors.pin.view is None:
                # What differs was written here, over this process's own copy: that is its user's.
                attachment = known.attachment = self._attach(manifest, known.scope)
                self._verify(manifest, known, attachment)
            else:
                if Event.REJECT in known.lifecycle.moves:  # else an engine holds it already
                    self._refuse(known, describe(error), forget=True)
                raise
        return self._tensors_of(known, manifest, attachment)

    def _verify(
        self, manifest: WeightUpdateManifest, record: _Update, attachment: Attachment
    ) -> None:
        start = time.perf_counter()
        scope = record.scope
        if not isinstance(scope, PartNeeds) or attachment.is_digested:
            _require_bytes(manifest, attachment)
            require_header(manifest, attachment, binds_header=self._binds_header)
        else:
            # The header comes first: it vouches for the list of column blocks.
            require_header(manifest, attachment, binds_header=self._binds_header)
            try:
                _require_part(manifest, attachment, scope)
            except (ChecksumMismatch, StaleUpdate):  # the latter of tensors in place
                pin = attachment.tensors.pin
                if pin.view is None or not pin.view.refresh(pin.address, pin.nbytes):
                    raise
                # What differed may be pages that this process wrote to in an earlier version.
                _require_part(manifest, attachment, scope)
        record.timings_ms["verify"] = (time.perf_counter() - start) * 1e3

    def _check_acceptable(self, manifest: WeightUpdateManifest, known: _Update | None) -> None:
        """Refuse before anything is touched; what is refused here leaves no record."""
        try:
            manifest.weight_layout.validate_supported()
            self.order.check(manifest, reason=None if known is None else known.lifecycle.reason)
        except WeightBridgeError as error:
            if known is None or known.manifest is None:  # else the publisher knows
                record = self._new_record(manifest.update_id, manifest, is_observed=False)
                record.lifecycle.fire(Event.REJECT, reason=describe(error))
                self._report(record)
            raise

    def _import_failed(
        self,
        record: _Update,
        manifest: WeightUpdateManifest,
        error: BaseException,
        known: _Update | None,
    ) -> None:
        """Refuse for good only what is wrong with the update: otherwise it may come again."""
        # If nothing was attached, the manifest leads nowhere: perhaps an altered copy. If another
        # header was sealed with the bytes, it is one.
        sealed = b"" if record.attachment is None else _sealed_header(record.attachment)
        is_altered = bool(sealed) and sealed != manifest.header_digest
        record.is_of_a_copy = record.attachment is None or is_altered
        if not is_shortage(error):
            if known is None:
                self._refuse(record, describe(error), forget=True)
                return
            self._note_rejected(record)
        attachment, record.attachment = record.attachment, None
        if attachment is not None:
            attachment.tensors.forget()
        # What was known of the update before stands.
        del self._updates[manifest.update_id]
        if known is not None:
            self._updates[manifest.update_id] = known
            self._report(known)

    def _collect_garbage(self) -> None:
        """Collect garbage if tensors of a refused update still live.

        The frames of the exception that refused it hold them, and asyncio ties that exception into
        cycles: until Python's next full collection, which may be hours away, the update would keep
        its publisher's slot. If tensors are held on purpose, this gives up soon.
        """
        held = [
            record
            for record in self._updates.values()
            if record.collections_left
            and record.lifecycle.state is State.REJECTED
            and record.living_buffers
        ]
        if held:
            gc.collect()
            for record in held:
                record.collections_left -= 1

    # ---- what becomes of an update --------------------------------------------------------------

    def acknowledge(
        self,
        update_id: str,
        *,
        proof: Mapping[str, JSONValue] | None = None,
        timings_ms: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Say that an update is installed; it becomes the active one. See `TensorBridge`.

        Returns:
            All of its timings: phase -> milliseconds.

        """
        with self.turn():
            self.check_open()
            record = self._record(update_id, "acknowledge update before import_update succeeds")
            # What cannot travel is refused before anything changes. A caller that installs by
            # himself vouches for one thing: that the imported bytes were verified.
            given = {phase: float(ms) for phase, ms in (timings_ms or {}).items()}
            told = {"proof": proof or {"method": "import"}, "timings_ms": given}
            sent = plain(told, where="acknowledge")
            evidence, timings = sent["proof"], sent["timings_ms"]
            manifest = record.manifest
            if manifest is not None and Event.ACKNOWLEDGE in record.lifecycle.moves:
                self.order.check_newest(manifest)
                self.order.acknowledged(manifest)
                if isinstance(manifest, GroupManifest):
                    evidence["group_root"] = manifest.root
                    attachment = record.attachment
                    made = None if attachment is None else attachment.tensors.manifest
                    if made is not None:
                        evidence["assembled_root"] = made.root
                        evidence["wanted"] = made.metadata["wanted"]
                record.proof = evidence
                record.timings_ms |= timings
                self._active = record
            record.lifecycle.fire(Event.ACKNOWLEDGE)
            self._report(record)
            return dict(record.timings_ms)

    def reject(self, update: UpdateRef, reason: str) -> None:
        """Refuse an update, imported or not; rejecting it again changes nothing.

        An id that nobody here has met is taken as well, and its update refused should it come: an
        engine may know that it does not want one. A mistyped id is therefore not noticed.
        """
        with self.turn():
            self.check_open()
            manifest = update if isinstance(update, WeightUpdateManifest) else None
            update_id = update if isinstance(update, str) else update.update_id
            record = self._updates.get(update_id)
            if record is None:
                record = self._announce(update_id, manifest)
            elif record.is_of_a_copy:  # its manifest may name another update
                record = self._announce(update_id, None)
            if record.lifecycle.state is not State.REJECTED:
                self._refuse(record, reason)

    def release(self, update_id: str) -> None:
        """Release an update on this side; tensors that are still referenced keep their bytes.

        Idempotent; unknown ids are ignored.
        """
        if os.getpid() != self._pid:
            return  # before the lock: at the fork, another thread may have held it
        with self.turn():
            record = self._updates.get(update_id)
            if record is None or self._is_closed or Event.RELEASE not in record.lifecycle.moves:
                return
            record.lifecycle.fire(Event.RELEASE)
            self._drop(record)
            for end in self._open_ends:
                end.settle()

    def advance(self, update_id: str, event: Event, *, reason: str | None = None) -> None:
        """Take a fine step: verify, stage, install, tear, undo (an executor's business)."""
        with self.turn():
            record = self._record(update_id, f"{event} update")
            record.lifecycle.fire(event, reason=reason)
            if event is Event.UNDO and record.lifecycle.state is State.REJECTED:
                self.order.rejected(update_id, record.manifest)
                self._drop(record)
            elif event in _REPORTED:
                self._report(record)

    def close(self) -> None:
        """Release everything; tensors that are still referenced keep their bytes. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self.turn():
            for update_id in list(self._updates):
                self.release(update_id)
            self._is_closed = True
            for record in self._updates.values():
                record.attachment = None
            for end in self._open_ends:
                end.close()

    def check_open(self) -> None:
        """Refuse to go on once it was closed."""
        if self._is_closed:
            raise BridgeClosed("this consumer is closed. Make a new bridge.")

    # ---- inside ---------------------------------------------------------------------------------

    @property
    def _open_ends(self) -> list[ConsumerEnd]:
        if self._group_end is None or self._is_group_bridge:
            return [self.end]
        return [self._group_end, self.end]

    def _record(self, update_id: str, purpose: str) -> _Update:
        record = self._updates.get(update_id)
        if record is None:
            raise UnknownUpdate(
                f"cannot {purpose}: unknown weight update {update_id}. Call "
                "import_update(manifest) first."
            )
        return record

    def _new_record(
        self, update_id: str, manifest: WeightUpdateManifest | None, *, is_observed: bool = True
    ) -> _Update:
        lifecycle = Lifecycle(
            Role.CONSUMER,
            update_id=update_id,
            weight_version=-1 if manifest is None else manifest.weight_version,
            observer=self._observer if is_observed else None,
        )
        return _Update(update_id, manifest, lifecycle)

    def _announce(self, update_id: str, manifest: WeightUpdateManifest | None) -> _Update:
        """Begin a new record; where there are too many, the oldest that are over go."""
        record = self._new_record(update_id, manifest)
        known = self._updates.pop(update_id, None)
        if known is not None:
            record.buffers = known.living_buffers  # tensors of an earlier import of it
        self._updates[update_id] = record
        surplus = len(self._updates) - REMEMBERED
        for old in list(self._updates) if surplus > 0 else ():
            if surplus > 0 and self._updates[old].lifecycle.state in OVER:
                del self._updates[old]
                surplus -= 1
        return record

    def _refuse(self, record: _Update, reason: str, *, forget: bool = False) -> None:
        """Reject an update.

        With `forget` the mapping releases its memory as well, also while it is still referenced: by
        the frames of the exception that is on its way, for instance.
        """
        attachment = record.attachment if forget else None
        record.lifecycle.fire(Event.REJECT, reason=reason)
        self._note_rejected(record)
        self._drop(record)
        if attachment is not None:
            attachment.tensors.forget()

    def _note_rejected(self, record: _Update) -> None:
        if record.is_of_a_copy and record.manifest is not None:
            self.order.rejected_copy(record.manifest)
        else:
            self.order.rejected(record.update_id, record.manifest)

    def _drop(self, record: _Update) -> None:
        """Let the bytes go, and tell the publisher: now, and when the last tensor has died."""
        attachment, record.attachment = record.attachment, None
        pin = None if attachment is None else attachment.tensors.held
        if pin is not None:
            buffer = pin.buffer
            record.buffers.append(weakref.ref(buffer))
            # At exit nobody is told: the lock that the kernel releases then says the same.
            finalizer = weakref.finalize(buffer, _note_death, weakref.ref(self), record.update_id)
            finalizer.atexit = False
            del buffer
        del attachment, pin
        self._report(record)

    def _report(self, record: _Update) -> None:
        manifest = record.manifest
        if manifest is None or self._is_closed:
            return
        reason = record.lifecycle.reason
        record.is_reported_held = bool(record.living_buffers)
        # Not validated once more: each part was checked where it came in.
        report = UpdateReport.model_construct(
            update_id=manifest.update_id,
            weight_version=manifest.weight_version,
            state=str(record.lifecycle.state),
            reason=reason if reason is None else legible(reason),
            proof=record.proof,
            timings_ms=dict(record.timings_ms),
            tensors_held=record.is_reported_held,
        )
        try:
            self._end_for(manifest).report(manifest, report)
        except Exception:  # noqa: BLE001 - logged in full
            # What it says has happened: a report that fails must not look like its failure.
            _LOG.exception("the publisher did not get the report %s", report)


def _note_death(consumer: "weakref.ref[Consumer]", update_id: str) -> None:
    owner = consumer()
    if owner is not None:
        owner.note_death(update_id)


class PlainConsumer:
    """A consumer's bridge of the user's own, which has four verbs and keeps no states.

    It has the methods of `Consumer` that an executor calls.
    """

    def __init__(self, bridge: WeightConsumer) -> None:
        self._bridge = bridge
        self._acknowledged: str | None = None

    @property
    def consumer(self) -> Self:
        """The consuming half of such a bridge is the bridge itself."""
        return self

    def claim(self, owner: object) -> None:
        """Keep it for one owner: other users of such a bridge are not known."""

    def give_up(self, owner: object) -> None:
        """End the claim of `owner`."""

    def import_update(
        self, manifest: WeightUpdateManifest, *, scope: Scope = Scope.ALL
    ) -> Mapping[str, torch.Tensor]:
        """Import and verify one complete version."""
        del scope
        self._acknowledged = None  # what it said of this update, it said of an earlier install
        return self._bridge.import_update(manifest)

    def acknowledge(
        self,
        update_id: str,
        *,
        proof: Mapping[str, JSONValue] | None = None,
        timings_ms: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Say that it is installed; its bridge has no room for more."""
        del proof
        self._bridge.acknowledge(update_id)
        self._acknowledged = update_id
        return dict(timings_ms or {})

    def reject(self, update_id: str, reason: str) -> None:
        """Say that it is not, and why."""
        self._bridge.reject(update_id, reason)

    def release(self, update_id: str) -> None:
        """Release an update."""
        self._bridge.release(update_id)

    release_imported = release

    def advance(self, update_id: str, event: Event, *, reason: str | None = None) -> None:
        """Take a fine step: there are none."""

    def state(self, update_id: str) -> State | None:  # noqa: ARG002 - the same for all
        """Fine state of an update: unknown."""
        return None

    def has_acknowledged(self, update_id: str) -> bool:
        """Whether this update was acknowledged last."""
        return update_id == self._acknowledged


AnyConsumer = Consumer | PlainConsumer
"""What an executor imports through."""


class LazyTensors(ImportedTensors):
    """An imported update that nobody has read here: the engine's own processes verify it.

    Whatever first asks for its memory, such as a tensor, has every byte of the update read and
    verified here; over a transport that copies, it is fetched only then.
    """

    def __init__(
        self,
        manifest: WeightUpdateManifest,
        attachment: Attachment,
        consumer: "weakref.ref[Consumer]",
    ) -> None:
        super().__init__(attachment.tensors.table, attachment.tensors.held)
        self._manifest = manifest
        self._attachment = attachment
        self._consumer = consumer
        self._is_read = False

    @property
    def pin(self) -> Pin:
        """The memory behind it.

        Raises:
            ChecksumMismatch: the bytes are not what the manifest says.
            WeightUpdateRejectedError: the update was refused or undone, and its memory given back.
            StaleUpdate: it was released before it was fetched.
            WeightBridgeError: it cannot be fetched: its publisher is gone, the bridge is closed.

        """
        if self._is_read:
            return super().pin
        if self._attachment.is_part:
            consumer = self._consumer()
            if consumer is None:
                raise BridgeClosed(
                    f"version {self._manifest.weight_version} cannot be fetched: the bridge that "
                    "imported it is gone. Keep it as long as tensors of the update are asked for."
                )
            self._attachment = consumer.read_late(self._manifest)
            self.held = self._attachment.tensors.pin
        else:
            _require_bytes(self._manifest, self._attachment)
        self._is_read = True
        return super().pin

    def forget(self) -> None:
        """Give the memory back."""
        super().forget()
        self._is_read = True  # and gone
        self._attachment.tensors.forget()


class ImportedShare(ImportedTensors):
    """An imported update of which only some ranges were read and verified here.

    Its tensors have their whole shapes; what lies outside of these ranges is undefined.
    """

    def __init__(
        self, manifest: WeightUpdateManifest, attachment: Attachment, needs: PartNeeds
    ) -> None:
        super().__init__(manifest.table, attachment.tensors.pin)
        self._manifest = manifest
        self._attachment = attachment
        self._needs = needs

    def verify(self, names: Iterable[str]) -> None:
        """Read and verify once more what was read of some tensors.

        Raises:
            ChecksumMismatch: it is not what was published any more.
            WeightUpdateRejectedError: the update was refused or undone, and its memory given back.

        """
        needs = self._needs.of_rows([self.table.rows[name] for name in names])
        _require_part(self._manifest, self._attachment, needs)

    def digest(self, name: str, start: int, nbytes: int) -> bytes | None:
        """The digest that bytes of a tensor must have; None if its leaves do not tell it.

        It is made of the leaf list, which the manifest's digests prove: these bytes are not read.

        Raises:
            ChecksumMismatch: the leaf list went bad.
            WeightUpdateRejectedError: as `verify`.

        """
        table, end = self.table, start + nbytes
        row = table.rows[name]
        is_cut = start % LEAF_NBYTES or (end % LEAF_NBYTES and end != table.nbytes[row])
        if is_cut or not self._needs.has_leaves:
            return None
        at = int(table.leaf_starts[row]) + start // LEAF_NBYTES * DIGEST_NBYTES
        leaves = self._leaf_list[at : at + -(-nbytes // LEAF_NBYTES) * DIGEST_NBYTES]
        return tensor_digest(leaves, nbytes)

    @cached_property
    def _leaf_list(self) -> bytes:
        return leaf_list(self._manifest, self._attachment.tensors.pin.address)

    def forget(self) -> None:
        """Give the memory back."""
        super().forget()
        self._attachment.tensors.forget()


# ---- checks --------------------------------------------------------------------------------------


def _require_bytes(manifest: WeightUpdateManifest, attachment: Attachment) -> None:
    """Read every byte, and compare with the manifest."""
    manifest = attachment.tensors.manifest or manifest
    found = attachment.digests()
    if found != manifest.digests:
        found = attachment.refresh(manifest.digests, found)
    if found != manifest.digests:
        raise ChecksumMismatch(mismatch(manifest, found))


def _require_part(manifest: WeightUpdateManifest, attachment: Attachment, needs: PartNeeds) -> None:
    """Read some ranges of an update, and compare with the manifest."""
    pin = attachment.tensors.pin
    if pin.place is not CPU_PLACE:
        raise WeightBridgeUnavailableError(
            f"version {manifest.weight_version} arrived on {pin.place.device}, where no part of an "
            "update can be verified alone. Let it arrive in memory of the CPU."
        )
    needs.verify(manifest, pin.address, num_threads=attachment.num_threads)


def require_header(
    manifest: WeightUpdateManifest, attachment: Attachment, *, binds_header: bool
) -> None:
    """Compare a manifest's header with the one that was sealed with the bytes.

    Args:
        manifest: one whose bytes are right.
        attachment: those bytes.
        binds_header: the transport's word that a header is sealed with them.

    """
    sealed = _sealed_header(attachment)
    if binds_header and not sealed:
        raise DigestMismatch(
            f"version {manifest.weight_version}: no header was sealed with the bytes of update "
            f"{manifest.update_id}, expected {manifest.header_digest.hex()}: nobody can tell "
            "whether the manifest was changed on its way. Use the same release of rl_bridge on "
            "both sides, and publish again."
        )
    if sealed and sealed != manifest.header_digest:
        in_groups = "; a part of a group comes with its group: import that"
        raise DigestMismatch(
            f"version {manifest.weight_version}: the manifest's header (weight_version, metadata, "
            "source_worker, source_rank, created_at, handle) was changed on its way: its digest is "
            f"{manifest.header_digest.hex()}, expected {sealed.hex()}. Import the manifest as it "
            f"was published{in_groups if manifest.weight_layout.world_size > 1 else ''}."
        )


def _sealed_header(attachment: Attachment) -> bytes:
    """Digest of the header that was sealed with the bytes; empty if there is none."""
    pin = attachment.tensors.held
    return b"" if pin is None else pin.header or b""
