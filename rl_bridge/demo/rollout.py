"""The rollout: an engine that gets its weights over the bridge and samples with them.

`RolloutWorker` does the work and speaks JSON. The trainer sees a `Rollout`, whose worker is in a
process of its own if the transport crosses processes: the two share nothing but a pipe and what the
bridge hands over.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.demo.learning import SampleBatch, SortTask
from rl_bridge.demo.lora import ADAPTER
from rl_bridge.demo.model import ModuleSampler, Sampler, engine_seed
from rl_bridge.demo.sglang_engine import SGLangSampler
from rl_bridge.demo.vllm_engine import VLLMLoRASampler, VLLMSampler, VLLMServerSampler
from rl_bridge.errors import (
    DeadlineExceeded,
    EngineLost,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.remote.client import RemoteEngine
from rl_bridge.testing.installer_faults import EngineFault
from rl_bridge.testing.processes import Child, ChildDied, ChildError
from rl_bridge.transports.registry import transport_class

_START_TIMEOUT_S = 300.0  # on a busy machine with a cold disk


class Engine(StrEnum):
    """The rollout's engine: it samples."""

    MODULE = "module"
    """A torch module, updated in place."""
    VLLM = "vllm"
    """A vLLM engine that serves a small Qwen3."""
    SGLANG = "sglang"
    """An SGLang engine that serves it."""
    VLLM_HTTP = "vllm-http"
    """A vLLM server that serves it, with a side-car beside it, each a process of its own."""


