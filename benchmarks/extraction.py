"""Measures extractors: `python benchmarks/extraction.py [--quick] [--out FILE]`.

Two ranks of a trainer, joined by Gloo on this machine, with a model under FSDP2. What `local` costs
beyond copying the same tensors, and what `full` takes of memory. README.md beside this file says
how each figure comes about.
"""

import datetime as dt
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from _lib.environment import collect_environment, save
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from rl_bridge.trainers import FSDPWeightExtractor

__all__ = ["main"]

_FORMAT = 1
_OUT = Path(__file__).resolve().parent / "results" / "extraction.json"
_ALLOWED_MS = 1.0
_AIM_US = 2.0
_AIM_PEAK = 1.0
_WARM_UP = 3
_TIMEOUT_S = 600.0
_RANKS = 2


def _model(num_tensors: int, width: int) -> nn.Module:
    """Weights and biases in equal number, sharded over all ranks."""
    per_block = 12
    blocks = [
        nn.Sequential(*(nn.Linear(width, width) for _ in range(per_block // 2)))
        for _ in range(num_tensors // per_block)
    ]
    model = nn.Sequential(*blocks)
    mesh = init_device_mesh("cpu", (_RANKS,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _drain(extractor: FSDPWeightExtractor, dtype: torch.dtype | None) -> None:
    for chunk in extractor.local(dtype):
        del chunk


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _local(num_tensors: int, width: int, reps: int) -> dict[str, Any]:
    """`local` with a cast and without one, beside a loop that copies the same tensors."""
    extractor = FSDPWeightExtractor(_model(num_tensors, width), keep_buffers=True)
    sources = [tensor for chunk in extractor.local() for tensor in chunk.tensors]
    cast = [tensor.bfloat16() for tensor in sources]
    ways: dict[str, Callable[[], object]] = {
        "local": lambda: _drain(extractor, None),
        "local_cast": lambda: _drain(extractor, torch.bfloat16),
        "copy": lambda: _copy(cast, sources),
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(_WARM_UP + reps):
        for name, work in ways.items():
            taken = _seconds(work)
            if turn >= _WARM_UP:
                samples[name].append(taken)
    return {"num_tensors": len(sources), "samples_s": samples}


def _full(num_tensors: int, width: int, chunk_nbytes: int) -> dict[str, Any]:
    """The most memory that torch's allocator hands out while whole tensors are gathered."""
    extractor = FSDPWeightExtractor(_model(num_tensors, width), chunk_nbytes=chunk_nbytes)
    for chunk in extractor.full(torch.bfloat16):
        del chunk
    began, count = time.perf_counter(), 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for chunk in extractor.full(torch.bfloat16):
            count += 1
            del chunk
    results: Any = profiled.profiler
    events = [one for one in results.kineto_results.events() if one.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    seconds = time.perf_counter() - began
    return {
        "chunk_nbytes": chunk_nbytes,
        "chunks": count,
        "peak_nbytes": peak,
        "seconds": seconds,
    }


def _rank(rank: int, meeting: str, plan: dict[str, Any], line: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=_RANKS
    )
    measured: dict[str, Any] = {"local": []}
    for num_tensors, width in plan["local"]:
        # One rank after the other: the machine has few cores, and the other one's work is the same.
        for turn in range(_RANKS):
            torch.distributed.barrier()
            found = _local(num_tensors, width, plan["reps"] if turn == rank else 0)
            if turn == rank:
                measured["local"].append(found)
    measured["full"] = _full(**plan["full"])
    torch.distributed.barrier()
    line.send_bytes(json.dumps(measured).encode("ascii"))
    torch.distributed.destroy_process_group()


def _measure(plan: dict[str, Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        lines, processes = [], []
        for rank in range(_RANKS):
            here, there = context.Pipe()
            meeting = str(Path(folder) / "meeting")
            process = context.Process(target=_rank, args=(rank, meeting, plan, there), daemon=True)
            process.start()
            there.close()
            lines.append(here)
            processes.append(process)
        try:
            answers = []
            for line in lines:
                if not line.poll(_TIMEOUT_S):
                    raise TimeoutError(f"a rank said nothing for {_TIMEOUT_S} s")
                answers.append(json.loads(line.recv_bytes()))
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    first: dict[str, Any] = answers[0]
    return first


def _figures(measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in measured["local"]:
        count = row["num_tensors"]
        times = {name: median(samples) for name, samples in row["samples_s"].items()}
        for name, beyond in (
            ("local", times["local"]),
            ("local_cast", times["local_cast"] - times["copy"]),
        ):
            us = max(0.0, beyond * 1e6 - _ALLOWED_MS * 1e3) / count
            found[f"{name}_us_per_tensor_{count}"] = {
                "value": round(us, 3),
                "aim": f"<= {_AIM_US}",
                "aim_met": us <= _AIM_US,
                "ms": round(beyond * 1e3, 3),
                "fastest_ms": {
                    way: round(min(samples) * 1e3, 3) for way, samples in row["samples_s"].items()
                },
            }
    full = measured["full"]
    ratio = full["peak_nbytes"] / full["chunk_nbytes"]
    found["full_peak_vs_chunk"] = {
        "value": round(ratio, 3),
        "aim": f"<= {_AIM_PEAK}",
        "aim_met": ratio <= _AIM_PEAK,
        "ms": round(full["seconds"] * 1e3, 3),
    }
    return found


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller models, fewer turns.")] = False,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = _OUT,
) -> None:
    """Measure and write the results."""
    console = Console(stderr=True)
    started = time.monotonic()
    plan = {
        "reps": 7 if quick else 25,
        "local": [(300, 64), (1200, 32)] if quick else [(300, 512), (3600, 64), (36000, 8)],
        "full": {
            "num_tensors": 120 if quick else 300,
            "width": 256 if quick else 1024,
            "chunk_nbytes": (2 << 20) if quick else (64 << 20),
        },
    }
    measured = _measure(plan)
    figures = _figures(measured)
    document = {
        "format": _FORMAT,
        "timestamp": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "seconds": round(time.monotonic() - started, 1),
        "environment": collect_environment(),
        "plan": plan,
        "ratios": {name: figure["value"] for name, figure in figures.items()},
        "details": figures,
        "measured": measured,
    }
    save(document, out)
    table = Table()
    for column in ("figure", "value", "aim", "met", "ms"):
        table.add_column(column)
    for name, figure in figures.items():
        met = "yes" if figure["aim_met"] else "no"
        table.add_row(name, str(figure["value"]), figure["aim"], met, str(figure["ms"]))
    console.print(table)
    console.print(f"{document['seconds']} s; all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)
