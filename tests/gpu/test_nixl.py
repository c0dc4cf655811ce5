"""``nixl`` on a GPU: versions that are read from one slot of its memory into another."""

from typing import Any

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.testing import TransportSuite
from rl_bridge.transports.nixl.transport import NIXL
from rl_bridge.transports.registry import probe

_FOUND = probe("nixl")
if _FOUND.status != "pass":
    pytest.skip(f"nixl is blocked: {_FOUND.cause}", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("nixl of a GPU's memory is blocked: torch sees no GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu


class TestOnAGPU(TransportSuite):
    transport_class = NIXL
    device = "cuda"

    @pytest.fixture
    def transport_kwargs(self) -> dict[str, Any]:
        return {"device": 0}


@pytest.mark.parametrize("in_place", [False, True])
def test_versions_are_read_and_installed_and_nothing_is_made_once_warm(in_place: bool) -> None:
    engine = torch.nn.Linear(512, 512, bias=False, device="cuda", dtype=torch.bfloat16)
    adapter = ModuleInstallAdapter(engine, mode="copy")
    live = {"weight": torch.zeros(512, 512, device="cuda", dtype=torch.bfloat16)}
    trainer: Any = make_weight_bridge("nixl", device=0, in_place=in_place)
    rollout: Any = make_weight_bridge("nixl", device=0)
    with trainer, rollout:
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        counts = []
        for version in range(1, 9):
            live["weight"].normal_()
            manifest = trainer.publish(live, weight_version=version)
            executor.update_weights(manifest.to_json())
            assert torch.equal(engine.weight.data, live["weight"])
            trainer.release(manifest.update_id)
            counts.append((trainer.counters, rollout.counters))
        assert all(one == counts[4] for one in counts[4:]), counts
        executor.close()
