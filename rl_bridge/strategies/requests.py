"""Requests from a trainer to an engine's loader, and the init info before the first of them.

A sync is one update. Its requests are batches of that update, in order: the first carries the
manifest, the others name the update, and the last one makes the engine install it. Requests and
init info travel as plain JSON; a peer's text is parsed and checked before it is used.
"""

from collections.abc import Iterable
from math import prod
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, runtime_checkable

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from rl_bridge.errors import DuplicateTensorName, MalformedManifest, ShapeMismatch
from rl_bridge.manifest.canonical import canonical_json, decode_json, malformed
from rl_bridge.manifest.dtypes import dtype_nbytes
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.transports.broadcast.messages import TorchDistributedWeightSyncInitInfo

_REMEDY = "Send what to_json wrote."
_MAX_DIM = 2**63
_Dim = Annotated[StrictInt, Field(ge=0, lt=_MAX_DIM)]
_Id = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]


class WeightUpdateRequest(BaseModel):
    """One batch of one update. `from_json` gives the kind that was sent.

    ``names``, ``dtypes``, ``shapes``, ``sizes``, ``packed`` and ``extras`` are the fields of the
    dict that loaders of other libraries know as ``NamedWeightsUpdateRequest``.

    Attributes:
        update_id: the update that this is a batch of.
        weight_version: its version.
        batch: which batch this is, counted from 0.
        num_batches: of the whole update.
        names: of the batch's tensors.
        dtypes: such as ``bfloat16``.
        shapes: of the tensors.
        sizes: elements of each.
        manifest: the update's manifest as JSON; of the first batch only.

    Raises:
        MalformedManifest: lists that do not fit each other, a batch that is none of the update's, a
            manifest that is missing or too much.
        DuplicateTensorName: a name came twice.
        ShapeMismatch: a size that is not its shape's.
        UnknownDtype: a dtype outside the table.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: StrictStr
    update_id: _Id
    weight_version: Annotated[StrictInt, Field(ge=0, lt=_MAX_DIM)]
    batch: Annotated[StrictInt, Field(ge=0, lt=2**31)] = 0
    num_batches: Annotated[StrictInt, Field(ge=1, lt=2**31)] = 1
    names: tuple[StrictStr, ...] = ()
    dtypes: tuple[StrictStr, ...] = ()
    shapes: tuple[tuple[_Dim, ...], ...] = ()
    sizes: tuple[StrictInt, ...] = ()
    manifest: StrictStr | None = None

    packed: ClassVar[bool] = True
    """Whether the tensors of the update lie in one buffer: in all that `rl_bridge` sends."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch >= self.num_batches:
            raise MalformedManifest(
                f"batch {self.batch} of {self.num_batches}: they count from 0. {_REMEDY}"
            )
        if (self.manifest is not None) != (self.batch == 0 and self._has_manifest):
            has = "no manifest" if self.manifest is None else "a manifest"
            raise MalformedManifest(
                f"{self._what} has {has}: the first batch carries it, no other. {_REMEDY}"
            )
        counts = [len(self.names), len(self.dtypes), len(self.shapes), len(self.sizes)]
        if len(set(counts)) != 1:
            raise MalformedManifest(
                f"{self._what} has {counts} names, dtypes, shapes, sizes. {_REMEDY}"
            )
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise DuplicateTensorName(f"{self._what} names tensor {twice!r} twice. {_REMEDY}")
        for name, dtype, shape, size in zip(
            self.names, self.dtypes, self.shapes, self.sizes, strict=True
        ):
            dtype_nbytes(dtype, tensor=name)
            if prod(shape) != size:
                raise ShapeMismatch(
                    f"{self._what}: tensor {name!r} of shape {list(shape)} has size {size}, "
                    f"expected {prod(shape)} elements. {_REMEDY}"
                )
        return self

    _has_manifest: ClassVar[bool] = True

    @property
    def is_last(self) -> bool:
        """Whether the engine installs the update when it has loaded this batch."""
        return self.batch == self.num_batches - 1

    @property
    def extras(self) -> list[dict[str, Any]] | None:
        """What a reader needs beside names and shapes, in the form of other libraries."""
        return None

    @property
    def _what(self) -> str:
        return f"batch {self.batch} of version {self.weight_version} (update {self.update_id})"

    def to_named_weights(self) -> dict[str, Any]:
        """The dict that loaders of other libraries know: lists, strings and numbers only."""
        return {
            "names": list(self.names),
            "dtypes": list(self.dtypes),
            "shapes": [list(shape) for shape in self.shapes],
            "sizes": list(self.sizes),
            "extras": self.extras,
            "packed": self.packed,
        }

    def to_json(self) -> str:
        """Write it as canonical JSON text."""
        return canonical_json(self.model_dump(mode="json"))

    @staticmethod
    def from_json(text: object) -> "WeightUpdateRequest":
        """Read what `to_json` wrote, of whichever kind.

        Raises:
            MalformedManifest: it is not that.
            WeightManifestValidationError: its fields contradict each other.

        """
        if not isinstance(text, str):
            raise MalformedManifest(
                f"a request is a {type(text).__name__}, expected JSON text. {_REMEDY}"
            )
        value, end = decode_json(text)
        named = value.get("kind") if isinstance(value, dict) else None
        kind = _KINDS.get(named) if isinstance(named, str) else None
        if kind is None or end != len(text):
            raise MalformedManifest(
                f"a request is of no known kind, expected one of {sorted(_KINDS)}. {_REMEDY}"
            )
        try:
            return kind.model_validate(value)
        except ValidationError as error:
            raise malformed("a request's", error, _REMEDY) from error


