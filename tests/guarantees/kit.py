"""What the guarantees are tried on: transports as both sides make them, and engines with weights.

Only public names are used here and in the tests: what is behind them may change, the promises stay.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import (
    Acknowledgement,
    ModuleInstallAdapter,
    RolloutExecutor,
    TensorBridge,
    WeightUpdateManifest,
)
from rl_bridge.bridge import ConsumerReport
from rl_bridge.testing import (
    BridgeOver,
    Child,
    EngineFault,
    FaultInjecting,
    HostIPC,
    HostVMM,
    Peer,
    Rig,
    Stage,
    engine_state,
    poke,
    sample_engine,
)

__all__ = [
    "ADAPTERS",
    "TRANSPORTS",
    "Carrier",
    "ModuleReplica",
    "Replica",
    "Tensors",
    "TwoVerbAdapter",
    "damage",
    "engine_tensors",
]

Tensors = Mapping[str, torch.Tensor]


# ---- transports ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Carrier:
    """A transport by its class or name, with the options from which each process makes it."""

    transport: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def bridge(self, **options: Any) -> BridgeOver:
        """One side, over a transport whose bytes a test can damage."""
        return BridgeOver(FaultInjecting.over(self.transport, self.options), **options)

    def peer(self, **options: Any) -> Child:
        """The same in a process of its own."""
        return Child(
            Peer, transport_class=self.transport, transport_kwargs=dict(self.options), **options
        )

    @property
    def declares(self) -> FaultInjecting:
        """What the transport says of itself, such as ``crosses_processes``."""
        return FaultInjecting.over(self.transport, self.options)


TRANSPORTS: Mapping[str, Callable[[Path], Carrier]] = {
    "local-clone": lambda _: Carrier("local-clone"),
    "shared-memory": lambda _: Carrier("shared-memory"),
    "shared-memory-in-files": lambda path: Carrier("shared-memory", {"directory": path}),
    "cuda-vmm-on-host": lambda _: Carrier(HostVMM),
    "cuda-ipc-on-host": lambda _: Carrier(HostIPC),
    "broadcast": lambda _: Carrier("broadcast", {"timeout_s": 20.0}),
}
"""Every transport that runs on a CPU; those of GPUs with a driver that stands on host memory."""


def damage(trainer: BridgeOver, manifest: WeightUpdateManifest, name: str, place: int = 0) -> None:
    """Turn the bits of one byte of a published tensor around; done twice, it is as before."""
    tensor = manifest.tensors[name]
    assert isinstance(trainer.given, FaultInjecting)
    trainer.given.corrupt(manifest, tensor.offset + place % tensor.nbytes)


# ---- engines ------------------------------------------------------------------------------------


class TwoVerbAdapter:
    """An adapter as users write their first one: it installs, it releases, it shows its engine."""

    def __init__(self, engine: torch.nn.Module) -> None:
        self.engine = engine

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        for name, live in engine_tensors(self.engine).items():
            if live.dtype is torch.bool:  # as bytes: random ones are neither True nor False
                live.view(torch.uint8).copy_(tensors[name].view(torch.uint8))
            else:
                live.copy_(tensors[name])

    def release(self, update_id: str) -> None:
        """Nothing is kept here."""


ADAPTERS: Mapping[str, Callable[[torch.nn.Module], Any]] = {
    "copy": lambda engine: ModuleInstallAdapter(engine, mode="copy"),
    "alias": lambda engine: ModuleInstallAdapter(engine, mode="alias"),
    "flip": lambda engine: ModuleInstallAdapter(engine, mode="flip"),
    "two-verbs": TwoVerbAdapter,
}
"""Every adapter that runs without an engine of somebody else's. (vLLM and SGLang run the same
tests in `tests/engines/test_guarantees.py` and `tests/sglang/test_guarantees.py`.)"""


def engine_tensors(engine: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name -> the very tensor that the engine computes with, detached."""
    return engine.state_dict()


# Of all replicas: an engine that several tests share has seen the versions of those before.
_VERSIONS = count(1)


