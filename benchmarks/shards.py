"""Measures the shares of an engine's ranks: `python benchmarks/shards.py [--against TREE]`.

The bytes of one layer of Qwen2-7B's shape that each rank of 2, 4 and 8 asks a transport for, and
those that `nixl` reads over a network for it, beside those that it takes: planned as every import
plans them, nothing is sent. With `--against`,
the sources of an earlier commit (a worktree of it, with its compiled module), also updates of a
vLLM engine of two ranks, of Qwen3-0.6B's shape: by that commit and by this one, in turn; published
by one trainer rank, and by four, each its rows. README.md beside this file says how each figure
comes about.
"""

import datetime as dt
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from _lib.environment import collect_environment, commit_of, save
from _lib.qwen import QWEN3
from _lib.tp_engine import SETTINGS, Lane
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.engines import EngineCompat, ModelInstaller
from rl_bridge.memory.parts import PartNeeds
from rl_bridge.transports.nixl.messages import Leased
from rl_bridge.transports.nixl.reading import plan_steps

__all__ = ["main"]

_OUT = Path(__file__).resolve().parent / "results" / "shards.json"
_WARMUPS = 4
_AIMS = {2: 1.05, 4: 1.1, 8: 1.1}
# One trainer rank; and four, which an earlier commit had to assemble and to publish once more.
_WAYS = {
    "tp2": {"before": "whole", "now": "whole"},
    "sharded": {"before": "assembled", "now": "direct"},
}
# On the CPU vLLM packs the weights of most layers anew, which takes as long as all else together.
_ENGINES = {"": False, "_plain": True}


# ---- what is read of a layer ---------------------------------------------------------------------


