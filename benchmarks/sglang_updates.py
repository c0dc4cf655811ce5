"""Measures updates of a real SGLang engine: `python benchmarks/sglang_updates.py [--quick]`.

One engine of Qwen2.5-0.5B's shape with random bf16 weights; ours and SGLang's own same-host routes
in turn in one run, every update new bytes. README.md beside this file says how each figure comes
about.
"""

import datetime as dt
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from _lib import sglang_cpu
from _lib.alternating import Ours, alternate, timed
from _lib.environment import collect_environment, save
from _lib.qwen import QUICK, QWEN2, make_weights
from rich.console import Console
from rich.table import Table

__all__ = ["main"]

_OUT = Path(__file__).resolve().parent / "results" / "sglang.json"


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    share: Any = tensor.clone().share_memory_  # which has no types
    shared: torch.Tensor = share()
    return shared


class _Bench:
    """The engine, the trainer's weights, and each way of getting them in."""

    def __init__(self, shape: dict[str, Any], folder: Path) -> None:
        from rl_bridge.sglang import SGLangInstallAdapter

        self.folder = folder
        self.versions = [make_weights(shape, seed) for seed in (0, 1)]
        self.nbytes = sum(tensor.nbytes for tensor in self.versions[0].values())
        self.engine = sglang_cpu.start(shape, folder, load_format="dummy")
        self.bridges = Ours(SGLangInstallAdapter(self.engine), "sglang")
        # What SGLang's route takes by reference: a trainer's weights that lie in shared memory.
        self.shared = [
            {name: _shared(tensor) for name, tensor in weights.items()} for weights in self.versions
        ]

    def ours(self, which: int) -> dict[str, Any]:
        """Publish, then the executor's whole transaction."""
        return self.bridges.update(self.versions[which])

    def reference(self, which: int) -> dict[str, Any]:
        """`update_weights_from_tensor` of weights in shared memory: one copy, by reference."""
        named = list(self.shared[which].items())
        return {"update_s": timed(lambda: self._session(named, None))}

    def bucket(self, which: int) -> dict[str, Any]:
        """`update_weights_from_tensor` of a flattened bucket, which is made for it."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        start = time.perf_counter()
        made = FlattenedTensorBucket(named_tensors=list(self.versions[which].items()))
        content = {"flattened_tensor": made.get_flattened_tensor(), "metadata": made.get_metadata()}
        serialized = [MultiprocessingSerializer.serialize(content)]
        made_s = time.perf_counter() - start
        return {
            "bucket_s": made_s,
            "update_s": timed(lambda: self._session(serialized, "flattened_bucket")),
        }

    def disk(self, which: int) -> dict[str, Any]:
        """Safetensors on tmpfs, and `update_weights_from_disk`."""
        from safetensors.torch import save_file

        weights = self.versions[which]
        save_s = timed(lambda: save_file(weights, self.folder / "model.safetensors"))
        loaded_s = timed(
            lambda: sglang_cpu.require(
                self.engine.update_weights_from_disk(str(self.folder), load_format="safetensors")
            )
        )
        return {"save_s": save_s, "update_s": loaded_s}

    def _session(self, named: Any, load_format: str | None) -> None:
        # As SGLang's own callers do it: a session, and the cache flushed with the last load.
        sglang_cpu.require(self.engine.begin_weight_update())
        sglang_cpu.require(
            self.engine.update_weights_from_tensor(named, load_format=load_format, flush_cache=True)
        )
        sglang_cpu.require(self.engine.end_weight_update())


def _ratios(samples: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    def mid(lane: str, *names: str) -> float:
        return float(median(sum(sample[name] for name in names) for sample in samples[lane]))

    def phase(*names: str) -> float:
        return float(median(sum(s["phases_ms"].get(n, 0) for n in names) for s in samples["ours"]))

    whole = {
        "reference": mid("reference", "update_s"),
        "bucket": mid("bucket", "bucket_s", "update_s"),
        "disk": mid("disk", "save_s", "update_s"),
    }
    cheapest = min(whole.values())
    update = mid("ours", "update_s")
    stopped = phase("pause", "install", "prove", "cache", "label", "resume") / 1e3
    return {
        "update_vs_cheapest": update / cheapest,
        "publish_and_update_vs_cheapest": mid("ours", "publish_s", "update_s") / cheapest,
        "publish_and_update_vs_bucket": mid("ours", "publish_s", "update_s") / whole["bucket"],
        "pause_vs_cheapest": stopped / cheapest,
        "update_s": update,
        "publish_s": mid("ours", "publish_s"),
        "pause_s": stopped,
        **{f"{name}_s": seconds for name, seconds in whole.items()},
    }


def main(
    quick: Annotated[bool, typer.Option(help="A small model, few repetitions.")] = False,  # noqa: FBT002 - a flag
    reps: Annotated[int, typer.Option(min=1, help="Updates by each way that count.")] = 7,
    warmups: Annotated[int, typer.Option(min=1, help="Updates by each way before.")] = 4,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the samples go.")] = _OUT,
) -> None:
    """Measure updates of a real SGLang engine on the CPU, ours beside SGLang's own."""
    console = Console()
    sglang_cpu.set_up()
    shape = QWEN2 | (QUICK if quick else {})
    began = dt.datetime.now(dt.UTC)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, torch.no_grad():
        bench = _Bench(shape, Path(folder))
        lanes = {
            "ours": bench.ours,
            "reference": bench.reference,
            "bucket": bench.bucket,
            "disk": bench.disk,
        }
        first = bench.ours(1)
        samples = alternate(lanes, warmups, reps, console)
        ratios = _ratios(samples)
        import sglang

        document = {
            "format": 1,
            "began": began.isoformat(timespec="seconds"),
            "environment": collect_environment()
            | {"sglang": sglang.__version__, "settings": sglang_cpu.SETTINGS},
            "quick": quick,
            "shape": shape,
            "total_nbytes": bench.nbytes,
            "warmups": warmups,
            "ratios": ratios,
            "first_update": first,
            "samples": samples,
        }
        bench.bridges.close()
        bench.engine.shutdown()
    save(document, out)
    table = Table(
        "figure", "value", title=f"{bench.nbytes / 2**30:.2f} GiB in bf16, {reps} updates"
    )
    for name, value in ratios.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    console.print(f"all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)
