"""Requests and init infos: typed, plain JSON, and nothing that a peer sends is believed."""

import json
from typing import Any

import pytest

from rl_bridge import TorchDistributedWeightSyncInitInfo
from rl_bridge.errors import (
    DuplicateTensorName,
    MalformedManifest,
    ShapeMismatch,
    UnknownDtype,
    WeightBridgeError,
)
from rl_bridge.strategies.requests import (
    AbandonedWeightUpdateRequest,
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    EmptyWeightSyncInitInfo,
    GPUHandle,
    PackedCudaIpcWeightUpdateRequest,
    SharedMemoryWeightUpdateRequest,
    WeightSyncInitInfo,
    WeightUpdateRequest,
    init_info_from_json,
)

FIELDS: dict[str, Any] = {
    "update_id": "a" * 32,
    "weight_version": 3,
    "batch": 0,
    "num_batches": 2,
    "names": ("q.weight", "k.weight"),
    "dtypes": ("bfloat16", "float32"),
    "shapes": ((4, 8), ()),
    "sizes": (32, 1),
    "manifest": "{}",
}
GPUS = (
    GPUHandle(gpu="GPU-1", handle='{"pid":1}', manifest="{}"),
    GPUHandle(gpu="GPU-2", handle='{"pid":2}', manifest="{}"),
)
REQUESTS = [
    BroadcastWeightUpdateRequest(**FIELDS),
    SharedMemoryWeightUpdateRequest(**FIELDS),
    CudaIpcWeightUpdateRequest(**FIELDS, handles=GPUS, offsets=(0, 256)),
    PackedCudaIpcWeightUpdateRequest(**FIELDS, handles=GPUS, offsets=(0, 256)),
    AbandonedWeightUpdateRequest(update_id="a" * 32, weight_version=3, reason="a rank died"),
]
INFO = TorchDistributedWeightSyncInitInfo(
    address="127.0.0.1",
    port=4000,
    token="0" * 64,
    publisher_id="b" * 32,
    group_name="weights",
    backend="gloo",
    world_size=5,
)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: str(one.kind))
def test_a_request_comes_back_as_what_it_was(request_: WeightUpdateRequest) -> None:
    text = request_.to_json()
    again = WeightUpdateRequest.from_json(text)
    assert again == request_
    assert type(again) is type(request_)
    assert again.to_json() == text
    with pytest.raises(ValueError, match="frozen"):
        again.batch = 1  # type: ignore[misc]  # that is what is tried


def test_the_fields_that_other_loaders_read_are_there() -> None:
    broadcast, shared, ipc, packed, _ = (one.to_named_weights() for one in REQUESTS)
    for found in (broadcast, shared, ipc, packed):
        assert found["names"] == ["q.weight", "k.weight"]
        assert found["dtypes"] == ["bfloat16", "float32"]
        assert found["shapes"] == [[4, 8], []]
        assert found["sizes"] == [32, 1]
        assert json.loads(json.dumps(found)) == found
    assert broadcast["extras"] is None
    assert shared["extras"] is None
    assert (ipc["packed"], packed["packed"]) == (False, True)
    assert packed["extras"] == [{"ipc_handles": {"GPU-1": {"pid": 1}, "GPU-2": {"pid": 2}}}]
    assert [one["ipc_handles"]["GPU-2"] for one in ipc["extras"]] == [
        {"handle": {"pid": 2}, "offset": 0},
        {"handle": {"pid": 2}, "offset": 256},
    ]


HOSTILE: dict[str, tuple[dict[str, Any], type[WeightBridgeError]]] = {
    "no such kind": ({"kind": "pickle"}, MalformedManifest),
    "a kind that is no text": ({"kind": ["broadcast"]}, MalformedManifest),
    "a field too many": ({"code": "os.system"}, MalformedManifest),
    "a field too few": ({"names": None}, MalformedManifest),
    "an id that is a path": ({"update_id": "../" * 8}, MalformedManifest),
    "a negative version": ({"weight_version": -1}, MalformedManifest),
    "a version that is true": ({"weight_version": True}, MalformedManifest),
    "a batch behind the last": ({"batch": 2, "manifest": None}, MalformedManifest),
    "no batches": ({"num_batches": 0}, MalformedManifest),
    "a first batch without a manifest": ({"manifest": None}, MalformedManifest),
    "a second manifest": ({"batch": 1}, MalformedManifest),
    "a name twice": ({"names": ["k.weight", "k.weight"]}, DuplicateTensorName),
    "names without dtypes": ({"dtypes": []}, MalformedManifest),
    "an unknown dtype": ({"dtypes": ["bfloat16", "object"]}, UnknownDtype),
    "a negative dimension": ({"shapes": [[-4, -8], []]}, MalformedManifest),
    "a size that is not the shape's": ({"sizes": [33, 1]}, ShapeMismatch),
    "a dimension beyond 63 bits": ({"shapes": [[2**63, 8], []]}, MalformedManifest),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_is_refused(name: str) -> None:
    fields, error = HOSTILE[name]
    text = json.dumps({**json.loads(REQUESTS[0].to_json()), **fields})
    with pytest.raises(error, match=r"Send what to_json wrote|Cast the tensor"):
        WeightUpdateRequest.from_json(text)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"handles": []}, id="no GPU"),
        pytest.param({"handles": [GPUS[0].model_dump()] * 2}, id="a GPU twice"),
        pytest.param({"offsets": [0]}, id="an offset missing"),
        pytest.param({"offsets": [0, -1]}, id="a negative offset"),
        pytest.param({"handles": [{"gpu": "../x", "handle": "{}"}]}, id="no UUID"),
        pytest.param({"handles": [{"gpu": "GPU-1", "handle": "{}"}]}, id="no manifest of it"),
        pytest.param({"handles": [GPUS[0].model_dump() | {"handle": "[["}]}, id="a torn handle"),
        pytest.param({"handles": [GPUS[0].model_dump() | {"handle": "1"}]}, id="no handle"),
    ],
)
def test_a_hostile_handle_map_is_refused(fields: dict[str, Any]) -> None:
    text = json.dumps({**json.loads(REQUESTS[3].to_json()), **fields})
    with pytest.raises(MalformedManifest):
        WeightUpdateRequest.from_json(text)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"kind":1}', None, 5, b"{}"], ids=repr
)
def test_text_of_no_request_is_refused(text: object) -> None:
    with pytest.raises(MalformedManifest):
        WeightUpdateRequest.from_json(text)


def test_text_behind_a_request_and_keys_that_come_twice_are_refused() -> None:
    text = REQUESTS[0].to_json()
    with pytest.raises(MalformedManifest):
        WeightUpdateRequest.from_json(text + "{}")
    with pytest.raises(MalformedManifest, match="repeats the keys"):
        WeightUpdateRequest.from_json(text[:-1] + ',"batch":1}')


@pytest.mark.parametrize("info", [EmptyWeightSyncInitInfo(), INFO], ids=["empty", "broadcast"])
def test_an_init_info_comes_back_as_what_it_was(
    info: EmptyWeightSyncInitInfo | TorchDistributedWeightSyncInitInfo,
) -> None:
    assert isinstance(info, WeightSyncInitInfo)
    assert init_info_from_json(info.to_json()) == info


@pytest.mark.parametrize("text", ["{}", '{"kind":"empty"}x', "[1]", None, '{"kind":"full"}'])
def test_text_of_no_init_info_is_refused(text: object) -> None:
    with pytest.raises(MalformedManifest):
        init_info_from_json(text)