class _Cut(NamedTuple):
    """A tensor of a checkpoint, and how ranks cut it."""

    shape: tuple[int, ...]
    dim: int | None  # None: each rank takes all of it
    least: int = 1  # rows of a part that are not cut any more: of a head

    def part(self, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """What one of the ranks takes."""
        if self.dim is None:
            return tensor
        size = max(self.shape[self.dim] // ranks, self.least)
        heads = self.shape[self.dim] // size
        return tensor.narrow(self.dim, rank * heads // ranks * size, size)


def _layer(hidden: int, inner: int, pairs: int, head: int) -> dict[str, _Cut]:
    """A layer as Qwen2 has it: name -> its cut by tensor parallelism."""
    return {
        "input_layernorm.weight": _Cut((hidden,), None),
        "self_attn.q_proj.weight": _Cut((hidden, hidden), 0, head),
        "self_attn.q_proj.bias": _Cut((hidden,), 0, head),
        "self_attn.k_proj.weight": _Cut((pairs, hidden), 0, head),
        "self_attn.k_proj.bias": _Cut((pairs,), 0, head),
        "self_attn.v_proj.weight": _Cut((pairs, hidden), 0, head),
        "self_attn.v_proj.bias": _Cut((pairs,), 0, head),
        "self_attn.o_proj.weight": _Cut((hidden, hidden), 1),
        "post_attention_layernorm.weight": _Cut((hidden,), None),
        "mlp.gate_proj.weight": _Cut((inner, hidden), 0),
        "mlp.up_proj.weight": _Cut((inner, hidden), 0),
        "mlp.down_proj.weight": _Cut((hidden, inner), 1),
    }


class _Rank(torch.nn.Module):
    """One rank's part of a layer, with the loader of an engine."""

    def __init__(self, cuts: dict[str, _Cut], rank: int, ranks: int) -> None:
        super().__init__()
        self.cuts, self.rank, self.ranks = cuts, rank, ranks
        self.held = torch.nn.ParameterDict()
        for name, cut in cuts.items():
            whole = torch.empty(cut.shape, dtype=torch.bfloat16, device="meta")
            part = torch.empty(cut.part(whole, rank, ranks).shape, dtype=torch.bfloat16)
            self.held[name.replace(".", "/")] = torch.nn.Parameter(part, requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put this rank's part of each tensor into its place."""
        for name, tensor in weights:
            part = self.cuts[name].part(tensor, self.rank, self.ranks)
            self.held[name.replace(".", "/")].data.copy_(part)


def _bytes_read(manifest: WeightUpdateManifest, cuts: dict[str, _Cut], ranks: int) -> Any:
    """What each of the ranks takes, and asks for."""
    names = ("share_nbytes", "read_nbytes", "read_ranges", "wire_nbytes")
    found: dict[str, list[Any]] = {name: [] for name in names}
    for rank in range(ranks):
        model = _Rank(cuts, rank, ranks)
        found["share_nbytes"].append(sum(one.nbytes for one in model.parameters()))
        needs = ModelInstaller(model, EngineCompat(), num_ranks=ranks).scope_of(manifest)
        assert isinstance(needs, PartNeeds)
        found["read_nbytes"].append(int(needs.read_nbytes.sum()))
        found["read_ranges"].append(len(needs.read_starts))
        found["wire_nbytes"].append(_wire_nbytes(manifest.table.arena_nbytes, needs))
    ratios = {
        f"{what}_vs_share": max(map(truediv, found[f"{what}_nbytes"], found["share_nbytes"]))
        for what in ("read", "wire")
    }
    return {**found, **ratios}


def _wire_nbytes(nbytes: int, needs: PartNeeds) -> int:
    """What `nixl` reads over a network of an arena of `nbytes`: also some bytes in between."""
    arena = {"addresses": (0,), "starts": (0,), "nbytes": (nbytes,)}
    where = Leased(update_id="0" * 32, slot=1, metadata=(), stamp=0, **arena)
    return int(plan_steps(where, nbytes, needs.read_starts, needs.read_nbytes).nbytes.sum())


def _plan(*, quick: bool, console: Console) -> dict[str, Any]:
    """The bytes that ranks read of one layer, relative to their shares."""
    # (Of few columns a leaf holds many rows: what is read beyond a share depends on it.)
    sizes = (896, 4864, 256, 64) if quick else (3584, 18944, 512, 128)
    cuts = _layer(*sizes)
    weights = {name: torch.zeros(cut.shape, dtype=torch.bfloat16) for name, cut in cuts.items()}
    found: dict[str, Any] = {}
    for name, columns in (("by_columns", True), ("by_leaves", False)):
        with make_weight_bridge("shared-memory", columns=columns) as trainer:
            manifest = trainer.publish(weights, weight_version=1)
            found[name] = {
                str(ranks): _bytes_read(manifest, cuts, ranks)
                for ranks in track(_AIMS, f"plans {name}", console=console)
            }
            found["layer_nbytes"] = manifest.table.total_nbytes
            found[f"lists_{name}_nbytes"] = manifest.table.arena_nbytes - found["layer_nbytes"]
    return {"shape": dict(zip(("hidden", "inner", "pairs", "head"), sizes, strict=True)), **found}


# ---- updates of an engine of two ranks -----------------------------------------------------------


def _updates(
    against: Path,
    layers: int,
    reps: int,
    console: Console,
    ways: Mapping[str, str],
    *,
    is_plain: bool,
) -> dict[str, Any]:
    """Updates by an earlier commit and by this one, in turn; `ways` are what `Lane` takes."""
    shape = QWEN3 | {"tie_word_embeddings": True, "num_hidden_layers": layers}
    trees = {"before": against, "now": Path(__file__).resolve().parents[1]}
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    with ExitStack() as stack:
        lanes = {}
        for name, tree in trees.items():
            lanes[name] = Lane(name, tree, shape, ways[name], is_plain=is_plain)
            stack.callback(lanes[name].close)
        for turn in track(range(_WARMUPS + reps), "updates", console=console):
            # Each goes first in every other turn.
            for name in list(trees)[:: 1 if turn % 2 else -1]:
                sample = lanes[name].update()
                if turn >= _WARMUPS:
                    samples[name].append(sample)
        facts = {name: lane.facts for name, lane in lanes.items()}
    return {
        "shape": shape,
        "warmups": _WARMUPS,
        "settings": SETTINGS,
        "total_nbytes": facts["now"]["total_nbytes"],
        "commits": {name: commit_of(tree) for name, tree in trees.items()},
        "medians": {name: _medians(found) for name, found in samples.items()},
        "samples": samples,
    }


def _medians(samples: list[dict[str, Any]]) -> dict[str, float]:
    """The middle of each figure; of ranks, that of the slowest or the most."""

    def worst(part: str, name: str) -> float:
        return float(median(max(rank[name] for rank in one[part]) for one in samples))

    found = {}
    for name in ("publish_s", "update_s"):
        found[name] = float(median(one[name] for one in samples))
    found["cpu_s"] = median(map(_cpu_s, samples))
    for step in ("import", "stage", "install", "prove"):
        found[f"rank_{step}_ms"] = worst("rank_ms", step)
    for what in ("copied_nbytes", "digested_nbytes"):
        found[f"rank_{what}"] = worst("rank_passes", what)
    return found


def _cpu_s(sample: dict[str, Any]) -> float:
    """The processor's seconds of an update, of the driver and both ranks."""
    ranks: float = sum(rank["cpu_s"] for rank in sample["rank_passes"])
    return ranks + float(sample["driver_cpu_s"])


def _ratios_of(updates: dict[str, Any], what: str) -> dict[str, float]:
    before, now = updates["samples"]["before"], updates["samples"]["now"]
    pairs = list(zip(before, now, strict=True))
    return {
        f"{what}_update_before_vs_now": median(a["update_s"] / b["update_s"] for a, b in pairs),
        f"{what}_cpu_before_vs_now": median(_cpu_s(a) / _cpu_s(b) for a, b in pairs),
        f"{what}_digested_before_vs_now": updates["medians"]["before"]["rank_digested_nbytes"]
        / updates["medians"]["now"]["rank_digested_nbytes"],
    }


# ---- the command ---------------------------------------------------------------------------------


def main(
    quick: Annotated[bool, typer.Option(help="A small layer.")] = False,  # noqa: FBT002 - a flag
    against: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Sources to compare with.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the engine's model.")] = 28,
    reps: Annotated[int, typer.Option(min=1, help="Updates by each that count.")] = 25,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the samples go.")] = _OUT,
) -> None:
    """Measure what ranks read of an update, and how long an update of two ranks takes."""
    console = Console()
    began = dt.datetime.now(dt.UTC)
    environment = collect_environment()  # (with the load that others make, before ours)
    plan = _plan(quick=quick, console=console)
    ratios = {
        f"read_vs_share_tp{ranks}{behind}": found["read_vs_share"]
        for name, behind in (("by_columns", ""), ("by_leaves", "_without_columns"))
        for ranks, found in plan[name].items()
    }
    ratios |= {
        f"wire_vs_share_tp{ranks}": found["wire_vs_share"]
        for ranks, found in plan["by_columns"].items()
    }
    updates = {}
    for kind, is_plain in _ENGINES.items():
        for way, ways in _WAYS.items():
            if against is None:
                continue
            what = f"{way}{kind}"
            found = _updates(against, layers, reps, console, ways, is_plain=is_plain)
            updates[what] = found
            ratios |= _ratios_of(found, what)
    aims = {
        f"{way}{kind}_update_before_vs_now": aim
        for way, aim in (("tp2", 1.2), ("sharded", 1.5))
        for kind in _ENGINES
    }
    aims |= {f"{what}_vs_share_tp{n}": aim for n, aim in _AIMS.items() for what in ("read", "wire")}
    document = {
        "format": 1,
        "began": began.isoformat(timespec="seconds"),
        "environment": environment,
        "quick": quick,
        "aims": aims,
        "ratios": ratios,
        "plan": plan,
        "updates": updates,
    }
    save(document, out)
    table = Table("figure", "value", "aim", title="shares of ranks")
    for name, value in ratios.items():
        table.add_row(name, f"{value:.3f}", str(aims.get(name, "")))
    console.print(table)
    console.print(f"all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)
