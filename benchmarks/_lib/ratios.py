"""From samples to the ratios object: every figure with what it was divided by."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from _lib.groups import Row
from _lib.stats import median_of

__all__ = ["Figures", "fastest"]

_MS = 1e3
_US_PER_MS = 1e3
Samples = Sequence[dict[str, Any]]


def fastest(candidates: dict[str, float | None]) -> tuple[str, float] | None:
    """Return the name and seconds of the fastest candidate that was measured."""
    measured = {name: seconds for name, seconds in candidates.items() if seconds is not None}
    if not measured:
        return None
    name = min(measured, key=lambda key: measured[key])
    return name, measured[name]


@dataclass(slots=True)
class Figures:
    """The ratios and, beside them, how each came about and which aim it has."""

    ratios: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str, value: float | None, aim: str, **details: Any) -> None:
        """Record one figure; None where it was not measured, with the reason in the details."""
        self.ratios[name] = None if value is None else round(value, 4)
        holds = None if value is None else _holds(value, aim)
        self.details[name] = {"aim": aim, "aim_met": holds, **details}

    def put_ratio(
        self,
        name: str,
        ours: float | None,
        baselines: dict[str, float | None],
        aim: str,
        *,
        rate: bool,
    ) -> None:
        """Record ours against the fastest baseline: a ratio of rates, or of times."""
        best = fastest(baselines)
        if ours is None or best is None:
            self.put(name, None, aim, reason="not measured in this run")
            return
        value = best[1] / ours if rate else ours / best[1]
        self.put(
            name,
            value,
            aim,
            kind="rate ours / rate baseline" if rate else "time ours / time baseline",
            ours_s=ours,
            baseline=best[0],
            baselines_s=baselines,
        )


def _holds(value: float, aim: str) -> bool | None:
    """Return whether an aim such as ``<= 1.5`` holds; None where the aim is no number."""
    sign, _, bound = aim.partition(" ")
    tests: dict[str, Callable[[float, float], bool]] = {
        "<=": lambda a, b: a <= b,
        "<": lambda a, b: a < b,
        ">=": lambda a, b: a >= b,
    }
    return tests[sign](value, float(bound.split()[0])) if sign in tests else None


def _named(samples: Samples, prefix: str) -> dict[str, float | None]:
    """Return the medians of a baseline's variants, by name."""
    keys = {
        key
        for sample in samples
        for key in sample["extras"]
        if key.startswith(prefix) and key.endswith("_s")
    }
    return {key.removesuffix("_s"): median_of(samples, key) for key in sorted(keys)}


def core_figures(figures: Figures, rows: Iterable[Row]) -> None:
    """Fill in what the core group measured."""
    by_name = {row.lane.name: row.samples for row in rows}
    ours, flip, copy = by_name["ours"], by_name["ours_flip"], by_name["ours_copy"]
    arenas = {name: samples for name, samples in by_name.items() if name.startswith("bare_arena")}
    figures.put_ratio(
        "publish_vs_memcpy",
        median_of(ours, "publish_s"),
        _named(ours, "memcpy_"),
        ">= 0.9",
        rate=True,
    )
    figures.put_ratio(
        "handoff_vs_bare_arena",
        median_of(ours, "usable_s"),
        {name: median_of(samples, "usable_s") for name, samples in arenas.items()},
        "<= 1.5",
        rate=False,
    )
    figures.put_ratio(
        "loaded_vs_bare_arena_and_copy",
        median_of(flip, "loaded_s"),
        {name: median_of(samples, "loaded_s") for name, samples in arenas.items()},
        "< 1.0",
        rate=False,
    )
    figures.put_ratio(
        "verify_vs_xxh3",
        median_of(ours, "import_s"),
        _named(ours, "xxh3_"),
        ">= 0.85",
        rate=True,
    )
    figures.put_ratio(
        "copy_install_vs_memcpy",
        median_of(copy, "install_s"),
        _named(copy, "copy_"),
        ">= 0.85",
        rate=True,
    )


