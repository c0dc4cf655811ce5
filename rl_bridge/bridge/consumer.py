"""The engine's use case: import a version, verify every byte, say what became of it.

A consumer orders versions within each publisher's stream: what is older than the last acknowledged
version, or was rejected, never gets in again (see `rl_bridge.bridge.consumer`).
"""

import errno
import gc
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from rl_bridge.bridge.arguments import as_manifest, require_own_process, require_transport
from rl_bridge.cuda.driver import INVALID_VALUE
from rl_bridge.errors import (
    BridgeClosed,
    ChecksumMismatch,
    DeadlineExceeded,
    DigestMismatch,
    DriverError,
    MalformedManifest,
    StaleUpdate,
    UnknownUpdate,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
    describe,
)
from rl_bridge.lifecycle import Event, Lifecycle, Observer, Role, State
from rl_bridge.manifest.canonical import JSONValue, freeze, thaw
from rl_bridge.manifest.compare import mismatch
from rl_bridge.manifest.group_digests import LEAVES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import UpdateReport
from rl_bridge.memory.views import ImportedTensors
from rl_bridge.transports.base import Attachment, ConsumerEnd, Transport

__all__ = [
    "REMEMBERED",
    "UNSEEN",
    "Books",
    "Consumer",
    "ImportedUpdate",
    "Order",
    "UnreadTensors",
    "checked_proof",
    "checked_timings",
    "is_as_published",
    "is_sealed_so",
    "is_shortage",
    "never_let_in",
    "news_of",
    "remember",
    "report_of",
    "require_bytes",
    "require_header",
    "require_verified",
    "sweep",
    "verified",
]

# ---- What a consumer remembers of each update that it met.

# Each remembered update keeps its manifest: with 40,000 tensors that is a megabyte.
REMEMBERED = 32
# What Python and torch's allocator of CPU memory say, whose errors have no type of their own.
_SAID = ("can't start new thread", "can't allocate memory")
# Behind the remedy of a changed header.
_IN_GROUPS = "; a part of a group comes with its group: import that with GroupBridge"
_LACKS = (MemoryError, torch.OutOfMemoryError, WeightBridgeUnavailableError, DeadlineExceeded)
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOLCK, errno.EAGAIN})


@dataclass(slots=True)
class ImportedUpdate:
    """One update on the consumer's side.

    Attributes:
        update_id: the update.
        manifest: as it was imported; None for an id that was rejected unseen.
        lifecycle: where it stands.
        attachment: its bytes, while they are held.
        proof: what the acknowledgement carried.
        timings_ms: phase -> milliseconds.
        buffers: the memory of what was let go of here; it lives on with tensors of the update.
        is_of_a_copy: what was refused is one manifest, which may have been changed on its way; the
            update itself may come.
        sweeps_left: how often `sweep` still looks for what holds its tensors.

    """

    update_id: str
    manifest: WeightUpdateManifest | None
    lifecycle: Lifecycle
    attachment: Attachment | None = None
    proof: Mapping[str, JSONValue] | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)
    buffers: list[weakref.ref[object]] = field(default_factory=list)
    is_of_a_copy: bool = False
    sweeps_left: int = 2

    @property
    def is_cut_off(self) -> bool:
        """Whether it is attached, and its bytes were never verified, or are given back."""
        return self.attachment is not None and (
            not self.lifecycle.has_taken(Event.VERIFY) or self.attachment.tensors.is_forgotten
        )

    @property
    def living_buffers(self) -> list[weakref.ref[object]]:
        """Those of `buffers` that tensors still hold."""
        return [buffer for buffer in list(self.buffers) if buffer() is not None]


def remember(
    updates: OrderedDict[str, ImportedUpdate], update_id: str, record: ImportedUpdate
) -> None:
    """Add a record; where there are too many, the oldest that are over go."""
    updates.pop(update_id, None)
    updates[update_id] = record
    surplus = len(updates) - REMEMBERED
    for old in list(updates) if surplus > 0 else ():
        if surplus > 0 and updates[old].lifecycle.state in {State.RELEASED, State.REJECTED}:
            del updates[old]
            surplus -= 1


