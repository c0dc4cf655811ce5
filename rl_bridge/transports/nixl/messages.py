"""The messages between publisher and readers, besides the common kinds; endpoint and handle."""

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from rl_bridge.transports.wire.channel import (
    Count,
    Endpoint,
    Gone,
    Handle,
    Message,
    PeerJoin,
    PeerProtocol,
    Text,
    UpdateId,
)

MAX_MESSAGE_NBYTES = 16 << 20
"""The addresses of a live model's parameters travel in one message."""

MAX_REASON = 2048
"""Characters of a reason at most."""

STALL_PART = 1 / 6
"""A read that stands still for this part of the reader's time is reported, and what serves it has
as long once more to show that it runs."""

_Address = Annotated[StrictInt, Field(ge=0, lt=2**64)]
_Hex = Annotated[StrictStr, Field(max_length=8 << 20, pattern=r"^([0-9a-f]{2})*$")]
_Kind = Literal["DRAM", "VRAM"]
_Seconds = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


# ---- from a reader ------------------------------------------------------------------------------


class Join(PeerJoin):
    """The first message."""

    kind: Literal["join"] = "join"
    timeout_s: _Seconds
    """The time after which it gives up a read that stands still."""


class Lease(Message):
    """Asks the publisher to keep this version unchanged while the reader reads it.

    `known`: slots that the reader knows how to reach. `needs_help`: the network cannot read by
    itself, so the publisher has to make progress meanwhile. `epoch`: of the agent that the reader
    knows.
    """

    kind: Literal["lease"] = "lease"
    update_id: UpdateId
    generation: Count
    arena_nbytes: Count
    known: Annotated[tuple[Count, ...], Field(max_length=4096)] = ()
    needs_help: StrictBool = True
    epoch: Count


class Renew(Message):
    """The reader is still reading this version."""

    kind: Literal["renew"] = "renew"
    update_id: UpdateId


class Help(Message):
    """Asks the publisher to make progress for the reader's leases from now on, or to stop.

    Asked for again while it is given, it says that nothing arrives: whoever serves the reader has
    to show that it runs.
    """

    kind: Literal["help"] = "help"
    is_needed: StrictBool


class Unlease(Message):
    """The reader has read the version, or gave up."""

    kind: Literal["unlease"] = "unlease"
    update_id: UpdateId


class AskCatalog(Message):
    """Asks for the versions that the publisher holds."""

    kind: Literal["ask catalog"] = "ask catalog"


# ---- from the publisher -------------------------------------------------------------------------


class Welcome(Message):
    """The reader is a member now; `metadata` leads to the agent, and not yet to its memory."""

    kind: Literal["welcome"] = "welcome"
    metadata: _Hex
    epoch: Count
    """Counts the publisher's agents: when one dies, another takes its place."""
    timeout_s: _Seconds
    """A lease that is not renewed ends after this time."""


class Leased(Message):
    """The version is leased, until the reader ends the lease, or is gone.

    Attributes:
        slot: number of the slot; unique at its publisher.
        metadata: what a reader needs to reach the slot's regions; empty if it knows the slot.
        stamp: address of the slot's stamp.
        addresses: where the version lies: one range; or in place, one range for each tensor.
        starts: where each range belongs in the arena.
        nbytes: size of each range.
        memory: the kind of the ranges' memory; the stamp's is always DRAM.
        device: number of the ranges' device.
        epoch: of the agent that is to be read from.
        moved: how to reach that agent, if the reader knows another one.

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
    """The renewed lease is over: the publisher may write there, and no longer helps to read it."""

    kind: Literal["lapsed"] = "lapsed"
    update_id: UpdateId


class Entry(Message):
    """One slot of a publisher, or the trainer's own tensors if they are read in place.

    Attributes:
        slot: its number; unique at its publisher.
        update_id: the version in it; None if there is none, or no longer.
        generation: which write of the slot it is.
        arena_nbytes: bytes of the version.
        nbytes: bytes of the slot.
        readers: worker, rank and process of each reader that leases the version.

    """

    slot: Count
    update_id: UpdateId | None
    generation: Count
    arena_nbytes: Count
    nbytes: Count
    readers: tuple[Text, ...] = ()


class Catalog(Message):
    """Everything that a publisher holds."""

    kind: Literal["catalog"] = "catalog"
    entries: tuple[Entry, ...]


FromReader = Lease | Renew | Help | Unlease | AskCatalog

PROTOCOL = PeerProtocol(
    magic=b"rlbnixl1",
    join=Join,
    welcome=Welcome,
    from_receiver=(Lease, Renew, Help, Unlease, AskCatalog),
    from_publisher=(Leased, Lapsed, Gone, Catalog),
    max_message_nbytes=MAX_MESSAGE_NBYTES,
)


# ---- where a publisher can be read --------------------------------------------------------------


class NIXLEndpoint(Endpoint):
    """One rank's parameter server. In a group each rank's manifest has its own endpoint.

    Anybody who has an endpoint with a token can read the weights: keep it as safe as the manifests.

    Attributes:
        address: see `Endpoint`, as for the other fields that are not listed here.
        server_name: the control server's name, with its rank.
        token: the shared secret, 64 hexadecimal digits; None if both sides were given it.

    """

    server_name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.:-]{1,160}$")]
    token: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    backend: Annotated[StrictStr, Field(pattern=r"^[A-Z0-9_]{1,32}$")] = "UCX"

    @property
    def identity(self) -> str:
        """The name in both sides' proofs."""
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