def peer_figures(figures: Figures, groups: Sequence[Sequence[Row]]) -> None:
    """Fill in the peers: seconds until usable; each group's own figure of ours is in the details.

    A peer that ran in a group of its own is scaled by nothing: what was measured stands. A peer
    that is missing or failed stands as None, and then nobody can say that ours led them all.
    """
    peers: dict[str, float | None] = {}
    details: dict[str, Any] = {}
    for rows in groups:
        ours_s = median_of(_samples_of(rows, "ours"), "usable_s")
        for row in rows:
            usable_s = median_of(row.samples, "usable_s")
            name = row.lane.name
            if peers.get(name) is not None or name == "ours_flip":
                continue
            usable_s = usable_s if row.status == "ok" else None
            peers[name] = None if usable_s is None else round(usable_s, 5)
            details[name] = {
                "status": row.status,
                "reason": row.reason,
                "snapshot": row.snapshot,
                "kind": row.kind,
                "verified": row.lane.verified,
                "usable_s": usable_s,
                "loaded_s": median_of(row.samples, "loaded_s"),
                "ours_usable_s_in_the_same_rounds": ours_s,
            }
        flip_s = median_of(_samples_of(rows, "ours_flip"), "loaded_s")
        details["ours"].setdefault("loaded_s_by_flip", flip_s)
    not_measured = [name for name, seconds in peers.items() if seconds is None]
    not_led = [
        name
        for name, detail in details.items()
        if name != "ours"
        and name not in not_measured
        and detail["snapshot"]
        and detail["usable_s"] <= detail["ours_usable_s_in_the_same_rounds"]
    ]
    met = False if not_led else None if not_measured else True
    reasons = [f"not led: {name}" for name in not_led]
    reasons += [f"not measured: {name}" for name in not_measured]
    figures.ratios["peers"] = peers
    figures.details["peers"] = {
        "aim": "ours is faster than every peer that hands over a snapshot",
        "aim_met": met,
        "reason": ", ".join(reasons) or None,
        "not_led": not_led,
        "not_measured": not_measured,
        "rows": details,
    }


def _samples_of(rows: Iterable[Row], name: str) -> Samples:
    return next((row.samples for row in rows if row.lane.name == name), [])


def size_figures(figures: Figures, rows: Iterable[Row], firsts: Sequence[float]) -> None:
    """Fill in what depends on the number of tensors and on the size of the model."""
    by_name = {row.lane.name: row for row in rows}
    many, few = by_name["many_tensors"], by_name["few_tensors"]
    count = many.lane.spec.num_tensors if many.lane.spec else 0
    import_ms = _import_without_verification(by_name["many_import"].samples)
    if import_ms is None or not count:
        figures.put("import_us_per_tensor", None, "<= 1.0", reason="not measured in this run")
    else:
        figures.put(
            "import_us_per_tensor",
            max(0.0, import_ms - 1.0) * _US_PER_MS / count,
            "<= 1.0",
            kind="(manifest text to tensors, less the verification, less 1 ms) / tensors",
            import_ms=import_ms,
            num_tensors=count,
        )
    for size, lane in (("64mib", "flip_64mib"), ("1200mib", "flip_1200mib"), ("4gib", "flip_4gib")):
        row = by_name.get(lane)
        seconds = median_of(row.samples, "install_s") if row is not None else None
        reason = (
            None if seconds is not None else "not part of --quick, or left out for want of memory"
        )
        value = None if seconds is None else seconds * _MS
        figures.put(f"flip_ms_{size}", value, "<= 2.0 ms", reason=reason)
    many_s, few_s = median_of(many.samples, "loaded_s"), median_of(few.samples, "loaded_s")
    overhead = None if many_s is None or few_s is None else (many_s - few_s) * _MS
    figures.put(
        "overhead_ms_40k",
        overhead,
        "<= 50 ms",
        kind="update of the many - update of the same bytes in few tensors, publish to ack",
        many_s=many_s,
        few_s=few_s,
        num_tensors=count,
    )
    first = statistics.median(firsts) * _MS if firsts else None
    figures.put(
        "first_plan_ms_40k",
        first,
        "<= 1000 ms",
        kind="first update of fresh processes, publish to ack, layout planned and sent",
        samples_ms=[seconds * _MS for seconds in firsts],
    )


def _import_without_verification(samples: Samples) -> float | None:
    """Return the median milliseconds of parsing and importing, less those of verifying."""
    rest = [
        sample["extras"]["import_s"] * _MS - sample["extras"]["import_verify_ms"]
        for sample in samples
        if "import_verify_ms" in sample["extras"]
    ]
    return statistics.median(rest) if rest else None
