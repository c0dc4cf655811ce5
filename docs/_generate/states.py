"""Draws the moves of a role as SVG, from the table of the lifecycle.

The first move of each state leads along the path that a sound update takes: these are arrows. All
other moves stand as text beside the state that they leave.
"""

from html import escape

from rl_bridge.lifecycle import INITIAL, TABLE, Role, State

__all__ = ["draw"]

_LEFT, _BOX_WIDTH, _BOX_HEIGHT, _ROW, _WIDTH = 20, 136, 32, 66, 720


def path_of(role: Role) -> list[State]:
    """The states of an update that nothing happens to, in order."""
    found = [INITIAL[role]]
    while moves := TABLE[role][found[-1]]:
        found.append(next(iter(moves.values())))
    return found


def draw(role: Role) -> str:
    """The picture: the path from top to bottom, and the other states below it."""
    path = path_of(role)
    parts, top = [], 20
    for state in [*path, *(state for state in TABLE[role] if state not in path)]:
        moves = [f"{event} → {target}" for event, target in TABLE[role][state].items()]
        parts += _box(state, moves[1:] if state in path else moves, top)
        if state in path[:-1]:
            parts += _arrow(next(iter(TABLE[role][state])), top + _BOX_HEIGHT)
        top += _ROW
    height = top - _ROW + _BOX_HEIGHT + 20
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" '
        f'aria-label="The states of a {role}: {escape(", ".join(path))}." '
        'font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif" font-size="14">'
    )
    paper = f'<rect width="{_WIDTH}" height="{height}" rx="14" fill="#ffffff" stroke="#cfd8dc"/>'
    return "\n".join([head, paper, *parts, "</svg>\n"])


def _box(state: State, moves: list[str], top: int) -> list[str]:
    centre, base, beside = _LEFT + _BOX_WIDTH // 2, top + 21, _LEFT + _BOX_WIDTH + 20
    name = f'text-anchor="middle" font-weight="bold" fill="#1a237e">{escape(state)}'
    size = f'width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="6"'
    return [
        f'<rect x="{_LEFT}" y="{top}" {size} fill="#e8eaf6" stroke="#1a237e"/>',
        f'<text x="{centre}" y="{base}" {name}</text>',
        f'<text x="{beside}" y="{base}" fill="#546e7a">{escape("   ·   ".join(moves))}</text>',
    ]


def _arrow(event: str, top: int) -> list[str]:
    middle, bottom = _LEFT + _BOX_WIDTH // 2, top + _ROW - _BOX_HEIGHT
    return [
        f'<path d="M{middle} {top}V{bottom - 8}" stroke="#00897b" stroke-width="2"/>',
        f'<path d="M{middle} {bottom}l-5 -9h10z" fill="#00897b"/>',
        f'<text x="{middle + 12}" y="{top + 22}" fill="#00695c">{escape(event)}</text>',
    ]
