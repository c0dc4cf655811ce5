"""Measures the transport broadcast: `python benchmarks/broadcast.py [--quick] [--out FILE]`.

A trainer and an engine in two processes, joined by Gloo on this machine. In turn, in one run: one
raw broadcast of the whole arena in the very same process group, and ours, from the sealed slot to
the verified import. README.md beside this file says how each figure comes about.
"""

import datetime as dt
import json
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from _lib.environment import collect_environment, save
from _lib.memory import GIB, MIB, warm_up
from _lib.payload import Payload, PayloadSpec, find_wrong_tensor
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rl_bridge import make_weight_bridge
from rl_bridge.bridge import BroadcastTensorBridge
from rl_bridge.transports.broadcast import group, receiver, sender

__all__ = ["main"]

_FORMAT = 1
_OUT = Path(__file__).resolve().parent / "results" / "broadcast.json"
_SMALL_NBYTES = 16 << 10
_WARM_UP = 3
_TIMEOUT_S = 120.0
_QUIET_S = 0.02
_AIMS = {"broadcast_vs_raw_gloo": 0.85, "small_vs_one_tensor": 0.7}


class Clock:
    """Times of this process's last transfer; raw transfers take the place of ours when asked."""

    def __init__(self) -> None:
        self.is_raw = False
        self.began_ns = 0
        self.ended_ns = 0

    def install(self, module: Any) -> None:
        """Stand in for a side's `send_slices`."""
        module.send_slices = self.transfer

    def transfer(
        self,
        members: group.Group,
        arena: torch.Tensor,
        slice_nbytes: int,
        *,
        meanwhile: Callable[[int], None] | None = None,
    ) -> None:
        """Ours, or the whole arena at once; both sides begin together."""
        if not self.is_raw:
            self.began_ns = time.monotonic_ns()
            group.send_slices(members, arena, slice_nbytes, meanwhile=meanwhile)
        else:
            for _ in range(2):  # everybody is there
                members.finish(members.broadcast(arena[:1]))
            self.began_ns = time.monotonic_ns()
            members.finish(members.broadcast(arena))
        self.ended_ns = time.monotonic_ns()


def _engine(connection: Connection, specs: dict[str, dict[str, int]], info: str) -> None:
    """The other process: imports what it is told to, and says when it was verified."""
    torch.set_num_threads(1)
    clock = Clock()
    clock.install(receiver)
    bridge = make_weight_bridge(
        "broadcast", source_worker="engine", init_info=info, timeout_s=_TIMEOUT_S
    )
    assert isinstance(bridge, BroadcastTensorBridge)
    with bridge:
        bridge.join()
        connection.send_bytes(b"ready")
        while True:
            lane, raw, version = json.loads(connection.recv_bytes())
            if not lane:
                return
            clock.is_raw = raw
            connection.send_bytes(b"ready")
            tensors = bridge.import_update(connection.recv_bytes().decode("ascii"))
            verified_ns = time.monotonic_ns()
            wrong = find_wrong_tensor(tensors, PayloadSpec(**specs[lane]), version)
            answer = {"verified_ns": verified_ns, "ended_ns": clock.ended_ns, "wrong": wrong}
            connection.send_bytes(json.dumps(answer).encode("ascii"))
            released = connection.recv_bytes().decode("ascii")
            bridge.acknowledge(released)
            del tensors
            bridge.release(released)
            connection.send_bytes(b"released")


class Pair:
    """The trainer's side, and the pipe to the engine."""

    def __init__(self, specs: dict[str, PayloadSpec]) -> None:
        self.payloads = {lane: Payload.build(spec) for lane, spec in specs.items()}
        self.clock = Clock()
        self.clock.install(sender)
        made = make_weight_bridge(
            "broadcast",
            source_worker="trainer",
            timeout_s=_TIMEOUT_S,
            suspicious="off",
            nonfinite="warn",
        )
        assert isinstance(made, BroadcastTensorBridge)
        self.bridge = made
        self.version = 0
        self.known: set[str] = set()
        context = multiprocessing.get_context("spawn")
        self.line, there = context.Pipe()
        sizes = {
            lane: {"num_tensors": spec.num_tensors, "rows": spec.rows, "cols": spec.cols}
            for lane, spec in specs.items()
        }
        info = self.bridge.init_info().to_json()
        self.process = context.Process(target=_engine, args=(there, sizes, info), daemon=True)
        self.process.start()
        there.close()
        self._hear()

    def _hear(self) -> bytes:
        if not self.line.poll(_TIMEOUT_S):
            raise TimeoutError(f"the engine said nothing for {_TIMEOUT_S} s")
        return self.line.recv_bytes()

    def update(self, lane: str, *, raw: bool) -> dict[str, float]:
        """One update, every byte new."""
        self.version += 1
        payload = self.payloads[lane]
        payload.advance_to(self.version)
        self.line.send_bytes(json.dumps([lane, raw, self.version]).encode("ascii"))
        self._hear()
        self.clock.is_raw = raw
        time.sleep(_QUIET_S)
        began = time.monotonic()
        manifest = self.bridge.publish(payload.tensors, weight_version=self.version)
        sealed = self._sealed_at(manifest.update_id)
        # The layout travels once, with the first update of a lane.
        self.line.send_bytes(manifest.to_json(layout=lane not in self.known).encode("ascii"))
        self.known.add(lane)
        told = json.loads(self._hear())
        if told["wrong"]:
            raise ValueError(told["wrong"])
        self.line.send_bytes(manifest.update_id.encode("ascii"))
        self._hear()
        self.bridge.release(manifest.update_id)
        return {
            "publish_s": sealed - began,
            "wire_s": (told["ended_ns"] - self.clock.began_ns) / 1e9,
            "sealed_to_verified_s": told["verified_ns"] / 1e9 - sealed,
        }

    def _sealed_at(self, update_id: str) -> float:
        end: Any = self.bridge.publisher.end
        return float(end._sender.find(update_id).published_at)  # noqa: SLF001

    def close(self) -> None:
        """End the engine."""
        self.line.send_bytes(b'["", false, 0]')
        self.process.join(_TIMEOUT_S)
        if self.process.is_alive():
            self.process.kill()
        self.bridge.close()


