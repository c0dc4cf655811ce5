"""torch's CUDA IPC handles as an input: what is checked, what is opened, and how often."""

import gc
import itertools
import json
import os
import struct
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, rebuild_tensor

from rl_bridge.cuda import torch_handle
from rl_bridge.cuda.torch_handle import Calls, TorchHandle
from rl_bridge.errors import (
    DuplicateTensorName,
    MalformedManifest,
    RangeBeyondSegment,
    ShapeMismatch,
    TransportUnavailable,
    UnknownDtype,
    WeightBridgeError,
    WeightUpdateRejectedError,
)
from rl_bridge.transports import cuda_ipc_requests
from rl_bridge.transports.cuda_ipc_requests import (
    ImportRequest,
    decline_request,
    open_request,
)

GPU, OTHER = "10111213-1415-1617-1819-1a1b1c1d1e1f", "20212223-2425-2627-2829-2a2b2c2d2e2f"
RAW = b"\2c" + bytes(range(64))
_FILES = itertools.count()


class Exporter:
    """Another process's torch: exports CPU tensors as if they were on a GPU, and keeps count."""

    def __init__(self, *, pid: int = 4_000_000, head: bytes = b"\2c") -> None:
        self.file = b"/torch_%d_%d" % (pid, next(_FILES))
        self.head = head
        self.counters: list[int] = []
        self.opened: list[int] = []
        self._storages: list[torch.UntypedStorage] = []
        self.refuse: set[int] = set()
        self.calls = Calls(self._open, self._decline, kind="cpu")

    def reduce(self, tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        """What `reduce_tensor` gives for a tensor on a GPU."""
        number = len(self.counters)
        self.counters.append(1)
        storage = tensor.untyped_storage()
        self._storages.append(storage)
        handle = self.head + number.to_bytes(64, "little")
        arguments = (
            *(type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset()),
            *(torch.storage.TypedStorage, tensor.dtype, 3, handle, storage.nbytes(), 512, False),
            *(self.file, number, b"event", True),
        )
        return rebuild_cuda_tensor, arguments

    def _open(self, device: int, handle: bytes, *rest: Any) -> torch.UntypedStorage:
        nbytes, at, counter, number, event, waits = rest
        assert (device, at, counter, event, waits) == (0, 512, self.file, b"event", True)
        if number in self.refuse:
            raise RuntimeError("CUDA error: invalid resource handle\nand more")
        self.opened.append(number)
        source: Any = self._storages[int.from_bytes(handle[-64:], "little")]
        assert source.nbytes() == nbytes
        # An alias with an end of its own, which takes 1 from the counter.
        storage: torch.UntypedStorage = source.clone()
        weakref.finalize(storage, self._take, number)
        return storage

    def _decline(self, counter: bytes, number: int) -> None:
        assert counter == self.file
        self._take(number)

    def _take(self, number: int) -> None:
        self.counters[number] -= 1


@pytest.fixture
def exporter() -> Exporter:
    return Exporter()


WEIGHTS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(20, dtype=torch.float32)[4:].view(4, 4).t(),
    "c": torch.tensor(5.0),
}


def unpacked(exporter: Exporter, gpu: str = GPU) -> dict[str, Any]:
    return {
        "names": list(WEIGHTS),
        "dtypes": ["float32", "torch.float32", "float32"],
        "shapes": [list(tensor.shape) for tensor in WEIGHTS.values()],
        "extras": [{"ipc_handles": {gpu: exporter.reduce(t)}} for t in WEIGHTS.values()],
        "packed": False,
    }


def packed(exporter: Exporter) -> dict[str, Any]:
    buffer = torch.cat([tensor.reshape(-1) for tensor in WEIGHTS.values()])
    return {
        "names": list(WEIGHTS),
        "dtypes": ["float32"] * 3,
        "shapes": [list(tensor.shape) for tensor in WEIGHTS.values()],
        "sizes": [tensor.numel() for tensor in WEIGHTS.values()],
        "extras": [{"ipc_handles": {GPU: exporter.reduce(buffer)}}],
        "packed": True,
    }


FORMS: dict[str, Callable[[Exporter], dict[str, Any]]] = {"unpacked": unpacked, "packed": packed}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Callable[[Exporter], dict[str, Any]]:
    return FORMS[request.param]


