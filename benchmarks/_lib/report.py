"""Tables for people; programs read the JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from _lib.groups import Row
from _lib.ratios import Figures
from _lib.stats import median_of

__all__ = ["print_figures", "print_rows"]

_MS = 1e3


def _milliseconds(row: Row, key: str) -> str:
    value = median_of(row.samples, key)
    return "" if value is None else f"{value * _MS:.1f}"


def print_rows(console: Console, title: str, rows: Sequence[Row]) -> None:
    """Print one group, fastest first."""
    table = Table(title=title, title_justify="left")
    for column in ("way", "usable ms", "loaded ms", "verified", "what the consumer holds"):
        table.add_column(column, justify="right" if column.endswith(" ms") else "left")
    for row in sorted(rows, key=lambda row: median_of(row.samples, "usable_s") or float("inf")):
        table.add_row(
            row.lane.title,
            _milliseconds(row, "usable_s"),
            _milliseconds(row, "loaded_s"),
            "yes" if row.lane.verified else "no",
            row.kind if row.status == "ok" else f"{row.status}: {row.reason}",
        )
    console.print(table)


def _mark(aim_met: bool | None) -> str:  # noqa: FBT001 - three-valued
    return {True: "yes", False: "no", None: ""}[aim_met]


def print_figures(console: Console, figures: Figures) -> None:
    """Print every figure with its aim."""
    table = Table(title="figures", title_justify="left")
    for column in ("figure", "value", "aim", "met", "against"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for name, value in figures.ratios.items():
        details: dict[str, Any] = figures.details[name]
        shown = value
        if isinstance(value, dict):
            shown = f"{sum(seconds is not None for seconds in value.values())} ways"
        text = "not measured" if shown is None else str(shown)
        against = str(details.get("baseline") or details.get("reason") or "")
        table.add_row(name, text, str(details["aim"]), _mark(details["aim_met"]), against)
    console.print(table)
