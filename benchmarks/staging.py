"""Measures the two stagings: `python benchmarks/staging.py [--quick] [--out FILE]`.

One rank's model of Qwen3-0.6B's shape, fused as engines do, with random bf16 weights that come over
shared memory; every update is new bytes. In turn in one run: an install beside, an install through,
the proof and the undo of each, and a plain copy of the same bytes into the same parameters; of one
more install of each, not timed, the peak of memory. README.md beside this file says how each figure
comes about.
"""

import datetime as dt
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any, get_args

import numpy as np
import torch
import typer
from _lib.environment import collect_environment, save
from _lib.memory import process_nbytes
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.engines import EngineCompat, ModelInstaller
from rl_bridge.engines.staging import Staging
from rl_bridge.memory.passes import BytePlan

__all__ = ["main"]

_OUT = Path(__file__).resolve().parent / "results" / "staging.json"
_HIDDEN, _INNER, _HEADS, _GROUPS = 1024, 3072, 2048, 1024
# Parameter -> the tensors of a checkpoint that are fused in it, with their rows; columns.
_FUSED = {
    "qkv": ({"q": _HEADS, "k": _GROUPS, "v": _GROUPS}, _HIDDEN),
    "out": ({"o": _HIDDEN}, _HEADS),
    "gate_up": ({"gate": _INNER, "up": _INNER}, _HIDDEN),
    "down": ({"d": _HIDDEN}, _INNER),
}
_AIM = 1.3
_AIM_OF_MEMORY = 1.1


def _parameter(rows: int, columns: int) -> torch.nn.Parameter:
    # (Zeros would take no memory until somebody writes to them.)
    made = torch.ones(rows, columns, dtype=torch.bfloat16)
    return torch.nn.Parameter(made, requires_grad=False)


