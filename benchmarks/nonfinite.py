"""Measures what the look for NaN and Inf adds to a publication: `python benchmarks/nonfinite.py`.

The same tensors are published with the look and without, in turn, over shared memory; every other
time the one or the other is first. README.md beside this file says how each figure comes about.
"""

import datetime as dt
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from _lib.environment import collect_environment, save
from _lib.memory import GIB, MIB
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rl_bridge import TensorBridge, make_weight_bridge

__all__ = ["main"]

_FORMAT = 1
_OUT = Path(__file__).resolve().parent / "results" / "nonfinite.json"
_TENSORS = 300
_WARM_UP = 3
_LOOKS = {"with": "reject", "without": "off"}


class _Lane:
    """A publisher, and the last version of it."""

    def __init__(self, stack: ExitStack, policy: str, threads: int) -> None:
        self._bridge: TensorBridge = stack.enter_context(
            make_weight_bridge(
                "shared-memory",
                suspicious="off",
                nonfinite=policy,
                num_threads=threads,
                max_slots=2,
            )
        )
        self._version, self._held = 0, ""

    def publish(self, source: dict[str, torch.Tensor]) -> dict[str, float]:
        """One publication, in seconds of the wall and of the processor; then the old one goes."""
        self._version += 1
        start, busy = time.perf_counter(), time.process_time()
        manifest = self._bridge.publish(source, weight_version=self._version)
        spent = {"wall": time.perf_counter() - start, "processor": time.process_time() - busy}
        if self._held:
            self._bridge.release(self._held)
        self._held = manifest.update_id
        return spent


def _source(dtype: torch.dtype, nbytes: int, *, is_strided: bool) -> dict[str, torch.Tensor]:
    side = int((nbytes / _TENSORS / dtype.itemsize) ** 0.5)
    found = {}
    for number in range(_TENSORS):
        tensor = (torch.randn(side, side) * 0.02).to(dtype)
        found[f"layers.{number}.weight"] = tensor.t() if is_strided else tensor
    return found


def _measure(
    dtype: str, nbytes: int, threads: int, reps: int, console: Console, *, is_strided: bool
) -> dict[str, Any]:
    source = _source(getattr(torch, dtype), nbytes, is_strided=is_strided)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in _LOOKS}
    title = f"{dtype}{', strided' if is_strided else ''}, {threads} threads"
    with ExitStack() as stack:
        lanes = {name: _Lane(stack, policy, threads) for name, policy in _LOOKS.items()}
        for turn in track(range(_WARM_UP + reps), title, console=console):
            for name in sorted(lanes, reverse=bool(turn % 2)):
                spent = lanes[name].publish(source)
                if turn >= _WARM_UP:
                    samples[name].append(spent)
    return {
        "dtype": dtype,
        "is_strided": is_strided,
        "threads": threads,
        "nbytes": sum(one.nbytes for one in source.values()),
        "samples_s": samples,
        **{clock: _ratios(samples, clock) for clock in ("wall", "processor")},
    }


def _ratios(samples: dict[str, list[dict[str, float]]], clock: str) -> dict[str, float]:
    looks, plain = ([one[clock] for one in samples[name]] for name in ("with", "without"))
    return {
        "of_medians": median(looks) / median(plain),
        "of_fastest": min(looks) / min(plain),
        "median_in_turn": median(one / other for one, other in zip(looks, plain, strict=True)),
    }


def main(
    *,
    mib: Annotated[int, typer.Option(help="Size of an update.")] = GIB // MIB,
    reps: Annotated[int, typer.Option(help="Publications of each kind.")] = 31,
    out: Annotated[Path, typer.Option(help="Where to write the figures.")] = _OUT,
) -> None:
    """Measure everything and write one JSON file."""
    console = Console(stderr=True)
    torch.set_num_threads(1)
    cases = [("bfloat16", 1, False), ("bfloat16", 2, False), ("float32", 1, False)]
    cases += [("float8_e4m3fn", 1, False), ("bfloat16", 1, True)]
    rows = [
        _measure(dtype, mib * MIB, threads, reps, console, is_strided=is_strided)
        for dtype, threads, is_strided in cases
    ]
    report = {
        "format": _FORMAT,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "environment": collect_environment(),
        "publications": rows,
    }
    save(report, out)
    table = Table("dtype", "strided", "threads", "clock", "with / without", "in turn", "fastest")
    for row in rows:
        for clock in ("wall", "processor"):
            table.add_row(
                row["dtype"],
                "yes" if row["is_strided"] else "no",
                str(row["threads"]),
                clock,
                *(
                    f"{row[clock][one]:.3f}"
                    for one in ("of_medians", "median_in_turn", "of_fastest")
                ),
            )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
