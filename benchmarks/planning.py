"""Measures update groups: `python benchmarks/planning.py [--quick] [--out FILE] [--against TREE]`.

How long the arithmetic takes, once per layout: proving coverage, reading a layout, planning. What a
version costs: assembling it beside copying and digesting as many bytes, publishing it beside
publishing the same tensors without a group. And what it costs if its tensors are very many and
small: with `--against`, the sources of an earlier commit (a worktree of it, with its compiled
module), by that commit and by this one, in turn. README.md beside this file says how each figure
comes about.
"""

import datetime as dt
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from _lib.cuts import placement
from _lib.environment import collect_environment, commit_of, save
from _lib.many import Lane
from _lib.memory import GIB, MIB, warm_up
from rich.console import Console
from rich.table import Table

from rl_bridge import SharedMemoryTensorBridge as Bridge
from rl_bridge.assembly.plan import make_plan
from rl_bridge.assembly.wanted import TensorParallel, Wanted, everything, parallel
from rl_bridge.groups import GroupBridge, GroupPublisher, Placement
from rl_bridge.groups.exchange import FunctionExchange
from rl_bridge.manifest.coverage import held_pieces, prove_coverage
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.passes import BytePlan

__all__ = ["main"]

_FORMAT = 1
_OUT = Path(__file__).resolve().parent / "results" / "planning.json"
_RANKS = 8
_WARM_UP = 2
_AIMS = {
    "coverage_s": 2.0,
    "plan_reshard_s": 2.0,
    "plan_whole_s": 2.0,
    "plan_again_s": 0.001,
    "group_read_s": 0.06,
}

Ranks = list[dict[str, Placement]]


def _cut(num_tensors: int) -> Ranks:
    """Half of the tensors by rows, half by columns."""
    names = [f"layers.{i // 2}.{('row', 'column')[i % 2]}.weight" for i in range(num_tensors)]
    return [
        {name: placement(name, (64, 64), i % 2, rank, _RANKS) for i, name in enumerate(names)}
        for rank in range(_RANKS)
    ]


def _table(placements: dict[str, Placement]) -> TensorTable:
    return TensorTable.pack({name: (one.dtype, one.shape) for name, one in placements.items()})


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = action()
    return time.perf_counter() - start, found


def _read(text: str) -> GroupLayout:
    return GroupLayout.from_text(text)


def _arithmetic(num_tensors: int, repetitions: int) -> dict[str, list[float]]:
    ranks = _cut(num_tensors)
    layout = GroupLayout.build([_table(one) for one in ranks], ranks)
    layout.held, layout.wholes, layout.digest  # noqa: B018 - computed once per layout
    wishes: dict[str, Wanted] = {
        "plan_whole_s": everything(),
        "plan_reshard_s": parallel(tensor=TensorParallel(2, 1, {"*.row.*": 1, "*.column.*": 0})),
    }
    samples: dict[str, list[float]] = {}
    for _ in range(repetitions):
        found = {
            "coverage_s": _timed(lambda: prove_coverage(held_pieces(ranks)))[0],
            "read_layout_s": _timed(lambda: _read(layout.text))[0],
        }
        for name, wish in wishes.items():
            found[name] = _timed(lambda wish=wish: make_plan(layout, wish(layout.wholes)))[0]  # type: ignore[misc]
        for name, seconds in found.items():
            samples.setdefault(name, []).append(seconds)
    with GroupBridge() as bridge:
        bridge.plan(layout)
        samples["plan_again_s"] = [_timed(lambda: bridge.plan(layout))[0] for _ in range(20)]
    return samples


def _alone(payload: bytes, _limit: float) -> list[bytes]:
    return [payload]


