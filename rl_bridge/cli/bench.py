"""`rl-bridge bench`: what an update costs here, next to a plain memcpy of the same bytes."""

import os
import platform
from typing import Annotated

import torch
import typer
from rich.table import Table
from rich.text import Text

from rl_bridge.cli.environment import memory_nbytes, version
from rl_bridge.cli.measure import MEMORY_FACTOR, WAYS, Sizes, Timings, measure
from rl_bridge.cli.screen import say_json, screen, size
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.memory.passes import default_threads, native_cause

__all__ = ["bench"]

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
    plans = [
        Sizes(nbytes=each * _MIB, num_tensors=tensors, repeats=repeats)
        for each in mib or [_DEFAULT_MIB]
    ]
    _check_memory(max(plan.nbytes for plan in plans))
    progress = screen(stderr=True)
    results = []
    for plan in plans:
        with progress.status(f"{size(plan.nbytes)}: starting") as status:
            label = size(plan.nbytes)
            timings = measure(plan, on_update=lambda line: status.update(f"{label}: {line}"))  # noqa: B023 - called before the next round
        results.append((plan, timings))
    if as_json:
        say_json(_document(results))
        return
    out = screen()
    for plan, timings in results:
        out.print(_table(plan, timings))
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
        msg = f"needs about {size(needed)} of memory, {size(memory[0])} are available"
        raise typer.BadParameter(msg, param_hint="--mib")


def _best_memcpy(timings: Timings) -> str:
    return min(("memcpy_1", "memcpy_all"), key=timings.median_ms)


def _document(results: list[tuple[Sizes, Timings]]) -> dict[str, JSONValue]:
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
                "num_tensors": plan.num_tensors,
                "phases": {phase: _phase(timings, phase) for phase in timings.samples_ms},
                "repeats": plan.repeats,
                "ways": list(WAYS),
            }
            for plan, timings in results
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


def _table(plan: Sizes, timings: Timings) -> Table:
    table = Table(
        title=f"{size(timings.nbytes)} in {plan.num_tensors} tensors, {plan.repeats} updates a way",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column("", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("GB/s", justify="right", no_wrap=True)
    table.add_column("of memcpy", justify="right", no_wrap=True)
    for phase, label in _LABELS.items():
        rate = share = "-"
        if phase not in _WITHOUT_RATE:
            rate = f"{timings.gb_per_s(phase):.1f}"
            share = f"{_of_memcpy(timings, phase):.2f}"
        style = "bold" if phase.startswith("loaded") else ""
        table.add_row(label, f"{timings.median_ms(phase):.2f}", rate, share, style=style)
        if phase in _ENDS_A_GROUP:
            table.add_row()
    return table
