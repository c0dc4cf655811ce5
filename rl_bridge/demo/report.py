"""The end of a run: tables for people, `demo.json` for programs, `demo.png` for both."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_bridge.demo.phases import phase_series
from rl_bridge.demo.picture import draw_picture
from rl_bridge.demo.records import DemoResult

__all__ = ["print_report", "write_files"]


def write_files(result: DemoResult, out: Path) -> tuple[Path, Path]:
    """Write `demo.json` and `demo.png` into a directory and return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    json_path, picture_path = out / "demo.json", out / "demo.png"
    text = json.dumps(result.to_json(), sort_keys=True, indent=2, allow_nan=False)
    json_path.write_text(f"{text}\n", encoding="utf-8")
    draw_picture(result, picture_path)
    return json_path, picture_path


def print_report(result: DemoResult, console: Console) -> None:
    """Print what was learnt, what was refused, and what an update costs."""
    console.print(_summary(result))
    console.print(_costs(result))


def _summary(result: DemoResult) -> Table:
    table = Table(title="What happened", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("reward", f"{result.reward_first:.3f} -> [bold]{result.reward_last:.3f}[/bold]")
    table.add_row(
        "versions installed",
        f"{result.versions_installed}, each verified and proved "
        f"({result.num_tensors} tensors, {result.total_nbytes:,} bytes)",
    )
    for fault in result.faults:
        table.add_row(
            fault.outcome,
            f"{fault.kind} v{fault.version} at step {fault.step}: {fault.error}; "
            f"v{fault.active_version} stayed active",
        )
    stale = result.logprob_min_diff_if_stale
    control = "" if stale is None else f"; one version older would differ by {stale:.2f} or more"
    table.add_row(
        "log-probs", f"agree within {result.logprob_max_abs_diff:.1e} at every step{control}"
    )
    if result.engine_name:
        labels = f"{result.labels_checked:,} outputs, each with the label of the version asked for"
        # An old vLLM labels nothing; then nothing is claimed.
        table.add_row("labels", labels if result.labels_checked else "none: too old an engine")
        table.add_row("engine", result.engine_name)
    table.add_row("time", f"{result.seconds:.1f} s, {result.transport}, seed {result.seed}")
    return table


def _costs(result: DemoResult) -> Table:
    table = Table(title="One update, milliseconds", title_justify="left", caption_justify="left")
    table.add_column("side")
    table.add_column("phase")
    table.add_column("median", justify="right")
    table.add_column("worst", justify="right")
    previous = None
    for series in phase_series(result.rows):
        side = series.side or "between"
        table.add_row(
            "" if side == previous else side,
            series.name,
            f"{series.median_ms:.2f}",
            f"{max(series.values_ms):.2f}",
        )
        previous = side
    updates = sorted(row.update_ms for row in result.rows)
    table.add_section()
    table.add_row("both", "whole update", f"{updates[len(updates) // 2]:.2f}", f"{updates[-1]:.2f}")
    return table