_STEPS = {
    "raw": ("300", True, "wire_s"),
    "ours": ("300", False, "sealed_to_verified_s"),
    "one": ("one", False, "sealed_to_verified_s"),
    "small": ("small", False, "sealed_to_verified_s"),
}
"""Sample -> payload, raw or ours, and what of it counts."""


def _specs(nbytes: int) -> dict[str, PayloadSpec]:
    cols = 1024
    return {
        "300": PayloadSpec.for_nbytes(nbytes),
        "one": PayloadSpec(num_tensors=1, rows=nbytes // (2 * cols), cols=cols),
        "small": PayloadSpec(
            num_tensors=nbytes // _SMALL_NBYTES, rows=_SMALL_NBYTES // (2 * cols), cols=cols
        ),
    }


def _measure(
    nbytes: int, reps: int, console: Console
) -> tuple[dict[str, list[dict[str, float]]], dict[str, list[dict[str, float]]]]:
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in _STEPS}
    warm: dict[str, list[dict[str, float]]] = {name: [] for name in _STEPS}
    pair = Pair(_specs(nbytes))
    try:
        for turn in track(range(_WARM_UP + reps), "turns", console=console):
            for name, (lane, raw, _) in _STEPS.items():
                (warm if turn < _WARM_UP else samples)[name].append(pair.update(lane, raw=raw))
    finally:
        pair.close()
    return samples, warm


def _figures(samples: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    seconds = {name: [sample[_STEPS[name][2]] for sample in rows] for name, rows in samples.items()}
    parts = {"broadcast_vs_raw_gloo": ("raw", "ours"), "small_vs_one_tensor": ("one", "small")}
    found = {}
    for name, (baseline, ours) in parts.items():
        ratio = median(seconds[baseline]) / median(seconds[ours])
        found[name] = {
            "value": round(ratio, 3),
            "aim": _AIMS[name],
            "aim_met": ratio >= _AIMS[name],
            "baseline_s": median(seconds[baseline]),
            "ours_s": median(seconds[ours]),
            "baseline_fastest_s": min(seconds[baseline]),
            "ours_fastest_s": min(seconds[ours]),
        }
    return found


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="64 MiB and fewer repetitions.")] = False,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = _OUT,
    mib: Annotated[int | None, typer.Option(help="Another payload size.")] = None,
    reps: Annotated[int | None, typer.Option(help="Another number of repetitions.")] = None,
    slice_mib: Annotated[int | None, typer.Option(help="Slices of another size.")] = None,
) -> None:
    """Measure and write the results."""
    console = Console(stderr=True)
    # OpenMP's threads would spin on and take a core from whatever is timed next.
    torch.set_num_threads(1)
    if slice_mib is not None:
        sender.SLICE_NBYTES = slice_mib * MIB
    started = time.monotonic()
    environment = collect_environment()
    nbytes = mib * MIB if mib else (64 * MIB if quick else GIB)
    repetitions = reps or (5 if quick else 15)
    timestamp = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    warm = warm_up(9 * nbytes)
    samples, warmup_samples = _measure(nbytes, repetitions, console)
    figures = _figures(samples)
    document = {
        "format": _FORMAT,
        "timestamp": timestamp,
        "quick": quick,
        "seconds": round(time.monotonic() - started, 1),
        "environment": environment,
        "warm_up": warm,
        "payload_nbytes": nbytes,
        "slice_nbytes": sender.SLICE_NBYTES,
        "receivers": 1,
        "repetitions": repetitions,
        "ratios": {name: figure["value"] for name, figure in figures.items()},
        "details": figures,
        "samples": samples,
        "warmup_samples": warmup_samples,
    }
    save(document, out)
    table = Table()
    for column in ("figure", "value", "aim", "met", "baseline ms", "ours ms"):
        table.add_column(column)
    for name, figure in figures.items():
        table.add_row(
            name,
            str(figure["value"]),
            f">= {figure['aim']}",
            "yes" if figure["aim_met"] else "no",
            f"{figure['baseline_s'] * 1e3:.1f}",
            f"{figure['ours_s'] * 1e3:.1f}",
        )
    console.print(table)
    console.print(f"{document['seconds']} s; all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)
