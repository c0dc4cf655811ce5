"""Every exception that rl_bridge raises on its own account.

The tree::

    WeightBridgeError(RuntimeError)
    ├── WeightBridgeUnavailableError      this machine, transport or engine cannot do it ("blocked")
    │   ├── TransportUnavailable          a transport is blocked, with cause and remedy
    │   ├── CertificateRefused            TLS: a certificate is expired, foreign, or another host's
    │   ├── EngineAsleep                  the engine's weights are not in memory: wake it first
    │   ├── SignatureRefused              a request or answer over HTTP without the right key
    │   └── TransferTimeout               (DeadlineExceeded too) bytes did not arrive in time
    ├── WeightManifestValidationError     manifest or bytes are not what they claim
    │   ├── MalformedManifest             no canonical JSON of a known format, wrong field
    │   ├── DuplicateTensorName
    │   ├── UnknownDtype
    │   ├── NegativeRange                 an offset, size or dimension below zero
    │   ├── RangeOverflow                 sizes that do not fit 63 bits
    │   ├── ShapeMismatch                 shape, dtype and byte count disagree
    │   ├── OverlappingRange
    │   ├── RangeBeyondSegment
    │   ├── BadSegmentName                path separators and the like
    │   ├── ForeignTransport              made by another transport than the one asked to import it
    │   ├── LayoutUnknown                 compact manifest whose layout never arrived here
    │   ├── DigestMismatch                layout digest or root do not belong to the content
    │   ├── ChecksumMismatch              "tensor checksum mismatch": bytes differ from the manifest
    │   ├── VersionNotMonotonic           "weight_version must increase monotonically"
    │   ├── IncompleteCoverage            a group misses a range of a tensor, or has it twice
    │   └── RanksDisagree                 ranks of an update group contradict each other
    ├── WeightUpdateRejectedError         the update may not be imported, acknowledged or installed
    │   ├── UnknownUpdate                 not known here, or an engine does not hold that version
    │   ├── IllegalTransition             the lifecycle table has no such move
    │   ├── StaleUpdate                   late or replayed, or its bytes are gone
    │   ├── SuspiciousUpdate              cannot be what was meant: changes nothing, stale, or NaN
    │   ├── IncompatibleUpdate            prepare: names, shapes or dtypes do not fit the engine
    │   └── ProofFailed                   the engine does not hold what was installed
    ├── TornEngine                        an install failed and so did its undo, or it was cut off
    ├── EngineLost                        an engine in other processes is lost to its driver
    │   └── SessionRefused                another driver has the engine, or it was started anew
    ├── SegmentError                      shared memory that vanished, shrank or was replaced
    │   └── VersionNotFound              a version in files that is not there, or not visible yet
    ├── DriverError                       a call of a memory driver failed: CUDA's, or its stand-in
    ├── GroupAborted                      a rank of an update group failed or died: none published
    ├── SlotsExhausted                    every slot is held; the message names the holders
    ├── DeadlineExceeded(TimeoutError)
    └── BridgeClosed

Each message names the version or tensor, what was expected, what was found, and the remedy.
An exception raised by a user's adapter or engine comes out unchanged in type and text, with a note
added; only if the undo failed too, it is the cause of a `TornEngine`.
"""

import difflib
import errno
import logging
from collections.abc import Iterable

__all__ = [
    "BadSegmentName",
    "BridgeClosed",
    "CertificateRefused",
    "ChecksumMismatch",
    "DeadlineExceeded",
    "DigestMismatch",
    "DriverError",
    "DuplicateTensorName",
    "EngineAsleep",
    "EngineLost",
    "ForeignTransport",
    "GroupAborted",
    "IllegalTransition",
    "IncompatibleUpdate",
    "IncompleteCoverage",
    "LayoutUnknown",
    "MalformedManifest",
    "NegativeRange",
    "OverlappingRange",
    "ProofFailed",
    "RangeBeyondSegment",
    "RangeOverflow",
    "RanksDisagree",
    "SegmentError",
    "SessionRefused",
    "ShapeMismatch",
    "SignatureRefused",
    "SlotsExhausted",
    "StaleUpdate",
    "SuspiciousUpdate",
    "TornEngine",
    "TransferTimeout",
    "TransportUnavailable",
    "UnknownDtype",
    "UnknownUpdate",
    "VersionNotFound",
    "VersionNotMonotonic",
    "WeightBridgeError",
    "WeightBridgeUnavailableError",
    "WeightManifestValidationError",
    "WeightUpdateRejectedError",
]

