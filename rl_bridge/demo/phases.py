"""How the phases of an update are told to people: who spent the time, and on what."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rl_bridge.demo.options import Engine
from rl_bridge.demo.records import StepRow

__all__ = ["BETWEEN", "PhaseSeries", "grouped", "phase_series"]

BETWEEN = "messages"

# Small steps with one purpose, told as one; a phase that is not named here keeps its own name.
_GROUPS = {
    "trainer": {
        "slot": "copy, digest",
        "stage_digest": "copy, digest",
        "seal": "manifest",
        "to_json": "manifest",
    },
    "rollout": {
        "parse": "manifest",
        "attach": "verify",
        "prepare": "install",
        "finish": "acknowledge",
        "failed": "refuse, undo",
    },
}
# Real engines have a version staged beside the one that serves (or that one copied aside), which
# takes time; what stands between their pause and their resume is the install.
_GROUPS_OF_ENGINES = {
    "trainer": _GROUPS["trainer"],
    "rollout": {
        **_GROUPS["rollout"],
        "prepare": "stage",
        "pause": "install",
        "cache": "install",
        "label": "install",
        "resume": "install",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeries:
    """One phase over all updates."""

    side: str
    """"trainer", "rollout", or "" for what lies between the two."""
    name: str
    values_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The typical update; the first one is slower, because it makes memory and plans."""
        return median(self.values_ms)


def phase_series(rows: Sequence[StepRow]) -> list[PhaseSeries]:
    """Return the phases in the order in which they happen.

    What neither side accounts for is the way of the manifest and of the answer through the pipe.
    """
    sides = {
        "trainer": [row.publish_ms for row in rows],
        "rollout": [row.install_ms for row in rows],
    }
    series = [
        PhaseSeries(
            side=side, name=name, values_ms=tuple(phases.get(name, 0.0) for phases in updates)
        )
        for side, updates in sides.items()
        for name in dict.fromkeys(name for phases in updates for name in phases)
    ]
    known = [sum(column) for column in zip(*(one.values_ms for one in series), strict=True)]
    between = tuple(max(row.update_ms - spent, 0.0) for row, spent in zip(rows, known, strict=True))
    return [*series, PhaseSeries(side="", name=BETWEEN, values_ms=between)]


def grouped(series: Sequence[PhaseSeries], engine: str = Engine.MODULE) -> list[PhaseSeries]:
    """Sum up phases of one purpose; nothing is left out."""
    groups = _GROUPS if engine == Engine.MODULE else _GROUPS_OF_ENGINES
    sums: dict[tuple[str, str], tuple[float, ...]] = {}
    for one in series:
        key = one.side, groups.get(one.side, {}).get(one.name, one.name)
        before = sums.get(key, (0.0,) * len(one.values_ms))
        sums[key] = tuple(a + b for a, b in zip(before, one.values_ms, strict=True))
    return [
        PhaseSeries(side=side, name=name, values_ms=values) for (side, name), values in sums.items()
    ]