def sweep(updates: Mapping[str, ImportedUpdate]) -> None:
    """Collect garbage where tensors of a refused update still live.

    The frames of the exception that refused it hold them, and asyncio ties that exception into
    cycles: until Python's next full collection, which may be hours away, the update would keep its
    publisher's slot. Where tensors are held on purpose this gives up soon.
    """
    held = []
    for one in updates.values():
        if one.sweeps_left:
            state = one.lifecycle.state
            if state is State.RELEASED:
                one.sweeps_left = 0  # nothing follows: not every later update looks at it again
            elif state is State.REJECTED and one.living_buffers:
                held.append(one)
    if held:
        gc.collect()
        for one in held:
            one.sweeps_left -= 1


def never_let_in(manifest: WeightUpdateManifest, reason: str) -> ImportedUpdate:
    """An update that was refused before anything of it was touched, as its publisher is told."""
    lifecycle = Lifecycle(
        Role.CONSUMER, update_id=manifest.update_id, weight_version=manifest.weight_version
    )
    lifecycle.fire(Event.REJECT, reason=reason)
    return ImportedUpdate(manifest.update_id, manifest, lifecycle)


def news_of(record: ImportedUpdate) -> dict[str, Any]:
    """What can change of an update's report, as it stands."""
    return {
        "state": str(record.lifecycle.state),
        "reason": record.lifecycle.reason,
        "proof": None if record.proof is None else dict(record.proof),
        "timings_ms": dict(record.timings_ms),
        "tensors_held": bool(record.living_buffers),
    }


def report_of(manifest: WeightUpdateManifest, news: Mapping[str, Any]) -> UpdateReport:
    """What the publisher gets to know of an update."""
    return UpdateReport(
        update_id=manifest.update_id, weight_version=manifest.weight_version, **news
    )


def checked_proof(proof: Mapping[str, JSONValue] | None) -> dict[str, JSONValue]:
    """What an acknowledgement is to carry as its proof, as JSON.

    Raises:
        MalformedManifest: values that JSON has no form for.

    """
    # Who installs by himself vouches for one thing: that the imported bytes were verified.
    plain: dict[str, JSONValue] = thaw(freeze(proof or {"method": "import"}, where="proof"))
    return plain


def checked_timings(timings_ms: Mapping[str, float]) -> dict[str, float]:
    """Check what an acknowledgement is to say of its phases: name -> milliseconds.

    Raises:
        MalformedManifest: values that are no numbers, or that JSON has no form for.

    """
    try:
        timings = {phase: float(ms) for phase, ms in timings_ms.items()}
    except (TypeError, ValueError) as error:
        msg = (
            f"timings_ms must map phases to milliseconds, got {dict(timings_ms)!r}: {error}. Leave "
            "out what has no duration."
        )
        raise MalformedManifest(msg) from error
    freeze(timings, where="timings_ms")
    return timings


def verified(
    manifest: WeightUpdateManifest,
    record: ImportedUpdate,
    attachment: Attachment,
    *,
    binds_header: bool,
) -> ImportedTensors:
    """Read every byte of an imported update, and time that.

    Raises:
        ChecksumMismatch: a tensor's bytes are not what the manifest says.
        DigestMismatch: the bytes are right, and were published under another header or none.

    """
    start = time.perf_counter()
    require_bytes(manifest, attachment)
    require_header(manifest, attachment, binds_header=binds_header)
    record.timings_ms["verify"] = (time.perf_counter() - start) * 1e3
    return attachment.tensors


def require_bytes(manifest: WeightUpdateManifest, attachment: Attachment) -> None:
    """Read every byte, and compare with the manifest.

    Raises:
        ChecksumMismatch: a tensor's bytes are not what the manifest says.

    """
    found = attachment.digests()
    if found != manifest.digests:
        found = attachment.refresh(manifest.digests, found)
    if found != manifest.digests:
        raise ChecksumMismatch(mismatch(manifest, found))


def require_header(
    manifest: WeightUpdateManifest, attachment: Attachment, *, binds_header: bool
) -> None:
    """Compare a manifest's header with what was sealed with the bytes; they come first.

    Args:
        manifest: whose bytes are right.
        attachment: those bytes.
        binds_header: the transport's word that a header is sealed with them.

    Raises:
        DigestMismatch: another header was sealed, or none where one has to be.

    """
    if binds_header and not _sealed(attachment):
        msg = (
            f"version {manifest.weight_version}: no header was sealed with the bytes of update "
            f"{manifest.update_id}, expected {manifest.header_digest.hex()}: nobody can tell "
            "whether the manifest was changed on its way. Use the same release of rl_bridge on "
            "both sides, and publish again."
        )
        raise DigestMismatch(msg)
    if not is_as_published(manifest, attachment):
        msg = (
            f"version {manifest.weight_version}: the manifest's header (weight_version, metadata, "
            "source_worker, source_rank, created_at, handle) was changed on its way: its digest is "
            f"{manifest.header_digest.hex()}, expected {_sealed(attachment).hex()}. Import the "
            f"manifest as it was published{_IN_GROUPS if LEAVES in manifest.table.rows else ''}."
        )
        raise DigestMismatch(msg)