def _updates(nbytes: int, repetitions: int) -> dict[str, list[float]]:
    """One rank, 300 matrices; the engine wants half of the rows of each."""
    rows = nbytes // 300 // 2 // 1024 // 4 * 4
    whole = {f"layers.{i}.weight": torch.ones(rows, 1024, dtype=torch.bfloat16) for i in range(300)}
    placements = {name: placement(name, (rows, 1024), 0, 0, 1) for name in whole}
    half = sum(one.nbytes for one in whole.values()) // 2
    samples: dict[str, list[float]] = {}
    with ExitStack() as stack:
        plain, mine = (
            stack.enter_context(Bridge(source_worker="trainer", suspicious="off", nonfinite="off"))
            for _ in "ab"
        )
        group = GroupPublisher(mine, FunctionExchange(_alone, rank=0, world_size=1))
        wish = parallel(tensor=TensorParallel(2, 1, {"*": 0}))
        engine = stack.enter_context(GroupBridge(wish))
        source, target = (np.ones(half, np.uint8) for _ in "ab")
        copy = BytePlan(np.full(300, half // 300, np.uint64))
        offsets = np.arange(300, dtype=np.uint64) * np.uint64(half // 300)
        pointers = [np.uint64(one.ctypes.data) + offsets for one in (source, target)]
        for version in range(1, _WARM_UP + repetitions + 1):
            for tensor in whole.values():
                tensor.view(torch.int16).add_(0x0101)
            seconds, manifest = _timed(lambda v=version: plain.publish(whole, weight_version=v))  # type: ignore[misc]
            plain.release(manifest)
            found = {"publish": seconds}
            found["group_publish"], made = _timed(
                lambda v=version: group.publish(whole, placements, weight_version=v)  # type: ignore[misc]
            )
            text = made.to_json(layout=version == 1)
            found["copy_digest"] = _timed(lambda: copy.copy_digest(*pointers))[0]
            found["assemble"] = _timed(lambda t=text: engine.import_update(t))[0]  # type: ignore[misc]
            engine.acknowledge(made)
            engine.release(made)
            group.release(made)
            for name, one in found.items():
                if version > _WARM_UP:
                    samples.setdefault(name, []).append(one)
    return samples


def _many(num_tensors: int, repetitions: int, against: Path | None) -> dict[str, Any]:
    """Versions of very many tensors, with each of the trees in turn."""
    trees = {"before": against, "now": Path(__file__).resolve().parents[1]}
    used = {name: tree.resolve() for name, tree in trees.items() if tree is not None}
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in used}
    first: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        lanes = {
            name: stack.enter_context(Lane(tree, num_tensors, _RANKS))
            for name, tree in used.items()
        }
        for turn in range(_WARM_UP + repetitions):
            # Each goes first in every other turn.
            for name in list(used)[:: 1 if turn % 2 else -1]:
                sample = lanes[name].update()
                first.setdefault(name, sample)
                for step, seconds in sample.items() if turn >= _WARM_UP else ():
                    samples[name].setdefault(step, []).append(seconds)
    medians = {
        name: {step: median(taken) for step, taken in found.items()}
        for name, found in samples.items()
    }
    return {
        "commits": {name: commit_of(tree) for name, tree in used.items()},
        "first": first,
        "medians": medians,
        "samples": samples,
    }


def main(
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="64 MiB, 4,000 tensors, fewer times.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="Sources of an earlier commit, with its compiled module.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = _OUT,
) -> None:
    """Measure and write the results."""
    console = Console(stderr=True)
    torch.set_num_threads(1)
    started = time.monotonic()
    nbytes, num_tensors = (64 * MIB, 4_000) if quick else (GIB, 40_000)
    repetitions = 3 if quick else 7
    environment = collect_environment()
    warm = warm_up(5 * nbytes)
    samples = _arithmetic(num_tensors, repetitions)
    updates = _updates(nbytes, 2 * repetitions)
    many = _many(num_tensors, repetitions, against)
    figures = {name: median(found) for name, found in samples.items()} | many["medians"]["now"]
    ratios = {
        "assemble_vs_copy_digest": median(updates["copy_digest"]) / median(updates["assemble"]),
        "group_publish_vs_publish": median(updates["publish"]) / median(updates["group_publish"]),
    }
    for name, before in many["medians"].get("before", {}).items():
        ratios[f"{name.removesuffix('_s')}_before_vs_now"] = before / many["medians"]["now"][name]
    document = {
        "format": _FORMAT,
        "timestamp": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "seconds": round(time.monotonic() - started, 1),
        "environment": environment,
        "warm_up": warm,
        "tensors": num_tensors,
        "ranks": _RANKS,
        "payload_nbytes": nbytes,
        "repetitions": repetitions,
        "figures_s": figures,
        "ratios": ratios,
        "aims": _AIMS,
        "many": many,
        "samples": {**samples, **updates},
    }
    save(document, out)
    table = Table("figure", "value", "aim")
    for name, value in {**figures, **ratios}.items():
        aim = _AIMS.get(name)
        table.add_row(name, f"{value:.4f}", "" if aim is None else f"<= {aim}")
    console.print(table)
    console.print(f"{document['seconds']} s; all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)
