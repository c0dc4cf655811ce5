"""The messages between publisher and receivers of a broadcast, besides the common kinds.

The length of a message is bounded before it is read.
"""

from typing import Annotated, Literal

from pydantic import Field, StrictInt, StrictStr

from rl_bridge.transports.broadcast.init_info import MAGIC
from rl_bridge.transports.wire.channel import (
    Count,
    Gone,
    Message,
    PeerJoin,
    PeerProtocol,
    Refused,
    Text,
    UpdateId,
)

# ---- either way ---------------------------------------------------------------------------------


class StoreValue(Message):
    """A value of the rendezvous of one group; the publisher passes it on to the others."""

    kind: Literal["value"] = "value"
    group: Count
    key: Text
    value: Annotated[StrictStr, Field(max_length=32768, pattern=r"^([0-9a-f]{2})*$")]


# ---- from a receiver ----------------------------------------------------------------------------


class Join(PeerJoin):
    """The first message; an observer asks for single updates, and is sent no others."""

    kind: Literal["join"] = "join"
    group_rank: Count


class Want(Message):
    """Asks for this update, perhaps again."""

    kind: Literal["want"] = "want"
    update_id: UpdateId
    generation: Count
    arena_nbytes: Count


class Ready(Message):
    """The receiver has a slot for this transfer."""

    kind: Literal["ready"] = "ready"
    transfer: Count


class Declined(Message):
    """The receiver takes no part in this transfer."""

    kind: Literal["declined"] = "declined"
    transfer: Count
    reason: Text


class Arrived(Message):
    """All bytes of this transfer are at the receiver."""

    kind: Literal["arrived"] = "arrived"
    transfer: Count


class Failed(Message):
    """This transfer broke off at the receiver."""

    kind: Literal["failed"] = "failed"
    transfer: Count
    reason: Text


# ---- from the publisher -------------------------------------------------------------------------


class Welcome(Message):
    """The receiver is a member now."""

    kind: Literal["welcome"] = "welcome"


class Offer(Message):
    """This update is about to be sent: the receiver answers `Ready` or `Declined`."""

    kind: Literal["offer"] = "offer"
    transfer: Count
    update_id: UpdateId
    generation: Count
    arena_nbytes: Count
    layout_digest: Annotated[StrictStr, Field(max_length=64)]
    header: UpdateId
    """The digest of the manifest's header."""


class Go(Message):
    """The transfer begins now, in this group, in slices of this size."""

    kind: Literal["go"] = "go"
    transfer: Count
    group: Count
    rank: Annotated[StrictInt, Field(ge=1, lt=2**20)]
    size: Annotated[StrictInt, Field(ge=2, lt=2**20)]
    slice_nbytes: Annotated[StrictInt, Field(ge=4096, le=2**32)]


class CalledOff(Message):
    """The transfer does not take place, or the group is given up."""

    kind: Literal["called off"] = "called off"
    transfer: Count
    reason: Text


class Released(Message):
    """The publisher released this update: a receiver need not keep it for a later import."""

    kind: Literal["released"] = "released"
    update_id: UpdateId


FromReceiver = Want | Ready | Declined | Arrived | Failed | StoreValue
FromPublisher = Welcome | Refused | Offer | Go | CalledOff | Gone | Released | StoreValue

PROTOCOL = PeerProtocol(
    magic=MAGIC,
    join=Join,
    welcome=Welcome,
    from_receiver=(Want, Ready, Declined, Arrived, Failed, StoreValue),
    from_publisher=(Offer, Go, CalledOff, Gone, Released, StoreValue),
)
