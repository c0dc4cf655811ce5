"""How the trainer's ranks hold the state that an update carries: no bytes, no torch.

`WeightLayout` has the counts of a whole update. It travels in ``metadata["layout"]``, filled with
its defaults when the user leaves it out. (`rl_bridge.manifest.table` says where each tensor lies in
the arena.)

A `Placement` says where one tensor of a rank lies in the whole tensors. It consists of one or more
*pieces*. A piece is a box of a whole tensor, or a range of its elements in row-major order
(``is_flat``), as ZeRO-3 and FSDP1 cut. Fused tensors that are cut per rank (gate and up of one rank
side by side) have several pieces.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from pydantic import StrictBool, StrictInt, StrictStr, ValidationError

from rl_bridge.errors import MalformedManifest, WeightBridgeUnavailableError
from rl_bridge.manifest.canonical import Frozen, JSONValue, freeze, malformed

ADAPTER = "adapter"
"""The kind of an update that holds a LoRA adapter (`rl_bridge.manifest.adapter`)."""
_SUPPORTED_KINDS = frozenset({"full-state", "replicated", ADAPTER})

# Degrees that were added after the first users came. They are written only if they are not 1, so
# that the metadata of a plain update stays as those users know it.
_WRITTEN_IF_SET = ("pipeline_parallel_size", "expert_parallel_size")


class WeightLayout(Frozen):
    """The parallel layout of one update: kind, world size, rank and degrees (all counts).

    Raises:
        MalformedManifest: an unknown field, or a value of the wrong type.

    """

    kind: StrictStr = "full-state"
    world_size: StrictInt = 1
    rank: StrictInt = 0
    tensor_parallel_size: StrictInt = 1
    data_parallel_size: StrictInt = 1
    zero_stage: StrictInt = 0
    node_count: StrictInt = 1
    rdma_enabled: StrictBool = False
    pipeline_parallel_size: StrictInt = 1
    expert_parallel_size: StrictInt = 1

    def __init__(self, /, **fields: Any) -> None:
        """Check `fields`; a wrong one is a `MalformedManifest`, not pydantic's own error."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            names = ", ".join(type(self).model_fields)
            remedy = f"Its fields are {names}. Leave out what has its default."
            raise malformed('weight layout (metadata["layout"])', error, remedy) from error

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, JSONValue] | None) -> Self:
        """Read ``metadata["layout"]``; what is missing gets its default.

        Raises:
            MalformedManifest: not a mapping, an unknown key, a wrong type.

        """
        given: object = metadata
        if given is not None and not isinstance(given, Mapping):
            kind = type(given).__name__
            raise MalformedManifest(
                f"metadata is a {kind}, expected a mapping of JSON values. Pass a dict, or None."
            )
        raw = (metadata or {}).get("layout")
        if raw is None:
            return cls()
        if not isinstance(raw, Mapping):
            raise MalformedManifest(
                f'metadata["layout"] is a {type(raw).__name__}, expected a mapping. Pass '
                "WeightLayout(...).to_metadata(), or leave it out."
            )
        is_frozen = type(raw) is MappingProxyType  # a manifest's own
        return cls(**(raw if is_frozen else freeze(raw, where='metadata["layout"]')))

    def to_metadata(self) -> dict[str, JSONValue]:
        """Give the form that travels in ``metadata["layout"]``."""
        fields = self.model_dump()
        for name in _WRITTEN_IF_SET:
            if fields[name] == 1:
                del fields[name]
        return fields

    def validate_supported(self) -> None:
        """Refuse what one packed full-state update cannot carry.

        Raises:
            WeightBridgeUnavailableError: shards, tensor parallelism or several nodes.
            MalformedManifest: counts that contradict each other.

        """
        if self.kind not in _SUPPORTED_KINDS:
            raise WeightBridgeUnavailableError(
                f"weight layout {self.kind!r} is not supported by this bridge, expected one of "
                f"{sorted(_SUPPORTED_KINDS)}. Publish a gathered full-state update, or the shards "
                "of all ranks as a group: GroupPublisher."
            )
        sharded = {
            "tensor-parallel": self.tensor_parallel_size,
            "pipeline-parallel": self.pipeline_parallel_size,
            "expert-parallel": self.expert_parallel_size,
        }
        for name, degree in sharded.items():
            if degree != 1:
                raise WeightBridgeUnavailableError(
                    f"{name} weight layouts are not supported by this bridge (degree {degree}, "
                    "expected 1). Publish a gathered full-state update for each consumer, or the "
                    "shards of all ranks as a group: GroupPublisher."
                )
        if self.node_count != 1 or self.rdma_enabled:
            raise WeightBridgeUnavailableError(
                "multi-node/RDMA weight transport is not implemented "
                f"(node_count={self.node_count}, rdma_enabled={self.rdma_enabled}) for one packed "
                "update. Publish a gathered full-state update on one node, or the shards of all "
                "ranks as a group: GroupPublisher, over 'nixl' between machines."
            )
        if not 0 <= self.rank < self.world_size:
            raise MalformedManifest(
                f"weight layout rank {self.rank} is outside its world of {self.world_size}, "
                "expected 0 <= rank < world_size. Pass the rank that publishes."
            )
        if self.data_parallel_size < 1 or not 0 <= self.zero_stage <= 3:  # noqa: PLR2004 - ZeRO stages
            raise MalformedManifest(
                f"weight layout has data_parallel_size={self.data_parallel_size} (expected >= 1) "
                f"and zero_stage={self.zero_stage} (expected 0 to 3). Pass the trainer's counts."
            )


def with_layout(
    metadata: Mapping[str, JSONValue],
) -> tuple[Mapping[str, JSONValue], WeightLayout]:
    """Frozen metadata with ``layout`` filled, and that layout.

    Raises:
        MalformedManifest: not a mapping, an unknown key, a wrong type.

    """
    layout = WeightLayout.from_metadata(metadata)
    written = MappingProxyType(layout.to_metadata())
    return MappingProxyType({**metadata, "layout": written}), layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One box of a whole tensor, and where it lies in the rank's own tensor.

    Attributes:
        name: of the whole tensor.
        global_shape: shape of the whole tensor.
        offset: first index in each dimension of the whole; one number where `is_flat`.
        shape: of the box; one number where `is_flat`.
        local_offset: first index of the box in the rank's own tensor, same dimensions as `shape`.
        is_flat: `offset`, `shape` and `local_offset` count elements in row-major order.
        replica: 0 for the copy that counts, k for the k-th further copy of the same elements.

    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local_offset: tuple[int, ...]
    is_flat: bool = False
    replica: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What one tensor of a rank consists of.

    Attributes:
        dtype: wire name, such as ``bfloat16``.
        shape: of the rank's own tensor, as it travels.
        pieces: what it holds; together they fill it, except for padding.

    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def require_supported(metadata: Mapping[str, JSONValue] | None) -> None:
    """Refuse a layout that one packed full-state update cannot carry; raises what that does."""
    WeightLayout.from_metadata(metadata).validate_supported()
