"""Measures a side-car: `python benchmarks/remote.py [--quick] [--out FILE]`.

What HTTP, signatures and the ledger add to an update: the same small update through a side-car in a
process of its own, step by step, less what its engine's acknowledgement says that the update took
there. Beside it, what the disk takes for a change. README.md beside this file says more.
"""

import datetime as dt
import multiprocessing
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from _lib.environment import collect_environment, save
from rich.console import Console
from rich.table import Table

from rl_bridge import ModuleInstallAdapter, SharedMemoryTensorBridge
from rl_bridge.errors import EngineLost
from rl_bridge.remote import RemoteEngine, TwoPhaseExecutor, serve
from rl_bridge.remote.state import StateDirectory
from rl_bridge.testing.processes import free_port

__all__ = ["main"]

_FORMAT = 1
_OUT = Path(__file__).resolve().parent / "results" / "remote.json"
_WARM_UP = 10
_AIM_MS = 10.0
_START_S = 120.0
_TENSORS = 64


def _weights() -> dict[str, torch.Tensor]:
    return {f"layers.{number}.weight": torch.zeros(8) for number in range(_TENSORS)}


def _sidecar(directory: str, port: int) -> None:
    torch.set_num_threads(1)
    bridge = SharedMemoryTensorBridge(source_worker="rollout")
    executor = TwoPhaseExecutor(
        weight_bridge=bridge, weight_install_adapter=ModuleInstallAdapter(_weights())
    )
    root = Path(directory)
    serve(executor, key_file=root / "key", state_dir=root / "state", port=port)


def _wait_for(engine: RemoteEngine) -> None:
    end = time.monotonic() + _START_S
    while True:
        try:
            engine.status()
        except EngineLost:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return


def _updates(engine: RemoteEngine, repetitions: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    weights = _weights()
    with SharedMemoryTensorBridge(source_worker="trainer") as trainer:
        for version in range(1, repetitions + _WARM_UP + 1):
            for tensor in weights.values():
                tensor.add_(1)
            manifest = trainer.publish(weights, weight_version=version)
            marks = [time.perf_counter()]
            engine.import_weights(manifest)
            marks.append(time.perf_counter())
            engine.prepare_weights(manifest)
            marks.append(time.perf_counter())
            ack = engine.commit_weights(manifest)
            marks.append(time.perf_counter())
            trainer.release(manifest)
            whole = (marks[-1] - marks[0]) * 1e3
            steps = [(b - a) * 1e3 for a, b in pairwise(marks)]
            found = dict(zip(("import_ms", "prepare_ms", "commit_ms"), steps, strict=True))
            found |= {"update_ms": whole, "engine_ms": ack.timings_ms["total"]}
            found["overhead_ms"] = whole - ack.timings_ms["total"]
            if version > _WARM_UP:
                for name, one in found.items():
                    samples.setdefault(name, []).append(one)
    return samples


def _requests(engine: RemoteEngine, repetitions: int) -> list[float]:
    found = []
    for _ in range(repetitions):
        start = time.perf_counter()
        engine.status()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def _changes(directory: Path, repetitions: int) -> list[float]:
    found = []
    with StateDirectory(directory / "changes") as state:
        for number in range(repetitions):
            start = time.perf_counter()
            with state.change(sync=True) as db:
                db.execute("INSERT INTO nonces VALUES (?, ?)", [f"{number:032x}", number])
            found.append((time.perf_counter() - start) * 1e3)
    return found


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer times.")] = False,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = _OUT,
) -> None:
    """Measure and write the results."""
    console = Console(stderr=True)
    torch.set_num_threads(1)
    started = time.monotonic()
    repetitions = 50 if quick else 300
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "key").touch(mode=0o600)
        (directory / "key").write_bytes(os.urandom(32))
        port = free_port()
        process = multiprocessing.get_context("spawn").Process(
            target=_sidecar, args=(name, port), daemon=True
        )
        process.start()
        try:
            with RemoteEngine(f"http://127.0.0.1:{port}", directory / "key") as engine:
                _wait_for(engine)
                samples = _updates(engine, repetitions)
                samples["status_ms"] = _requests(engine, repetitions)
        finally:
            process.terminate()
            process.join(30)
        samples["durable_change_ms"] = _changes(directory, repetitions)
    figures = {name: median(found) for name, found in samples.items()}
    document: dict[str, Any] = {
        "format": _FORMAT,
        "timestamp": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "seconds": round(time.monotonic() - started, 1),
        "environment": collect_environment(),
        "tensors": _TENSORS,
        "repetitions": repetitions,
        "load_average": os.getloadavg(),
        "figures_ms": figures,
        "aims": {"overhead_ms": _AIM_MS},
        "samples": samples,
    }
    save(document, out)
    table = Table("figure", "median", "aim")
    for label, value in figures.items():
        table.add_row(label, f"{value:.2f} ms", f"<= {_AIM_MS} ms" if "overhead" in label else "")
    console.print(table)
    console.print(f"{document['seconds']} s; all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)
