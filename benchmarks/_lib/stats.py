"""Summaries of samples; every sample stays in the file beside them."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["median_of", "summarise"]


def summarise(values: Sequence[float]) -> dict[str, float | int]:
    """Return count, median, extremes and quartiles."""
    ordered = sorted(values)
    if len(ordered) > 1:
        low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    else:
        low = high = ordered[0]
    return {
        "n": len(ordered),
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "p25": low,
        "p75": high,
    }


def median_of(samples: Iterable[dict[str, Any]], key: str) -> float | None:
    """Return the median of ``key`` over the samples that have it (also among their extras)."""
    values = [
        sample[key] if key in sample else sample["extras"][key]
        for sample in samples
        if key in sample or key in sample.get("extras", {})
    ]
    return statistics.median(values) if values else None
