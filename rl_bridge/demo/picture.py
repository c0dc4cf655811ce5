"""The picture of a run: what was learnt, which versions carried it, what each update cost.

The colours are Okabe and Ito's: they stay apart for colour-blind readers, and every mark also
differs in shape or is labelled where it stands.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_bridge.demo.phases import grouped, phase_series
from rl_bridge.demo.records import DemoResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_picture"]

_INK = "#222222"
_MUTED = "#6b6b6b"
_GRID = "#e4e4e4"
_BLUE = "#0072b2"
_SKY = "#56b4e9"
_REFUSED = "#d55e00"
_UNDONE = "#cc79a7"
# Hue says which side spends the time, lightness which phase.
_SIDES = {
    "trainer": ("#004c78", "#2a8fcb", "#a9d6f2"),
    "rollout": ("#5c3d00", "#9a6700", "#d6952a", "#efbf66", "#f9e3b8", "#d55e00", "#8f2d56"),
    "": ("#bdbdbd",),
}
_PROCESSES = {1: "one process", 2: "two processes", 3: "three processes"}
_STYLE: Any = {
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "grid.color": _GRID,
    "legend.frameon": False,
}


def draw_picture(result: DemoResult, path: Path) -> None:
    """Draw a run into a PNG file."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        # A figure of its own, without pyplot: no global state, and no display is asked for.
        figure = Figure(figsize=(10.5, 8.2), dpi=150)
        FigureCanvasAgg(figure)
        top, strip, bottom = figure.subplots(
            3, 1, sharex=True, gridspec_kw={"height_ratios": [3.0, 1.0, 2.0], "hspace": 0.14}
        )
        figure.subplots_adjust(left=0.085, right=0.825, top=0.885, bottom=0.07)
        _draw_title(figure, result)
        _draw_reward(top, result)
        _draw_versions(strip, result)
        _draw_phases(bottom, result)
        for axes in (top, bottom):
            axes.grid(axis="y")
            axes.set_axisbelow(True)
        for fault in result.faults:
            colour = _REFUSED if fault.outcome == "refused" else _UNDONE
            for axes in (top, bottom):
                axes.axvline(fault.step - 0.5, color=colour, linewidth=1.0, linestyle=(0, (4, 3)))
        figure.savefig(path)


def _draw_title(figure: Any, result: DemoResult) -> None:
    processes = _PROCESSES[result.num_processes]
    title = "A policy learns to sort while its weights travel"
    if result.engine_name:
        title += f" to {result.engine_name}"
    figure.text(0.085, 0.955, title, fontsize=15, weight="bold")
    figure.text(
        0.085,
        0.925,
        f"{result.transport}, {processes}: {result.versions_installed} versions installed and "
        f"proved, {result.refused} updates refused, {result.undone} undone; log-probs agree within "
        f"{result.logprob_max_abs_diff:.0e}",
        color=_MUTED,
    )


def _draw_reward(axes: "Axes", result: DemoResult) -> None:
    steps = [row.step for row in result.rows]
    reward, exact = [row.reward for row in result.rows], [row.exact for row in result.rows]
    for label, values, colour, width, height in (
        ("reward", reward, _BLUE, 2.6, reward[-1]),
        # The curves may end close to each other: this label keeps its distance.
        ("fully sorted", exact, _SKY, 1.6, min(exact[-1], reward[-1] - 0.08)),
    ):
        axes.plot(steps, values, color=colour, linewidth=width)
        axes.annotate(
            f"{label} {values[-1]:.2f}",
            (steps[-1], height),
            xytext=(10, 0),
            textcoords="offset points",
            color=colour,
            weight="bold",
            va="center",
            annotation_clip=False,
        )
    axes.plot(steps[0], reward[0], marker="o", color=_BLUE)
    axes.annotate(
        f"{result.reward_first:.2f} untrained",
        (steps[0], reward[0]),
        xytext=(8, -9),
        textcoords="offset points",
        va="center",
        color=_BLUE,
    )
    axes.set_ylim(0.0, 1.04)
    axes.set_ylabel("share that is right")


def _draw_versions(axes: "Axes", result: DemoResult) -> None:
    installed = [row for row in result.rows if row.update == "installed"]
    steps = [row.step for row in installed]
    axes.scatter(steps, [0.0] * len(steps), marker="|", s=90, color=_BLUE, linewidths=1.3)
    stride = max(1, len(steps) // 8)
    for row in installed[::stride]:
        axes.annotate(
            f"v{row.version}",
            (row.step, 0.0),
            xytext=(0, -18),
            textcoords="offset points",
            ha="center",
            color=_MUTED,
            fontsize=9,
        )
    for index, fault in enumerate(result.faults):
        refused = fault.outcome == "refused"
        colour = _REFUSED if refused else _UNDONE
        axes.plot(
            fault.step - 0.5,
            0.0,
            marker="X" if refused else "D",
            markersize=9 if refused else 8,
            color=colour,
            markeredgecolor="white",
        )
        axes.annotate(
            f"v{fault.version} {fault.kind}: {fault.outcome}",
            (fault.step - 0.5, 0.0),
            # Neighbouring labels stand on different lines.
            xytext=(0, 11 + 13 * (index % 3)),
            textcoords="offset points",
            ha="center",
            color=colour,
            fontsize=9,
            weight="bold",
        )
    axes.set_ylim(-1.0, 2.0)
    axes.set_yticks([])
    axes.set_ylabel("versions")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0)


def _draw_phases(axes: "Axes", result: DemoResult) -> None:
    steps = [row.step for row in result.rows]
    base = [0.0] * len(steps)
    seen: dict[str, int] = {}
    for series in grouped(phase_series(result.rows), result.engine):
        shades = _SIDES[series.side]
        colour = shades[seen.get(series.side, 0) % len(shades)]
        seen[series.side] = seen.get(series.side, 0) + 1
        label = f"{series.side}: {series.name}" if series.side else series.name
        axes.bar(steps, series.values_ms, bottom=base, width=0.86, color=colour, label=label)
        base = [low + value for low, value in zip(base, series.values_ms, strict=True)]
    # The first updates make memory and plans: cut them off rather than flatten all the others.
    usual = sorted(base)[int(0.95 * (len(base) - 1))]
    ceiling = min(max(base), usual * 1.35) * 1.08 or 1.0
    axes.set_ylim(0.0, ceiling)
    for step, total in zip(steps, base, strict=True):
        if total > ceiling:
            axes.annotate(
                f"{total:.0f} ms",
                (step, ceiling),
                xytext=(5, -3) if step < 0.9 * steps[-1] else (-5, -3),
                textcoords="offset points",
                ha="left" if step < 0.9 * steps[-1] else "right",
                va="top",
                color=_MUTED,
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
            )
    axes.set_ylabel("ms per update")
    axes.set_xlabel("step")
    axes.set_xlim(0.0, steps[-1] + 1.0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.02),
        fontsize=9,
        handlelength=1.0,
        labelspacing=0.35,
        borderaxespad=0.0,
    )