# ---- opening ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["objects", "json"])
def test_each_tensor_arrives_and_each_export_is_opened_once(
    exporter: Exporter, form: Callable[[Exporter], dict[str, Any]], way: str
) -> None:
    request = ImportRequest.of(form(exporter))
    if way == "json":
        request = ImportRequest.of(json.loads(json.dumps(request.to_dict())))
    with open_request(request, device=0, gpu=GPU, calls=exporter.calls) as tensors:
        assert list(tensors) == list(WEIGHTS)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, WEIGHTS[name])
            assert tensor.dtype == WEIGHTS[name].dtype
        assert exporter.counters == [1] * len(exporter.counters)
        del tensor
    gc.collect()
    assert exporter.opened == list(range(len(exporter.counters)))
    assert set(exporter.counters) == {0}, "the exporter may free"


def test_a_request_can_be_opened_once(exporter: Exporter) -> None:
    request = ImportRequest.of(unpacked(exporter))
    with open_request(request, device=0, gpu=GPU, calls=exporter.calls):
        pass
    with (
        pytest.raises(WeightUpdateRejectedError, match=r"a second time.*once for each opening"),
        open_request(request, device=0, gpu=GPU, calls=exporter.calls),
    ):
        pass
    gc.collect()
    assert set(exporter.counters) == {0}, "and not below"


def test_what_does_not_open_is_told_in_the_words_of_the_table_and_all_is_let_go(
    exporter: Exporter,
) -> None:
    request = ImportRequest.of(unpacked(exporter))
    exporter.refuse = {1}
    told = r"CUDA IPC handle reconstruction failed: CUDA error: invalid resource handle\."
    with (
        pytest.raises(TransportUnavailable, match=told) as kept,
        open_request(request, device=0, gpu=GPU, calls=exporter.calls),
    ):
        pass
    assert exporter.opened == [0]
    kept.value.__traceback__ = None
    gc.collect()
    assert exporter.counters == [0, 0, 0]


def test_what_is_not_wanted_is_declined_once(exporter: Exporter) -> None:
    request = ImportRequest.of(unpacked(exporter))
    assert decline_request(request, gpu=OTHER, calls=exporter.calls) == 0
    assert decline_request(request, gpu=GPU, calls=exporter.calls) == 3
    assert decline_request(request, gpu=GPU, calls=exporter.calls) == 0
    assert exporter.counters == [0, 0, 0]
    with (
        pytest.raises(WeightUpdateRejectedError, match="a second time"),
        open_request(request, device=0, gpu=GPU, calls=exporter.calls),
    ):
        pass
    assert exporter.counters == [0, 0, 0]


