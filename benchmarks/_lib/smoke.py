"""What the smoke command runs per mode, and what it says where a mode cannot run."""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

from _lib.smoke_model import train_a_little
from _lib.wire import BenchmarkError, recv_json, send_json
from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.engines.vllm import probe as vllm
from rl_bridge.errors import TransportUnavailable
from rl_bridge.transports.registry import probe

__all__ = ["Mode", "Outcome", "SmokeConfig", "run_mode"]

_TIMEOUT_S = 120.0
_EXIT_S = 20.0
_MS = 1e3

Weights = Mapping[str, torch.Tensor]


class Mode(StrEnum):
    """What can be asked for."""

    LOCAL = "local"
    SHARED_MEMORY = "shared-memory"
    ROLLOUT_UPDATE = "rollout-update"
    CUDA_IPC = "cuda-ipc"
    CUDA_VMM = "cuda-vmm"
    CUDA_VMM_ROLLOUT_UPDATE = "cuda-vmm-rollout-update"
    VLLM_CUDA_IPC_HOT_UPDATE = "vllm-cuda-ipc-hot-update"
    VLLM_CUDA_VMM_EXTERNAL_STORAGE = "vllm-cuda-vmm-external-storage"
    RUNTIME_BLOCKERS = "runtime-blockers"


_TRANSPORTS = {
    Mode.LOCAL: "local-clone",
    Mode.SHARED_MEMORY: "shared-memory",
    Mode.ROLLOUT_UPDATE: "shared-memory",
    Mode.CUDA_IPC: "cuda-ipc",
    Mode.CUDA_VMM: "cuda-vmm",
    Mode.CUDA_VMM_ROLLOUT_UPDATE: "cuda-vmm",
    Mode.VLLM_CUDA_IPC_HOT_UPDATE: "cuda-ipc",
    Mode.VLLM_CUDA_VMM_EXTERNAL_STORAGE: "cuda-vmm",
}
_NEEDS_VLLM = frozenset({Mode.VLLM_CUDA_IPC_HOT_UPDATE, Mode.VLLM_CUDA_VMM_EXTERNAL_STORAGE})


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeConfig:
    """What to move, and how often."""

    weights: Weights
    first_version: int
    warmup: int
    updates: int
    transport: str = "shared-memory"

    @property
    def device(self) -> str:
        """Where the weights lie that the transport carries."""
        return "cuda" if self.transport.startswith("cuda") else "cpu"

    @property
    def versions(self) -> range:
        """The versions that are published, in order."""
        return range(self.first_version, self.first_version + self.warmup + self.updates)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a mode."""

    status: str
    notes: list[str]
    tensor_count: int = 0
    total_nbytes: int = 0
    active_weight_version: int | None = None
    times_ms: dict[str, float | None] = field(default_factory=dict)


def blockers(mode: Mode) -> list[str]:
    """Return what stands in the way of a mode here, each with its remedy if there is one."""
    found = probe(_TRANSPORTS[mode])
    causes = []
    if found.status != "pass":
        causes.append(f"{found.cause} (remedy: {found.remedy})" if found.remedy else found.cause)
    if mode in _NEEDS_VLLM:
        if causes:
            causes.append(
                f"vLLM would be given what {_TRANSPORTS[mode]} carries (remedy: VLLMEngineAdapter, "
                "which installs over shared-memory, on the CPU too)"
            )
        # No remedy by installing it: without the transport there is nothing to give to it.
        if vllm.PACKAGE.version() is None:
            causes.append("vllm is not installed")
    return causes


def _runtime_blockers() -> Outcome:
    notes = []
    blocked = False
    for mode in _TRANSPORTS:
        causes = blockers(mode)
        blocked = blocked or bool(causes)
        notes.append(f"{mode}: {'; '.join(causes) if causes else 'nothing is missing'}")
    for item in vllm.probe():
        blocked = blocked or item.status != "pass"
        notes.append(f"{item.name}: {item.cause or 'nothing is missing'}")
    return Outcome(status="blocked" if blocked else "pass", notes=notes)


class _Stopwatch:
    """Collects the milliseconds of each phase of each update."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block."""
        started = time.monotonic()
        yield
        self.add(phase, (time.monotonic() - started) * _MS)

    def add(self, phase: str, milliseconds: float) -> None:
        """Add one sample of a phase."""
        self.samples.setdefault(phase, []).append(milliseconds)

    def medians(self, skip: int) -> dict[str, float | None]:
        """Return the median of every phase, less the first ``skip`` where there are more."""
        return {
            phase: round(statistics.median(values[skip:] or values), 4)
            for phase, values in self.samples.items()
        }


