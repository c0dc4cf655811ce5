"""The measurement behind `rl-bridge bench`: a publisher here, a consumer in a process of its own.

Each update changes every byte and takes the whole way: publish with digests, the manifest's JSON
through a pipe, import, verification of every byte, install, proof, acknowledgement. Between updates
the same tensors are copied plainly, by the C library's memcpy on one thread and on all: the rate
that this machine gives at that moment.
"""

import ctypes
import json
import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, cast

import torch

from rl_bridge.bridge.bridges import SharedMemoryTensorBridge
from rl_bridge.bridge.rollout import RolloutExecutor
from rl_bridge.demo.frames import bound_sends
from rl_bridge.errors import DeadlineExceeded, WeightBridgeError
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.passes import default_threads

__all__ = ["MEMORY_FACTOR", "WAYS", "MeasurementFailed", "Sizes", "Timings", "measure"]

Way = Literal["copy", "flip"]
WAYS: tuple[Way, ...] = ("copy", "flip")

# Models in memory at the worst moment: source, its copy, three slots, the engine, its snapshot.
MEMORY_FACTOR = 7

_WARMUPS = 3  # both slots written, every page touched, plans cached
_ANSWER_TIMEOUT_S = 120.0  # the first one includes the import of torch
_STOP_TIMEOUT_S = 10.0


