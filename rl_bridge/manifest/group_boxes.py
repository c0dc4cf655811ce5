"""Boxes of index space: half-open, one lower and one upper index per dimension.

What coverage and resharding are made of. A range of elements in row-major order (``is_flat``) is a
few boxes as well, so that everything meets in one form.
"""

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

__all__ = [
    "Box",
    "box_of",
    "find_gap",
    "find_overlap",
    "flat_boxes",
    "intersect",
    "is_empty",
    "shown",
    "subtract",
    "volume",
]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First indices, and the indices behind the last ones."""

# Rows of the comparison that look for overlaps at a time: 1024 x 20,000 x dims bytes at most.
_ROWS = 1024


def box_of(offset: Sequence[int], shape: Sequence[int]) -> Box:
    """The box that begins at `offset`."""
    return tuple(offset), tuple(a + n for a, n in zip(offset, shape, strict=True))


def volume(box: Box) -> int:
    """How many elements it has."""
    return prod(hi - lo for lo, hi in zip(*box, strict=True))


def is_empty(box: Box) -> bool:
    """Whether it has none."""
    return any(hi <= lo for lo, hi in zip(*box, strict=True))


def shown(box: Box) -> str:
    """How a message writes it: ``[0:4, 8:16]``."""
    return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in zip(*box, strict=True)) + "]"


def flat_boxes(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """Cut a range of elements, in row-major order, into boxes: at most two for each dimension."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    rest = tuple(shape[1:])
    inner = prod(rest)
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)

    def in_row(row: int, begin: int, end: int) -> list[Box]:
        return [((row, *lo), (row + 1, *hi)) for lo, hi in flat_boxes(begin, end, rest)]

    if first == last:
        return in_row(first, head, tail)
    found: list[Box] = []
    if head:
        found += in_row(first, head, inner)
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in rest)), (last, *rest)))
    return found + in_row(last, 0, tail)


def intersect(one: Box, other: Box) -> Box | None:
    """What two boxes share, or None."""
    low = tuple(map(max, one[0], other[0]))
    high = tuple(map(min, one[1], other[1]))
    box = (low, high)
    return None if is_empty(box) else box


def subtract(box: Box, other: Box) -> list[Box]:
    """What is left of `box` without `other`: disjoint boxes, in order of their first indices."""
    shared = intersect(box, other)
    if shared is None:
        return [box]
    before: list[Box] = []
    behind: list[Box] = []
    low, high = list(box[0]), list(box[1])
    for dim, (lo, hi) in enumerate(zip(*shared, strict=True)):
        if low[dim] < lo:
            before.append((tuple(low), (*high[:dim], lo, *high[dim + 1 :])))
        if hi < high[dim]:
            behind.append(((*low[:dim], hi, *low[dim + 1 :]), tuple(high)))
        low[dim], high[dim] = lo, hi
    return before + behind[::-1]


def find_gap(whole: Box, boxes: Iterable[Box]) -> Box | None:
    """A range of `whole` that none of `boxes` covers, the first in a search; None if there is none.

    Meant for telling: it takes long only where there are many boxes and no gap.
    """
    waiting = [(whole, list(boxes))]
    while waiting:
        box, others = waiting.pop()
        if is_empty(box):
            continue
        others = [other for other in others if intersect(box, other) is not None]
        if not others:
            return box
        taken, *rest = others
        waiting += [(left, rest) for left in reversed(subtract(box, taken))]
    return None


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two of `boxes` that share elements, by their places; None if all are disjoint."""
    kept = [place for place, box in enumerate(boxes) if not is_empty(box)]
    if len(kept) > 1 and not boxes[kept[0]][0]:
        return kept[0], kept[1]  # of no dimensions: one element, twice
    if len(kept) < 2:  # noqa: PLR2004 - a pair
        return None
    kept.sort(key=lambda place: boxes[place][0][0])
    low = np.array([boxes[place][0] for place in kept], np.int64)
    high = np.array([boxes[place][1] for place in kept], np.int64)
    for begin in range(0, len(kept), _ROWS):
        rows = slice(begin, begin + _ROWS)
        # Sorted by their first index: what begins behind the end of all of these meets none.
        end = int(np.searchsorted(low[:, 0], high[rows, 0].max()))
        meets = (low[rows, None] < high[None, :end]) & (low[None, :end] < high[rows, None])
        pairs = np.argwhere(meets.all(axis=2))
        pairs = pairs[pairs[:, 0] + begin < pairs[:, 1]]
        if len(pairs):
            first, second = pairs[0]
            return kept[begin + int(first)], kept[int(second)]
    return None