def _notes(config: SmokeConfig, where: str) -> list[str]:
    first, last = config.versions[0], config.versions[-1]
    told = f"version {first}" if first == last else f"versions {first} to {last}"
    warm = f", medians after {config.warmup} warm-up updates" if config.warmup else ""
    return [f"{told} {where}{warm}"]


def _local(config: SmokeConfig) -> Outcome:
    """Publisher and consumer in this process."""
    watch = _Stopwatch()
    with (
        make_weight_bridge("local-clone", source_worker="trainer") as publisher,
        make_weight_bridge("local-clone", source_worker="rollout") as consumer,
    ):
        for version in config.versions:
            train_a_little(config.weights)
            with watch("publish_ms"):
                manifest = publisher.publish(config.weights, weight_version=version)
            with watch("import_ms"):
                consumer.import_update(manifest)
            with watch("ack_ms"):
                consumer.acknowledge(manifest.update_id)
            active = consumer.active_weight_version
            with watch("release_ms"):
                consumer.release(manifest.update_id)
                publisher.release(manifest.update_id)
    return Outcome(
        status="pass",
        notes=_notes(config, "published, imported, acknowledged and released in one process"),
        tensor_count=manifest.tensor_count,
        total_nbytes=manifest.total_nbytes,
        active_weight_version=active,
        times_ms=watch.medians(config.warmup),
    )


def _consume(connection: Connection) -> None:
    """Import, acknowledge and release what the trainer announces (in a process of its own)."""
    watch = _Stopwatch()
    transport = recv_json(connection, _TIMEOUT_S, "the trainer")["transport"]
    with make_weight_bridge(transport, source_worker="rollout") as bridge:
        while True:
            command = recv_json(connection, _TIMEOUT_S, "the trainer")
            if command["do"] == "end":
                break
            manifest = WeightUpdateManifest.from_json(command["manifest"])
            try:
                with watch("import_ms"):
                    bridge.import_update(manifest)
            except TransportUnavailable as error:
                send_json(connection, {"blocked": [error.transport, error.cause, error.remedy]})
                return
            with watch("ack_ms"):
                bridge.acknowledge(manifest.update_id)
            active = bridge.active_weight_version
            with watch("release_ms"):
                bridge.release(manifest.update_id)
            send_json(connection, {"active": active})
    send_json(connection, {"samples": watch.samples})


def _roll_out(connection: Connection) -> None:
    """Install what the trainer announces through a RolloutExecutor (in a process of its own)."""
    watch = _Stopwatch()
    told = recv_json(connection, _TIMEOUT_S, "the trainer")
    engine = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype), device=told["device"])
        for name, (shape, dtype) in told["shapes"].items()
    }
    with make_weight_bridge(told["transport"], source_worker="rollout") as bridge:
        executor = RolloutExecutor(
            weight_bridge=bridge,
            weight_install_adapter=ModuleInstallAdapter(engine, mode="copy"),
        )
        while True:
            command = recv_json(connection, _TIMEOUT_S, "the trainer")
            if command["do"] == "end":
                break
            manifest = WeightUpdateManifest.from_json(command["manifest"])
            with watch("update_ms"):
                executor.update_weights(manifest)
            ack = executor.last_ack
            phases = {} if ack is None else dict(ack.timings_ms)
            for phase, milliseconds in phases.items():
                watch.add(f"phase {phase}", milliseconds)
            watch.add("import_ms", phases["attach"] + phases["verify"])
            # "total" ends with the proof; what is left is the acknowledgement.
            watch.add("ack_ms", watch.samples["update_ms"][-1] - phases.pop("total"))
            send_json(connection, {"active": executor.active_weight_version})
        with watch("release_ms"):
            executor.release_weights()
    send_json(connection, {"samples": watch.samples})


