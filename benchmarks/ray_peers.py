"""Measures updates between two actors of Ray: `python benchmarks/ray_peers.py [--quick]`.

One trainer's actor and one rollout's, on one node. In turn, in one run: our fleet, our tensor
transport of Ray Direct Transport, Ray's own object store with zero-copy tensors, and Ray Direct
Transport over Gloo and over NIXL. Each update is timed by the driver from the call that publishes
to the answer of the rollout, which has then looked into every tensor. README.md beside this file
says more. Needs the environment of `make test-machines`.
"""

import datetime as dt
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

# Read by Ray when it is imported, here and in the workers.
os.environ.setdefault("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
import typer
from _lib.environment import collect_environment, save
from _lib.memory import GIB, MIB, warm_up
from _lib.payload import Payload, PayloadSpec, find_wrong_tensor
from _lib.stats import summarise
from rich.console import Console
from rich.table import Table

from rl_bridge.ray import (
    RolloutActor,
    RolloutFleet,
    WeightPublisherActor,
    register_direct_transport,
)

__all__ = ["main"]

_FORMAT = 1
_HERE = Path(__file__).resolve().parent
_OUT = _HERE / "results" / "ray.json"
_TIMEOUT_S = 180.0
_WARM_UP = 3
# Lane -> the tensor transport of its method; ours needs none, and None is the object store.
_LANES: Mapping[str, str | None] = {
    "ours": None,
    "ours_direct": "rl_bridge",
    "object_store_zero_copy": None,
    "direct_gloo": "gloo",
    "direct_nixl": "nixl",
}
_PEERS = ("object_store_zero_copy", "direct_gloo", "direct_nixl")


class Trainer(WeightPublisherActor):
    """Holds the payload and rewrites every byte of it in place."""

    def __init__(self, spec: dict[str, int]) -> None:
        torch.set_num_threads(1)
        self.payload = Payload.build(PayloadSpec(**spec))

    def advance_to(self, version: int) -> None:
        self.payload.advance_to(version)

    def weights_to_publish(self) -> dict[str, torch.Tensor]:
        return self.payload.tensors

    def weights(self) -> dict[str, torch.Tensor]:
        return self.payload.tensors


class Rollout(RolloutActor):
    """Looks into every tensor of what it gets."""

    def __init__(self, spec: dict[str, int]) -> None:
        torch.set_num_threads(1)
        self.spec = PayloadSpec(**spec)

    def weight_adapter(self) -> None:
        return None  # the imported tensors themselves are what it uses

    def update_weights(self, manifest: bytes) -> bytes:
        answer = super().update_weights(manifest)
        executor = self._rollout_endpoint().executor
        version = executor.active_weight_version
        assert version is not None
        self._look_into(dict(executor.shared_weights), version)
        return answer

    def take(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        self._look_into(tensors, version)

    def _look_into(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        wrong = find_wrong_tensor(tensors, self.spec, version)
        assert wrong is None, wrong


def _returns_by(transport: str) -> dict[str, object]:
    # A function of its own: Ray writes the transport into it.
    def weights(self: Trainer) -> dict[str, torch.Tensor]:
        return self.payload.tensors

    return {"weights": ray.method(tensor_transport=transport)(weights)}


class Lane:
    """Two actors that hand weights over in one way."""

    def __init__(self, name: str, spec: PayloadSpec) -> None:
        self._name = name
        sizes = {"num_tensors": spec.num_tensors, "rows": spec.rows, "cols": spec.cols}
        transport = _LANES[name]
        kind = type("Trainer", (Trainer,), {} if transport is None else _returns_by(transport))
        remote = ray.remote(num_cpus=0.5, enable_tensor_transport=transport is not None)
        self.trainer = remote(kind).remote(sizes)
        self.rollout = remote(Rollout).remote(sizes)
        if transport == "gloo":
            from ray.experimental.collective import create_collective_group

            create_collective_group([self.trainer, self.rollout], backend="gloo")
        self._fleet = None
        if name == "ours":
            self._fleet = RolloutFleet(self.trainer, timeout_s=_TIMEOUT_S)
            self._fleet.join("rollout", self.rollout)

    def update(self, version: int) -> float:
        """Hand one version over; the seconds that it took."""
        ray.get(self.trainer.advance_to.remote(version), timeout=_TIMEOUT_S)
        start = time.perf_counter()
        if self._fleet is not None:
            self._fleet.update(version).require_all()
        else:
            reference = self.trainer.weights.remote()
            ray.get(self.rollout.take.remote(reference, version), timeout=_TIMEOUT_S)
        return time.perf_counter() - start

    def close(self) -> None:
        """End both actors; their memory goes with them."""
        ray.kill(self.trainer)
        ray.kill(self.rollout)


@contextmanager
def _cluster(nbytes: int) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            # Two versions at a time, and room.
            object_store_memory=max(3 * nbytes, 128 * MIB),
            _temp_dir=folder,
            runtime_env={
                "env_vars": {
                    "PYTHONPATH": f"{_HERE.parent}:{_HERE}",
                    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
                }
            },
        )
        try:
            register_direct_transport()
            yield
        finally:
            ray.shutdown()


def _measure(
    spec: PayloadSpec, rounds: int, reps: int, console: Console
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    samples: dict[str, list[float]] = {name: [] for name in _LANES}
    warm: dict[str, list[float]] = {name: [] for name in _LANES}
    for number in range(rounds):
        for name in _LANES:
            # Anew in each round: the threads of NIXL's agents would take cores from other lanes.
            lane = Lane(name, spec)
            try:
                for version in range(1, _WARM_UP + reps + 1):
                    taken = lane.update(version)
                    (warm if version <= _WARM_UP else samples)[name].append(taken)
            finally:
                lane.close()
            last = samples[name][-reps:]
            console.print(f"round {number + 1} {name}: {median(last) * 1e3:.1f} ms")
    return samples, warm


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="64 MiB and one round.")] = False,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = _OUT,
    rounds: Annotated[int | None, typer.Option(help="Another number of rounds.")] = None,
    reps: Annotated[int, typer.Option(help="Updates of each lane in a round.")] = 6,
) -> None:
    """Measure and write the results."""
    console = Console(stderr=True)
    torch.set_num_threads(1)
    started = time.monotonic()
    environment = collect_environment()
    spec = PayloadSpec.for_nbytes(64 * MIB if quick else GIB)
    timestamp = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    warm_nbytes = warm_up(7 * spec.nbytes)
    with _cluster(spec.nbytes):
        samples, warm = _measure(spec, rounds or (1 if quick else 3), reps, console)
    summary = {name: summarise(taken) for name, taken in samples.items()}
    ours = summary["ours"]["median"]
    direct = summary["ours_direct"]["median"]
    ratios = {f"ours_vs_{peer}": round(summary[peer]["median"] / ours, 3) for peer in _PEERS}
    ratios |= {
        f"ours_direct_vs_{peer}": round(summary[peer]["median"] / direct, 3) for peer in _PEERS
    }
    document = {
        "format": _FORMAT,
        "timestamp": timestamp,
        "quick": quick,
        "seconds": round(time.monotonic() - started, 1),
        "environment": environment,
        "warm_up": warm_nbytes,
        "payload_nbytes": spec.nbytes,
        "num_tensors": spec.num_tensors,
        "ratios": ratios,
        "figures": {
            name: {"value": ratio, "aim": ">= 1", "aim_met": ratio >= 1}
            for name, ratio in ratios.items()
        },
        "summary_s": summary,
        "samples_s": samples,
        "warmup_samples_s": warm,
    }
    save(document, out)
    table = Table()
    for column in ("lane", "median ms", "min ms", "GB/s", "ours is faster by"):
        table.add_column(column)
    for name, row in summary.items():
        factor = ratios.get(f"ours_vs_{name}")
        table.add_row(
            name,
            f"{row['median'] * 1e3:.1f}",
            f"{row['min'] * 1e3:.1f}",
            f"{spec.nbytes / row['median'] / 1e9:.2f}",
            "" if factor is None else f"{factor:.2f}",
        )
    console.print(table)
    console.print(f"{document['seconds']} s; all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)
