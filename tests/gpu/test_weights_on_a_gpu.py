"""What this release promises on a machine with a GPU: refusals, and CPU copies that travel."""

import pytest
import torch

from rl_bridge import WeightBridgeUnavailableError, make_weight_bridge
from rl_bridge.cuda.devices import cuda_cause

_CAUSE = cuda_cause()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_CAUSE is not None, reason=f"no CUDA here: {_CAUSE}"),
]


def test_a_tensor_on_the_gpu_is_refused_by_name_before_a_version_is_used_up() -> None:
    with make_weight_bridge("shared-memory", max_slots=1) as bridge:
        weights = {"w": torch.ones(3, device="cuda")}
        with pytest.raises(WeightBridgeUnavailableError, match=r"'w' is on cuda.*\.cpu\(\)"):
            bridge.publish(weights, weight_version=1)
        copied = {name: tensor.cpu() for name, tensor in weights.items()}
        assert bridge.publish(copied, weight_version=1).weight_version == 1


def test_what_was_trained_on_the_gpu_arrives_to_the_byte() -> None:
    torch.manual_seed(0)
    weights = {
        "bf16": torch.randn(257, 129, device="cuda").bfloat16(),
        "f8": torch.randn(1000, device="cuda").to(torch.float8_e4m3fn),
    }
    with make_weight_bridge("shared-memory") as trainer, make_weight_bridge("shm") as rollout:
        host = {name: tensor.cpu() for name, tensor in weights.items()}
        manifest = trainer.publish(host, weight_version=1)
        for name, tensor in rollout.import_update(manifest).items():
            there = tensor.cuda().view(torch.uint8)
            assert torch.equal(there, weights[name].view(torch.uint8)), name
