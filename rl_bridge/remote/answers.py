"""What a side-car answers: views of its engine and of updates, and problem documents (RFC 9457).

A problem's ``error`` names the exception; at the other end it is raised again by that name, if it
is one of ours. Anything else of an engine comes out as a `WeightUpdateRejectedError` that quotes
it.
"""

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_bridge import errors
from rl_bridge.bridge.engine_state import Acknowledgement
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

Stage = Literal["imported", "prepared", "committed", "aborted", "refused", "undone", "torn"]


class _View(BaseModel):
    model_config = ConfigDict(frozen=True)


class UpdateView(_View):
    """One update.

    Attributes:
        update_id: the update.
        weight_version: its version.
        root: its root.
        stage: how far it got, or what became of it.
        reason: why it got no further; empty else.
        acknowledgement: of a committed one.

    """

    update_id: str
    weight_version: int
    root: str
    stage: Stage
    reason: str = ""
    acknowledgement: Acknowledgement | None = None


class Recovery(_View):
    """What the start of a side-car found of the one before it.

    Attributes:
        outcome: ``nothing`` (there was none, or it had committed nothing), ``reinstalled`` (the
            engine is at `weight_version` again, proven), ``lost`` (its bytes are gone: the engine
            must get an update before it serves).
        weight_version: the version that the engine was to hold.
        interrupted: the update that was on its way when the side-car died, if there was one.
        interrupted_at: how far that one was: ``prepared``, or ``committing``.
        detail: in words.

    """

    outcome: Literal["nothing", "reinstalled", "lost"] = "nothing"
    weight_version: int | None = None
    interrupted: str | None = None
    interrupted_at: Literal["prepared", "committing"] | None = None
    detail: str = ""


class Status(_View):
    """Where the engine stands.

    Attributes:
        state: ``empty`` (no verified version yet), ``serving``, ``torn`` (must not serve), or
            ``lost`` (it is gone, or another one is in its place, which needs an update first). This
            is how the engine was at the last step.
        servable: whether the engine may answer requests.
        lost: how it is known that the engine is lost.
        active_weight_version: the version that it holds.
        active_update_id: that update.
        active_root: its root.
        pending: the update that waits for its next step.
        busy: what the side-car is doing right now; None if nothing.
        transport: the transport that the manifests must be of; empty for a bridge of your own.
        recovery: what the start found.
        last_acknowledgement: of the update that was committed last in this process.

    """

    state: Literal["empty", "serving", "torn", "lost"]
    servable: bool
    lost: str = ""
    active_weight_version: int | None = None
    active_update_id: str | None = None
    active_root: str | None = None
    pending: UpdateView | None = None
    busy: str | None = None
    transport: str = ""
    recovery: Recovery = Field(default_factory=Recovery)
    last_acknowledgement: Acknowledgement | None = None


# ---- problems, there and back --------------------------------------------------------------------

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


class Problem(_View):
    """A problem document.

    Attributes:
        type: a name for this kind of problem.
        title: the same for people.
        status: of the answer that carries it.
        detail: what was expected, what came, and the remedy.
        error: the exception's class.
        notes: the exception's notes, such as that of an undo.

    """

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
