"""Draws each folder of the package: its files, which of them uses which, and the path of a weight.

`write.py` calls it; the tests of the documentation compare what is in `docs/assets/folders` with
what it would draw. Files and arrows come from the code; `PATH` is all that is written by hand: the
files that a version goes through, in that order. An arrow that follows from two others is left out.
"""

import ast
import textwrap
from collections.abc import Iterable
from functools import cache
from html import escape
from pathlib import Path

__all__ = ["FOLDERS", "PATH", "draw", "files", "summary"]

PACKAGE = Path(__file__).resolve().parents[2] / "rl_bridge"

# Of a module's update over shared memory, from `publish` to the acknowledgement; of other folders,
# the same with that transport or engine.
PATH: dict[str, tuple[str, ...]] = {
    "trainers": ("state_dict",),
    "manifest": ("table", "digest", "model", "canonical", "compare"),
    "memory": ("packing", "slots", "passes", "views", "control"),
    "transports": ("_slots", "shared_memory"),
    "transports/wire": ("server", "channel", "client", "arenas"),
    "transports/broadcast": ("sender", "receiver", "consumer"),
    "transports/nixl": ("server", "fetch", "reading", "consumer"),
    "transports/files": ("transport", "checkpoint", "store", "directory", "objects", "watching"),
    "cuda": ("digest", "driver", "broker", "views", "live"),
    "assembly": ("end", "wanted", "plan", "assemble"),
    "bridge": (
        "tensor_bridge",
        "publisher",
        "executor",
        "transaction",
        "consumer",
        "engine_state",
    ),
    "installers": ("base", "module", "engine_memory"),
    "groups": ("publish", "exchange"),
    "strategies": ("strategy", "sender", "requests", "receiver"),
    "engines": (
        "driver",
        "session",
        "rpc",
        "rank",
        "model_installer",
        "load_plan",
        "staging",
        "evidence",
        "serving",
    ),
    "engines/vllm": ("engine_adapter", "client", "plugin", "host", "model_installer", "compat"),
    "engines/sglang": ("engine_adapter", "client", "plugin", "host", "front", "lora"),
    "ray": ("actors", "publisher_endpoint", "fleet", "calls", "rollout_endpoint"),
    "remote": ("client", "signing", "gate", "app", "sidecar", "state"),
}
FOLDERS = tuple(PATH)

_WIDTH, _MARGIN, _GAP = 1000, 20, 14
_BOX_WIDTH, _BOX_HEIGHT, _ROW = 184, 92, 136
_LINE_WIDTH = 10
_PER_ROW = 4
_SWEEPS = 8
_INK, _MUTED = "#1a237e", "#546e7a"
_ON_LINE, _OFF_LINE = "#00897b", "#90a4ae"


def files(folder: str) -> tuple[str, ...]:
    """The modules of a folder, without its face."""
    found = (PACKAGE / folder).glob("*.py")
    return tuple(sorted(path.stem for path in found if path.stem != "__init__"))


# Which file uses which, both in the order of their names: the same code gives the same picture.
_Arrows = dict[str, list[str]]


@cache
def _tree(folder: str, name: str) -> ast.Module:
    return ast.parse((PACKAGE / folder / f"{name}.py").read_text("utf-8"))


def summary(folder: str, name: str) -> str:
    """The first line of a module's docstring, without its own name."""
    line = (ast.get_docstring(_tree(folder, name)) or "").partition("\n")[0].replace("`", "")
    return line.removesuffix(".")


def _uses(folder: str, name: str) -> set[str]:
    """The files of the same folder that this one imports."""
    here = ".".join(("rl_bridge", *folder.split("/")))
    found = set()
    for node in ast.walk(_tree(folder, name)):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == here:
                found |= {alias.name for alias in node.names}
            elif node.module.startswith(f"{here}."):
                found.add(node.module.removeprefix(f"{here}."))
    return found & set(files(folder)) - {name}


def _arrows(folder: str) -> _Arrows:
    """Which file uses which, without what follows from two other arrows."""
    uses = {name: _uses(folder, name) for name in files(folder)}

    def reached(names: Iterable[str]) -> set[str]:
        seen: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo.extend(uses[name])
        return seen

    return {
        name: sorted(
            other for other in given if other not in reached(_below(uses, given - {other}))
        )
        for name, given in uses.items()
    }


def _below(uses: dict[str, set[str]], names: Iterable[str]) -> set[str]:
    return {below for name in names for below in uses[name]}


# A row holds files, and for each arrow that goes on below it a gap, named by its two ends.
_Row = list["str | tuple[str, str]"]


def _rows(arrows: _Arrows) -> tuple[list[_Row], dict[str, int]]:
    """Files by depth, each below all that use it; also return the row of each file."""
    depth = dict.fromkeys(arrows, 0)
    for _ in arrows:
        for name, used in arrows.items():
            for other in used:
                depth[other] = max(depth[other], depth[name] + 1)
    rows: list[_Row] = []
    for level in sorted(set(depth.values())):
        names = [name for name in arrows if depth[name] == level]
        rows += [list(names[start : start + _PER_ROW]) for start in range(0, len(names), _PER_ROW)]
    row_of = {name: number for number, row in enumerate(rows) for name in row if type(name) is str}
    for name, used in arrows.items():
        for other in used:
            for number in range(row_of[name] + 1, row_of[other]):
                rows[number].append((name, other))
    for sweep in range(_SWEEPS):
        is_down = sweep % 2 == 0
        order = range(1, len(rows)) if is_down else range(len(rows) - 2, -1, -1)
        for number in order:
            middles = _middles(rows[number - 1 if is_down else number + 1])
            rows[number].sort(key=lambda item: _wish(item, arrows, middles, is_down=is_down))
    return rows, row_of