_LOG = logging.getLogger(__name__)


class WeightBridgeError(RuntimeError):
    """Base of everything that rl_bridge raises."""


class WeightBridgeUnavailableError(WeightBridgeError):
    """A transport, engine, layout or resource is not available here.

    Nothing has changed: an install that had begun was undone, and its update may come again.
    """


class TransportUnavailable(WeightBridgeUnavailableError):
    """A transport is blocked on this machine.

    Attributes:
        transport: the transport's name.
        cause: what exactly is missing.
        remedy: what the user can do about it.

    """

    def __init__(self, transport: str, cause: str, remedy: str) -> None:
        """Keep the parts, which stay readable as attributes."""
        # All of them, so that it can be made again: Ray and others send errors between processes.
        super().__init__(transport, cause, remedy)
        self.transport = transport
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return f"transport {self.transport!r} is blocked: {self.cause}. {self.remedy}"


class CertificateRefused(WeightBridgeUnavailableError):
    """TLS: a certificate was refused, the other side's or this one's; nothing was said behind it.

    It has expired, another authority signed it, or it names another host.
    """


class SignatureRefused(WeightBridgeUnavailableError):
    """The key, time or nonce of a request over HTTP, or the key of its answer, is wrong."""


class WeightManifestValidationError(WeightBridgeError):
    """A manifest, or the bytes it describes, are incomplete, damaged or inconsistent."""


class MalformedManifest(WeightManifestValidationError):
    """The text is no manifest of a format version known here."""


class DuplicateTensorName(WeightManifestValidationError):
    """Two tensors of one update carry the same name."""


class UnknownDtype(WeightManifestValidationError):
    """A dtype outside the table in `rl_bridge.manifest.dtypes`."""


class NegativeRange(WeightManifestValidationError):
    """An offset, byte count or dimension is below zero."""


class RangeOverflow(WeightManifestValidationError):
    """An offset or size does not fit into 63 bits."""


class ShapeMismatch(WeightManifestValidationError):
    """Shape and dtype do not give the byte count that the manifest states."""


class OverlappingRange(WeightManifestValidationError):
    """Two tensors claim the same bytes of the arena, or stand out of order."""


class RangeBeyondSegment(WeightManifestValidationError):
    """A tensor reaches beyond the arena, or the arena beyond its segment."""


class BadSegmentName(WeightManifestValidationError):
    """A segment name that is not a plain file name."""


class ForeignTransport(WeightManifestValidationError):
    """The manifest was made by another transport."""


class LayoutUnknown(WeightManifestValidationError):
    """A compact manifest refers to a layout that this process has never seen."""


class DigestMismatch(WeightManifestValidationError):
    """Layout digest or root are not the manifest's, or its header not what was published."""


class ChecksumMismatch(WeightManifestValidationError):
    """The bytes that arrived are not the bytes that were published."""


class VersionNotMonotonic(WeightManifestValidationError):
    """The publisher was asked to reuse or go below an earlier version."""


class IncompleteCoverage(WeightManifestValidationError):
    """The ranks of an update group do not hold every element of every tensor exactly once."""


class RanksDisagree(WeightManifestValidationError):
    """The ranks of an update group contradict each other: dtypes, shapes, versions, world size."""


class WeightUpdateRejectedError(WeightBridgeError):
    """An update cannot be imported, acknowledged or installed."""


class UnknownUpdate(WeightUpdateRejectedError):
    """No update of that id is known to this bridge; or an engine holds no such adapter's version.

    A request to vLLM for a version of an adapter that was dropped raises it, too.
    """


class IllegalTransition(WeightUpdateRejectedError):
    """The lifecycle table has no such move; nothing changed."""


class StaleUpdate(WeightUpdateRejectedError):
    """The update is late: its version is not above the active one, or its bytes are gone.

    They were released, or their slot was written again.
    """


class SuspiciousUpdate(WeightUpdateRejectedError):
    """The update cannot be what was meant, such as one that changes nothing, or NaN."""


class IncompatibleUpdate(WeightUpdateRejectedError):
    """Names, shapes or dtypes of the update do not fit the engine; it was not touched."""


class ProofFailed(WeightUpdateRejectedError):
    """The engine's memory differs from the update that was just installed."""


class TornEngine(WeightBridgeError):
    """An install failed and its undo too, or a second Ctrl-C came: the engine must not serve.

    The way out is a later update that installs in full, or a completed undo.
    """


