"""Requests for vLLM's own backends. Only the making of CUDA handles is replaced; no vLLM is needed.

What vLLM itself says to these requests is asked in `tests/engines/test_requests.py`.
"""

import json
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from rl_bridge import (
    TensorBridge,
    WeightBridgeUnavailableError,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.engines.vllm import requests
from rl_bridge.engines.vllm.requests import (
    VLLMIPCWeightUpdateRequestBuilder,
    VLLMNCCLWeightUpdateRequestBuilder,
)
from rl_bridge.errors import IncompatibleUpdate

Update = tuple[WeightUpdateManifest, dict[str, torch.Tensor]]


def weights() -> dict[str, torch.Tensor]:
    head = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    return {
        "embed": head,
        "head": head,  # tied
        "norm": torch.tensor([1.5, -2.0, 3.0]),
        "scale": torch.tensor(7, dtype=torch.int64),
        "turned": torch.arange(8.0).reshape(2, 4).t(),
    }


@pytest.fixture
def bridge() -> Iterator[TensorBridge]:
    with make_weight_bridge("local-clone") as bridge:
        yield bridge


@pytest.fixture
def update(bridge: TensorBridge) -> Update:
    manifest = bridge.publish(weights(), weight_version=1)
    return manifest, dict(bridge.import_update(manifest))


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is installed, its form is asked; these tests are about the one that is known."""
    monkeypatch.setattr(requests, "find_spec", lambda _: None)


def exported(tensor: torch.Tensor, gpu: str = "GPU-0") -> Any:
    """What stands for a CUDA handle: the address, as another process would reopen it."""
    return gpu, (torch.empty, ("handle", tensor.data_ptr(), tensor.nbytes))


def builder(**options: Any) -> VLLMIPCWeightUpdateRequestBuilder:
    return VLLMIPCWeightUpdateRequestBuilder(_export=exported, **options)


# ---- ipc ----------------------------------------------------------------------------------------


def test_a_request_describes_every_tensor_and_has_its_handle(update: Update) -> None:
    info = builder()(*update)["update_info"]
    assert set(info) == {"names", "dtype_names", "shapes", "ipc_handles"}
    assert sorted(info["names"]) == sorted(weights())
    for name, dtype, shape, handle in zip(*info.values(), strict=True):
        tensor = update[1][name]
        assert getattr(torch, dtype) == tensor.dtype
        assert shape == list(tensor.shape)
        assert set(handle) == {"GPU-0"}
        assert handle["GPU-0"][2] == tensor.nbytes
    described = {key: value for key, value in info.items() if key != "ipc_handles"}
    assert json.loads(json.dumps(described)) == described


def test_the_tensors_live_until_their_update_is_released(update: Update) -> None:
    import weakref

    manifest, tensors = update
    made: list[weakref.ref[torch.Tensor]] = []

    def noting(tensor: torch.Tensor) -> Any:
        made.append(weakref.ref(tensor))
        return exported(tensor)

    keeper = VLLMIPCWeightUpdateRequestBuilder(_export=noting)
    request = keeper(manifest, tensors)
    tensors.clear()
    assert all(alive() is not None for alive in made)
    keeper.release("another update")
    assert all(alive() is not None for alive in made)
    keeper.release(manifest.update_id)
    assert all(alive() is None for alive in made)
    assert request["update_info"]["names"]
    keeper.release(manifest.update_id)  # twice is once


def test_a_tensor_that_is_not_contiguous_is_shared_as_a_copy(update: Update) -> None:
    shared: dict[int, torch.Tensor] = {}

    def noting(tensor: torch.Tensor) -> Any:
        shared[tensor.data_ptr()] = tensor
        return exported(tensor)

    manifest, tensors = update
    turned = {**tensors, "turned": weights()["turned"]}
    assert not turned["turned"].is_contiguous()
    VLLMIPCWeightUpdateRequestBuilder(_export=noting)(manifest, turned)
    assert all(tensor.is_contiguous() for tensor in shared.values())
    assert any(torch.equal(tensor, turned["turned"]) for tensor in shared.values())


def test_a_cpu_tensor_is_refused_by_name_with_what_to_do(update: Update) -> None:
    with pytest.raises(
        WeightBridgeUnavailableError, match=r"'embed': a tensor is on cpu.*VLLMEngineAdapter"
    ):
        VLLMIPCWeightUpdateRequestBuilder()(*update)


@pytest.mark.parametrize("wrong", ["missing", "strange", "dtype", "shape"])
def test_tensors_of_another_update_are_refused(update: Update, wrong: str) -> None:
    manifest, tensors = update
    if wrong == "missing":
        del tensors["norm"]
    elif wrong == "strange":
        tensors["more"] = torch.ones(1)
    elif wrong == "dtype":
        tensors["norm"] = tensors["norm"].double()
    else:
        tensors["norm"] = tensors["norm"][:2]
    with pytest.raises(IncompatibleUpdate, match="import_update returned"):
        builder()(manifest, tensors)
    with pytest.raises(IncompatibleUpdate, match="import_update returned"):
        list(VLLMNCCLWeightUpdateRequestBuilder().buffers(manifest, tensors))


def test_a_tensor_that_is_larger_than_the_buffer_is_refused(update: Update) -> None:
    with pytest.raises(IncompatibleUpdate, match=r"'turned' has 32 bytes.*at least 32"):
        list(builder().packed(*update, buffer_nbytes=31))


def test_handles_of_several_gpus_are_merged(update: Update) -> None:
    parts = [
        VLLMIPCWeightUpdateRequestBuilder(_export=partial(exported, gpu=gpu))(*update)
        for gpu in ("GPU-0", "GPU-1")
    ]
    merged = VLLMIPCWeightUpdateRequestBuilder.merge(parts)["update_info"]
    assert merged["names"] == parts[0]["update_info"]["names"]
    assert all(set(handle) == {"GPU-0", "GPU-1"} for handle in merged["ipc_handles"])
    assert set(parts[0]["update_info"]["ipc_handles"][0]) == {"GPU-0"}, "the parts stay"


def test_requests_of_different_updates_are_not_merged(update: Update, bridge: TensorBridge) -> None:
    other = bridge.publish({"norm": torch.ones(3)}, weight_version=2)
    requests_of = [builder()(*update), builder()(other, bridge.import_update(other))]
    with pytest.raises(IncompatibleUpdate, match="different updates"):
        VLLMIPCWeightUpdateRequestBuilder.merge(requests_of)


@pytest.mark.parametrize("flag", [True, False])
def test_the_format_is_said_where_requests_can_say_it(
    update: Update, flag: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="rl_bridge"):
        info = builder(is_checkpoint_format=flag)(*update)["update_info"]
    assert "is_checkpoint_format" not in info
    assert ("is_checkpoint_format=False" in caplog.text) == (not flag)
    older = requests._Form(
        frozenset({"names", "ipc_handles", "is_checkpoint_format", "packed"}), with_function=True
    )
    monkeypatch.setattr(requests._Form, "of", lambda *_: older)
    info = builder(is_checkpoint_format=flag)(*update)["update_info"]
    assert info["is_checkpoint_format"] is flag
    function, arguments = info["ipc_handles"][0]["GPU-0"]
    assert callable(function)
    assert arguments[0] == "handle"
    for request in builder().packed(*update):
        assert request["update_info"]["packed"] is True


# ---- nccl ---------------------------------------------------------------------------------------


def test_unpacked_tensors_are_sent_one_by_one(update: Update) -> None:
    nccl = VLLMNCCLWeightUpdateRequestBuilder(packed=False)
    names = nccl(update[0])["update_info"]["names"]
    for name, tensor in zip(names, nccl.buffers(*update), strict=True):
        assert torch.equal(tensor, update[1][name])
        assert tensor.is_contiguous()


@pytest.mark.parametrize("name", ["packed_buffer_size_bytes", "packed_num_buffers"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        VLLMNCCLWeightUpdateRequestBuilder(**{name: 0})  # type: ignore[arg-type]  # one of two