def is_as_published(manifest: WeightUpdateManifest, attachment: Attachment | None) -> bool:
    """Whether a manifest's header is the one that was sealed; True where nobody can tell."""
    sealed = _sealed(attachment)
    return not sealed or sealed == manifest.header_digest


def is_sealed_so(manifest: WeightUpdateManifest, attachment: Attachment) -> bool:
    """Whether this very header, and with it the digests, was sealed with the bytes."""
    return _sealed(attachment) == manifest.header_digest


def _sealed(attachment: Attachment | None) -> bytes:
    """Digest of the header that was sealed with the bytes; empty where there is none."""
    if attachment is None or attachment.tensors.is_forgotten:
        return b""
    return attachment.tensors.pin.header or b""


def is_shortage(error: BaseException) -> bool:
    """Whether nothing is wrong with an update: this side lacks something, or was interrupted."""
    if not isinstance(error, Exception):
        return True
    if isinstance(error, DriverError):
        return error.code != INVALID_VALUE  # that is how a driver names a descriptor of no memory
    if isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID):
        return True
    is_refused = isinstance(error, OSError) and error.errno in _SHORT
    return is_refused or isinstance(error, _LACKS)


# ---- What a consumer can tell of the updates that it met; nothing changes here.


class Books:
    """A consumer's records, by update."""

    def __init__(self) -> None:
        """Begin with no update known."""
        self._updates: OrderedDict[str, ImportedUpdate] = OrderedDict()

    def state(self, update_id: str) -> State:
        """Fine state of an update.

        Raises:
            UnknownUpdate: nothing is known of it here.

        """
        return self._record(update_id, "tell the state of update").lifecycle.state

    def reason(self, update_id: str) -> str | None:
        """Why an update was rejected or torn.

        Raises:
            UnknownUpdate: nothing is known of it here.

        """
        return self._record(update_id, "tell the reason of update").lifecycle.reason

    def timings_ms(self, update_id: str) -> dict[str, float]:
        """Phase -> milliseconds on this side.

        Raises:
            UnknownUpdate: nothing is known of it here.

        """
        return dict(self._record(update_id, "tell the timings of update").timings_ms)

    def has_acknowledged(self, update_id: str) -> bool:
        """Whether an update was acknowledged here; it may be released by now."""
        record = self._updates.get(update_id)
        return record is not None and record.lifecycle.has_taken(Event.ACKNOWLEDGE)

    def knows(self, update_id: str) -> bool:
        """Whether anything is known of the update here."""
        return update_id in self._updates

    def _record(self, update_id: str, purpose: str) -> ImportedUpdate:
        record = self._updates.get(update_id)
        if record is None:
            msg = (
                f"cannot {purpose}: unknown weight update {update_id}. Call "
                "import_update(manifest) first."
            )
            raise UnknownUpdate(msg)
        return record


# ---- Which updates a consumer lets in: only what is newer, and never what was rejected.
#
# Kept apart from the records of single updates, which are forgotten after a while: what was
# decided here holds for as long as the consumer lives.

# Ids that were rejected before any manifest of theirs came: nobody knows whose they are, so no
# later version can make them superfluous. The oldest go when there are more.
UNSEEN = 4096
_ANY = b""