class MeasurementFailed(WeightBridgeError):
    """The consumer's process failed, or ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What to measure.

    Attributes:
        nbytes: of the whole state dict.
        num_tensors: how many bfloat16 tensors share them.
        repeats: measured updates, after a few that are not.

    """

    nbytes: int
    num_tensors: int
    repeats: int

    def source(self) -> dict[str, torch.Tensor]:
        """Make the trainer's state dict; every page of it is touched."""
        each = max(1, self.nbytes // self.num_tensors // 2)
        return {
            f"layers.{index:04}.weight": torch.ones(each, dtype=torch.bfloat16)
            for index in range(self.num_tensors)
        }


@dataclass(frozen=True, slots=True)
class Timings:
    """Samples in milliseconds by phase, over updates of `nbytes` bytes."""

    nbytes: int
    samples_ms: dict[str, list[float]] = field(default_factory=dict)

    def add(self, phase: str, value_ms: float) -> None:
        """Add one sample."""
        self.samples_ms.setdefault(phase, []).append(value_ms)

    def median_ms(self, phase: str) -> float:
        """Median of a phase."""
        return statistics.median(self.samples_ms[phase])

    def gb_per_s(self, phase: str) -> float:
        """Rate of a phase, in 10^9 bytes a second."""
        return self.nbytes / self.median_ms(phase) / 1e6


def measure(sizes: Sizes, *, on_update: Callable[[str], None] = lambda _: None) -> Timings:
    """Run all updates and collect the samples.

    Args:
        sizes: what to measure.
        on_update: called with a line of progress before each update.

    Returns:
        Samples of ``memcpy_1``, ``memcpy_all``, ``publish``, ``import_verify``, and for each way
        ``prepare_WAY``, ``install_WAY``, ``prove_WAY``, ``rest_WAY`` (manifest, messages and
        bookkeeping) and ``loaded_WAY`` (the sum: publish to acknowledged, both processes).

    Raises:
        WeightBridgeError: the consumer failed or did not answer in time.

    """
    source = sizes.source()
    spare = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    timings = Timings(sum(tensor.nbytes for tensor in source.values()))
    version = 0
    with _consumer() as ask, SharedMemoryTensorBridge(source_worker="bench") as bridge:
        held = None
        for way in WAYS:
            ask({"do": "start", "way": way})
            for number in range(_WARMUPS + sizes.repeats):
                on_update(f"{way}: update {number + 1} of {_WARMUPS + sizes.repeats}")
                version += 1
                is_sample = number >= _WARMUPS
                for phase, elapsed in _plain_copies(source, spare):
                    if is_sample:
                        timings.add(phase, elapsed)
                _change(source)
                start = time.perf_counter()
                manifest = bridge.publish(source, weight_version=version)
                published = time.perf_counter()
                answer = ask({"do": "update", "manifest": manifest.to_json()})
                loaded = time.perf_counter()
                if is_sample:
                    _add_update(
                        timings,
                        way,
                        answer["timings_ms"],
                        publish_ms=(published - start) * 1e3,
                        loaded_ms=(loaded - start) * 1e3,
                    )
                if held is not None:
                    bridge.release(held)
                held = manifest.update_id
    return timings


def _add_update(
    timings: Timings,
    way: Way,
    phases: Mapping[str, float],
    *,
    publish_ms: float,
    loaded_ms: float,
) -> None:
    samples = {
        "publish": publish_ms,
        "import_verify": phases["attach"] + phases["verify"],
        f"prepare_{way}": phases["prepare"],
        f"install_{way}": phases["install"],
        f"prove_{way}": phases["prove"],
    }
    samples[f"rest_{way}"] = loaded_ms - sum(samples.values())
    samples[f"loaded_{way}"] = loaded_ms
    for phase, value_ms in samples.items():
        timings.add(phase, value_ms)


def _change(source: Mapping[str, torch.Tensor]) -> None:
    """Change every byte, as a training step would."""
    for tensor in source.values():
        tensor.view(torch.uint8).add_(1)


def _plain_copies(
    source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, float]]:
    jobs = [
        (target[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)
        for name, tensor in source.items()
    ]
    threads = min(default_threads(), len(jobs))
    with ThreadPoolExecutor(threads) as pool:
        for phase, shares in (
            ("memcpy_1", [jobs]),
            ("memcpy_all", [jobs[index::threads] for index in range(threads)]),
        ):
            _change(source)
            start = time.perf_counter()
            list(pool.map(_copy, shares))
            yield phase, (time.perf_counter() - start) * 1e3


def _copy(jobs: list[tuple[int, int, int]]) -> None:
    for target, source, nbytes in jobs:
        ctypes.memmove(target, source, nbytes)


# ---- the other process --------------------------------------------------------------------------


@contextmanager
def _consumer() -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Start the consumer; gives a function that asks it and waits, boundedly, for the answer."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), name="rl-bridge-bench", daemon=True)
    process.start()
    there.close()
    bound_sends(here, _ANSWER_TIMEOUT_S)

    def ask(message: dict[str, Any]) -> dict[str, Any]:
        try:
            _send(here, json.dumps(message).encode(), process.pid)
            if not here.poll(_ANSWER_TIMEOUT_S):
                msg = f"the consumer (pid {process.pid}) gave no answer for {_ANSWER_TIMEOUT_S} s."
                raise DeadlineExceeded(msg)
            answer = json.loads(here.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            process.join(_STOP_TIMEOUT_S)
            msg = f"the consumer's process ended (exit code {process.exitcode}) in the middle."
            raise MeasurementFailed(msg) from error
        if "error" in answer:
            msg = f"the consumer failed: {answer['error']}"
            raise MeasurementFailed(msg)
        return cast("dict[str, Any]", answer)

    try:
        ask({"do": "hello"})
        yield ask
    finally:
        # The closed pipe is what ends the consumer.
        here.close()
        process.join(_STOP_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join(_STOP_TIMEOUT_S)


def _send(connection: Connection, message: bytes, pid: int | None) -> None:
    try:
        connection.send_bytes(message)
    except BlockingIOError as error:
        msg = f"the consumer (pid {pid}) took no message for {_ANSWER_TIMEOUT_S} s. Run again."
        raise DeadlineExceeded(msg) from error


def serve(connection: Connection) -> None:
    """Answer until the pipe is closed. Runs in the consumer's process."""
    # Ctrl-C reaches both processes: the publisher's closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = _Worker()
    try:
        while True:
            request = json.loads(connection.recv_bytes())
            try:
                answer = worker.answer(request)
            except (WeightBridgeError, OSError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.send_bytes(json.dumps(answer).encode())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        worker.close()


class _Worker:
    """The consumer: one engine, replaced for each way to install."""

    def __init__(self) -> None:
        self._way: Way = "copy"
        self._bridge: SharedMemoryTensorBridge | None = None
        self._executor: RolloutExecutor | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what was asked."""
        if request["do"] == "start":
            self.close()
            self._way = request["way"]
        elif request["do"] == "update":
            executor = self._executor or self._start(request["manifest"])
            executor.update_weights(request["manifest"])
            if executor.last_ack is not None:
                return {"timings_ms": dict(executor.last_ack.timings_ms)}
        return {}

    def close(self) -> None:
        """Let go of the engine and of the last version."""
        if self._executor is not None and self._bridge is not None:
            self._executor.release_weights()
            self._bridge.close()
        self._executor = self._bridge = None

    def _start(self, manifest: str) -> RolloutExecutor:
        described = WeightUpdateManifest.from_json(manifest).tensors
        engine = {
            name: torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
            for name, tensor in described.items()
        }
        self._bridge = SharedMemoryTensorBridge(source_worker="bench-consumer")
        self._executor = RolloutExecutor(
            weight_bridge=self._bridge,
            weight_install_adapter=ModuleInstallAdapter(engine, mode=self._way),
        )
        return self._executor
