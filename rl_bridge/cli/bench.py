"""`rl-bridge bench`: what an update costs here, next to a plain memcpy of the same bytes."""

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import typer
from rich.table import Table
from rich.text import Text

from rl_bridge.bridge.bridges import SharedMemoryTensorBridge
from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.cli.screen import memory_nbytes, say_json, screen, size, table, version
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.passes import default_threads, native_cause
from rl_bridge.testing.processes import Child

# ---- the measurement: a publisher here, a consumer in a process of its own ----------------------
#
# Each update changes every byte and takes the whole way: publish with digests, the manifest's JSON
# through a pipe, import, verification of every byte, install, proof, acknowledgement. Between
# updates the same tensors are copied plainly, by the C library's memcpy on one thread and on all:
# the rate that this machine gives at that moment.

Way = Literal["copy", "flip"]
WAYS: tuple[Way, ...] = ("copy", "flip")

# Models in memory at the worst moment: source, its copy, three slots, the engine, its snapshot.
MEMORY_FACTOR = 7

_WARMUPS = 3  # both slots written, every page touched, plans cached
_ANSWER_TIMEOUT_S = 120.0  # the first one includes the import of torch


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


def measure(
    nbytes: int,
    *,
    num_tensors: int,
    repeats: int,
    on_update: Callable[[str], None] = lambda _: None,
) -> Timings:
    """Run all updates and collect the samples.

    Args:
        nbytes: of the whole state dict.
        num_tensors: how many bfloat16 tensors share them.
        repeats: measured updates, after a few that are not.
        on_update: called with a line of progress before each update.

    Returns:
        Samples of ``memcpy_1``, ``memcpy_all``, ``publish``, ``import_verify``, and for each way
        ``prepare_WAY``, ``install_WAY``, ``prove_WAY``, ``rest_WAY`` (manifest, messages and
        bookkeeping) and ``loaded_WAY`` (the sum: publish to acknowledged, both processes).

    Raises:
        WeightBridgeError: the consumer failed or did not answer in time.

    """
    each = max(1, nbytes // num_tensors // 2)
    source = {  # the trainer's state dict; every page of it is touched
        f"layers.{index:04}.weight": torch.ones(each, dtype=torch.bfloat16)
        for index in range(num_tensors)
    }
    spare = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    timings = Timings(sum(tensor.nbytes for tensor in source.values()))
    version = 0
    with (
        _consumer() as ask,
        # (What `_change` makes of a number may be NaN.)
        SharedMemoryTensorBridge(source_worker="bench", nonfinite="off") as bridge,
    ):
        held = None
        for way in WAYS:
            ask("start", way=way)
            for number in range(_WARMUPS + repeats):
                on_update(f"{way}: update {number + 1} of {_WARMUPS + repeats}")
                version += 1
                is_sample = number >= _WARMUPS
                for phase, elapsed in _plain_copies(source, spare):
                    if is_sample:
                        timings.add(phase, elapsed)
                _change(source)
                start = time.perf_counter()
                manifest = bridge.publish(source, weight_version=version)
                published = time.perf_counter()
                phases = ask("update", manifest=manifest.to_json())
                loaded = time.perf_counter()
                if is_sample:
                    _add_update(
                        timings,
                        way,
                        phases,
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
def _consumer() -> Iterator[Callable[..., Any]]:
    """Start the consumer; gives a function that calls its methods and waits for their answers."""
    with Child(Consumer) as child:

        def ask(name: str, **options: Any) -> Any:
            child.tell(name, **options)
            return child.answer(deadline_s=_ANSWER_TIMEOUT_S)

        yield ask
        ask("close")
        child.stop()


class Consumer:
    """The other process's engine, replaced for each way to install."""

    def __init__(self) -> None:
        """Hold no engine yet."""
        self._way: Way = "copy"
        self._bridge: SharedMemoryTensorBridge | None = None
        self._executor: RolloutExecutor | None = None

    def start(self, way: Way) -> None:
        """Begin with a new engine; the first update makes it."""
        self.close()
        self._way = way

    def update(self, manifest: str) -> dict[str, float]:
        """Install an update, and return how long each phase took."""
        executor = self._executor or self._start(manifest)
        executor.update_weights(manifest)
        acknowledged = executor.last_ack
        return {} if acknowledged is None else dict(acknowledged.timings_ms)

    def close(self) -> None:
        """Release the engine and the last version."""
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


# ---- the command ---------------------------------------------------------------------------------

_MIB = 1 << 20
_DEFAULT_MIB = 256

_LABELS = {
    "memcpy_1": "memcpy, 1 thread",
    "memcpy_all": f"memcpy, {default_threads()} threads",
    "publish": "publish: copy and digest",
    "import_verify": "import, every byte verified",
    "prepare_copy": "prepare the copy",
    "install_copy": "install by copy",
    "prove_copy": "prove the copy",
    "rest_copy": "all the rest, by copy",
    "loaded_copy": "publish to loaded, by copy",
    "prepare_flip": "prepare the flip",
    "install_flip": "install by flip",
    "prove_flip": "prove the flip",
    "rest_flip": "all the rest, by flip",
    "loaded_flip": "publish to loaded, by flip",
}
# These read or write no weights: a rate in bytes would say nothing.
_WITHOUT_RATE = frozenset({"install_flip", "prove_flip"}).union(
    f"{phase}_{way}" for phase in ("prepare", "rest") for way in WAYS
)
_ENDS_A_GROUP = frozenset({"memcpy_all", "import_verify", "loaded_copy"})


def bench(
    mib: Annotated[
        list[int] | None,
        typer.Option(
            "--mib",
            metavar="<int>",
            min=1,
            show_default=False,
            help=f"Size of the state dict in MiB, {_DEFAULT_MIB} unless given; may be repeated.",
        ),
    ] = None,
    tensors: Annotated[int, typer.Option(min=1, help="How many tensors share it.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Measured updates for each way.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON with every sample.")] = False,
) -> None:
    """Measure an update between two processes over shared memory.

    A trainer's process publishes; another one imports, verifies, installs by copy and by flip, and
    proves. Medians of several updates after a warm-up. The rates stand next to a plain memcpy of
    the same bytes, measured between the updates.
    """
    sizes = [each * _MIB for each in mib or [_DEFAULT_MIB]]
    _check_memory(max(sizes))
    progress = screen(stderr=True)
    results = []
    for nbytes in sizes:
        with progress.status(f"{size(nbytes)}: starting") as status:
            timings = measure(
                nbytes,
                num_tensors=tensors,
                repeats=repeats,
                on_update=lambda line: status.update(f"{size(nbytes)}: {line}"),  # noqa: B023 - called before the next round
            )
        results.append(timings)
    if as_json:
        say_json(_document(results, tensors, repeats))
        return
    out = screen()
    for timings in results:
        title = f"{size(timings.nbytes)} in {tensors} tensors, {repeats} updates a way"
        out.print(_table(timings, title))
        out.print()
    out.print(
        Text(
            "Medians. Loaded: from the start of publish to the acknowledgement of installed and "
            "proven bytes, both processes and the pipe between them included. Prepare: fit the "
            "update to the engine; a flip reads its pages in. The rest: the manifest written, sent "
            "and read, the update acknowledged and the one before released, two processes woken.",
            style="dim",
        )
    )


def _check_memory(nbytes: int) -> None:
    needed = nbytes * MEMORY_FACTOR
    memory = memory_nbytes()
    if memory is not None and needed > memory[0]:
        raise typer.BadParameter(
            f"needs about {size(needed)} of memory, {size(memory[0])} are available",
            param_hint="--mib",
        )


def _best_memcpy(timings: Timings) -> str:
    return min(("memcpy_1", "memcpy_all"), key=timings.median_ms)


def _document(results: list[Timings], num_tensors: int, repeats: int) -> dict[str, JSONValue]:
    return {
        "environment": {
            "compiled_pass": native_cause() is None,
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "rl_bridge": version(),
            "threads": default_threads(),
            "torch": torch.__version__,
        },
        "sizes": [
            {
                "nbytes": timings.nbytes,
                "num_tensors": num_tensors,
                "phases": {phase: _phase(timings, phase) for phase in timings.samples_ms},
                "repeats": repeats,
                "ways": list(WAYS),
            }
            for timings in results
        ],
    }


def _phase(timings: Timings, phase: str) -> dict[str, JSONValue]:
    has_rate = phase not in _WITHOUT_RATE
    return {
        "gb_per_s": timings.gb_per_s(phase) if has_rate else None,
        "median_ms": timings.median_ms(phase),
        "of_memcpy": _of_memcpy(timings, phase) if has_rate else None,
        "samples_ms": timings.samples_ms[phase],
    }


def _of_memcpy(timings: Timings, phase: str) -> float:
    """Rate of a phase as a share of the better memcpy's."""
    return timings.median_ms(_best_memcpy(timings)) / timings.median_ms(phase)


def _table(timings: Timings, title: str) -> Table:
    shown = table("", "ms", "GB/s", "of memcpy", title=title)
    for phase, label in _LABELS.items():
        rate = share = "-"
        if phase not in _WITHOUT_RATE:
            rate = f"{timings.gb_per_s(phase):.1f}"
            share = f"{_of_memcpy(timings, phase):.2f}"
        style = "bold" if phase.startswith("loaded") else ""
        shown.add_row(label, f"{timings.median_ms(phase):.2f}", rate, share, style=style)
        if phase in _ENDS_A_GROUP:
            shown.add_row()
    return shown