class Order:
    """The last acknowledged update of each publisher, and what was rejected above it."""

    def __init__(self) -> None:
        """Begin with no publisher known."""
        self._floors: dict[str, tuple[int, str]] = {}
        # By id and header: of an update of which nothing could be seen but a manifest that may have
        # been changed on its way, that manifest alone. The empty header is any.
        self._rejected: dict[tuple[str, bytes], tuple[str, int]] = {}
        self._unseen: dict[str, None] = {}

    def check(self, manifest: WeightUpdateManifest, *, reason: str | None) -> None:
        """Refuse what must not be imported.

        Args:
            manifest: of the update.
            reason: why it was rejected, where that is still known.

        Raises:
            WeightUpdateRejectedError: it was rejected here.
            StaleUpdate: it is not above the last acknowledged version of its publisher.

        """
        name = f"update {manifest.update_id} (version {manifest.weight_version})"
        if self._has_rejected(manifest):
            because = f": {reason}" if reason else ""
            msg = f"weight {name} was rejected{because}. Publish again under a new version."
            raise WeightUpdateRejectedError(msg)
        floor = self._floors.get(manifest.publisher_id)
        if floor is None or manifest.weight_version > floor[0]:
            return
        # The floor itself may come again once it was released: after a loss, into a fresh engine.
        if (manifest.weight_version, manifest.update_id) == floor:
            return
        msg = (
            f"{name} is stale: version {floor[0]} of publisher {manifest.publisher_id} was "
            "acknowledged here already. A late or replayed manifest is never installed: get the "
            "publisher's latest one."
        )
        raise StaleUpdate(msg)

    def _has_rejected(self, manifest: WeightUpdateManifest) -> bool:
        update_id = manifest.update_id
        return (
            update_id in self._unseen
            or (update_id, _ANY) in self._rejected
            # (Digested only where it decides: that takes a while.)
            or (bool(self._rejected) and (update_id, manifest.header_digest) in self._rejected)
        )

    def check_newest(self, manifest: WeightUpdateManifest) -> None:
        """Refuse to acknowledge what something later has overtaken since its import.

        Raises:
            StaleUpdate: a later version of its publisher was acknowledged.

        """
        floor = self._floors.get(manifest.publisher_id)
        this = (manifest.weight_version, manifest.update_id)
        if floor is None or manifest.weight_version > floor[0] or this == floor:
            return
        msg = (
            f"cannot acknowledge version {manifest.weight_version}: version {floor[0]} of "
            f"publisher {manifest.publisher_id} was acknowledged already, and versions only "
            "grow. Reject or release it."
        )
        raise StaleUpdate(msg)

    def acknowledged(self, manifest: WeightUpdateManifest) -> None:
        """Let in only what is above this update, or itself again, from now on."""
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


# ---- An update of which this process only holds the memory: the engine's own processes verify it.


