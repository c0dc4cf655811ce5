"""What a consumer remembers of each update that it met."""

import errno
import gc
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_bridge.cuda.driver import INVALID_VALUE
from rl_bridge.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    DigestMismatch,
    DriverError,
    MalformedManifest,
    WeightBridgeUnavailableError,
)
from rl_bridge.lifecycle import Event, Lifecycle, Role, State
from rl_bridge.manifest.canonical import JSONValue, freeze, thaw
from rl_bridge.manifest.compare import mismatch
from rl_bridge.manifest.group_digests import LEAVES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import UpdateReport
from rl_bridge.memory.views import ImportedTensors
from rl_bridge.transports.base import Attachment

__all__ = [
    "REMEMBERED",
    "ImportedUpdate",
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
    "sweep",
    "verified",
]

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
