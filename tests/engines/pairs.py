"""Choosing few combinations that contain every pair of values: most bugs need two of them."""

import itertools
from collections.abc import Sequence

from tests.engines.drive import Setting
from tests.engines.models import Kind

__all__ = ["FAMILIES", "every_setting", "pairs_of", "pairwise"]

FAMILIES = ("qwen2", "qwen3", "llama", "moe")


def every_setting() -> list[Setting]:
    """All engines that can be: two ranks cannot be in one process."""
    return [
        Setting(Kind(family, tied, dtype), compiled, in_process, ranks)
        for family, tied, dtype, compiled, in_process, ranks in itertools.product(
            FAMILIES, (False, True), ("float32", "bfloat16"), (False, True), (True, False), (1, 2)
        )
        if not (in_process and ranks > 1)
    ]


def pairs_of(setting: Setting) -> frozenset[tuple[object, ...]]:
    """All pairs of values in it."""
    kind = setting.kind
    values = (
        kind.family,
        kind.tied,
        kind.dtype,
        setting.compiled,
        setting.in_process,
        setting.ranks,
    )
    return frozenset(itertools.combinations(enumerate(values), 2))


def pairwise(settings: Sequence[Setting]) -> list[Setting]:
    """Some of them that have every pair that any has; those that tell most for their time."""
    left = frozenset[tuple[object, ...]]().union(*map(pairs_of, settings))
    chosen: list[Setting] = []
    while left:
        best = max(settings, key=lambda s: len(pairs_of(s) & left) / _cost_s(s))
        chosen.append(best)
        left -= pairs_of(best)
    return sorted(chosen, key=str)


def _cost_s(setting: Setting) -> int:
    """Seconds that a test of it takes, about, on two busy cores."""
    start = 14 if setting.in_process else 45
    return start + 60 * (setting.ranks - 1) + 18 * setting.compiled