class UnreadTensors(Mapping[str, torch.Tensor]):
    """An imported update that nobody read here: name -> tensor.

    Who asks for a tensor gets a verified one: the first question reads every byte of the update.
    Otherwise it is as `rl_bridge.memory.views.ImportedTensors`.
    """

    def __init__(self, manifest: WeightUpdateManifest, attachment: Attachment) -> None:
        """Look at what was attached; nothing is read."""
        self._manifest = manifest
        self._attachment = attachment
        self._is_read = False

    def __getitem__(self, name: str) -> torch.Tensor:
        """Make, or find, one tensor.

        Raises:
            ChecksumMismatch: the bytes are not what the manifest says.
            WeightUpdateRejectedError: the update was refused or undone, and its memory given back.

        """
        tensors = self._attachment.tensors
        if name not in tensors.table.rows:
            raise KeyError(name)
        if not self._is_read:
            require_bytes(self._manifest, self._attachment)
            self._is_read = True
        return tensors[name]

    def __contains__(self, name: object) -> bool:
        """Look at the names only."""
        return name in self._attachment.tensors.table.rows

    def __iter__(self) -> Iterator[str]:
        """Go over the names, as those of an imported update."""
        return iter(self._attachment.tensors)

    def __len__(self) -> int:
        """Count the names, tied ones included."""
        return len(self._attachment.tensors)

    def __repr__(self) -> str:
        """Say how many there are rather than printing weights."""
        return repr(self._attachment.tensors)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, as all imported tensors.

        Raises:
            TypeError: always.

        """
        self._attachment.tensors.__reduce__()

    def forget(self) -> None:
        """Let go of the memory. See `rl_bridge.memory.views.ImportedTensors`."""
        self._attachment.tensors.forget()


def require_verified(manifest: WeightUpdateManifest, root: str) -> None:
    """Take an engine's word that its processes verified an update, if it is about this one.

    Raises:
        ChecksumMismatch: it is not.

    """
    if root != manifest.root:
        msg = (
            f"version {manifest.weight_version}: the engine's processes verified root {root!r}, "
            f"expected {manifest.root!r}. Use the same release of rl_bridge in all of them; an "
            "adapter that imports_itself must tell what they verified."
        )
        raise ChecksumMismatch(msg)


# ---- the rest builds on the parts above

_LOG = logging.getLogger(__name__)
_OVER = frozenset({State.REJECTED, State.RELEASED})
_TOLD = frozenset({Event.VERIFY, Event.TEAR})


class Consumer(Books):
    """Imports versions over one transport. Thread-safe: concurrent calls are taken in turn."""

    def __init__(
        self,
        transport: Transport,
        *,
        source_worker: str,
        source_rank: int,
        observer: Observer | None = None,
    ) -> None:
        """Open the transport's consumer end.

        Raises:
            TransportUnavailable: the transport is blocked here.

        """
        super().__init__()
        self._transport_name = transport.name
        self._binds = transport.binds_header
        self._end: ConsumerEnd = transport.consumer_end(source_worker, source_rank)
        self._observer = observer
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._order = Order()
        self._is_closed = self._is_given_back = False
        # The update acknowledged last, and the one that is being acknowledged: what became of that
        # one is read off its life cycle, since an interrupt may come right behind the step.
        self._active: ImportedUpdate | None = None
        self._candidate: ImportedUpdate | None = None

    @property
    def active_weight_version(self) -> int | None:
        """Version of the update that was acknowledged last; None before the first."""
        active = self._acknowledged_last()
        return None if active is None or active.manifest is None else active.manifest.weight_version

    @property
    def active_update_id(self) -> str | None:
        """The update that was acknowledged last; None before the first and after its release."""
        active = self._acknowledged_last()
        if active is None or active.lifecycle.state is not State.ACKNOWLEDGED:
            return None
        return active.update_id

    def _acknowledged_last(self) -> ImportedUpdate | None:
        candidate = self._candidate  # read without the lock, from any thread: nothing changes here
        if candidate is not None and candidate.lifecycle.has_taken(Event.ACKNOWLEDGE):
            return candidate
        return self._active

    def _settle(self) -> None:
        """Under the lock: take note of what became of the candidate."""
        candidate = self._candidate
        if candidate is not None:
            if candidate.lifecycle.has_taken(Event.ACKNOWLEDGE):
                if candidate.manifest is not None:
                    self._order.acknowledged(candidate.manifest)
                self._active = candidate
            self._candidate = None

    def import_update(
        self, manifest: WeightUpdateManifest | str, *, reads: bool = True
    ) -> Mapping[str, torch.Tensor]:
        """Make an update's tensors readable here and verify every byte. See `TensorBridge`.

        With `reads` False, who calls has them verified elsewhere and says so: `Event.VERIFY`.
        """
        manifest = as_manifest(manifest, caller="import_update")
        self._check_process()
        with self._lock, self._end.in_one_go():
            self._check_open()
            require_transport(manifest, self._transport_name)
            known = self._updates.get(manifest.update_id)
            self._check_acceptable(manifest, known)
            if known is not None and known.is_cut_off:
                # Two interrupts in a row cut its import off, or one its end: it begins anew.
                known.attachment, known = None, None
            if known is not None and known.attachment is not None:
                if known.manifest != manifest:
                    msg = (
                        f"update {manifest.update_id} is imported already, from another manifest. "
                        "Import the one that its publisher sent, or release the update first."
                    )
                    raise WeightUpdateRejectedError(msg)
                try:
                    return verified(manifest, known, known.attachment, binds_header=self._binds)
                except ChecksumMismatch as error:
                    if known.lifecycle.allows(Event.REJECT):  # else an engine holds it already
                        self._refuse(known, describe(error), forget=True)
                    raise
            sweep(self._updates)
            record = self._announce(manifest.update_id, manifest)
            try:
                start = time.perf_counter()
                attachment = record.attachment = self._end.attach(manifest)
                record.timings_ms["attach"] = (time.perf_counter() - start) * 1e3
                record.lifecycle.fire(Event.IMPORT)
                if not reads and is_sealed_so(manifest, attachment):
                    return UnreadTensors(manifest, attachment)
                tensors = verified(manifest, record, attachment, binds_header=self._binds)
                record.lifecycle.fire(Event.VERIFY)
                self._report(record)
                return tensors  # noqa: TRY300 - an interrupt up to here must find the handler
            except BaseException as error:
                self._refuse_import(record, manifest, error, known=known)
                raise

    def acknowledge(
        self,
        update_id: str,
        *,
        proof: Mapping[str, JSONValue] | None = None,
        timings_ms: Mapping[str, float] | None = None,
    ) -> None:
        """Say that an update is installed; it becomes the active one.

        Raises:
            UnknownUpdate: it was never imported here.
            IllegalTransition: its state does not allow it.
            StaleUpdate: a later version of its publisher was acknowledged already.

        """
        self._check_process()
        with self._lock:
            self._check_open()
            record = self._record(update_id, "acknowledge update before import_update succeeds")
            manifest = record.manifest
            evidence = checked_proof(proof)  # what cannot travel is refused before all changes
            timings = checked_timings(timings_ms or {})
            if not record.lifecycle.allows(Event.ACKNOWLEDGE):
                record.lifecycle.fire(Event.ACKNOWLEDGE)  # raises, and says why
            if manifest is not None:
                self._order.check_newest(manifest)
            self._settle()
            self._candidate = record
            try:
                record.lifecycle.fire(Event.ACKNOWLEDGE)
            finally:  # an interrupt may come right before the step is taken, or right behind it
                if record.lifecycle.has_taken(Event.ACKNOWLEDGE):
                    record.proof = evidence
                    record.timings_ms |= timings
                    self._settle()
                    self._report(record)

    def reject(self, update: str | WeightUpdateManifest, reason: str) -> None:
        """Refuse an update, imported or not; rejecting it again changes nothing.

        An id that nobody here has met is taken as well, and its update refused should it come: an
        engine may know that it does not want one. A mistyped id is therefore not told.

        Raises:
            IllegalTransition: it was acknowledged already.
            MalformedManifest: neither an id nor a manifest.

        """
        self._check_process()
        with self._lock:
            self._check_open()
            manifest = update if isinstance(update, WeightUpdateManifest) else None
            update_id: object = update if manifest is None else manifest.update_id
            if not isinstance(update_id, str):
                kind = type(update).__name__
                msg = (
                    f"reject got a {kind}, expected an update's id or its manifest. Pass what "
                    "publish returned, or its update_id."
                )
                raise MalformedManifest(msg)
            record = self._updates.get(update_id)
            if record is None:
                record = self._announce(update_id, manifest)
            elif record.is_of_a_copy:  # whose update this is, its manifest cannot tell
                record = self._announce(update_id, None)
            if record.lifecycle.state is not State.REJECTED:
                self._refuse(record, reason)

    def release(self, update_id: str) -> bool:
        """Drop this side's hold on an update; tensors still referenced keep their bytes.

        Idempotent; False if the update is unknown here.
        """
        if os.getpid() != self._pid:
            return False  # before the lock: at the fork, another thread may have held it
        with self._lock:
            record = self._updates.get(update_id)
            if record is None or self._is_closed:
                return False
            self._settle()
            # (If an interrupt came in between last time, it is released and still attached.)
            is_due = record.lifecycle.allows(Event.RELEASE) or record.attachment is not None
            try:
                if record.lifecycle.allows(Event.RELEASE):
                    record.lifecycle.fire(Event.RELEASE)
            finally:  # as in `acknowledge`
                if is_due and record.lifecycle.state is State.RELEASED:
                    self._drop(record)
                    self._end.settle()
            return True

    def advance(self, update_id: str, event: Event, *, reason: str | None = None) -> None:
        """Take a fine step: verify, stage, install, tear, undo (the executor's business).

        Raises:
            UnknownUpdate: it was never imported here.
            IllegalTransition: its state does not allow it.

        """
        self._check_process()
        with self._lock:
            record = self._record(update_id, f"{event} update")
            if not record.lifecycle.allows(event):
                record.lifecycle.fire(event)  # raises, and says why
            try:
                record.lifecycle.fire(event, reason=reason)
            finally:  # as in `acknowledge`
                if event is Event.UNDO:
                    self._order.rejected(update_id, record.manifest)
                    self._drop(record)
                elif event in _TOLD and record.lifecycle.has_taken(event):
                    self._report(record)

    def close(self) -> None:
        """Let go of everything; tensors still referenced keep their bytes. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._is_given_back:
                for update_id in list(self._updates):
                    self.release(update_id)
                self._is_closed = True
                for record in self._updates.values():
                    record.attachment = None
                self._end.close()
                self._is_given_back = True  # last: what an interrupt cut off, the next call ends

    # ---- inside ---------------------------------------------------------------------------------

    def _check_acceptable(
        self, manifest: WeightUpdateManifest, known: ImportedUpdate | None
    ) -> None:
        """Refuse before anything is touched; what is refused here leaves no record of ours."""
        try:
            manifest.weight_layout.validate_supported()
            self._order.check(manifest, reason=None if known is None else known.lifecycle.reason)
        except WeightBridgeError as error:
            if known is None or known.manifest is None:  # else the publisher was told what it is
                self._report(never_let_in(manifest, describe(error)))
            raise

    def _refuse_import(
        self,
        record: ImportedUpdate,
        manifest: WeightUpdateManifest,
        error: BaseException,
        *,
        known: ImportedUpdate | None,
    ) -> None:
        """Refuse for good only what is wrong with the update: else it may come again."""
        # Where nothing was attached, it is the copy that leads nowhere, altered or not.
        is_of_a_copy = record.attachment is None or not is_as_published(manifest, record.attachment)
        if not is_shortage(error):
            record.is_of_a_copy = is_of_a_copy
            self._refuse(record, describe(error), forget=True)
            if not is_of_a_copy or known is None or known.manifest == manifest:
                return
        # Until then it stands where it stood.
        attachment, record.attachment = record.attachment, None
        if attachment is not None:
            attachment.tensors.forget()
        del self._updates[manifest.update_id]
        if known is not None:
            self._updates[manifest.update_id] = known
            self._report(known)

    def _announce(self, update_id: str, manifest: WeightUpdateManifest | None) -> ImportedUpdate:
        lifecycle = Lifecycle(
            Role.CONSUMER,
            update_id=update_id,
            weight_version=-1 if manifest is None else manifest.weight_version,
            observer=self._observer,
        )
        known = self._updates.get(update_id)  # tensors of an earlier import of it may live
        buffers = [] if known is None else known.living_buffers
        record = ImportedUpdate(update_id, manifest, lifecycle, buffers=buffers)
        remember(self._updates, update_id, record)
        return record

    def _refuse(self, record: ImportedUpdate, reason: str, *, forget: bool = False) -> None:
        if not record.lifecycle.allows(Event.REJECT):
            record.lifecycle.fire(Event.REJECT)  # raises, and says why
        # With `forget` the mapping gives its memory back as well, whoever still holds it: the
        # frames of the exception that is on its way, for instance.
        attachment = record.attachment if forget else None
        try:
            record.lifecycle.fire(Event.REJECT, reason=reason)
        finally:  # as in `acknowledge`
            if record.lifecycle.state in _OVER:
                if record.is_of_a_copy and record.manifest is not None:
                    self._order.rejected_copy(record.manifest)
                else:
                    self._order.rejected(record.update_id, record.manifest)
                self._drop(record)
                if attachment is not None:
                    attachment.tensors.forget()

    def _drop(self, record: ImportedUpdate) -> None:
        """Let go of the bytes and tell the publisher, now and when the last tensor died."""
        attachment, record.attachment = record.attachment, None
        if attachment is not None and not attachment.tensors.is_forgotten:
            buffer = attachment.tensors.pin.buffer
            record.buffers.append(weakref.ref(buffer))
            later = weakref.finalize(buffer, _report_later, weakref.ref(self), record.update_id)
            later.atexit = False  # where the process ends, the kernel tells: its lock is gone
            del buffer
        del attachment
        self._report(record)

    def _report(self, record: ImportedUpdate) -> None:
        manifest = record.manifest
        if manifest is None or self._is_closed:
            return
        told: dict[str, object] | None = None
        try:
            # Another thread, in which a tensor died, may have told newer news meanwhile.
            while told != (news := news_of(record)):
                told = news
                self._end.report(manifest, report_of(manifest, news))
        except Exception:  # noqa: BLE001 - logged in full
            # What it tells of has happened: a way back that fails must not look like its failure.
            _LOG.exception("the publisher was not told of %s: %s", record.update_id, told)

    def _check_open(self) -> None:
        if self._is_closed:
            msg = "this consumer is closed. Make a new bridge."
            raise BridgeClosed(msg)

    def _check_process(self) -> None:
        require_own_process(self._pid, "consumer")


def _report_later(consumer: "weakref.ref[Consumer]", update_id: str) -> None:
    """Tell the publisher that the last tensor of an update died that is over."""
    owner = consumer()
    record = None if owner is None else owner._updates.get(update_id)  # noqa: SLF001 - this module's own class
    if owner is not None and record is not None and record.lifecycle.state in _OVER:
        owner._report(record)  # noqa: SLF001
