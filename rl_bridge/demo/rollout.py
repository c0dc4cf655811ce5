"""The rollout: an engine that gets its weights over the bridge and samples with them.

`RolloutWorker` does the work. The trainer sees a `Rollout`: the worker itself, or `RolloutProcess`,
which has the worker in a process of its own and talks to it in JSON; the two share nothing but that
pipe and what the bridge hands over.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.demo.learning import SampleBatch, Sampler, SortTask
from rl_bridge.demo.model import EngineFault, ModuleSampler
from rl_bridge.demo.sglang_engine import SGLangSampler
from rl_bridge.demo.vllm_engine import VLLMSampler
from rl_bridge.errors import (
    DeadlineExceeded,
    EngineLost,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.testing.processes import Child, ChildDied, ChildError

__all__ = [
    "START_TIMEOUT_S",
    "Engine",
    "InstallReply",
    "Rollout",
    "RolloutConfig",
    "RolloutProcess",
    "RolloutWorker",
    "SampleReply",
]

START_TIMEOUT_S = 300.0
"""How long an engine may take to start, on a busy machine with a cold disk."""


class Engine(StrEnum):
    """What the rollout samples with."""

    MODULE = "module"
    """A torch module, updated in place."""
    VLLM = "vllm"
    """A vLLM engine that serves a small Qwen3."""
    SGLANG = "sglang"
    """An SGLang engine that serves it."""
    VLLM_HTTP = "vllm-http"
    """A vLLM server that serves it, with a side-car beside it, each a process of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What trainer and rollout must agree on before the first message."""

    transport: str
    seed: int
    engine: Engine = Engine.MODULE
    num_digits: int = 6
    base: int = 10
    engine_log: str = ""
    """File for what the rollout's process prints; empty lets it print where the trainer does."""

    @property
    def task(self) -> SortTask:
        """What is learnt."""
        return SortTask(num_digits=self.num_digits, base=self.base)

    @property
    def engine_seed(self) -> int:
        """Seed of the engine's first weights, which are not the trainer's: none may be left."""
        return self.seed + 1_000_003


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
    """How many sequences carry each of the engine's own labels; empty if it has none."""


class Rollout(Protocol):
    """What the trainer sees of a rollout."""

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
        """Stop it and release everything. Idempotent."""


_SAMPLERS: dict[Engine, Callable[..., Sampler]] = {
    Engine.MODULE: ModuleSampler,
    Engine.VLLM: VLLMSampler,
    Engine.SGLANG: SGLangSampler,
}


class RolloutWorker:
    """Owns the sampler and the consumer's end of the bridge."""

    place = "this process"

    def __init__(self, config: RolloutConfig) -> None:
        """Start the engine."""
        make_sampler = _SAMPLERS[config.engine]
        self.sampler = make_sampler(config.task, model_seed=config.engine_seed, seed=config.seed)
        self._bridge = make_weight_bridge(config.transport, source_worker="rollout", num_threads=1)
        self._executor = RolloutExecutor(
            weight_bridge=self._bridge, weight_install_adapter=self.sampler.adapter
        )

    def wait_until_ready(self) -> str:
        """See `Rollout`: the constructor has waited."""
        return self.sampler.name

    def install(self, manifest_json: str, *, fail_half_way: bool = False) -> InstallReply:
        """Run one update as a transaction and report what became of it."""
        start = time.perf_counter()
        timings = {}
        try:
            manifest = WeightUpdateManifest.from_json(manifest_json)
            timings["parse"] = (time.perf_counter() - start) * 1e3
            with self.sampler.failing_half_way() if fail_half_way else nullcontext():
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
        assert acknowledged is not None, "update_weights returned"
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
        sampled = self.sampler.sample(num_groups=num_groups, group_size=group_size)
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
        self.sampler.close()


class ServedWorker:
    """A `RolloutWorker` in the child: arguments and results are JSON values."""

    def __init__(self, config: RolloutConfig) -> None:
        """Start the engine, and print into its log from now on."""
        # Ctrl-C reaches the whole group: the trainer decides, and ends this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if config.engine_log:
            with Path(config.engine_log).open("wb") as file:
                for descriptor in (1, 2):  # what C libraries print, too
                    os.dup2(file.fileno(), descriptor)
        self._worker = RolloutWorker(config)

    def name(self) -> str:
        """Return the engine's name."""
        return self._worker.wait_until_ready()

    def install(self, manifest_json: str, *, fail_half_way: bool) -> dict[str, Any]:
        """See `RolloutWorker.install`."""
        return asdict(self._worker.install(manifest_json, fail_half_way=fail_half_way))

    def sample(self, *, num_groups: int, group_size: int) -> dict[str, Any]:
        """See `RolloutWorker.sample`."""
        reply = self._worker.sample(num_groups=num_groups, group_size=group_size)
        return {
            "tokens": reply.batch.tokens.tolist(),
            "log_probs": reply.batch.log_probs.tolist(),
            "version": reply.version,
            "sample_ms": reply.sample_ms,
            "labels": dict(reply.labels),
        }

    def close(self) -> None:
        """See `RolloutWorker.close`."""
        self._worker.close()


class _EngineChild(Child):
    """A child that may start processes: engines do."""

    is_daemon: ClassVar[bool] = False


class RolloutProcess:
    """The trainer's view of a rollout in another process."""

    def __init__(self, config: RolloutConfig) -> None:
        """Start the process; `wait_until_ready` waits for it, so that both sides start at once."""
        self._task, self._log = config.task, config.engine_log
        self._is_ready = self._is_closed = False
        self._child = _EngineChild(ServedWorker, config=config)
        self.pid = self._child.pid
        self.place = f"process {self.pid}"

    def wait_until_ready(self) -> str:
        """Wait until the engine has started, and return its name for people.

        Raises:
            WeightBridgeUnavailableError: it did not start.

        """
        try:
            self._child.ready(deadline_s=START_TIMEOUT_S)
        except (ChildError, ChildDied, DeadlineExceeded) as error:
            cause = error.message if isinstance(error, ChildError) else str(error)
            raise WeightBridgeUnavailableError(f"{cause}{self._where_printed()}") from error
        self._is_ready = True
        return str(self._call("name"))

    def install(self, manifest_json: str, *, fail_half_way: bool = False) -> InstallReply:
        """Send a manifest and wait for what became of it."""
        answer = self._call("install", manifest_json=manifest_json, fail_half_way=fail_half_way)
        return InstallReply(**answer)

    def sample(self, *, num_groups: int, group_size: int) -> SampleReply:
        """Ask for a batch."""
        answer = self._call("sample", num_groups=num_groups, group_size=group_size)
        tokens = torch.tensor(answer.pop("tokens"))
        log_probs = torch.tensor(answer.pop("log_probs"))
        batch = SampleBatch.graded(self._task, tokens, log_probs, group_size)
        return SampleReply(batch=batch, **answer)

    def close(self) -> None:
        """Stop the process; one that does not stop is killed. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._child, suppress(ChildDied, DeadlineExceeded):
            if self._is_ready:
                self._child.tell("close")
                self._child.stop()

    def _call(self, name: str, **options: Any) -> Any:
        try:
            return self._child.call(name, **options)
        except (ChildDied, DeadlineExceeded) as error:
            raise EngineLost(
                f"the rollout's process {self.pid} is gone or stuck: {error}{self._where_printed()}"
            ) from error

    def _where_printed(self) -> str:
        return f" What it printed is in {self._log}." if self._log else ""