class Replica(ABC):
    """An engine, an executor around it, and a trainer that publishes for it.

    Weights go by number: 0 is what the engine holds at first; neighbours differ in every tensor.
    """

    trainer: TensorBridge
    executor: RolloutExecutor
    fault: type[Exception] | tuple[type[Exception], ...] = EngineFault
    """What `update` raises where a test planted a failure."""
    can_refuse: bool = True
    """Whether its adapter looks at an update before it begins to install it."""
    stages: frozenset[Stage] = frozenset(Stage)
    """Where an install can be made to fail."""
    places: int
    """Behind how many tensors an install can be made to fail."""
    worker: str = "local-training"
    """The name under which the executor's side reports."""
    can_be_torn: bool = True
    """Whether its undo can be made to fail."""

    def __init__(self) -> None:
        self._published: deque[WeightUpdateManifest] = deque()

    @abstractmethod
    def weights(self, number: int) -> Tensors:
        """What a trainer publishes under that number."""

    @abstractmethod
    def holds(self, number: int) -> bool:
        """Whether the engine, looked at without the adapter's help, holds exactly these weights."""

    @abstractmethod
    def fail_next(self, stage: Stage, *, count: int = 3, undo_too: bool = False) -> None:
        """Let the next install fail there, half-way behind `count` tensors; its undo as well."""

    @abstractmethod
    def damage_next(self) -> None:
        """Let one byte of the engine change behind the adapter's back, after the next install."""

    @abstractmethod
    def mend(self) -> None:
        """Let nothing fail any more."""

    def publish(self, number: int, **changed: torch.Tensor) -> WeightUpdateManifest:
        """Publish under the next version; the version before the last is released."""
        while len(self._published) > 1:
            self.trainer.release(self._published.popleft())
        weights = dict(self.weights(number)) | changed
        manifest = self.trainer.publish(weights, weight_version=next(_VERSIONS))
        self._published.append(manifest)
        return manifest

    def close(self) -> None:
        """Mend what a test planted, and release what was published."""
        self.mend()
        while self._published:
            self.trainer.release(self._published.popleft())

    def update(self, number: int) -> Acknowledgement:
        """Publish and install."""
        self.executor.update_weights(self.publish(number).to_json())
        acknowledgement = self.executor.last_ack
        assert acknowledgement is not None
        return acknowledgement

    @property
    def version(self) -> int | None:
        """The version that the executor reports."""
        return self.executor.active_weight_version

    def require(self, stage: Stage) -> None:
        """Skip a test whose failure cannot be planted in this engine."""
        if stage not in self.stages:
            pytest.skip(f"no failure of this engine can be planted {stage}")

    def require_torn(self) -> None:
        """Skip a test whose undo cannot be made to fail in this engine."""
        if not self.can_be_torn:
            pytest.skip("the undo of this engine cannot be made to fail")

    def reports(self, update_id: str) -> list[ConsumerReport]:
        """What the trainer hears of an update from the executor's side."""
        return [it for it in self.trainer.holders(update_id) if it.worker == self.worker]


class ModuleReplica(Replica):
    """A module of this process behind an adapter."""

    def __init__(self, adapter: str) -> None:
        super().__init__()
        self.engine = sample_engine()
        self.first = engine_state(self.engine)
        self.rig = Rig(
            self.engine,
            ADAPTERS[adapter](self.engine),
            "shared-memory",
            initial_weights=None,
            rebinds=adapter in {"alias", "flip"},
        )
        self.trainer, self.executor = self.rig.trainer, self.rig.executor
        self.places = len(self.first)
        if adapter == "two-verbs":  # it has no undo() that fails, and no prepare() that refuses
            self.can_be_torn = self.can_refuse = False

    def weights(self, number: int) -> Tensors:
        return self.rig.weights(number)

    def holds(self, number: int) -> bool:
        if number == 0:
            return engine_state(self.engine) == self.first
        return self.rig.holds(self.weights(number))

    def fail_next(self, stage: Stage, *, count: int = 3, undo_too: bool = False) -> None:
        self.rig.sabotage.plan(stage, count)
        self.rig.sabotage.fails_undo = undo_too

    def damage_next(self) -> None:
        def change_a_byte() -> None:
            poke(self.engine.get_parameter("norm.weight"), -1)

        self.rig.sabotage.plan(Stage.AFTER_INSTALL, action=change_a_byte)

    def mend(self) -> None:
        self.rig.sabotage.plan(None)
        self.rig.sabotage.fails_undo = False

    def close(self) -> None:
        super().close()
        self.rig.close()
