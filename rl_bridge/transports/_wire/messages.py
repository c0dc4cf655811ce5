"""What publishers and receivers of every transport say to each other: JSON, of fixed kinds only.

Each transport adds kinds of its own. Every message is one object with a ``kind``; what does not
parse ends the connection.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from rl_bridge.errors import SegmentError, StaleUpdate, WeightBridgeError
from rl_bridge.memory.control import UpdateReport

__all__ = [
    "Count",
    "Gone",
    "Leave",
    "Message",
    "Refused",
    "Reported",
    "Text",
    "UpdateId",
    "error_of",
]

Count = Annotated[StrictInt, Field(ge=0, lt=2**63)]
Text = Annotated[StrictStr, Field(max_length=2048)]
UpdateId = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]


class Message(BaseModel):
    """What all have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# ---- from a receiver ----------------------------------------------------------------------------


class Reported(Message):
    """What became of an update."""

    kind: Literal["report"] = "report"
    report: UpdateReport


class Leave(Message):
    """The last message."""

    kind: Literal["leave"] = "leave"


# ---- from the publisher -------------------------------------------------------------------------


class Refused(Message):
    """You are not in, or not any more."""

    kind: Literal["refused"] = "refused"
    reason: Text


class Gone(Message):
    """The update that you want cannot be had."""

    kind: Literal["gone"] = "gone"
    update_id: UpdateId
    reason: Text
    is_stale: StrictBool
    """It was released; otherwise it is not what was asked for."""


def error_of(gone: Gone) -> WeightBridgeError:
    """What an import raises that got this answer."""
    if gone.is_stale:
        return StaleUpdate(
            f"update {gone.update_id} is gone: {gone.reason}. Import the publisher's latest "
            "manifest."
        )
    return SegmentError(
        f"update {gone.update_id} is not what was published: {gone.reason}. Use the manifest "
        "as it was published."
    )
