"""Measures the core: `python benchmarks/core.py [--quick] [--out FILE]`, what `make bench` runs.

Two spawned processes, a state dict of 300 bf16 tensors, every byte new in every sample, ours and
the baselines in turn in one run. README.md beside this file says how each figure comes about.
"""

import datetime as dt
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from _lib.environment import collect_environment, save
from _lib.groups import Group, Row, count_steps, run_group, share_probes
from _lib.memory import GIB, MIB, available_nbytes, warm_up
from _lib.pair import Pair
from _lib.plan import MANY_TENSORS, Plan, fit, make_plan, needed_nbytes
from _lib.ratios import Figures, core_figures, peer_figures, size_figures
from _lib.report import print_figures, print_rows
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

__all__ = ["main"]

_FORMAT = 1
_DEFAULT_OUT = Path(__file__).resolve().parent / "results" / "core.json"


def _first_updates(plan: Plan, tick: Any) -> list[float]:
    """Return the seconds of the first update of the many tensors, in fresh processes each time."""
    seconds = []
    for _ in range(plan.first_plans):
        with Pair(plan.payload, [MANY_TENSORS]) as pair:
            pair.setup(MANY_TENSORS)
            seconds.append(float(pair.update(MANY_TENSORS)["loaded_s"]))
        tick()
    return seconds


def _run(plan: Plan, console: Console) -> tuple[dict[str, list[Row]], list[float], dict[str, Any]]:
    """Run the whole plan with a progress bar per group."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    results: dict[str, list[Row]] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:

        def task(name: str, total: int) -> partial[None]:
            return partial(progress.advance, progress.add_task(name, total=total))

        tick = task("memory touched once", 1)
        warm = warm_up(plan.warm_up_nbytes)
        tick()

        def run(group: Group, *, probe: Collection[str] = (), weigh: bool = False) -> None:
            tick = task(group.name, count_steps(group, probe=probe))
            results[group.name] = run_group(group, tick=tick, probe=probe, weigh=weigh)

        core, peers = _names(plan.core), _names(plan.peers)
        # The peers probe most of these lanes again: in a quick run once is enough.
        run(plan.core, probe=core - peers if plan.quick else core)
        run(plan.peers, probe=peers)
        share_probes(results[plan.core.name], results[plan.peers.name])
        run(plan.ray, probe=_names(plan.ray))
        for sized in (plan.sizes, *plan.flips):
            run(sized, weigh=True)
        # The group of sizes began with one in fresh processes, too.
        firsts = [float(results[plan.sizes.name][0].warmup_samples[0]["loaded_s"])]
        firsts += _first_updates(plan, task("first updates", plan.first_plans))
    return results, firsts, warm


def _names(group: Group) -> frozenset[str]:
    return frozenset(lane.name for lane in group.lanes)


def _figures(plan: Plan, results: dict[str, list[Row]], firsts: list[float]) -> Figures:
    """Return the ratios object and its details."""
    figures = Figures()
    core_figures(figures, results["core"])
    sized = [row for group in (plan.sizes, *plan.flips) for row in results[group.name]]
    size_figures(figures, sized, firsts)
    peer_figures(figures, [results["peers"], results["ray"]])
    return figures


def main(
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="256 MiB and fewer repetitions, under a minute.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = _DEFAULT_OUT,
    mib: Annotated[
        int | None, typer.Option(help="Another payload size, for trying things out.")
    ] = None,
) -> None:
    """Measure and write the results."""
    # Ended from outside, the run still ends its processes and removes its files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    console = Console(stderr=True)
    started = time.monotonic()
    environment = collect_environment()
    plan = make_plan(quick=quick, payload_nbytes=None if mib is None else mib * MIB)
    timestamp = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    available = available_nbytes()
    try:
        plan, left_out = fit(plan, available)
    except MemoryError as error:
        console.print(Text(f"error: {error}"))
        raise typer.Exit(1) from error
    needed = max(map(needed_nbytes, plan.groups()))
    console.print(f"Needs {needed / GIB:.1f} GiB of memory; {available / GIB:.1f} are available.")
    for group in left_out:
        console.print(f"Left out: {group.name}, which needs {needed_nbytes(group) / GIB:.1f} GiB.")
    results, firsts, warm = _run(plan, console)
    figures = _figures(plan, results, firsts)
    document = {
        "format": _FORMAT,
        "timestamp": timestamp,
        "quick": quick,
        "seconds": round(time.monotonic() - started, 1),
        "environment": environment,
        "warm_up": warm,
        "payload": {**asdict(plan.payload), "nbytes": plan.payload.nbytes, "dtype": "bfloat16"},
        "left_out": [group.name for group in left_out],
        "repetitions": {group.name: group.reps for group in plan.groups()},
        "warm_up_updates": plan.core.warmup,
        "ratios": figures.ratios,
        "details": figures.details,
        "rows": [row.to_json() for rows in results.values() for row in rows],
    }
    save(document, out)
    for name, rows in results.items():
        print_rows(console, name, rows)
    print_figures(console, figures)
    console.print(f"{document['seconds']} s; all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)