class _Model(torch.nn.Module):
    """One rank's model, with the loader of an engine."""

    def __init__(self, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = torch.nn.ParameterDict({"weight": _parameter(vocabulary, _HIDDEN)})
        self.layers = torch.nn.ModuleList(
            torch.nn.ParameterDict(
                {
                    name: _parameter(sum(parts.values()), width)
                    for name, (parts, width) in _FUSED.items()
                }
            )
            for _ in range(layers)
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put each tensor of a checkpoint into its place."""
        for name, tensor in weights:
            if name == "embed":
                self.embed["weight"].data.copy_(tensor)
                continue
            layer, fused, part = name.split(".")
            start = 0
            for one, rows in _FUSED[fused][0].items():
                if one == part:
                    parameters: Any = self.layers[int(layer)]
                    parameters[fused].data[start : start + rows].copy_(tensor)
                start += rows


def _weights(layers: int, vocabulary: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def made(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw).to(torch.bfloat16)

    named = {"embed": made(vocabulary, _HIDDEN)}
    for layer in range(layers):
        for fused, (parts, width) in _FUSED.items():
            named |= {f"{layer}.{fused}.{part}": made(rows, width) for part, rows in parts.items()}
    return named


def _ms(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


class _Lane:
    """A model, what installs into it, and a bridge of its own."""

    def __init__(self, model: _Model, way: Staging) -> None:
        self.model = model
        self.installer = ModelInstaller(model, EngineCompat(), staging=way)
        self.bridge = make_weight_bridge("shared-memory", source_worker=way)
        self._private_nbytes = process_nbytes()["rss_anon"]

    def update(self, manifest: WeightUpdateManifest) -> dict[str, float]:
        """Install, undo, install again; and a plain copy. Milliseconds of each step."""
        installer, tensors = self.installer, self.bridge.import_update(manifest)
        found = {
            "prepare": _ms(lambda: installer.prepare(manifest, tensors)),
            "install": _ms(lambda: installer.install(manifest, tensors)),
            "undo": _ms(installer.undo),
        }
        installer.prepare(manifest, tensors)
        installer.install(manifest, tensors)
        found["prove"] = _ms(installer.prove)
        # From the pause to the resume, but for what an engine does itself.
        found["pause"] = found["install"] + found["prove"]
        # The same bytes, as they lie in the slot, into the same parameters.
        found["copy"] = _ms(_copier(self.model, tensors))
        installer.prove()
        installer.commit()
        self.bridge.release_imported(manifest.update_id)
        return found

    def extra_nbytes(self, manifest: WeightUpdateManifest) -> int:
        """What an update takes at most beside the model and shared memory, and what is kept."""
        installer, tensors = self.installer, self.bridge.import_update(manifest)
        shared = process_nbytes()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        installer.prepare(manifest, tensors)
        installer.install(manifest, tensors)
        installer.prove()
        peak = process_nbytes()["rss_peak"] - shared["rss_shmem"] - shared["rss_file"]
        installer.commit()
        self.bridge.release_imported(manifest.update_id)
        return peak - self._private_nbytes


def main(
    quick: Annotated[bool, typer.Option(help="A small model, few repetitions.")] = False,  # noqa: FBT002 - a flag
    reps: Annotated[int, typer.Option(min=1, help="Updates by each way that count.")] = 9,
    warmups: Annotated[int, typer.Option(min=1, help="Updates by each way before.")] = 3,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the samples go.")] = _OUT,
) -> None:
    """Measure what a pause holds: an exchange, or a version that is written through."""
    console = Console()
    layers, vocabulary = (4, 16384) if quick else (14, 65536)
    began = dt.datetime.now(dt.UTC)
    weights = [_weights(layers, vocabulary, seed) for seed in range(3)]
    lanes: dict[str, _Lane] = {}
    extra: dict[str, int] = {}
    samples: list[dict[str, float]] = []
    versions = itertools.count()
    with make_weight_bridge("shared-memory", source_worker="trainer") as trainer:

        @contextmanager
        def published() -> Iterator[WeightUpdateManifest]:
            version = next(versions)
            manifest = trainer.publish(weights[version % 3], weight_version=version)
            yield manifest
            trainer.release(manifest.update_id)

        for way in get_args(Staging):
            lanes[way] = _Lane(_Model(layers, vocabulary), way)
            for _ in range(3):  # the first one may take a copy for its undo: the last one counts
                with published() as manifest:
                    extra[way] = lanes[way].extra_nbytes(manifest)
        for turn in track(range(warmups + reps), "updates", console=console):
            sample: dict[str, float] = {}
            for way, lane in lanes.items():
                with published() as manifest:
                    found = lane.update(manifest)
                sample |= {f"{way}_{name}_ms": ms for name, ms in found.items()}
            if turn >= warmups:
                samples.append(sample)
    for lane in lanes.values():
        lane.bridge.close()
    middle = {name: median(sample[name] for sample in samples) for name in samples[0]}

    def vs_copy(what: str) -> float:
        return median(
            sample[f"through_{what}_ms"] / sample["through_copy_ms"] for sample in samples
        )

    model = lanes["through"].model
    layer = max(
        sum(parameter.nbytes for parameter in one.parameters())
        for one in (model.embed, *model.layers)
    )
    ratios = {
        "through_install_vs_copy": vs_copy("install"),
        "through_pause_vs_copy": vs_copy("pause"),
        "through_undo_vs_copy": middle["through_undo_ms"] / middle["through_copy_ms"],
        "through_vs_beside": middle["through_install_ms"] / middle["beside_install_ms"],
        "through_extra_vs_layer": extra["through"] / layer,
    }
    nbytes = sum(tensor.nbytes for tensor in weights[0].values())
    document = {
        "format": 1,
        "began": began.isoformat(timespec="seconds"),
        "environment": collect_environment(),
        "quick": quick,
        "total_nbytes": nbytes,
        "warmups": warmups,
        "aims": {"through_pause_vs_copy": _AIM, "through_extra_vs_layer": _AIM_OF_MEMORY},
        "largest_layer_nbytes": layer,
        "extra_nbytes": extra,
        "ratios": ratios,
        "medians": middle,
        "samples": samples,
    }
    save(document, out)
    table = Table("figure", "value", title=f"{nbytes / 2**30:.2f} GiB in bf16")
    for name, value in {**ratios, **middle}.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    console.print(f"all samples are in {out}")


def _copier(model: _Model, tensors: Any) -> Callable[[], object]:
    """Copies the bytes of an update into the model's parameters, in one pass over all of them."""
    parameters: list[torch.Tensor] = [model.embed["weight"]]
    parts = [(tensors["embed"], parameters[0].data_ptr())]
    for layer, held in enumerate(model.layers):
        fused: Any = held
        for name, (rows_of, width) in _FUSED.items():
            place = fused[name].data_ptr()
            for part, rows in rows_of.items():
                parts.append((tensors[f"{layer}.{name}.{part}"], place))
                place += rows * width * 2
    sizes = [tensor.nbytes for tensor, _ in parts]
    sources = [tensor.data_ptr() for tensor, _ in parts]
    plan = BytePlan(np.array(sizes, np.uint64))
    given = (np.array(sources, np.uint64), np.array([place for _, place in parts], np.uint64))
    return lambda: plan.copy(*given, num_threads=None)


if __name__ == "__main__":
    typer.run(main)
