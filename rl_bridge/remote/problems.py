"""Errors as they travel: problem documents (RFC 9457), there and back. Pure.

A problem's ``error`` names the exception; at the other end it is raised again by that name, if it
is one of ours. Anything else of an engine comes out as a `WeightUpdateRejectedError` that quotes
it.
"""

from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_bridge import errors
from rl_bridge.errors import (
    BridgeClosed,
    DeadlineExceeded,
    EngineLost,
    IncompatibleUpdate,
    ProofFailed,
    SegmentError,
    SignatureRefused,
    UnknownUpdate,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightManifestValidationError,
    WeightUpdateRejectedError,
)

MEDIA_TYPE: Final = "application/problem+json"
_PREFIX: Final = "urn:rl_bridge:problem:"

STATUSES: Final = {
    400: "The request is not what the description says.",
    401: "Signature, time or nonce are missing or wrong, or this is a replay.",
    404: "No such path, or no such update.",
    405: "The path has no such method.",
    408: "The body did not arrive in time.",
    409: "The update, or the side-car, is not in a state for this.",
    413: "The body is too large.",
    422: "The manifest, or the update, is wrong or does not fit this engine.",
    500: "The engine or its undo failed; what is active is as the status says.",
    502: "The engine is gone.",
    503: "Not available here, or busy.",
    504: "The engine did not answer in time.",
}

# The first that fits, so the narrow ones come first.
_BY_ERROR: Final[tuple[tuple[type[WeightBridgeError], int], ...]] = (
    (SignatureRefused, 401),
    (UnknownUpdate, 404),
    (WeightManifestValidationError, 422),
    (IncompatibleUpdate, 422),
    (SegmentError, 422),
    (ProofFailed, 500),
    (WeightUpdateRejectedError, 409),
    (EngineLost, 502),
    (DeadlineExceeded, 504),
    (WeightBridgeUnavailableError, 503),
    (BridgeClosed, 503),
)


class Problem(BaseModel):
    """A problem document.

    Attributes:
        type: a name for this kind of problem.
        title: the same for people.
        status: of the answer that carries it.
        detail: what was expected, what came, and the remedy.
        error: the exception's class.
        notes: the exception's notes, such as that of an undo.

    """

    model_config = ConfigDict(frozen=True)

    type: str
    title: str
    status: int
    detail: str
    error: str
    notes: list[str] = Field(default_factory=list)

    def encoded(self) -> bytes:
        """Its JSON text."""
        return self.model_dump_json().encode()


def problem_of(error: BaseException) -> Problem:
    """Put an exception into words."""
    status = next((status for kind, status in _BY_ERROR if isinstance(error, kind)), 500)
    name = type(error).__name__
    return Problem(
        type=f"{_PREFIX}{name}",
        title=STATUSES[status],
        status=status,
        detail=str(error) or name,
        error=name,
        notes=list(getattr(error, "__notes__", [])),
    )


def http_problem(status: int, detail: str) -> Problem:
    """A problem of the request itself, for which there is no exception."""
    return Problem(
        type=f"{_PREFIX}http-{status}",
        title=STATUSES.get(status, "The request cannot be served."),
        status=status,
        detail=detail,
        error="",
    )


def raised_by(status: int, body: bytes) -> WeightBridgeError:
    """The exception that an answer with this status reports."""
    try:
        problem = Problem.model_validate_json(body)
    except ValidationError:
        msg = (
            f"the side-car answered with status {status} and {body[:200]!r}, expected a problem "
            "document. Is this a side-car's URL?"
        )
        return WeightBridgeUnavailableError(msg)
    error = _made(problem)
    for note in problem.notes:
        error.add_note(note)
    return error


def _made(problem: Problem) -> WeightBridgeError:
    kind = getattr(errors, problem.error, None) if problem.error in errors.__all__ else None
    while kind is not None:
        try:
            made = kind(problem.detail)
        except TypeError:
            kind = kind.__base__  # it is made of parts: its base takes the text
            continue
        assert isinstance(made, WeightBridgeError)
        return made
    if problem.error:
        return WeightUpdateRejectedError(f"the engine failed: {problem.error}: {problem.detail}")
    # The other side does not serve such a request.
    return WeightBridgeUnavailableError(problem.detail)
