"""mkdocs hook: puts the figures of `benchmarks/results/core.json` where a page has the marker.

No figure of speed is typed by hand: without the file the page says how to make it.
"""

import json
from pathlib import Path
from typing import Any

__all__ = ["MARKER", "on_page_markdown", "render"]

MARKER = "<!-- figures: benchmarks/results/core.json -->"
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "core.json"


def _value(value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _met(value: Any) -> str:
    return {True: "yes", False: "**no**"}.get(value, "-")


def _ratios(results: dict[str, Any]) -> list[str]:
    lines = ["| Figure | Value | Aim | Met |", "|---|---|---|---|"]
    for name, value in sorted(results["ratios"].items()):
        if name != "peers":
            detail = results["details"].get(name, {})
            shown = _value(value)
            if value is None and detail.get("reason"):
                shown += f" ({detail['reason']})"
            aim, met = detail.get("aim", "-"), _met(detail.get("aim_met"))
            lines.append(f"| `{name}` | {shown} | {aim} | {met} |")
    return lines


def _peers(results: dict[str, Any]) -> list[str]:
    rows = results["details"].get("peers", {}).get("rows", {})
    lines = [
        "| Way | Seconds until usable | Ours in the same rounds | Verified | Hands over |",
        "|---|---|---|---|---|",
    ]
    for name, row in sorted(rows.items(), key=lambda item: item[1].get("usable_s") or 1e9):
        shown = _value(row.get("usable_s"))
        if row.get("usable_s") is None:
            shown = f"not measured ({row.get('status', '-')}: {row.get('reason')})"
        ours = _value(row.get("ours_usable_s_in_the_same_rounds"))
        verified = "yes" if row.get("verified") else "no"
        lines.append(f"| `{name}` | {shown} | {ours} | {verified} | {row.get('kind', '-')} |")
    peers = results["details"].get("peers", {})
    if "aim" in peers:
        why = f" ({peers['reason']})" if peers.get("reason") else ""
        met = {True: "yes", False: "**no**"}.get(peers.get("aim_met"), "not known")
        lines += ["", f"Aim: {peers['aim']}. Met: {met}{why}."]
    return lines


def render(results: dict[str, Any] | None) -> str:
    """Markdown for one results file; None where there is none."""
    if results is None:
        return (
            "This checkout has no `benchmarks/results/core.json`. `make bench` writes it, and the "
            "next build of this page shows it here."
        )
    where = results["environment"]
    nbytes = results["payload"]["nbytes"]
    intro = (
        f"Measured {results['timestamp']} on {where['cpu']}, {where['cpu_cores_usable']} usable "
        f"cores, Linux {where['kernel']}, Python {where['python']}, torch "
        f"{where['versions'].get('torch')}, commit `{where['commit'][:12]}`"
        f"{' with local changes' if where.get('dirty') else ''}; payload {nbytes} bytes"
        f"{' (quick run)' if results['quick'] else ''}. Every sample is in the raw file "
        "`benchmarks/results/core.json`."
    )
    return "\n".join([intro, "", *_ratios(results), "", *_peers(results)])


def on_page_markdown(markdown: str, **_kwargs: Any) -> str:
    """Replace the marker; mkdocs calls this for every page."""
    if MARKER not in markdown:
        return markdown
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else None
    return markdown.replace(MARKER, render(results))
