"""Draws ours beside the peers: `python benchmarks/plot.py [RESULTS] [--out PICTURE]`."""

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer

__all__ = ["main"]

_RESULTS = Path(__file__).resolve().parent / "results" / "core.json"
_OURS = "#1f6f5c"
_SNAPSHOT = "#8a93a6"
_UNSAFE = "#d9a441"
_MS = 1e3
_MIB = 1 << 20


def _bars(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one entry per way, the first measurement of each, fastest last (drawn on top)."""
    chosen: dict[str, dict[str, Any]] = {}
    rank = {"peers": 0, "ray": 1}
    rows = [row for row in document["rows"] if row["group"] in rank and row["status"] == "ok"]
    for row in sorted(rows, key=lambda row: rank[row["group"]]):
        chosen.setdefault(row["name"], row)
    bars = []
    flip = chosen.pop("ours_flip", None)
    for name, row in chosen.items():
        loaded = row["loaded_s"]["median"]
        if name == "ours" and flip is not None:
            loaded = flip["loaded_s"]["median"]
        bars.append(
            {
                "name": name,
                "title": "rl_bridge (every byte verified)" if name == "ours" else row["title"],
                "usable_ms": row["usable_s"]["median"] * _MS,
                "loaded_ms": loaded * _MS,
                "snapshot": row["snapshot"],
                "verified": row["verified"],
                "alias": row["survives_step"] is False,
            }
        )
    return sorted(bars, key=lambda bar: -float(bar["usable_ms"]))


def _label(bar: dict[str, Any]) -> str:
    if bar["verified"]:
        return str(bar["title"])
    marks = ["unverified"]
    if bar["alias"]:
        marks.append("alias of live memory, no snapshot")
    elif not bar["snapshot"]:
        marks.append("overwritten by the next publish")
    return f"{bar['title']}\n({', '.join(marks)})"


def _color(bar: dict[str, Any]) -> str:
    if bar["name"] == "ours":
        return _OURS
    return _SNAPSHOT if bar["snapshot"] else _UNSAFE


def main(
    results: Annotated[Path, typer.Argument(help="What core.py wrote.")] = _RESULTS,
    out: Annotated[
        Path | None, typer.Option(help="Where the picture goes; beside the results by default.")
    ] = None,
) -> None:
    """Draw the picture."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    document = json.loads(results.read_text(encoding="utf-8"))
    bars = _bars(document)
    figure, axes = plt.subplots(figsize=(11, 1.6 + 0.62 * len(bars)), layout="constrained")
    places = range(len(bars))
    colors = [_color(bar) for bar in bars]
    usable = [bar["usable_ms"] for bar in bars]
    loading = [max(0.0, bar["loaded_ms"] - bar["usable_ms"]) for bar in bars]
    ends = [max(bar["usable_ms"], bar["loaded_ms"]) for bar in bars]
    axes.barh(places, usable, color=colors, height=0.62)
    axes.barh(places, loading, left=usable, color=colors, height=0.62, alpha=0.4)
    for place, bar, end in zip(places, bars, ends, strict=True):
        text = f"{bar['usable_ms']:.0f} ms, loaded {bar['loaded_ms']:.0f} ms"
        axes.text(end + max(ends) * 0.01, place, text, va="center", fontsize=9)
    axes.set_yticks(list(places), [_label(bar) for bar in bars], fontsize=9)
    for tick, bar in zip(axes.get_yticklabels(), bars, strict=True):
        tick.set_fontweight("bold" if bar["name"] == "ours" else "normal")
    axes.set_xlim(right=max(ends) * 1.28)
    axes.set_xlabel("milliseconds from the start of publishing (lower is better)")
    payload = document["payload"]
    cores = document["environment"]["cpu_cores_usable"]
    axes.set_title(
        f"Handing {payload['nbytes'] / _MIB:.0f} MiB in {payload['num_tensors']} bf16 tensors to "
        f"another process, {cores} cores\n"
        "solid: usable there; light: also loaded into the engine's parameters; medians",
        fontsize=10,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    legend = [
        Patch(color=_OURS, label="snapshot, every byte verified"),
        Patch(color=_SNAPSHOT, label="snapshot, unverified"),
        Patch(color=_UNSAFE, label="no snapshot, unverified"),
    ]
    axes.legend(handles=legend, loc="upper right", fontsize=9, frameon=False)
    target = out or results.with_suffix(".png")
    figure.savefig(target, dpi=150)
    typer.echo(f"wrote {target}")


if __name__ == "__main__":
    typer.run(main)
