"""The description of a publisher's group that lets a receiver join: typed, and plain JSON."""

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)

from rl_bridge.errors import MalformedManifest
from rl_bridge.transports.wire.channel import Handle, checked_address

Backend = Literal["gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = ("gloo", "nccl")

MAGIC = b"rlbcast1"
"""Names this transport's protocol in greetings."""

_MAX_TEXT = 8192

STEPS_IN_TIME = 3
"""Each wait for a slice or for an answer takes at most this part of ``timeout_s``.

So an import that waits for all of ``timeout_s`` sees a transfer break off, the answers of the
members that are left, and the next transfer, before its own deadline.
"""


class BroadcastInitInfo(BaseModel):
    """The address of a publisher's group, and the token that lets a receiver in.

    Anybody who has it can read the weights: keep it as safe as the manifests, which carry it too.

    Attributes:
        address: of the publisher, in numbers.
        port: where the publisher listens.
        token: the shared secret, 64 hexadecimal digits; it never travels itself.
        publisher_id: the publisher of the versions.
        group_name: the group's name.
        backend: what carries the bytes.
        world_size: how many members, the trainer and all engine ranks; 0: they come and go.
        rank_offset: added to an engine's own rank gives its place in the group.
        has_tls: whether the publisher's control connections have TLS.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: Annotated[StrictStr, AfterValidator(checked_address)]
    port: Annotated[StrictInt, Field(ge=1, lt=2**16)]
    token: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
    publisher_id: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]
    group_name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    backend: Backend
    world_size: Annotated[StrictInt, Field(ge=0, lt=2**20)] = 0
    rank_offset: Annotated[StrictInt, Field(ge=1, lt=2**20)] = 1
    has_tls: StrictBool = False

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
            msg = (
                f"the init info is a {type(text).__name__} of unexpected size, expected JSON text "
                f"of at most {_MAX_TEXT} characters. Send what to_json wrote."
            )
            raise MalformedManifest(msg)
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            msg = (
                f"the init info's field {where or '(all of it)'}: {first['msg']}. Send what "
                "to_json wrote."
            )
            raise MalformedManifest(msg) from error


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