class _Child:
    """A spawned process and the pipe to it; ended by force where it does not end by itself."""

    def __init__(self, target: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self._process.join(_EXIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_EXIT_S)

    def ask(self, value: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer."""
        send_json(self.connection, value)
        answer = recv_json(self.connection, _TIMEOUT_S, "the rollout process")
        if "blocked" in answer:
            # What a runtime can do is seen only where another process tries it.
            raise TransportUnavailable(*answer["blocked"])
        return answer


def _hand_over(config: SmokeConfig, child: _Child, watch: _Stopwatch) -> Outcome:
    """Publish every version to a child that answers with the version it is on."""
    active: int | None = None
    weights = {name: tensor.to(config.device) for name, tensor in config.weights.items()}
    with make_weight_bridge(config.transport, source_worker="trainer") as bridge:
        held: str | None = None
        for version in config.versions:
            train_a_little(weights)
            with watch("publish_ms"):
                manifest = bridge.publish(weights, weight_version=version)
            active = child.ask({"do": "import", "manifest": manifest.to_json()})["active"]
            if active != version:
                raise BenchmarkError(f"the rollout process is on {active}, expected {version}")
            states = {report.state for report in bridge.holders(manifest.update_id)}
            if not states & {"acknowledged", "released"}:
                raise BenchmarkError(f"version {version} was not acknowledged: {states}")
            if held is not None:
                bridge.release(held)
            held = manifest.update_id
        samples = child.ask({"do": "end"})["samples"]
        watch.samples |= samples
    return Outcome(
        status="pass",
        notes=[],
        tensor_count=manifest.tensor_count,
        total_nbytes=manifest.total_nbytes,
        active_weight_version=active,
    )


def _two_processes(config: SmokeConfig) -> Outcome:
    """Publisher here, consumer in a spawned process."""
    watch = _Stopwatch()
    with _Child(_consume) as child:
        send_json(child.connection, {"transport": config.transport})
        outcome = _hand_over(config, child, watch)
    outcome.notes = _notes(config, "imported, acknowledged and released in a spawned process")
    outcome.times_ms = watch.medians(config.warmup)
    return outcome


def _rollout_update(config: SmokeConfig) -> Outcome:
    """Publisher here, RolloutExecutor with a model of its own in a spawned process."""
    watch = _Stopwatch()
    with _Child(_roll_out) as child:
        shapes = {
            name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in config.weights.items()
        }
        told = {"transport": config.transport, "device": config.device, "shapes": shapes}
        send_json(child.connection, told)
        outcome = _hand_over(config, child, watch)
    times = watch.medians(config.warmup)
    phases = {name: times.pop(name) for name in list(times) if name.startswith("phase ")}
    whole = times.pop("update_ms")
    outcome.notes = _notes(config, "through RolloutExecutor.update_weights in a spawned process")
    listed = ", ".join(f"{name.removeprefix('phase ')} {value}" for name, value in phases.items())
    outcome.notes.append(f"update_weights took {whole} ms, of that: {listed}")
    outcome.times_ms = times
    return outcome


_RUNNERS: dict[Mode, Callable[[SmokeConfig], Outcome]] = {
    Mode.LOCAL: _local,
    Mode.SHARED_MEMORY: _two_processes,
    Mode.ROLLOUT_UPDATE: _rollout_update,
    Mode.CUDA_IPC: _two_processes,
    Mode.CUDA_VMM: _two_processes,
    Mode.CUDA_VMM_ROLLOUT_UPDATE: _rollout_update,
}


def run_mode(mode: Mode, config: SmokeConfig) -> Outcome:
    """Run a mode, or say precisely why it cannot run here.

    Raises:
        WeightBridgeError: an update failed that should not have.
        BenchmarkError: the processes did not answer in time, or not as they should.

    """
    if mode is Mode.RUNTIME_BLOCKERS:
        return _runtime_blockers()
    causes = blockers(mode)
    runner = _RUNNERS.get(mode)
    if runner is None and not causes:
        causes = [f"this command has no run for {mode} yet"]
    if causes or runner is None:
        return Outcome(status="blocked", notes=causes)
    try:
        return runner(replace(config, transport=_TRANSPORTS[mode]))
    except TransportUnavailable as error:
        return Outcome(status="blocked", notes=[f"{error.cause} (remedy: {error.remedy})"])
