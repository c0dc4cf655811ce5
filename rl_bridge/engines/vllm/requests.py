"""Requests for vLLM's own weight-transfer backends, made from a manifest.

For those who drive ``llm.update_weights`` themselves, with the backend ``ipc`` or ``nccl``. These
backends write into the serving model: an update that fails half-way is not undone, nothing is
proven, and no request may run meanwhile. `rl_bridge.vllm.VLLMEngineAdapter` has neither limit.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from rl_bridge.engines.vllm import require
from rl_bridge.errors import IncompatibleUpdate, WeightBridgeUnavailableError
from rl_bridge.manifest.model import WeightUpdateManifest

_LOG = logging.getLogger(__name__)
_SHOWN = 5

Request = dict[str, Any]
"""What ``llm.update_weights`` takes: ``{"update_info": {...}}``."""

Handle = tuple[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...]]]

# ---- buffers: each side cuts them by itself, and must do so by the same rule ---------------------

DEFAULT_BUFFER_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PackedBuffer:
    """Tensors that lie in one buffer, one behind the other."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(self.sizes)

    def fill(self, memory: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors to the start of `memory`, which is uint8."""
        offset = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            memory[offset : offset + size].copy_(flat_bytes(tensors[name]))
            offset += size


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in row-major order, as bytes."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def overfull_buffers(names: Sequence[str], sizes: Sequence[int], limit: int) -> list[PackedBuffer]:
    """Cut as ``nccl`` does: a buffer ends behind the tensor that makes it larger than `limit`."""
    ends, total = [], 0
    for index, size in enumerate(sizes):
        total += size
        if total > limit or index == len(sizes) - 1:
            ends.append(index + 1)
            total = 0
    return _cut(names, sizes, ends)


def full_buffers(names: Sequence[str], sizes: Sequence[int], limit: int) -> list[PackedBuffer]:
    """Cut as ``ipc`` does, whose one buffer has that size: before the tensor that does not fit."""
    ends, total = [], 0
    for index, size in enumerate(sizes):
        if size > limit:
            raise IncompatibleUpdate(
                f"tensor {names[index]!r} has {size} bytes, the buffer {limit}. Give it at least "
                f"{size}."
            )
        if total + size > limit:
            ends.append(index)
            total = 0
        total += size
    return _cut(names, sizes, [*ends, len(sizes)] if total else ends)


def _cut(names: Sequence[str], sizes: Sequence[int], ends: Sequence[int]) -> list[PackedBuffer]:
    return [
        PackedBuffer(tuple(names[first:end]), tuple(sizes[first:end]))
        for first, end in pairwise([0, *ends])
    ]


# ---- requests -----------------------------------------------------------------------------------


def cuda_handle(tensor: torch.Tensor) -> Handle:
    """The GPU's UUID, and what another process rebuilds the tensor with."""
    if not tensor.is_cuda:
        raise WeightBridgeUnavailableError(
            f"a tensor is on {tensor.device}, expected CUDA: vLLM's ipc backend shares GPU memory. "
            "Use VLLMEngineAdapter, which installs CPU tensors."
        )
    # What is shared must be written: the other process knows nothing of this one's streams.
    torch.cuda.current_stream(tensor.device).synchronize()
    return str(torch.cuda.get_device_properties(tensor.device).uuid), reduce_tensor(tensor)  # type: ignore[no-untyped-call]  # torch has no types here


class VLLMIPCWeightUpdateRequestBuilder:
    """Builds requests for vLLM's ``ipc`` backend, and keeps the tensors until `release`.

    The handles in a request are Python objects. They reach an engine in this process and Ray actors
    as they are; engines in processes of their own, and servers, take them only pickled, by vLLM's
    own clients, where ``VLLM_ALLOW_INSECURE_SERIALIZATION=1`` allows it.
    """

    def __init__(
        self,
        *,
        is_checkpoint_format: bool = True,
        _export: Callable[[torch.Tensor], Handle] = cuda_handle,
    ) -> None:
        """Configure; vLLM is looked at when the first request is made.

        Args:
            is_checkpoint_format: False says that the tensors have the engine's own names and
                shapes. A vLLM whose requests cannot say so (since 0.22) takes a checkpoint's, or is
                told in its ``start_weight_update``.

        """
        self._is_checkpoint_format = is_checkpoint_format
        self._export = _export
        self._kept: dict[str, list[torch.Tensor]] = {}

    @cached_property
    def _form(self) -> "_Form":
        form = _Form.of("ipc_engine", "IPCWeightTransferUpdateInfo", _IPC_FIELDS)
        if not self._is_checkpoint_format and "is_checkpoint_format" not in form.fields:
            _LOG.warning(
                "is_checkpoint_format=False is not part of this vLLM's requests: it loads what is "
                "sent as a checkpoint, unless start_weight_update is told otherwise"
            )
        return form

    def __call__(
        self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]
    ) -> Request:
        """One request with a handle for each tensor.

        Raises:
            IncompatibleUpdate: the tensors are not those of the manifest.
            WeightBridgeUnavailableError: a tensor is not on a CUDA device.

        """
        given = {name: one.detach().contiguous() for name, one in _checked(manifest, tensors)}
        handles = [self._handle(name, tensor) for name, tensor in given.items()]
        self._kept.setdefault(manifest.update_id, []).extend(given.values())
        return self._request({**_metadata(manifest), "ipc_handles": handles})

    def packed(
        self,
        manifest: WeightUpdateManifest,
        tensors: Mapping[str, torch.Tensor],
        *,
        buffer_nbytes: int = DEFAULT_BUFFER_NBYTES,
    ) -> Iterator[Request]:
        """Several requests over one buffer, for an engine whose ``init_info`` says ``packed``.

        Each has the bytes of the tensors that fit. Ask for the next one only when the engine has
        answered: it overwrites the buffer.

        Raises:
            IncompatibleUpdate: as above, or a tensor is larger than the buffer.
            WeightBridgeUnavailableError: a tensor is not on a CUDA device.

        """
        given = dict(_checked(manifest, tensors))
        names = list(given)
        buffers = full_buffers(names, [given[name].nbytes for name in names], buffer_nbytes)
        if not buffers:
            return
        nbytes, device = max(buffer.nbytes for buffer in buffers), given[names[0]].device
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._kept.setdefault(manifest.update_id, []).append(memory)
        # Shared once for all requests: each sharing is counted, and an engine lets go of it once.
        handle = self._handle(names[0], memory)
        for buffer in buffers:
            buffer.fill(memory, given)
            if memory.is_cuda:
                torch.cuda.current_stream(memory.device).synchronize()
            info = _metadata(manifest, buffer.names)
            info |= {"ipc_handles": handle, "tensor_sizes": list(buffer.sizes)}
            if "packed" in self._form.fields:
                info["packed"] = True
            yield self._request(info)

    @staticmethod
    def merge(requests: Sequence[Request]) -> Request:
        """One request from those of several GPUs, each of which has the whole update.

        Raises:
            IncompatibleUpdate: they are not of one update.

        """
        first, *others = (request["update_info"] for request in requests)
        if any(_described(info) != _described(first) for info in others):
            raise IncompatibleUpdate(
                "the requests are of different updates. Pass those of one manifest."
            )
        merged: Any
        if isinstance(first["ipc_handles"], dict):
            merged = {}
            for info in (first, *others):
                merged.update(info["ipc_handles"])
        else:
            merged = [dict(handle) for handle in first["ipc_handles"]]
            for info in others:
                for handle, more in zip(merged, info["ipc_handles"], strict=True):
                    handle.update(more)
        return {"update_info": {**first, "ipc_handles": merged}}

    def release(self, update_id: str) -> None:
        """Let go of an update's tensors: the engine has loaded them. Unknown ids are ignored."""
        self._kept.pop(update_id, None)

    def _handle(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        try:
            gpu, (rebuild, arguments) = self._export(tensor)
        except WeightBridgeUnavailableError as error:
            raise WeightBridgeUnavailableError(f"tensor {name!r}: {error}") from error
        return {gpu: (rebuild, arguments) if self._form.with_function else arguments}

    def _request(self, info: Request) -> Request:
        if "is_checkpoint_format" in self._form.fields:
            info["is_checkpoint_format"] = self._is_checkpoint_format
        return {"update_info": info}


class VLLMNCCLWeightUpdateRequestBuilder:
    """Builds requests for vLLM's ``nccl`` backend, and the buffers to broadcast meanwhile.

        llm.init_weight_transfer_engine(builder.init_request("10.0.0.1", 29500, world_size=3))
        # in another thread, since the workers receive while this one sends:
        llm.update_weights(builder(manifest))
        for buffer in builder.buffers(manifest, tensors):
            group.broadcast(buffer, src=0)

    The workers cut what they receive by the request alone: `buffers` must be sent as they come.
    """

    def __init__(
        self,
        *,
        packed: bool = True,
        packed_buffer_size_bytes: int = DEFAULT_BUFFER_NBYTES,
        packed_num_buffers: int = 2,
    ) -> None:
        """Configure; both sides must use the same values, which the requests carry.

        Args:
            packed: many tensors in one broadcast.
            packed_buffer_size_bytes: a buffer is sent once it holds more than that.
            packed_num_buffers: how many the workers receive in turn.

        Raises:
            ValueError: a size or number below 1.

        """
        if packed_buffer_size_bytes < 1 or packed_num_buffers < 1:
            raise ValueError(
                f"packed_buffer_size_bytes={packed_buffer_size_bytes}, "
                f"packed_num_buffers={packed_num_buffers}: expected 1 or more."
            )
        self._packing = {
            "packed": packed,
            "packed_buffer_size_bytes": packed_buffer_size_bytes,
            "packed_num_buffers": packed_num_buffers,
        }

    @property
    def is_packed(self) -> bool:
        """Whether many tensors go in one broadcast."""
        return bool(self._packing["packed"])

    def init_request(
        self, master_address: str, master_port: int, *, world_size: int, rank_offset: int = 1
    ) -> Request:
        """What ``llm.init_weight_transfer_engine`` takes.

        Args:
            master_address: where the trainer waits for the workers.
            master_port: its port.
            world_size: the trainer and all workers.
            rank_offset: rank of the first worker.

        """
        info: Request = {
            "master_address": master_address,
            "master_port": master_port,
            "world_size": world_size,
            "rank_offset": rank_offset,
        }
        form = _Form.of("nccl_engine", "NCCLWeightTransferInitInfo", _NCCL_INIT_FIELDS)
        return {"init_info": info | form.known(self._packing)}

    def __call__(self, manifest: WeightUpdateManifest) -> Request:
        """What ``llm.update_weights`` takes: what `buffers` will send, in its order."""
        form = _Form.of("nccl_engine", "NCCLWeightTransferUpdateInfo", _NCCL_FIELDS)
        return {"update_info": _metadata(manifest) | form.known(self._packing)}

    def layout(self, manifest: WeightUpdateManifest) -> list[PackedBuffer]:
        """The packed buffers: which tensors each has, and how large it is."""
        table = manifest.table
        sizes = [table.nbytes[row] for row in table.rows.values()]
        limit = self._packing["packed_buffer_size_bytes"]
        return overfull_buffers(list(table.rows), sizes, limit)

    def buffers(
        self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """What to broadcast, in order: packed bytes, or one tensor after another.

        Raises:
            IncompatibleUpdate: the tensors are not those of the manifest.

        """
        given = dict(_checked(manifest, tensors))
        if not self.is_packed:
            yield from (tensor.detach().contiguous() for tensor in given.values())
            return
        for buffer in self.layout(manifest):
            yield torch.cat([flat_bytes(given[name]) for name in buffer.names])


# ---- what this vLLM takes -----------------------------------------------------------------------

_DESCRIPTION = frozenset({"names", "dtype_names", "shapes"})
_PACKING = frozenset({"packed", "packed_buffer_size_bytes", "packed_num_buffers"})
# Of vLLM 0.32, for whoever builds requests where no vLLM is installed.
_IPC_FIELDS = _DESCRIPTION | {"ipc_handles", "ipc_handles_pickled", "tensor_sizes"}
_NCCL_FIELDS = _DESCRIPTION
_NCCL_INIT_FIELDS = _PACKING | {"master_address", "master_port", "rank_offset", "world_size"}


class _Form:
    """The fields that a request may have. They moved between versions of vLLM, and back."""

    def __init__(self, names: frozenset[str], *, with_function: bool = False) -> None:
        self.fields = names
        # Older handles are pairs: the function that rebuilds a tensor, and its arguments.
        self.with_function = with_function

    @classmethod
    def of(cls, module: str, name: str, otherwise: frozenset[str]) -> "_Form":
        """The form that the vLLM of this process has."""
        if find_spec("vllm") is None:
            return cls(otherwise)
        kind = getattr(require(f"vllm.distributed.weight_transfer.{module}"), name)
        found = {item.name: str(item.type) for item in fields(kind)}
        return cls(frozenset(found), with_function="Callable" in found.get("ipc_handles", ""))

    def known(self, values: Mapping[str, Any]) -> Request:
        """The values that have a field."""
        return {name: value for name, value in values.items() if name in self.fields}


def _metadata(manifest: WeightUpdateManifest, names: Sequence[str] | None = None) -> Request:
    table = manifest.table
    rows = [table.rows[name] for name in (names or table.rows)]
    return {
        "names": list(names or table.rows),
        "dtype_names": [table.dtypes[row] for row in rows],
        "shapes": [list(table.shapes[row]) for row in rows],
    }


def _described(info: Request) -> Request:
    return {name: info.get(name) for name in (*_DESCRIPTION, "tensor_sizes")}


def _checked(
    manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The update's tensors in its order, tied names too: an engine may not tie them."""
    table = manifest.table
    missing = [name for name in table.rows if name not in tensors]
    strange = [name for name in tensors if name not in table.rows]
    if missing or strange:
        raise IncompatibleUpdate(
            f"version {manifest.weight_version} has {len(table.rows)} tensors; of these "
            f"{missing[:_SHOWN]} are missing, and {strange[:_SHOWN]} are none of them. Pass what "
            "import_update returned."
        )
    for name, row in table.rows.items():
        tensor = tensors[name]
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        expected = (table.dtypes[row], tuple(table.shapes[row]))
        if found != expected:
            raise IncompatibleUpdate(
                f"tensor {name!r} is {found[0]}{list(found[1])}, the manifest says "
                f"{expected[0]}{list(expected[1])}. Pass what import_update returned."
            )
        yield name, tensor
