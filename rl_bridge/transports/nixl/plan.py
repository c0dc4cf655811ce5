"""Which bytes are read from where, in which steps: made once per slot and request."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_bridge.errors import MalformedManifest
from rl_bridge.transports.nixl.messages import Leased

__all__ = ["STEP_NBYTES", "Steps", "plan_steps"]

STEP_NBYTES = 8 << 20
"""Bytes of one read: what is digested while the next ones travel."""
_MAX_ROWS = 1024
# Between ranges that lie closer than that, the bytes are read too: one descriptor costs more.
_NEAR_NBYTES = 4096

_Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """A list of ranges, and how it is cut into reads.

    Attributes:
        places: where each range goes: first byte in the reader's arena.
        addresses: of each range at the publisher.
        nbytes: size of each.
        cuts: row with which each read begins, and the number of rows.
        marks: the publisher's arena is there up to here, behind each read.

    """

    places: _Column
    addresses: npt.NDArray[np.uint64]
    nbytes: _Column
    cuts: tuple[int, ...]
    marks: tuple[int, ...]


def plan_steps(
    leased: Leased,
    arena_nbytes: int,
    starts: _Column | None,
    nbytes: _Column | None,
    *,
    targets: _Column | None = None,
) -> Steps:
    """Cut a request into reads.

    Args:
        leased: where the version lies.
        arena_nbytes: its size.
        starts: first byte of each range that is asked for; None: everything.
        nbytes: size of each.
        targets: where each goes in an arena of the reader's own; None: to the same place.

    Raises:
        MalformedManifest: the publisher's ranges do not lie in the arena.

    """
    at = np.array(leased.starts, np.int64)
    size = np.array(leased.nbytes, np.int64)
    address = np.array(leased.addresses, np.uint64)
    ends = at + size
    # Each by itself first: the sum of two that are absurd may wrap around.
    is_absurd = (at > arena_nbytes) | (size > arena_nbytes) | (size < 1) | (ends > arena_nbytes)
    if is_absurd.any() or (ends[:-1] > at[1:]).any():
        msg = f"update {leased.update_id}: its publisher's ranges do not fit its arena. See it."
        raise MalformedManifest(msg)
    if starts is None or nbytes is None:
        low, high = at, ends
        source = np.arange(len(at))
    else:
        # What lies between two ranges must not be read along where it would land on others.
        first, last = _joined(starts, nbytes) if targets is None else (starts, starts + nbytes)
        low, high, source = _inside(first, last, at, ends)
    low, high, source = _split(low, high, source)
    rows = address[source] + (low - at[source]).astype(np.uint64)
    cuts = _cuts(high - low)
    marks = tuple(int(high[cut - 1]) for cut in cuts[1:])
    places = low
    if starts is not None and targets is not None:
        asked = np.searchsorted(starts, low, side="right") - 1
        places = targets[asked] + (low - starts[asked])
    return Steps(places, rows, high - low, cuts, marks)


def _joined(starts: _Column, nbytes: _Column) -> tuple[_Column, _Column]:
    """Join ranges that are near to each other."""
    if not len(starts):
        return starts, starts
    ends = starts + nbytes
    begins = np.flatnonzero(np.concatenate(([True], starts[1:] - ends[:-1] > _NEAR_NBYTES)))
    lasts = np.concatenate((begins[1:], [len(starts)])) - 1
    return starts[begins], ends[lasts]


def _inside(
    low: _Column, high: _Column, at: _Column, ends: _Column
) -> tuple[_Column, _Column, _Column]:
    """Cut ranges at the borders of those that the publisher has."""
    first = np.searchsorted(ends, low, side="right")
    last = np.searchsorted(at, high, side="left")
    counts = np.maximum(last - first, 0)
    rows = np.repeat(np.arange(len(low)), counts)
    source = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return np.maximum(low[rows], at[source]), np.minimum(high[rows], ends[source]), source


def _split(low: _Column, high: _Column, source: _Column) -> tuple[_Column, _Column, _Column]:
    """Cut long ranges at multiples of a step."""
    first, end = low // STEP_NBYTES, -(-high // STEP_NBYTES)
    counts = end - first
    rows = np.repeat(np.arange(len(low)), counts)
    step = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return (
        np.maximum(low[rows], step * STEP_NBYTES),
        np.minimum(high[rows], (step + 1) * STEP_NBYTES),
        source[rows],
    )


def _cuts(sizes: _Column) -> tuple[int, ...]:
    """Group rows into reads of about a step."""
    cuts = [0]
    total = count = 0
    for row, size in enumerate(sizes.tolist()):
        if count and (total + size > STEP_NBYTES or count >= _MAX_ROWS):
            cuts.append(row)
            total = count = 0
        total += size
        count += 1
    if len(sizes):
        cuts.append(len(sizes))
    return tuple(cuts)
