"""What publisher and readers say to each other, beside the kinds that all transports have."""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    TypeAdapter,
)

from rl_bridge.transports.wire.channel import (
    Count,
    Gone,
    Handle,
    Leave,
    Message,
    Refused,
    Reported,
    Text,
    UpdateId,
    checked_address,
)

__all__ = [
    "MAGIC",
    "MAX_MESSAGE_NBYTES",
    "AskCatalog",
    "Catalog",
    "Entry",
    "FromPublisher",
    "FromReader",
    "Help",
    "Join",
    "Lapsed",
    "Lease",
    "Leased",
    "NIXLEndpoint",
    "NIXLHandle",
    "Renew",
    "Unlease",
    "Welcome",
    "from_publisher",
    "from_reader",
]

MAGIC = b"rlbnixl1"
"""Names this transport's language in greetings."""

MAX_MESSAGE_NBYTES = 16 << 20
"""The addresses of a live model's parameters travel in one message."""

_Address = Annotated[StrictInt, Field(ge=0, lt=2**64)]
_Hex = Annotated[StrictStr, Field(max_length=8 << 20, pattern=r"^([0-9a-f]{2})*$")]
_Kind = Literal["DRAM", "VRAM"]


# ---- from a reader ------------------------------------------------------------------------------


class Join(Message):
    """The first message: who this is."""

    kind: Literal["join"] = "join"
    worker: Annotated[StrictStr, Field(max_length=512)]
    rank: Count
    pid: Count
    reader: UpdateId
    """The same for all connections of this reader, of which the publisher keeps the newest."""
    is_observer: StrictBool = False
    """It leaves no record."""


class Lease(Message):
    """Keep this version as it is while I read it.

    `needs_help`: the network cannot read by itself, so make progress until I am done. `known`: how
    to reach these slots is known here. `epoch`: that of the agent that is known here.
    """

    kind: Literal["lease"] = "lease"
    update_id: UpdateId
    generation: Count
    arena_nbytes: Count
    known: Annotated[tuple[Count, ...], Field(max_length=4096)] = ()
    needs_help: StrictBool = True
    epoch: Count


class Renew(Message):
    """I am still reading it."""

    kind: Literal["renew"] = "renew"
    update_id: UpdateId


class Help(Message):
    """From here on (no longer) make progress for what I lease."""

    kind: Literal["help"] = "help"
    is_needed: StrictBool


class Unlease(Message):
    """I have read it, or gave up."""

    kind: Literal["unlease"] = "unlease"
    update_id: UpdateId


class AskCatalog(Message):
    """What do you hold?"""

    kind: Literal["ask catalog"] = "ask catalog"


# ---- from the publisher -------------------------------------------------------------------------


class Welcome(Message):
    """You are in: this is how to reach the agent; of its memory it says nothing."""

    kind: Literal["welcome"] = "welcome"
    metadata: _Hex
    epoch: Count
    """Which agent of the publisher's it is: when one dies, another takes its place."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """A lease that is not asked for again ends after this time."""


class Leased(Message):
    """Here it is, and it stays until you say so or are gone.

    Attributes:
        slot: number of the slot; no two of a publisher have the same.
        metadata: let a reader reach that slot, one for each region; empty if it knows the slot.
        stamp: address of the slot's stamp.
        addresses: where the version lies: one range, or one for each tensor where it lies in the
            trainer's own parameters.
        starts: where each range belongs in the arena.
        nbytes: size of each range.
        memory: of which kind the ranges are; the stamp's is always DRAM.
        device: number of the ranges' device.
        epoch: of the agent that is to be read from.
        moved: how to reach it, if the reader knows another one.

    """

    kind: Literal["leased"] = "leased"
    update_id: UpdateId
    slot: Annotated[StrictInt, Field(ge=1, lt=2**63)]
    metadata: tuple[_Hex, ...]
    stamp: _Address
    addresses: tuple[_Address, ...]
    starts: tuple[Count, ...]
    nbytes: tuple[Count, ...]
    memory: _Kind = "DRAM"
    device: Count = 0
    epoch: Count = 0
    moved: _Hex = ""


class Lapsed(Message):
    """You renew a lease that is over: I may write there, and help nobody to read it."""

    kind: Literal["lapsed"] = "lapsed"
    update_id: UpdateId


class Entry(Message):
    """One slot of a publisher, or the trainer's own tensors where they are read in place.

    Attributes:
        slot: its number; no two of a publisher have the same.
        update_id: the version in it; None where there is none, or it is no version any more.
        generation: which write of the slot it is.
        arena_nbytes: bytes of that version.
        nbytes: bytes of the slot.
        readers: who leases the version: worker, rank and process of each.

    """

    slot: Count
    update_id: UpdateId | None
    generation: Count
    arena_nbytes: Count
    nbytes: Count
    readers: tuple[Text, ...] = ()


class Catalog(Message):
    """What a publisher holds."""

    kind: Literal["catalog"] = "catalog"
    entries: tuple[Entry, ...]


FromReader = Join | Lease | Renew | Help | Unlease | Reported | AskCatalog | Leave
FromPublisher = Welcome | Refused | Leased | Lapsed | Gone | Catalog

_FROM_READER: TypeAdapter[FromReader] = TypeAdapter(
    Annotated[FromReader, Field(discriminator="kind")]
)
_FROM_PUBLISHER: TypeAdapter[FromPublisher] = TypeAdapter(
    Annotated[FromPublisher, Field(discriminator="kind")]
)


def from_reader(text: bytes) -> FromReader:
    """Parse a reader's message.

    Raises:
        pydantic.ValidationError: it is none.

    """
    return _FROM_READER.validate_json(text)


def from_publisher(text: bytes) -> FromPublisher:
    """Parse a publisher's message.

    Raises:
        pydantic.ValidationError: it is none.

    """
    return _FROM_PUBLISHER.validate_json(text)


# ---- Where a publisher can be read: what its manifests say, and what it tells of what it holds.


class NIXLEndpoint(BaseModel):
    """One rank's parameter server. The manifests of a group have one each: all hosts are listed.

    Who has it, with a token in it, can read the weights: keep it as you keep the manifests.

    Attributes:
        address: in numbers.
        port: where its control server listens.
        server_name: of that server, with its rank.
        publisher_id: whose versions these are.
        token: the shared secret, 64 hexadecimal digits; None where both sides were given it.
        backend: what carries the bytes.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: Annotated[StrictStr, AfterValidator(checked_address)]
    port: Annotated[StrictInt, Field(ge=1, lt=2**16)]
    server_name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.:-]{1,160}$")]
    publisher_id: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]
    token: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    backend: Annotated[StrictStr, Field(pattern=r"^[A-Z0-9_]{1,32}$")] = "UCX"

    @property
    def identity(self) -> str:
        """What both sides' proofs are about."""
        return f"{self.publisher_id} {self.server_name}"


class NIXLHandle(Handle):
    """The JSON handle of a manifest: the server, and which write of its slot the version is."""

    endpoint: NIXLEndpoint
    generation: Annotated[StrictInt, Field(ge=1, lt=2**63)]
    in_place: bool = False

    @property
    def publisher_id(self) -> str:
        """The publisher that it leads to."""
        return self.endpoint.publisher_id