class EngineLost(WeightBridgeError):
    """An engine in other processes is lost to this driver: it died, or cannot be reached any more.

    The way out is a fresh engine, which gets the current version before it serves. If the engine
    lives and only refuses this driver, that is a `SessionRefused`, which has another way out.
    """


class EngineAsleep(WeightBridgeUnavailableError):
    """The engine sleeps and has its weights elsewhere, or nowhere: it must be woken first."""


class SessionRefused(EngineLost):
    """The engine's ranks take no call of this driver: another one has it, or it was started anew.

    The message names the driver that has the engine. ``recover()`` takes the engine over.
    """


class SegmentError(WeightBridgeError):
    """A shared-memory segment vanished, was truncated, replaced, or is not what it should be."""


class VersionNotFound(SegmentError):
    """A version in files is not there: it was removed, or it is not visible yet where one looks."""


class DriverError(WeightBridgeError):
    """A call of a memory driver failed: CUDA's, or the one on host memory that stands in for it.

    Attributes:
        call: the driver's function, by CUDA's name, e.g. ``cuMemMap``.
        code: symbolic name of what it answered, e.g. ``CUDA_ERROR_INVALID_VALUE``.
        cause: the message without its remedy.
        remedy: what the user can do about it.

    """

    def __init__(self, call: str, code: str, detail: str, remedy: str) -> None:
        """Keep the parts, as `TransportUnavailable` does."""
        super().__init__(call, code, detail, remedy)
        self.cause = f"{call} failed with {code}: {detail}"
        self.call = call
        self.code = code
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.cause}. {self.remedy}"


class GroupAborted(WeightBridgeError):
    """A rank of an update group failed, died or did not answer: no rank's part is published.

    Attributes:
        ranks: the ranks that failed, as far as they are known.

    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        """Keep the ranks readable."""
        super().__init__(message)
        self.ranks = ranks


class SlotsExhausted(WeightBridgeError):
    """Every slot of the publisher is still held; the message names the holders."""


class DeadlineExceeded(WeightBridgeError, TimeoutError):
    """A wait reached its deadline."""


class TransferTimeout(WeightBridgeUnavailableError, DeadlineExceeded):
    """Nothing of an update arrived for as long as was agreed; it may be imported again."""


class BridgeClosed(WeightBridgeError):
    """The bridge was closed; nothing can be published or imported through it any more."""


def add_note(error: BaseException, note: str) -> None:
    """Say with an error what was done about it; an error that takes no notes goes without."""
    try:
        error.add_note(f"rl_bridge: {note}")
    except Exception:  # noqa: BLE001 - the user's own exception must come out all the same
        _LOG.info("%s (%s takes no notes)", note, type(error).__name__)


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or nothing."""
    near = difflib.get_close_matches(str(given), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def describe(error: BaseException) -> str:
    """Type and text of an error, on one line."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the user's own exception: its type must do
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_shortage(error: BaseException) -> bool:
    """Whether nothing is wrong with an update: this side lacks something, or was interrupted."""
    if not isinstance(error, Exception) or isinstance(error, _SHORTAGES):
        return True
    if isinstance(error, DriverError):
        return error.code != _NO_MEMORY_OF_THE_DRIVERS
    if isinstance(error, OSError):
        return error.errno in SHORTAGE_NUMBERS
    # (This module does without torch, whose error is known by its name.)
    return isinstance(error, RuntimeError) and (
        any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
        or any(text in str(error) for text in _SHORTAGE_TEXTS)
    )


SHORTAGE_NUMBERS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOLCK, errno.EAGAIN}
)
"""What the kernel says if this machine is short of something: the update itself is all right."""


def require_sendable(error: BaseException, what: str) -> None:
    """Refuse a request that did not leave this process, which lacks descriptors or memory."""
    link: BaseException | None = error
    # (The first one says how it failed; behind it may be what the caller was about to handle.)
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    if link is not None and link.errno in SHORTAGE_NUMBERS:
        raise WeightBridgeUnavailableError(
            f"{what} could not be sent: {link}. Close files, or raise this process's limits, "
            "and try again."
        ) from error


_SHORTAGES = (
    MemoryError,
    WeightBridgeUnavailableError,
    DeadlineExceeded,
    SlotsExhausted,
    VersionNotFound,  # it may become visible yet
)
# Messages of Python and of torch's allocator of CPU memory: their errors have no own types.
_SHORTAGE_TEXTS = ("can't start new thread", "can't allocate memory")
# So a driver names a descriptor that leads to no memory: the update is not all right.
_NO_MEMORY_OF_THE_DRIVERS = "CUDA_ERROR_INVALID_VALUE"