def _wish(
    item: str | tuple[str, str],
    arrows: _Arrows,
    middles: dict[str | tuple[str, str], float],
    *,
    is_down: bool,
) -> float:
    """Where an item would stand if its neighbours in the row that is looked at had their way."""
    if isinstance(item, tuple):
        near: list[str | tuple[str, str]] = [item, item[0] if is_down else item[1]]
    elif is_down:
        near = [user for user, used in arrows.items() if item in used]
        near += [(user, item) for user in near if isinstance(user, str)]
    else:
        near = [*arrows[item], *((item, other) for other in arrows[item])]
    found = [middles[other] for other in near if other in middles]
    return sum(found) / len(found) if found else _WIDTH / 2


def _middles(row: _Row) -> dict[str | tuple[str, str], float]:
    """Where each item of a row stands: side by side, around the middle of the picture."""
    widths = [_BOX_WIDTH if isinstance(item, str) else _LINE_WIDTH for item in row]
    x = (_WIDTH - sum(widths) - _GAP * (len(row) - 1)) / 2
    found = {}
    for item, width in zip(row, widths, strict=True):
        found[item] = x + width / 2
        x += width + _GAP
    return found


def draw(folder: str) -> str:
    """The picture of a folder, as SVG."""
    arrows = _arrows(folder)
    rows, row_of = _rows(arrows)
    middles = [_middles(row) for row in rows]
    height = 2 * _MARGIN + len(rows) * _ROW - (_ROW - _BOX_HEIGHT)
    steps = {name: number for number, name in enumerate(PATH[folder], 1)}
    path = ", ".join(PATH[folder])
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" role="img" '
            f'aria-label="rl_bridge/{folder}: the path of a weight is {path}." '
            'font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif">'
        ),
        f"  <defs>{_tip('on', _ON_LINE)}{_tip('off', _OFF_LINE)}</defs>",
        f'  <rect width="{_WIDTH}" height="{height}" rx="14" fill="#ffffff" stroke="#cfd8dc"/>',
    ]
    for name in sorted(arrows):
        for other in arrows[name]:
            xs = [middles[row_of[name]][name]]
            xs += [middles[row][name, other] for row in range(row_of[name] + 1, row_of[other])]
            xs.append(middles[row_of[other]][other])
            parts.append(_arrow(xs, row_of[name], is_path=name in steps and other in steps))
    for name in sorted(arrows):
        at = (middles[row_of[name]][name], _top(row_of[name]))
        parts.append(_box(folder, name, at, steps.get(name)))
    return "\n".join([*parts, "</svg>", ""])


def _top(row: int) -> float:
    return _MARGIN + row * _ROW


def _tip(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerUnits="userSpaceOnUse" '
        f'markerWidth="10" markerHeight="10" orient="auto"><path d="M0 0 L10 5 L0 10 z" '
        f'fill="{colour}"/></marker>'
    )


def _arrow(xs: list[float], row: int, *, is_path: bool) -> str:
    """Draw an arrow from a row down: at each row on the way it passes through a gap."""
    x, y = xs[0], _top(row) + _BOX_HEIGHT
    line = f"M{x:.0f} {y:.0f}"
    for number, target in enumerate(xs[1:], row + 1):
        end = _top(number)
        bend = (end - y) / 2
        line += f" C{x:.0f} {y + bend:.0f} {target:.0f} {end - bend:.0f} {target:.0f} {end:.0f}"
        x, y = target, end + _BOX_HEIGHT
        if number < row + len(xs) - 1:
            line += f" L{x:.0f} {y:.0f}"
    colour, width, tip = (_ON_LINE, 1.8, "on") if is_path else (_OFF_LINE, 1.2, "off")
    return (
        f'  <path d="{line}" fill="none" stroke="{colour}" stroke-width="{width}" '
        f'marker-end="url(#{tip})"/>'
    )


def _box(folder: str, name: str, at: tuple[float, float], step: int | None) -> str:
    fill, line = ("#ffffff", _OFF_LINE) if step is None else ("#e0f2f1", _ON_LINE)
    middle, y = at
    x = middle - _BOX_WIDTH / 2
    lines = textwrap.wrap(summary(folder, name), 29, max_lines=4, placeholder=" ...")
    parts = [
        (
            f'  <rect x="{x:.0f}" y="{y:.0f}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="7" '
            f'fill="{fill}" stroke="{line}" stroke-width="1.4"/>'
        ),
        (
            f'  <text x="{middle:.0f}" y="{y + 19:.0f}" text-anchor="middle" font-size="13.5" '
            f'font-weight="bold" fill="{_INK}">{escape(name)}</text>'
        ),
    ]
    parts += [
        f'  <text x="{middle:.0f}" y="{y + 37 + 14 * number:.0f}" text-anchor="middle" '
        f'font-size="10.5" fill="{_MUTED}">{escape(text)}</text>'
        for number, text in enumerate(lines)
    ]
    if step is not None:
        parts += [
            f'  <circle cx="{x + 3:.0f}" cy="{y + 3:.0f}" r="10" fill="{line}"/>',
            (
                f'  <text x="{x + 3:.0f}" y="{y + 7:.0f}" text-anchor="middle" font-size="11" '
                f'font-weight="bold" fill="#ffffff">{step}</text>'
            ),
        ]
    return "\n".join(parts)
