"""The rollout: an engine that gets its weights over the bridge and samples with them.

`RolloutWorker` does the work wherever it lives; `Rollout` is what the trainer sees of it, whether
it runs in this process or in one of its own (`rl_bridge.demo.rollout_process`).
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.rollout import RolloutExecutor
from rl_bridge.demo.failures import UpdateLost
from rl_bridge.demo.half_way import EngineFault, HalfWayAdapter
from rl_bridge.demo.model import ModelConfig, build_model
from rl_bridge.demo.sampler import SampleBatch, sample
from rl_bridge.demo.task import SortTask
from rl_bridge.errors import WeightBridgeError
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["InstallReply", "Rollout", "RolloutConfig", "RolloutWorker", "SampleReply"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What a rollout needs to know before the first message."""

    transport: str
    seed: int
    engine: str = "module"
    num_digits: int = 6
    base: int = 10

    @property
    def model(self) -> ModelConfig:
        """The model that trainer and rollout share."""
        return ModelConfig(task=SortTask(num_digits=self.num_digits, base=self.base))


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallReply:
    """What became of one manifest."""

    active_version: int | None
    """What the rollout holds now, whatever happened."""
    root: str | None = None
    """Root digest of what was installed; None if it was refused or undone."""
    error: str | None = None
    """Type of what `update_weights` raised."""
    message: str = ""
    timings_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReply:
    """A batch, and the version that the rollout says it sampled with."""

    batch: SampleBatch
    version: int | None
    sample_ms: float


class Rollout(Protocol):
    """What the trainer sees of a rollout."""

    @property
    def pid(self) -> int:
        """The process that it runs in."""

    def install(self, manifest_json: str, *, fail_half_way: bool = False) -> InstallReply:
        """Hand a manifest over; with `fail_half_way` the engine is made to fail in the middle."""

    def sample(self, *, num_groups: int, group_size: int) -> SampleReply:
        """Sample with the weights that it holds."""

    def close(self) -> None:
        """Stop it and give everything back. Idempotent."""


class RolloutWorker:
    """Owns the sampler's model and the consumer's end of the bridge."""

    def __init__(self, config: RolloutConfig) -> None:
        """Build the model from other random weights than the trainer's: none may be left over."""
        self._model = build_model(config.model, seed=config.seed + 1_000_003)
        self._generator = torch.Generator().manual_seed(config.seed)
        self._bridge = make_weight_bridge(config.transport, source_worker="rollout", num_threads=1)
        self._adapter = HalfWayAdapter(self._model)
        self._executor = RolloutExecutor(
            weight_bridge=self._bridge, weight_install_adapter=self._adapter
        )

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def install(self, manifest_json: str, *, fail_half_way: bool = False) -> InstallReply:
        """Run one update as a transaction and say what became of it."""
        self._adapter.is_armed = fail_half_way
        start = time.perf_counter()
        timings = {}
        try:
            manifest = WeightUpdateManifest.from_json(manifest_json)
            timings["parse"] = (time.perf_counter() - start) * 1e3
            self._executor.update_weights(manifest)
        except (WeightBridgeError, EngineFault) as error:
            timings["failed"] = (time.perf_counter() - start) * 1e3 - sum(timings.values())
            return InstallReply(
                active_version=self._executor.active_weight_version,
                error=type(error).__name__,
                message=str(error),
                timings_ms=timings,
            )
        finally:
            self._adapter.is_armed = False
        acknowledged = self._executor.last_ack
        if acknowledged is None:
            raise UpdateLost("update_weights returned and left no acknowledgement")
        timings |= acknowledged.timings_ms
        # The sum of its phases; what comes after it is acknowledging and releasing the old one.
        timings.pop("total", None)
        timings["finish"] = (time.perf_counter() - start) * 1e3 - sum(timings.values())
        return InstallReply(
            active_version=self._executor.active_weight_version,
            root=acknowledged.root,
            timings_ms=timings,
        )

    def sample(self, *, num_groups: int, group_size: int) -> SampleReply:
        """Sample with whatever the model's memory holds, and say which version that should be."""
        start = time.perf_counter()
        batch = sample(
            self._model, num_groups=num_groups, group_size=group_size, generator=self._generator
        )
        return SampleReply(
            batch=batch,
            version=self._executor.active_weight_version,
            sample_ms=(time.perf_counter() - start) * 1e3,
        )

    def close(self) -> None:
        """Release the active update and close the bridge."""
        self._executor.release_weights()
        self._bridge.close()
