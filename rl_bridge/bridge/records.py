"""What a consumer remembers of each update that it met."""

import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_bridge.errors import ChecksumMismatch, MalformedManifest
from rl_bridge.lifecycle.machine import Lifecycle
from rl_bridge.lifecycle.table import State
from rl_bridge.manifest.canonical import JSONValue, freeze
from rl_bridge.manifest.compare import mismatch
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import UpdateReport
from rl_bridge.memory.imported import ImportedTensors
from rl_bridge.transports.base import Attachment

__all__ = [
    "REMEMBERED",
    "ImportedUpdate",
    "checked_timings",
    "remember",
    "report_of",
    "verified",
]

# Each remembered update keeps its manifest: with 40,000 tensors that is a megabyte.
REMEMBERED = 32


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

    """

    update_id: str
    manifest: WeightUpdateManifest | None
    lifecycle: Lifecycle
    attachment: Attachment | None = None
    proof: Mapping[str, JSONValue] | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)
    buffers: list[weakref.ref[object]] = field(default_factory=list)

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


def report_of(record: ImportedUpdate, manifest: WeightUpdateManifest) -> UpdateReport:
    """What the publisher gets to know of an update, as it stands."""
    return UpdateReport(
        update_id=manifest.update_id,
        weight_version=manifest.weight_version,
        state=str(record.lifecycle.state),
        reason=record.lifecycle.reason,
        proof=None if record.proof is None else dict(record.proof),
        timings_ms=record.timings_ms,
        tensors_held=bool(record.living_buffers),
    )


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
    manifest: WeightUpdateManifest, record: ImportedUpdate, attachment: Attachment
) -> ImportedTensors:
    """Read every byte of an imported update, and time that.

    Raises:
        ChecksumMismatch: a tensor's bytes are not what the manifest says.

    """
    start = time.perf_counter()
    found = attachment.digests()
    if found != manifest.digests:
        found = attachment.refresh(manifest.digests, found)
    if found != manifest.digests:
        raise ChecksumMismatch(mismatch(manifest, found))
    record.timings_ms["verify"] = (time.perf_counter() - start) * 1e3
    return attachment.tensors
