"""What publisher and receivers of a broadcast tell each other: init info, handle, and messages.

The length of a message is bounded before it is read.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, StrictInt, StrictStr, ValidationError

from rl_bridge.errors import MalformedManifest
from rl_bridge.transports.wire.channel import (
    Count,
    Endpoint,
    Gone,
    Handle,
    Message,
    PeerJoin,
    PeerProtocol,
    Refused,
    Text,
    UpdateId,
)

# ---- how a receiver gets there: init info and handle ---------------------------------------------

Backend = Literal["gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = ("gloo", "nccl")

_MAX_TEXT = 8192

STEPS_IN_TIME = 3
"""Each wait for a slice or for an answer takes at most this part of ``timeout_s``.

So an import that waits for all of ``timeout_s`` sees a transfer break off, the answers of the
members that are left, and the next transfer, before its own deadline.
"""


class BroadcastInitInfo(Endpoint):
    """The address of a publisher's group, and the token that lets a receiver in.

    Anybody who has it can read the weights: keep it as safe as the manifests, which carry it too.

    Attributes:
        address: see `Endpoint`, as for the other fields that are not listed here.
        token: the shared secret, 64 hexadecimal digits; it never travels itself.
        group_name: the group's name.
        world_size: how many members, the trainer and all engine ranks; 0: they come and go.
        rank_offset: added to an engine's own rank gives its place in the group.

    """

    token: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
    group_name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    backend: Backend
    world_size: Annotated[StrictInt, Field(ge=0, lt=2**20)] = 0
    rank_offset: Annotated[StrictInt, Field(ge=1, lt=2**20)] = 1

    @property
    def identity(self) -> str:
        """The name in both sides' proofs."""
        return f"{self.publisher_id} {self.group_name}"

    def to_json(self) -> str:
        """Write it as JSON text."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that `to_json` wrote.

        Raises:
            MalformedManifest: it is something else.

        """
        if not isinstance(text, str) or len(text) > _MAX_TEXT:
            raise MalformedManifest(
                f"the init info is a {type(text).__name__} of unexpected size, expected JSON text "
                f"of at most {_MAX_TEXT} characters. Send what to_json wrote."
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise MalformedManifest(
                f"the init info's field {where or '(all of it)'}: {first['msg']}. Send what "
                "to_json wrote."
            ) from error


TorchDistributedWeightSyncInitInfo = BroadcastInitInfo
"""The same class, under the name that transfer strategies use."""


class BroadcastHandle(Handle):
    """The JSON handle of a manifest: the group, and which write of its slot the version is."""

    group: BroadcastInitInfo
    generation: Annotated[StrictInt, Field(ge=1, lt=2**63)]

    @property
    def publisher_id(self) -> str:
        """The publisher that it leads to."""
        return self.group.publisher_id


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
    magic=b"rlbcast1",
    join=Join,
    welcome=Welcome,
    from_receiver=(Want, Ready, Declined, Arrived, Failed, StoreValue),
    from_publisher=(Offer, Go, CalledOff, Gone, Released, StoreValue),
)
