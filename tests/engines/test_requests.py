"""Requests for vLLM's own backends, given to vLLM itself: it takes them, and reads the same."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.engines.vllm.requests import (
    VLLMIPCWeightUpdateRequestBuilder,
    VLLMNCCLWeightUpdateRequestBuilder,
    full_buffers,
)

WEIGHTS = {
    f"layer.{n}": torch.randn(n + 1, 3, generator=torch.Generator().manual_seed(n)).to(dtype)
    for n, dtype in enumerate([torch.float32, torch.bfloat16] * 6)
}


@pytest.fixture
def manifest() -> WeightUpdateManifest:
    with make_weight_bridge("local-clone") as bridge:
        return bridge.publish(WEIGHTS, weight_version=1)


def exported(tensor: torch.Tensor) -> Any:
    """What stands for a CUDA handle: the tensor itself."""
    return "GPU-0", (torch.empty, ("handle", tensor))


def test_an_ipc_request_is_one_for_vllm(manifest: WeightUpdateManifest) -> None:
    builder = VLLMIPCWeightUpdateRequestBuilder(is_checkpoint_format=False, _export=exported)
    info = IPCWeightTransferUpdateInfo(**builder(manifest, WEIGHTS)["update_info"])
    assert sorted(info.names) == sorted(WEIGHTS)
    assert isinstance(info.ipc_handles, list)
    for name, handle in zip(info.names, info.ipc_handles, strict=True):
        # Engines of this version read the arguments, and no function.
        assert torch.equal(handle["GPU-0"][1], WEIGHTS[name])


def test_packed_ipc_requests_unpack_to_the_tensors(manifest: WeightUpdateManifest) -> None:
    builder = VLLMIPCWeightUpdateRequestBuilder(_export=exported)
    seen: dict[str, torch.Tensor] = {}
    count = 0
    for request in builder.packed(manifest, WEIGHTS, buffer_nbytes=200):
        count += 1
        info = IPCWeightTransferUpdateInfo(**request["update_info"])
        assert isinstance(info.ipc_handles, dict)
        assert info.tensor_sizes is not None
        packed = info.ipc_handles["GPU-0"][1][: sum(info.tensor_sizes)].clone()
        dtypes = [getattr(torch, name) for name in info.dtype_names]
        seen |= dict(unpack_tensor(packed, info.names, info.shapes, dtypes, info.tensor_sizes))
    assert count > 1
    assert seen.keys() == WEIGHTS.keys()
    assert all(torch.equal(seen[name], tensor) for name, tensor in WEIGHTS.items())


@pytest.mark.parametrize("limit", [1, 47, 48, 200, 10_000])
@pytest.mark.filterwarnings("ignore:Tensor")
def test_nccl_buffers_are_those_that_vllm_would_make(
    manifest: WeightUpdateManifest, limit: int
) -> None:
    builder = VLLMNCCLWeightUpdateRequestBuilder(packed_buffer_size_bytes=limit)
    info = NCCLWeightTransferUpdateInfo(**builder(manifest)["update_info"])
    items = iter([(name, WEIGHTS[name]) for name in info.names])
    for buffer in builder.buffers(manifest, WEIGHTS):
        theirs = pack_tensors(items, lambda item: item[1], limit)
        assert theirs is not None
        assert torch.equal(theirs.packed_tensor, buffer)
    assert pack_tensors(items, lambda item: item[1], limit) is None, "vLLM would send more"


def test_the_nccl_init_request_is_one_for_vllm() -> None:
    builder = VLLMNCCLWeightUpdateRequestBuilder(packed_buffer_size_bytes=64)
    info = NCCLWeightTransferInitInfo(
        **builder.init_request("127.0.0.1", 1, world_size=2)["init_info"]
    )
    assert (info.packed, info.packed_buffer_size_bytes, info.rank_offset) == (True, 64, 1)


@pytest.mark.parametrize("limit", [48, 60, 200])
def test_ipc_buffers_are_cut_where_vllm_cuts(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import packed_tensor

    # Its producer wants a GPU for nothing but the buffer and the stream.
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **{**k, "device": "cpu"}))
    monkeypatch.setattr(packed_tensor, "reduce_tensor", lambda _: (None, ()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=int))
    fitting = [(n, t) for n, t in WEIGHTS.items() if t.nbytes <= limit]
    theirs = packed_tensor.packed_ipc_producer(iter(fitting), "GPU-0", lambda item: item[1], limit)
    ours = full_buffers([n for n, _ in fitting], [t.nbytes for _, t in fitting], limit)
    assert [tuple(chunk.names) for chunk in theirs] == [buffer.names for buffer in ours]
    assert len(ours) > 1