def columns_of(manifest: WeightUpdateManifest, names: Iterable[str]) -> dict[str, Any]:
    """The fields of a request that describe some of an update's tensors."""
    table, names = manifest.table, tuple(names)
    rows = [table.rows[name] for name in names]
    shapes = tuple(tuple(table.shapes[row]) for row in rows)
    return {
        "names": names,
        "dtypes": tuple(table.dtypes[row] for row in rows),
        "shapes": shapes,
        "sizes": tuple(prod(shape) for shape in shapes),
    }


class BroadcastWeightUpdateRequest(WeightUpdateRequest):
    """The bytes come over the group that trainer and engines have in common."""

    kind: Literal["broadcast"] = "broadcast"


class SharedMemoryWeightUpdateRequest(WeightUpdateRequest):
    """The bytes lie in memory that trainer and engines of one machine share."""

    kind: Literal["shared-memory"] = "shared-memory"


class GPUHandle(BaseModel):
    """Where an update lies on one GPU.

    Attributes:
        gpu: its UUID.
        handle: what opens the memory there, as JSON text.
        manifest: the manifest of that GPU's copy, without its layout; of the first batch only.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9-]{1,128}$")]
    handle: StrictStr
    manifest: StrictStr | None = None

    @model_validator(mode="after")
    def _check_handle(self) -> Self:
        value, end = decode_json(self.handle)
        if not isinstance(value, dict) or end != len(self.handle):
            raise MalformedManifest(f"the handle for GPU {self.gpu} is no JSON object. {_REMEDY}")
        return self


class _CudaIpcRequest(WeightUpdateRequest):
    """The common part of the two kinds of requests for GPU memory.

    Attributes:
        handles: one for each GPU that has a copy.
        offsets: byte of that memory at which each tensor begins.

    """

    handles: tuple[GPUHandle, ...]
    offsets: tuple[_Dim, ...] = ()

    @model_validator(mode="after")
    def _check_handles(self) -> Self:
        gpus = [one.gpu for one in self.handles]
        if not gpus or len(set(gpus)) != len(gpus):
            raise MalformedManifest(
                f"{self._what} has handles for the GPUs {gpus}, expected one for each. {_REMEDY}"
            )
        if len(self.offsets) != len(self.names):
            raise MalformedManifest(
                f"{self._what} has {len(self.offsets)} offsets for {len(self.names)} tensors. "
                f"{_REMEDY}"
            )
        if any((one.manifest is None) != (self.batch > 0) for one in self.handles):
            raise MalformedManifest(
                f"{self._what}: the first batch carries each GPU's manifest. {_REMEDY}"
            )
        return self


class CudaIpcWeightUpdateRequest(_CudaIpcRequest):
    """The bytes lie in GPU memory; `extras` has an entry for each tensor."""

    kind: Literal["cuda-ipc"] = "cuda-ipc"
    packed: ClassVar[bool] = False

    @property
    def extras(self) -> list[dict[str, Any]] | None:
        """For each tensor, by GPU: the memory's handle and the byte at which the tensor begins."""
        opened = {one.gpu: decode_json(one.handle)[0] for one in self.handles}
        return [
            {"ipc_handles": {gpu: {"handle": what, "offset": at} for gpu, what in opened.items()}}
            for at in self.offsets
        ]


class PackedCudaIpcWeightUpdateRequest(_CudaIpcRequest):
    """The bytes lie in GPU memory, one buffer for all tensors; `extras` has one entry."""

    kind: Literal["packed-cuda-ipc"] = "packed-cuda-ipc"

    @property
    def extras(self) -> list[dict[str, Any]] | None:
        """By GPU: the buffer's handle."""
        return [{"ipc_handles": {one.gpu: decode_json(one.handle)[0] for one in self.handles}}]


class AbandonedWeightUpdateRequest(WeightUpdateRequest):
    """The update will not be completed: its trainer, or another engine, failed.

    An engine that has installed it keeps it; others forget it.

    Attributes:
        reason: what failed.

    """

    kind: Literal["abandoned"] = "abandoned"
    reason: Annotated[StrictStr, Field(max_length=4096)] = ""

    _has_manifest: ClassVar[bool] = False


_KINDS: dict[str, type[WeightUpdateRequest]] = {
    "broadcast": BroadcastWeightUpdateRequest,
    "shared-memory": SharedMemoryWeightUpdateRequest,
    "cuda-ipc": CudaIpcWeightUpdateRequest,
    "packed-cuda-ipc": PackedCudaIpcWeightUpdateRequest,
    "abandoned": AbandonedWeightUpdateRequest,
}


@runtime_checkable
class WeightSyncInitInfo(Protocol):
    """What engines must know before the first sync; one trainer rank makes it for all."""

    def to_json(self) -> str:
        """Write it as JSON text."""


class EmptyWeightSyncInitInfo(BaseModel):
    """Nothing: each manifest says where its bytes are."""

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
    raise MalformedManifest(
        f"the init info is a {type(text).__name__}, expected JSON text. Send what to_json wrote."
    )
