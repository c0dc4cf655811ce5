"""The lifecycle diagram of the docs, generated from the table (a test compares the two)."""

from rl_bridge.lifecycle.table import INITIAL, TABLE, Role, State

__all__ = ["mermaid"]


def mermaid(role: Role) -> str:
    """Mermaid state diagram of one role, one line per move."""
    lines = ["stateDiagram-v2", f"    [*] --> {INITIAL[role]}"]
    for state, moves in TABLE[role].items():
        lines += [f"    {state} --> {target}: {event}" for event, target in moves.items()]
    lines.append(f"    {State.RELEASED} --> [*]")
    return "\n".join(lines) + "\n"
