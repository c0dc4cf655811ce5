"""mkdocs hook: puts the figures of a file of `benchmarks/results` where a page has its marker.

No figure of speed is typed by hand: without the file the page says how to make it.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["MARKER", "on_page_markdown", "render", "render_engine", "render_plain"]

MARKER = "<!-- figures: benchmarks/results/core.json -->"
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "core.json"

# Files whose `figures` are a table by themselves, and what writes them.
_PLAIN = {"nixl": "benchmarks/nixl_reads.py", "ray": "benchmarks/ray_peers.py"}
_PLAIN_MARKER = re.compile(r"<!-- figures: benchmarks/results/(nixl|ray)\.json -->")
# Files of real engines: their `ratios`, by model where there is more than one.
_ENGINES = {"vllm": "benchmarks/vllm_updates.py", "sglang": "benchmarks/sglang_updates.py"}
_ENGINES_MARKER = re.compile(r"<!-- figures: benchmarks/results/(vllm|sglang)\.json -->")


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


def _intro(results: dict[str, Any], nbytes: int, name: str) -> str:
    where = results["environment"]
    began = results.get("timestamp", results.get("began"))
    return (
        f"Measured {began} on {where['cpu']}, {where['cpu_cores_usable']} usable "
        f"cores, Linux {where['kernel']}, Python {where['python']}, torch "
        f"{where['versions'].get('torch')}, commit `{where['commit'][:12]}`"
        f"{' with local changes' if where.get('dirty') else ''}; payload {nbytes} bytes"
        f"{' (quick run)' if results['quick'] else ''}. Every sample is in the raw file "
        f"`benchmarks/results/{name}.json`."
    )


def _missing(name: str, script: str) -> str:
    return (
        f"This checkout has no `benchmarks/results/{name}.json`. `python {script}` "
        "writes it, and the next build of this page shows it here."
    )


def render_engine(name: str, results: dict[str, Any] | None) -> str:
    """Markdown for the ratios of a real engine; None where there are none."""
    if results is None:
        return _missing(name, _ENGINES[name])
    models = results.get("models") or {"value": results}
    first = next(iter(models.values()))
    lines = [f"| Figure | {' | '.join(models)} |", "|---" * (1 + len(models)) + "|"]
    for figure in first["ratios"]:
        values = (_value(model["ratios"][figure]) for model in models.values())
        lines.append(f"| `{figure}` | {' | '.join(values)} |")
    values = (_value(model["first_update"]["update_s"]) for model in models.values())
    lines.append(f"| `first_update_s` | {' | '.join(values)} |")
    return "\n".join([_intro(results, first["total_nbytes"], name), "", *lines])


def render_plain(name: str, results: dict[str, Any] | None) -> str:
    """Markdown for a file whose `figures` are a table by themselves; None where there is none."""
    if results is None:
        return _missing(name, _PLAIN[name])
    lines = ["| Figure | Value | Aim | Met |", "|---|---|---|---|"]
    for figure, one in results["figures"].items():
        row = (_value(one["value"]), one.get("aim", "-"), _met(one.get("aim_met")))
        lines.append(f"| `{figure}` | {' | '.join(row)} |")
    return "\n".join([_intro(results, results["payload_nbytes"], name), "", *lines])


def render(results: dict[str, Any] | None) -> str:
    """Markdown for one results file; None where there is none."""
    if results is None:
        return (
            "This checkout has no `benchmarks/results/core.json`. `make bench` writes it, and the "
            "next build of this page shows it here."
        )
    intro = _intro(results, results["payload"]["nbytes"], "core")
    return "\n".join([intro, "", *_ratios(results), "", *_peers(results)])


def on_page_markdown(markdown: str, **_kwargs: Any) -> str:
    """Replace the markers; mkdocs calls this for every page."""
    if MARKER in markdown:
        markdown = markdown.replace(MARKER, render(_read(RESULTS)))
    for marker, show in ((_PLAIN_MARKER, render_plain), (_ENGINES_MARKER, render_engine)):
        markdown = marker.sub(partial(_shown, show), markdown)
    return markdown


def _shown(show: Callable[[str, Any], str], found: re.Match[str]) -> str:
    return show(found[1], _read(RESULTS.with_name(f"{found[1]}.json")))


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8")) if path.is_file() else None
