"""``cuda-vmm`` on a GPU: the transport's and the installers' promises, and flips under graphs."""

from typing import ClassVar

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.testing import TransportSuite
from rl_bridge.testing.faults import Locate
from rl_bridge.testing.host_vmm import published_address
from rl_bridge.transports.cuda_vmm import CUDAVMM
from rl_bridge.transports.registry import probe

_FOUND = probe("cuda-vmm")
if _FOUND.status != "pass":
    pytest.skip(f"cuda-vmm is blocked: {_FOUND.cause}", allow_module_level=True)

pytestmark = pytest.mark.gpu


class TestOnAGPU(TransportSuite):
    transport_class = CUDAVMM
    locate: ClassVar[Locate] = staticmethod(published_address)
    device = "cuda"


def engine_of() -> torch.nn.Linear:
    return torch.nn.Linear(512, 512, bias=False, device="cuda", dtype=torch.bfloat16)


def weights_of(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    return {"weight": torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)}


@pytest.mark.parametrize("mode", ["copy", "alias", "flip"])
def test_each_way_installs_and_undoes_to_the_byte(mode: str) -> None:
    engine = engine_of()
    adapter = ModuleInstallAdapter(engine, mode=mode)  # type: ignore[arg-type]  # parametrised
    with make_weight_bridge("cuda-vmm") as trainer, make_weight_bridge("cuda-vmm") as rollout:
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        for version in (1, 2, 3):
            expected = weights_of(version)
            manifest = trainer.publish(expected, weight_version=version)
            executor.update_weights(manifest.to_json())
            assert torch.equal(engine.weight.data, expected["weight"])
            trainer.release(manifest.update_id)
        bad = trainer.publish({"weight": weights_of(4)["weight"][:5]}, weight_version=4)
        with pytest.raises(Exception, match="weight"):
            executor.update_weights(bad.to_json())
        assert executor.active_weight_version == 3
        assert torch.equal(engine.weight.data, expected["weight"])


def test_a_captured_graph_replays_with_the_flipped_weights() -> None:
    engine = engine_of()
    inputs = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    adapter = ModuleInstallAdapter(engine, mode="flip")
    with (
        torch.no_grad(),
        make_weight_bridge("cuda-vmm") as trainer,
        make_weight_bridge("cuda-vmm") as rollout,
    ):
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)

        def update(version: int) -> torch.Tensor:
            manifest = trainer.publish(weights_of(version), weight_version=version)
            executor.update_weights(manifest.to_json())
            trainer.release(manifest.update_id)
            return weights_of(version)["weight"]

        update(1)
        engine(inputs)  # what a first call allocates must not be part of the graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = engine(inputs)
        for version in (2, 3, 4):
            weight = update(version)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(outputs, torch.nn.functional.linear(inputs, weight))


def test_a_flip_waits_for_a_kernel_that_runs() -> None:
    engine = engine_of()
    adapter = ModuleInstallAdapter(engine, mode="flip")
    inputs = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16)
    with (
        torch.no_grad(),
        make_weight_bridge("cuda-vmm") as trainer,
        make_weight_bridge("cuda-vmm") as rollout,
    ):
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        first, second = (trainer.publish(weights_of(n), weight_version=n) for n in (1, 2))
        executor.update_weights(first.to_json())
        results = [engine(inputs) for _ in range(200)]  # submitted, and not waited for
        executor.update_weights(second.to_json())
        expected = torch.nn.functional.linear(inputs, weights_of(1)["weight"])
        assert all(torch.equal(result, expected) for result in results)
        assert torch.equal(
            engine(inputs), torch.nn.functional.linear(inputs, weights_of(2)["weight"])
        )


def test_a_publish_sees_what_was_submitted_before_it() -> None:
    weights = weights_of(1)
    with make_weight_bridge("cuda-vmm") as trainer, make_weight_bridge("cuda-vmm") as rollout:
        for _ in range(100):
            weights["weight"] += 1
        manifest = trainer.publish(weights, weight_version=1)
        weights["weight"].zero_()  # the next step begins at once
        found = rollout.import_update(manifest.to_json())["weight"].clone()
        expected = weights_of(1)["weight"]
        for _ in range(100):
            expected += 1
        assert torch.equal(found, expected)


def test_a_thousand_updates_take_no_more_memory() -> None:
    engine = engine_of()
    adapter = ModuleInstallAdapter(engine, mode="flip")
    weights = weights_of(1)
    free = []
    with make_weight_bridge("cuda-vmm") as trainer, make_weight_bridge("cuda-vmm") as rollout:
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        for version in range(1, 1001):
            weights["weight"].neg_()
            manifest = trainer.publish(weights, weight_version=version)
            executor.update_weights(manifest.to_json())
            trainer.release(manifest.update_id)
            if version in {100, 1000}:
                torch.cuda.synchronize()
                free.append(torch.cuda.mem_get_info()[0])
    assert free[0] - free[1] < 8 << 20
