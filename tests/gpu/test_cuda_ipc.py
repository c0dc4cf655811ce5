"""``cuda-ipc`` on a GPU: the transport's promises, and torch's handles as an input."""

from typing import Any, ClassVar

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.errors import TransportUnavailable
from rl_bridge.testing import TransportSuite
from rl_bridge.testing.faults import Locate, published_address
from rl_bridge.testing.processes import Child, ChildError
from rl_bridge.transports.cuda import CUDAIPC
from rl_bridge.transports.cuda_ipc_requests import ImportRequest, open_request
from rl_bridge.transports.registry import probe

_FOUND = probe("cuda-ipc")
if _FOUND.status != "pass":
    pytest.skip(f"cuda-ipc is blocked: {_FOUND.cause}", allow_module_level=True)

pytestmark = pytest.mark.gpu


class TestOnAGPU(TransportSuite):
    transport_class = CUDAIPC
    locate: ClassVar[Locate] = staticmethod(published_address)
    device = "cuda"


class Exporter:
    """A trainer that exports by torch, as JSON values."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def request(self, *, packed: bool) -> dict[str, Any]:
        from torch.multiprocessing.reductions import reduce_tensor

        weights = {n: torch.full((64, 8), float(n), device="cuda") for n in range(3)}
        sent = list(weights.values())
        if packed:
            sent = [torch.cat([tensor.view(-1) for tensor in sent])]
        torch.cuda.synchronize()
        self._kept = sent
        gpu = str(torch.cuda.get_device_properties(0).uuid)
        reduce: Any = reduce_tensor
        request = {
            "names": [str(name) for name in weights],
            "dtypes": ["float32"] * 3,
            "shapes": [[64, 8]] * 3,
            "sizes": [512] * 3,
            "extras": [{"ipc_handles": {gpu: reduce(tensor)}} for tensor in sent],
            "packed": packed,
        }
        return ImportRequest.of(request).to_dict()

    def nbytes_after_collection(self) -> int:
        self._kept.clear()
        collect: Any = torch.cuda.ipc_collect
        collect()
        return torch.cuda.memory_allocated()


@pytest.mark.parametrize("packed", [False, True])
def test_handles_that_torch_made_are_opened_once_published_and_let_go(packed: bool) -> None:
    with (
        Child(Exporter) as exporter,
        make_weight_bridge("cuda-ipc") as trainer,
        make_weight_bridge("cuda-ipc") as rollout,
    ):
        request = ImportRequest.of(exporter.call("request", packed=packed))
        with open_request(request, device=0) as tensors:
            manifest = trainer.publish(tensors, weight_version=1)
        found = rollout.import_update(manifest)
        for number in range(3):
            expected = torch.full((64, 8), float(number), device="cuda")
            assert torch.equal(found[str(number)], expected)
        assert exporter.call("nbytes_after_collection") == 0


class ExpandableExporter(Exporter):
    """The same, from expandable segments."""

    def __init__(self) -> None:
        # Later torches have it under this name.
        settings: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (settings or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
        super().__init__()


def test_an_expandable_segment_is_refused_at_its_exporter() -> None:
    with Child(ExpandableExporter) as exporter, pytest.raises(ChildError) as told:
        exporter.call("request", packed=False)
    assert "expandable segment" in told.value.message
    assert TransportUnavailable.__name__ in told.value.lineage