def test_without_cuda_the_cause_is_told_and_nothing_is_opened(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ImportRequest.of(unpacked(exporter))
    monkeypatch.setattr(cuda_ipc_requests, "cuda_cause", lambda: "no driver today")
    with (
        pytest.raises(TransportUnavailable, match="no driver today"),
        open_request(request, device=0, gpu=GPU),
    ):
        pass
    with open_request(request, device=0, gpu=GPU, calls=exporter.calls) as tensors:
        assert list(tensors) == list(WEIGHTS)


def test_a_gpu_that_the_request_does_not_serve_is_named_and_others_keep_their_exports(
    exporter: Exporter,
) -> None:
    request = ImportRequest.of(unpacked(exporter, OTHER))
    with (
        pytest.raises(TransportUnavailable, match=f"no handles for GPU {GPU}, only for.*{OTHER}"),
        open_request(request, device=0, gpu=GPU, calls=exporter.calls),
    ):
        pass
    assert exporter.counters == [1, 1, 1]


def test_the_exporters_own_process_is_told_to_use_the_tensor() -> None:
    exporter = Exporter(pid=os.getpid())
    request = ImportRequest.of(unpacked(exporter))
    with (
        pytest.raises(TransportUnavailable, match=r"process that made it\. Use the tensor itself"),
        open_request(request, device=0, gpu=GPU, calls=exporter.calls),
    ):
        pass
    assert exporter.opened == []
    assert exporter.counters == [0, 0, 0]


def test_tensors_without_elements_need_no_handle(exporter: Exporter) -> None:
    function, arguments = exporter.reduce(torch.empty(0, 3))
    nothing = (*arguments[:7], None, 0, 0, False, None, None, None, None)
    export = TorchHandle.of((function, nothing))
    assert TorchHandle.from_dict(export.to_dict()) == export
    assert export.open(torch.device("cpu"), exporter.calls).shape == (0, 3)
    assert exporter.opened == []
    assert export.decline(exporter.calls) is False


def test_what_is_remembered_of_exports_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    used = torch_handle._Used()
    monkeypatch.setattr(torch_handle, "_USED", used)
    for _ in range(used.NUM_FILES + 10):
        exporter = Exporter()
        for tensor in (torch.ones(1), torch.ones(1)):
            TorchHandle.of(exporter.reduce(tensor)).decline(exporter.calls)
        assert exporter.counters == [0, 0]
    assert len(used._files) == used.NUM_FILES


# ---- exports that are refused before anything is opened -----------------------------------------


@pytest.mark.parametrize("num_pieces", [1, 9, 10, 4000])
def test_an_expandable_segment_is_refused_with_the_reason(num_pieces: int) -> None:
    # Process, size of a piece, how many there are; then a descriptor for each.
    raw = struct.pack(f"=i4xQQ{num_pieces}i", 7, 20 << 20, num_pieces, *range(num_pieces))
    told = r"expandable segment: .*descriptors.*expandable_segments:True"
    for version in (b"\1", b"\2"):
        with pytest.raises(TransportUnavailable, match=told):
            TorchHandle.of(with_argument(7, version + b"e" + raw))


@pytest.mark.parametrize("head", [b"", b"\1c", b"\2c", b"\3c", b"\x7fc"])
def test_handles_of_older_and_later_torches_are_known(head: bytes) -> None:
    assert TorchHandle.of(Exporter(head=head).reduce(torch.ones(3))).shape == (3,)


def trap(*_: object) -> None:
    pytest.fail("a callable of a request was called")


GOOD: tuple[Any, ...] = Exporter().reduce(torch.ones(2, 3))[1]
BAD: dict[str, tuple[Any, type[WeightBridgeError], str]] = {
    "no pair": ((rebuild_cuda_tensor,), MalformedManifest, "a function and its arguments"),
    "no list": (7, MalformedManifest, "a function and its arguments"),
    "another function": ((trap, GOOD), MalformedManifest, "expected torch's rebuild_cuda_tensor"),
    "a CPU tensor": ((rebuild_tensor, GOOD), MalformedManifest, "rebuild_cuda_tensor"),
    "too few": ((rebuild_cuda_tensor, GOOD[:14]), MalformedManifest, "15 arguments"),
}


def with_argument(place: int, value: Any) -> tuple[Any, tuple[Any, ...]]:
    return rebuild_cuda_tensor, (*GOOD[:place], value, *GOOD[place + 1 :])


BAD |= {
    "a size in text": (with_argument(1, ("2", 3)), MalformedManifest, "has the shape"),
    "a size below 0": (with_argument(1, (-2, 3)), MalformedManifest, "has the shape"),
    "a size too many": (with_argument(1, (2, 3, 1)), MalformedManifest, "other types"),
    "a huge size": (with_argument(1, (2**62, 3)), RangeBeyondSegment, "behind its storage"),
    "a stride below 0": (with_argument(2, (-3, 1)), MalformedManifest, "has the stride"),
    "a stride too long": (with_argument(2, (4, 1)), RangeBeyondSegment, "behind its storage"),
    "an offset too far": (with_argument(3, 1), RangeBeyondSegment, "behind its storage"),
    "an offset that is true": (with_argument(3, True), MalformedManifest, "other types"),
    "no dtype": (with_argument(5, "float32"), MalformedManifest, "the dtype 'float32'"),
    "an odd dtype": (with_argument(5, torch.quint8), UnknownDtype, "Cast the tensor"),
    "no handle": (with_argument(7, b""), MalformedManifest, "has no handle"),
    "a short handle": (with_argument(7, RAW[:-1]), MalformedManifest, "no known form"),
    "a long handle": (with_argument(7, RAW + b"x"), MalformedManifest, "no known form"),
    "another kind": (with_argument(7, b"\2x" + RAW[2:]), MalformedManifest, "no known form"),
    "a handle in text": (with_argument(7, "x" * 66), MalformedManifest, "other types"),
    "a small storage": (with_argument(8, 23), RangeBeyondSegment, "storage of 23 bytes"),
    "a storage below 0": (with_argument(9, -1), MalformedManifest, "other types"),
    "a counter elsewhere": (with_argument(11, b"/etc/passwd"), MalformedManifest, "counter is in"),
    "a way up": (with_argument(11, b"/torch_1_/../x"), MalformedManifest, "counter is in"),
    "a counter below 0": (with_argument(12, -1), MalformedManifest, "other types"),
    "a wait that is 1": (with_argument(14, 1), MalformedManifest, "other types"),
}


@pytest.mark.parametrize("kind", BAD)
def test_an_export_that_cannot_be_right_is_refused_and_nothing_is_called(kind: str) -> None:
    given, error, told = BAD[kind]
    with pytest.raises(error, match=told):
        TorchHandle.of(given)


@pytest.mark.parametrize(
    "change",
    [
        {"handle": "!"},
        {"handle": 5},
        {"shape": 5},
        {"surplus": 1},
        {"dtype": None},
        {"event": None},
    ],
    ids=str,
)
def test_json_that_is_no_export_is_refused(change: dict[str, Any]) -> None:
    good = TorchHandle.of((rebuild_cuda_tensor, GOOD))
    with pytest.raises(WeightBridgeError):
        TorchHandle.from_dict(good.to_dict() | change)
    with pytest.raises(MalformedManifest, match="has the fields"):
        TorchHandle.from_dict({})
    with pytest.raises(RangeBeyondSegment):
        replace(good, storage_nbytes=1)


# ---- requests that are refused ------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], type[WeightBridgeError], str]] = {
    "no names": ({"names": None}, MalformedManifest, "names are NoneType"),
    "names of numbers": ({"names": [1, 2, 3]}, MalformedManifest, "of other types"),
    "a name twice": ({"names": ["a", "a", "c"]}, DuplicateTensorName, "a name twice"),
    "a name too few": ({"names": ["a", "b"]}, MalformedManifest, r"\(2, 3, 3\) names"),
    "packed in text": ({"packed": "no"}, MalformedManifest, "of other types"),
    "no extras": ({"extras": []}, MalformedManifest, "handles"),
    "extras of text": ({"extras": ["x"] * 3}, MalformedManifest, "no ipc_handles by GPU"),
    "another dtype": ({"dtypes": ["float32", "bfloat16", "float32"]}, ShapeMismatch, "float32"),
    "a size below 0": ({"shapes": [[-3, 4], [4, 4], []]}, ShapeMismatch, "has the shape"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_request_that_contradicts_itself_is_refused(
    exporter: Exporter, form: Callable[[Exporter], dict[str, Any]], kind: str
) -> None:
    change, error, told = WRONG[kind]
    with pytest.raises(error, match=told):
        ImportRequest.of(form(exporter) | change)
    assert exporter.opened == []


def test_a_shape_that_is_not_the_exports_is_refused(exporter: Exporter) -> None:
    with pytest.raises(ShapeMismatch, match=r"'a' is float32 \(4, 3\) .* handle is float32 \(3, 4"):
        ImportRequest.of(unpacked(exporter) | {"shapes": [[4, 3], [4, 4], []]})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"sizes": [12, 16, 2]}, MalformedManifest),
        ({"sizes": None}, MalformedManifest),
        ({"shapes": [[3, 4], [4, 4], [2]], "sizes": [12, 16, 2]}, RangeBeyondSegment),
    ],
)
def test_sizes_that_do_not_fit_a_packed_buffer_are_refused(
    exporter: Exporter, change: dict[str, Any], error: type[WeightBridgeError]
) -> None:
    with pytest.raises(error):
        ImportRequest.of(packed(exporter) | change)


def test_a_packed_buffer_is_flat(exporter: Exporter) -> None:
    request = packed(exporter)
    request["extras"] = [{"ipc_handles": {GPU: exporter.reduce(torch.ones(10, 10))}}]
    with pytest.raises(ShapeMismatch, match="expected a flat"):
        ImportRequest.of(request)
