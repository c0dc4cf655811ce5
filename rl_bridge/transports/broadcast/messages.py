"""What publisher and receivers say to each other beside the weights: JSON, of these kinds only.

Every message is one object with a ``kind``; what does not parse ends the connection. The largest
one is bounded before it is read.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, TypeAdapter

from rl_bridge.memory.control import UpdateReport

__all__ = [
    "Arrived",
    "CalledOff",
    "Declined",
    "Failed",
    "FromPublisher",
    "FromReceiver",
    "Go",
    "Gone",
    "Join",
    "Leave",
    "Message",
    "Offer",
    "Ready",
    "Refused",
    "Released",
    "Reported",
    "StoreValue",
    "Want",
    "Welcome",
    "from_publisher",
    "from_receiver",
]

_Count = Annotated[StrictInt, Field(ge=0, lt=2**63)]
_Id = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]
_Text = Annotated[StrictStr, Field(max_length=2048)]


class Message(BaseModel):
    """What all have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# ---- either way ---------------------------------------------------------------------------------


class StoreValue(Message):
    """A value of the rendezvous of one group; the publisher passes it on to the others."""

    kind: Literal["value"] = "value"
    group: _Count
    key: _Text
    value: Annotated[StrictStr, Field(max_length=32768, pattern=r"^([0-9a-f]{2})*$")]


# ---- from a receiver ----------------------------------------------------------------------------


class Join(Message):
    """The first message: who this is."""

    kind: Literal["join"] = "join"
    worker: Annotated[StrictStr, Field(max_length=512)]
    rank: _Count
    group_rank: _Count
    pid: _Count
    is_observer: StrictBool = False
    """It takes single updates, is pushed none, and leaves no record."""


class Want(Message):
    """Send me this update (again)."""

    kind: Literal["want"] = "want"
    update_id: _Id
    generation: _Count
    arena_nbytes: _Count


class Ready(Message):
    """I have a slot for this transfer."""

    kind: Literal["ready"] = "ready"
    transfer: _Count


class Declined(Message):
    """I take no part in this transfer."""

    kind: Literal["declined"] = "declined"
    transfer: _Count
    reason: _Text


class Arrived(Message):
    """All bytes of this transfer are here."""

    kind: Literal["arrived"] = "arrived"
    transfer: _Count


class Failed(Message):
    """This transfer broke off here."""

    kind: Literal["failed"] = "failed"
    transfer: _Count
    reason: _Text


class Reported(Message):
    """What became of an update."""

    kind: Literal["report"] = "report"
    report: UpdateReport


class Leave(Message):
    """The last message."""

    kind: Literal["leave"] = "leave"


# ---- from the publisher -------------------------------------------------------------------------


class Welcome(Message):
    """You are in."""

    kind: Literal["welcome"] = "welcome"


class Refused(Message):
    """You are not, or not any more."""

    kind: Literal["refused"] = "refused"
    reason: _Text


class Offer(Message):
    """This update is about to be sent: answer `Ready` or `Declined`."""

    kind: Literal["offer"] = "offer"
    transfer: _Count
    update_id: _Id
    generation: _Count
    arena_nbytes: _Count
    layout_digest: Annotated[StrictStr, Field(max_length=64)]
    header: _Id
    """The digest of the manifest's header."""


class Go(Message):
    """The transfer begins now, in this group, in slices of this size."""

    kind: Literal["go"] = "go"
    transfer: _Count
    group: _Count
    rank: Annotated[StrictInt, Field(ge=1, lt=2**20)]
    size: Annotated[StrictInt, Field(ge=2, lt=2**20)]
    slice_nbytes: Annotated[StrictInt, Field(ge=4096, le=2**32)]


class CalledOff(Message):
    """The transfer does not take place, or the group is given up."""

    kind: Literal["called off"] = "called off"
    transfer: _Count
    reason: _Text


class Gone(Message):
    """The update that you want cannot be had."""

    kind: Literal["gone"] = "gone"
    update_id: _Id
    reason: _Text
    is_stale: StrictBool
    """It was released; otherwise it is not what was asked for."""


class Released(Message):
    """The publisher let go of this update: nobody needs to keep it for an import to come."""

    kind: Literal["released"] = "released"
    update_id: _Id


FromReceiver = Join | Want | Ready | Declined | Arrived | Failed | Reported | StoreValue | Leave
FromPublisher = Welcome | Refused | Offer | Go | CalledOff | Gone | Released | StoreValue

_FROM_RECEIVER: TypeAdapter[FromReceiver] = TypeAdapter(
    Annotated[FromReceiver, Field(discriminator="kind")]
)
_FROM_PUBLISHER: TypeAdapter[FromPublisher] = TypeAdapter(
    Annotated[FromPublisher, Field(discriminator="kind")]
)


def from_receiver(text: bytes) -> FromReceiver:
    """Parse a receiver's message.

    Raises:
        pydantic.ValidationError: it is none.

    """
    return _FROM_RECEIVER.validate_json(text)


def from_publisher(text: bytes) -> FromPublisher:
    """Parse a publisher's message.

    Raises:
        pydantic.ValidationError: it is none.

    """
    return _FROM_PUBLISHER.validate_json(text)
