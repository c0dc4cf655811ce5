"""What engines must know before the first sync: typed, plain JSON there and back."""

from typing import Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from rl_bridge.errors import MalformedManifest
from rl_bridge.manifest.canonical import canonical_json, decode_json
from rl_bridge.transports.broadcast.init_info import TorchDistributedWeightSyncInitInfo

__all__ = ["EmptyWeightSyncInitInfo", "WeightSyncInitInfo", "init_info_from_json"]


@runtime_checkable
class WeightSyncInitInfo(Protocol):
    """What one trainer rank makes, and every engine gets before the first sync."""

    def to_json(self) -> str:
        """Write it as JSON text."""


class EmptyWeightSyncInitInfo(BaseModel):
    """Nothing has to be known before: each manifest says where its bytes are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["empty"] = "empty"

    def to_json(self) -> str:
        """Write it as JSON text."""
        return canonical_json(self.model_dump())


def init_info_from_json(
    text: object,
) -> EmptyWeightSyncInitInfo | TorchDistributedWeightSyncInitInfo:
    """Read what ``to_json`` of either kind wrote.

    Raises:
        MalformedManifest: it is neither.

    """
    if isinstance(text, str):
        value, end = decode_json(text)
        if value == {"kind": "empty"} and end == len(text):
            return EmptyWeightSyncInitInfo()
        return TorchDistributedWeightSyncInitInfo.from_json(text)
    msg = f"the init info is a {type(text).__name__}, expected JSON text. Send what to_json wrote."
    raise MalformedManifest(msg)
