"""Where a publisher can be read: what its manifests say, and what it tells of what it holds."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StrictStr

from rl_bridge.transports._wire.addresses import checked_address

__all__ = ["NIXLEndpoint", "NIXLHandle"]


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


class NIXLHandle(BaseModel):
    """The JSON handle of a manifest: the server, and which write of which slot the version is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: NIXLEndpoint
    generation: Annotated[StrictInt, Field(ge=1, lt=2**63)]
    in_place: bool = False