_SAMPLERS: dict[Engine, Callable[..., Sampler]] = {
    Engine.MODULE: ModuleSampler,
    Engine.VLLM: VLLMSampler,
    Engine.SGLANG: SGLangSampler,
    Engine.VLLM_HTTP: VLLMServerSampler,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What trainer and rollout must agree on before the first message."""

    transport: str
    seed: int
    engine: Engine = Engine.MODULE
    lora: bool = False
    """Train a LoRA adapter on two ranks, instead of all weights on one."""
    task: SortTask = field(default_factory=SortTask)
    url: str = ""
    """Of the store, where versions travel in files."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of the module (`CausalTransformer`), where they are not the usual ones."""
    num_groups: int = 64
    """Prompts of a step."""
    engine_log: str = ""
    """File for what the rollout's processes print; empty lets them print where the trainer does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallReply:
    """The outcome of one manifest."""

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


class RolloutWorker:
    """Owns the engine, and the consumer's end of the bridge. Results are JSON values."""

    def __init__(self, config: RolloutConfig) -> None:
        """Start the engine."""
        # (An adapter is trained over the base that the engine serves.)
        model_seed = config.seed if config.lora else engine_seed(config.seed)
        kind = VLLMLoRASampler if config.lora else _SAMPLERS[config.engine]
        self.sampler = kind(config.task, model_seed=model_seed, seed=config.seed, **config.sizes)
        self._engine = self._updated(config)
        self._is_lora = config.lora
        self._rest = "HTTP" if config.engine is Engine.VLLM_HTTP else "finish"

    def _updated(self, config: RolloutConfig) -> RolloutExecutor | RemoteEngine:
        """Have the engine take updates."""
        return self.sampler.updated_over(config.transport)

    def name(self) -> str:
        """Return the engine's name, for people."""
        return self.sampler.name

    def _active_version(self) -> int | None:
        engine = self._engine
        if self._is_lora and isinstance(engine, RolloutExecutor):
            return engine.adapter_version(ADAPTER)
        return engine.active_weight_version

    def install(self, manifest_json: str, *, fail_half_way: bool) -> dict[str, Any]:
        """Run one update as a transaction; the result is an `InstallReply`."""
        start = time.perf_counter()
        try:
            with self.sampler.failing_half_way() if fail_half_way else nullcontext():
                self._engine.update_weights(manifest_json)
        except (WeightBridgeError, EngineFault) as error:
            return {
                "active_version": self._active_version(),
                "error": type(error).__name__,
                "message": str(error),
                "timings_ms": {"failed": (time.perf_counter() - start) * 1e3},
            }
        acknowledged = self._engine.last_ack
        assert acknowledged is not None, "update_weights returned"
        timings = dict(acknowledged.timings_ms)
        timings.pop("total", None)  # the sum of its phases
        # Reading the manifest, acknowledging, releasing the version before.
        timings[self._rest] = (time.perf_counter() - start) * 1e3 - sum(timings.values())
        return {
            "active_version": self._active_version(),
            "root": acknowledged.root,
            "timings_ms": timings,
        }

    def sample(self, *, num_groups: int, group_size: int) -> dict[str, Any]:
        """Sample with whatever the engine's memory holds, and say which version that should be."""
        start = time.perf_counter()
        batch = self.sampler.sample(num_groups=num_groups, group_size=group_size)
        return {
            "tokens": batch.tokens.tolist(),
            "log_probs": batch.log_probs.tolist(),
            "labels": dict(batch.labels),
            "version": self._active_version(),
            "sample_ms": (time.perf_counter() - start) * 1e3,
        }

    def close(self) -> None:
        """Release the active update, and stop the engine."""
        self._engine.close()
        self.sampler.close()


def _serve(worker: type[RolloutWorker], config: RolloutConfig) -> RolloutWorker:
    """Make the worker in a process of its own, which prints into its log from now on."""
    if config.engine_log:
        with Path(config.engine_log).open("wb") as file:
            for descriptor in (1, 2):  # what C libraries print, too
                os.dup2(file.fileno(), descriptor)
    return worker(config)


class _EngineChild(Child):
    """A child that may start processes: engines do."""

    is_daemon: ClassVar[bool] = False


class Rollout:
    """The trainer's view of a rollout, wherever its worker runs."""

    def __init__(
        self, config: RolloutConfig, worker_type: type[RolloutWorker] = RolloutWorker
    ) -> None:
        """Start the worker; `wait_until_ready` waits for it, so that both sides start at once."""
        self._task, self._log = config.task, config.engine_log
        self._worker: RolloutWorker | None = None
        self._child: _EngineChild | None = None
        self._is_ready = False
        if transport_class(config.transport).crosses_processes:
            self._child = _EngineChild(_serve, worker=worker_type, config=config)
            self.pid = self._child.pid
        else:
            self._worker = worker_type(config)
            self.pid = os.getpid()

    def wait_until_ready(self) -> str:
        """Wait until the engine has started, and return its name.

        Raises:
            WeightBridgeUnavailableError: it did not start.

        """
        if self._child is not None:
            try:
                self._child.ready(deadline_s=_START_TIMEOUT_S)
            except (ChildError, ChildDied, DeadlineExceeded) as error:
                cause = error.message if isinstance(error, ChildError) else str(error)
                raise WeightBridgeUnavailableError(f"{cause}{self._where_printed()}") from error
        self._is_ready = True
        return str(self._call("name"))

    def install(self, manifest_json: str, *, fail_half_way: bool = False) -> InstallReply:
        """Hand a manifest over; with `fail_half_way` the engine is made to fail in the middle."""
        answer = self._call("install", manifest_json=manifest_json, fail_half_way=fail_half_way)
        return InstallReply(**answer)

    def sample(self, *, num_groups: int, group_size: int) -> SampleReply:
        """Sample with the weights that the engine holds."""
        answer = self._call("sample", num_groups=num_groups, group_size=group_size)
        batch = SampleBatch.graded(
            self._task,
            torch.tensor(answer["tokens"]),
            torch.tensor(answer["log_probs"]),
            group_size,
            answer["labels"],
        )
        return SampleReply(batch=batch, version=answer["version"], sample_ms=answer["sample_ms"])

    def close(self) -> None:
        """Stop it; a process that does not stop is killed. Idempotent."""
        child, worker = self._child, self._worker
        self._child = self._worker = None
        if worker is not None:
            worker.close()
        if child is not None:
            with child, suppress(ChildDied, DeadlineExceeded):
                if self._is_ready:
                    child.tell("close")
                    child.stop()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Stop it."""
        self.close()

    def _call(self, name: str, **options: Any) -> Any:
        if self._child is None:
            return getattr(self._worker, name)(**options)
        try:
            return self._child.call(name, **options)
        except (ChildDied, DeadlineExceeded) as error:
            raise EngineLost(
                f"the rollout's process {self.pid} is gone or stuck: {error}{self._where_printed()}"
            ) from error

    def _where_printed(self) -> str:
        return f" What it printed is in {self._log}." if self._log else ""
