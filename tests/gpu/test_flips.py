"""Flips on a GPU: kernels that run, captured graphs, undo, and a thousand updates."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import ProofFailed
from rl_bridge.installers.base import InstallProof
from rl_bridge.transports.registry import probe
from tests.helpers import open_fds

_FOUND = probe("cuda-vmm")
if _FOUND.status != "pass":
    pytest.skip(f"cuda-vmm is blocked: {_FOUND.cause}", allow_module_level=True)

pytestmark = pytest.mark.gpu

cuda: Any = torch.cuda  # of which torch annotates half


def engine_of() -> torch.nn.Linear:
    return torch.nn.Linear(512, 512, bias=False, device="cuda", dtype=torch.bfloat16)


def weights_of(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    return {"weight": torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)}


class Adapter(ModuleInstallAdapter):
    """Flips, and looks at the engine on the way; on request, its proof fails behind the flip."""

    def __init__(self, engine: torch.nn.Module) -> None:
        super().__init__(engine, mode="flip", quiesce=self._stopped)
        self.running: list[Any] = []
        self.was_running: list[bool] = []
        self.graph: Graph | None = None
        self.fails = False
        self.seen: list[list[torch.Tensor]] = []

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        """What is submitted goes on: only a drain waits for it."""
        self.was_running += [not event.query() for event in self.running]
        yield
        self.was_running += [not event.query() for event in self.running]

    def prove(self) -> InstallProof:
        proof = super().prove()
        if self.graph is not None:
            self.seen.append(self.graph.replayed())
        if self.fails:
            raise ProofFailed("as planned. Try again.")
        return proof


class Graph:
    """An engine's forward pass, captured, with the weights' very bytes beside it."""

    def __init__(self, engine: torch.nn.Module, inputs: torch.Tensor) -> None:
        engine(inputs)  # what a first call allocates must not be part of the graph
        cuda.synchronize()
        self._graph = cuda.CUDAGraph()
        with cuda.graph(self._graph):
            self._outputs = engine(inputs)
            self._weights = [tensor.detach().clone() for tensor in engine.parameters()]

    def replayed(self) -> list[torch.Tensor]:
        """What it gives now, copied."""
        self._graph.replay()
        cuda.synchronize()
        return [tensor.clone() for tensor in (self._outputs, *self._weights)]


class Rig:
    """A trainer, and an engine that is flipped."""

    def __init__(self) -> None:
        self.trainer: TensorBridge = make_weight_bridge("cuda-vmm")
        self.rollout: TensorBridge = make_weight_bridge("cuda-vmm")
        self.engine = engine_of()
        self.adapter = Adapter(self.engine)
        self.executor = RolloutExecutor(
            weight_bridge=self.rollout, weight_install_adapter=self.adapter
        )

    def update(self, version: int, weights: dict[str, torch.Tensor] | None = None) -> None:
        manifest = self.trainer.publish(weights or weights_of(version), weight_version=version)
        try:
            self.executor.update_weights(manifest.to_json())
        finally:
            self.trainer.release(manifest.update_id)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with torch.no_grad():
        made = Rig()
        yield made
        made.rollout.close()
        made.trainer.close()


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_flip_waits_for_a_long_kernel_and_the_kernel_is_right(rig: Rig) -> None:
    for version in (1, 2, 3):  # slots are mapped, kernels compiled, memory is allocated
        rig.update(version)
    inputs = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(inputs, weights_of(3)["weight"])
    rig.engine(inputs)
    manifest = rig.trainer.publish(weights_of(4), weight_version=4)
    cuda.synchronize()
    engines = cuda.Stream()  # not the one that imports
    with cuda.stream(engines):
        [rig.engine(inputs) for _ in range(50)]  # to allocate may wait for what runs
    cuda.synchronize()
    with cuda.stream(engines):
        cuda._sleep(4_000_000_000)  # about two seconds: import and verification take less
        results = [rig.engine(inputs) for _ in range(50)]
        rig.adapter.running = [engines.record_event()]
    rig.executor.update_weights(manifest.to_json())
    assert rig.adapter.was_running == [True, False]
    assert all(torch.equal(result, expected) for result in results)
    assert torch.equal(rig.engine.weight, weights_of(4)["weight"])


def test_a_captured_graph_replays_new_weights_after_a_flip_and_old_ones_after_its_undo(
    rig: Rig,
) -> None:
    inputs = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    plain = engine_of()  # the same graph over memory of torch's own
    reference = Graph(plain, inputs)

    def expected(version: int) -> list[torch.Tensor]:
        plain.weight.copy_(weights_of(version)["weight"])
        return reference.replayed()

    rig.update(1)
    graph = rig.adapter.graph = Graph(rig.engine, inputs)
    assert same(graph.replayed(), expected(1))
    for version in (2, 3, 4):
        rig.update(version)
        assert same(graph.replayed(), expected(version))
    rig.adapter.fails = True
    with pytest.raises(ProofFailed, match="as planned"):
        rig.update(5)
    assert same(rig.adapter.seen[-1], expected(5))
    assert same(graph.replayed(), expected(4))
    assert rig.executor.active_weight_version == 4
    rig.adapter.fails = False
    rig.update(6)
    assert same(graph.replayed(), expected(6))


@pytest.mark.parametrize(
    ("transport", "mode"), [("cuda-vmm", "flip"), ("cuda-vmm", "copy"), ("cuda-ipc", "copy")]
)
def test_a_thousand_updates_take_no_memory_descriptors_or_addresses(
    transport: str, mode: str
) -> None:
    found = probe(transport)
    if found.status != "pass":
        pytest.skip(f"{transport} is blocked: {found.cause}")
    adapter = ModuleInstallAdapter(engine_of(), mode=mode)  # type: ignore[arg-type]  # parametrised
    weights = weights_of(1)
    held = []
    with make_weight_bridge(transport) as trainer, make_weight_bridge(transport) as rollout:
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        for version in range(1, 1101):
            weights["weight"].neg_()
            manifest = trainer.publish(weights, weight_version=version)
            executor.update_weights(manifest.to_json())
            trainer.release(manifest.update_id)
            if version in {100, 1100}:
                cuda.synchronize()
                maps = len(Path("/proc/self/maps").read_text("ascii", "replace").splitlines())
                held.append((cuda.mem_get_info()[0], len(open_fds()), maps))
    (free, fds, maps), (free_after, fds_after, maps_after) = held
    # Of a thousand allocations of 2 MiB, a thousand descriptors, a thousand reservations.
    assert free - free_after < 16 << 20
    assert fds_after - fds < 10
    assert maps_after - maps < 50
