"""``cuda-vmm`` on a GPU: the transport's and the installers' promises, streams and captures."""

from typing import Any, ClassVar

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.errors import (
    ChecksumMismatch,
    IncompatibleUpdate,
    TransportUnavailable,
    WeightBridgeUnavailableError,
)
from rl_bridge.testing import TransportSuite
from rl_bridge.testing.faults import Locate, published_address
from rl_bridge.transports.cuda import CUDAVMM
from rl_bridge.transports.registry import probe

_FOUND = probe("cuda-vmm")
if _FOUND.status != "pass":
    pytest.skip(f"cuda-vmm is blocked: {_FOUND.cause}", allow_module_level=True)

pytestmark = pytest.mark.gpu


class TestOnAGPU(TransportSuite):
    transport_class = CUDAVMM
    locate: ClassVar[Locate] = staticmethod(published_address)
    device = "cuda"


cuda: Any = torch.cuda  # of which torch annotates half
GIB = 1 << 30


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


# ---- streams and captures -----------------------------------------------------------------------


def test_a_publish_does_not_wait_for_other_streams() -> None:
    weights = weights_of(1)
    with make_weight_bridge("cuda-vmm") as trainer:
        for version in (1, 2):  # the first ones allocate, which may wait for the device
            trainer.release(trainer.publish(weights, weight_version=version).update_id)
        cuda.synchronize()
        other = cuda.Stream()
        with cuda.stream(other):
            cuda._sleep(2_000_000_000)  # about a second
            ended = other.record_event()
        trainer.publish(weights, weight_version=3)
        assert not ended.query()
        cuda.synchronize()


def test_a_publish_within_a_capture_is_refused_and_the_graph_is_whole() -> None:
    weights = {"weight": weights_of(1)["weight"].t()}  # strided: gathered before it is digested
    counted = torch.zeros(1, device="cuda")
    with make_weight_bridge("cuda-vmm") as trainer, make_weight_bridge("cuda-vmm") as rollout:
        trainer.release(trainer.publish(weights, weight_version=1).update_id)
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            counted += 1
            with pytest.raises(WeightBridgeUnavailableError, match="outside of the capture"):
                trainer.publish(weights, weight_version=2)
        expected = weights["weight"].clone()
        manifest = trainer.publish(weights, weight_version=2)
        weights["weight"].zero_()
        graph.replay()  # writes to no slot
        found = rollout.import_update(manifest.to_json())["weight"]
        assert torch.equal(found, expected)
        assert counted.item() == 1


# ---- far away -----------------------------------------------------------------------------------


def test_a_version_of_more_than_4_gib_is_verified_to_its_last_byte() -> None:
    sizes = {"a": 4 * GIB + 4096, "b": 3, "c": 300_001}
    needed = 4 * sum(sizes.values())  # weights, two slots, and what a comparison allocates
    free, _ = cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"{free >> 20} MiB of GPU memory are free, {needed >> 20} needed")
    weights = {
        n: torch.full((size,), 7, dtype=torch.uint8, device="cuda") for n, size in sizes.items()
    }
    with make_weight_bridge("cuda-vmm") as trainer, make_weight_bridge("cuda-vmm") as rollout:
        manifest = trainer.publish(weights, weight_version=1)
        tensors = rollout.import_update(manifest)
        assert all(torch.equal(tensors[name], weights[name]) for name in sizes)
        rollout.reject(manifest, "to import it once more")
        del tensors
        trainer.release(manifest.update_id)
        damaged = trainer.publish(weights, weight_version=2)
        end: Any = trainer.publisher
        end = getattr(end, "_end", end)
        at = published_address(end, damaged.update_id, {}) + damaged.tensors["c"].offset + 300_000
        end.place.bytes_at(at, 1).fill_(8)
        cuda.synchronize()
        with pytest.raises(ChecksumMismatch, match="'c'"):
            rollout.import_update(damaged)
    del weights
    cuda.empty_cache()


# ---- another GPU --------------------------------------------------------------------------------

several = pytest.mark.skipif(cuda.device_count() < 2, reason="one GPU is here")


@pytest.mark.multigpu
@several
def test_another_gpu_than_the_publishers_is_refused_by_uuid() -> None:
    with (
        make_weight_bridge("cuda-vmm", device=0) as trainer,
        make_weight_bridge("cuda-vmm", device=1) as rollout,
    ):
        manifest = trainer.publish(weights_of(1), weight_version=1)
        with pytest.raises(TransportUnavailable, match="was given device=1"):
            rollout.import_update(manifest.to_json())


@pytest.mark.multigpu
@several
@pytest.mark.parametrize("mode", ["copy", "alias", "flip"])
def test_an_engine_on_another_gpu_is_refused_and_stays_as_it_was(mode: str) -> None:
    engine = engine_of().to("cuda:1")
    before = engine.weight.detach().clone()
    adapter = ModuleInstallAdapter(engine, mode=mode)  # type: ignore[arg-type]  # parametrised
    with make_weight_bridge("cuda-vmm") as trainer, make_weight_bridge("cuda-vmm") as rollout:
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        manifest = trainer.publish(weights_of(1), weight_version=1)
        with pytest.raises(IncompatibleUpdate, match=r"cuda:0 .* cuda:1"):
            executor.update_weights(manifest.to_json())
        assert torch.equal(engine.weight, before)


@pytest.mark.multigpu
@several
def test_a_publish_uses_the_gpu_of_its_weights_whichever_is_current() -> None:
    with make_weight_bridge("cuda-vmm", device=1) as trainer:
        weights = {"weight": weights_of(1)["weight"].to("cuda:1")}
        with cuda.device(0):
            manifest = trainer.publish(weights, weight_version=1)
            with make_weight_bridge("cuda-vmm") as rollout:
                found = rollout.import_update(manifest.to_json())["weight"]
                assert found.device == torch.device("cuda", 1)
                assert torch.equal(found, weights["weight"])
