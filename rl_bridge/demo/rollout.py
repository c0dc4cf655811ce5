"""The rollout: an engine that gets its weights over the bridge and samples with them.

`RolloutWorker` does the work wherever it lives; `Rollout` is what the trainer sees of it, whether
it runs in this process or in one of its own (`rl_bridge.demo.rollout_process`).
"""

import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.demo.config import RolloutConfig
from rl_bridge.demo.engines import make_sampler
from rl_bridge.demo.failures import UpdateLost
from rl_bridge.demo.half_way import EngineFault
from rl_bridge.demo.sampler import SampleBatch
from rl_bridge.errors import WeightBridgeError
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["InstallReply", "Rollout", "RolloutWorker", "SampleReply"]


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
    labels: Mapping[str, int] = field(default_factory=dict)
    """How many sequences carry each of the engine's own labels; empty where it puts none."""


class Rollout(Protocol):
    """What the trainer sees of a rollout."""

    @property
    def pid(self) -> int:
        """The process that it runs in."""

    @property
    def place(self) -> str:
        """Where it samples, for people."""

    def wait_until_ready(self) -> str:
        """Wait until the engine has started, and return its name for people."""

    def install(self, manifest_json: str, *, fail_half_way: bool = False) -> InstallReply:
        """Hand a manifest over; with `fail_half_way` the engine is made to fail in the middle."""

    def sample(self, *, num_groups: int, group_size: int) -> SampleReply:
        """Sample with the weights that it holds."""

    def close(self) -> None:
        """Stop it and give everything back. Idempotent."""


class RolloutWorker:
    """Owns the sampler and the consumer's end of the bridge."""

    def __init__(self, config: RolloutConfig) -> None:
        """Start the engine with other random weights than the trainer's: none may be left over."""
        self._sampler = make_sampler(config, model_seed=config.seed + 1_000_003)
        self._bridge = make_weight_bridge(config.transport, source_worker="rollout", num_threads=1)
        self._executor = RolloutExecutor(
            weight_bridge=self._bridge, weight_install_adapter=self._sampler.adapter
        )

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    @property
    def place(self) -> str:
        """See `Rollout`."""
        return "this process"

    def wait_until_ready(self) -> str:
        """See `Rollout`: the constructor has waited."""
        return self._sampler.name

    def install(self, manifest_json: str, *, fail_half_way: bool = False) -> InstallReply:
        """Run one update as a transaction and say what became of it."""
        start = time.perf_counter()
        timings = {}
        try:
            manifest = WeightUpdateManifest.from_json(manifest_json)
            timings["parse"] = (time.perf_counter() - start) * 1e3
            with self._sampler.failing_half_way() if fail_half_way else nullcontext():
                self._executor.update_weights(manifest)
        except (WeightBridgeError, EngineFault) as error:
            timings["failed"] = (time.perf_counter() - start) * 1e3 - sum(timings.values())
            return InstallReply(
                active_version=self._executor.active_weight_version,
                error=type(error).__name__,
                message=str(error),
                timings_ms=timings,
            )
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
        """Sample with whatever the engine's memory holds, and say which version that should be."""
        start = time.perf_counter()
        sampled = self._sampler.sample(num_groups=num_groups, group_size=group_size)
        return SampleReply(
            batch=sampled.batch,
            version=self._executor.active_weight_version,
            sample_ms=(time.perf_counter() - start) * 1e3,
            labels=sampled.labels,
        )

    def close(self) -> None:
        """Release the active update, close the bridge, and stop the engine."""
        self._executor.release_weights()
        self._bridge.close()
        self._sampler.close()
