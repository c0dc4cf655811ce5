"""The proof that the ranks of a group hold every element of every tensor exactly once.

Nothing is assembled for it: it is arithmetic on placements. The pieces of a whole tensor that have
replica 0 must be disjoint and fill it; each further replica must repeat one of them. An error names
the tensor, the range of indices and the ranks.

The arithmetic is on boxes of index space: half-open, with one lower and one upper index for each
dimension. A range of elements in row-major order (``is_flat``) is a few boxes as well, so that all
pieces have one form. Resharding (`rl_bridge.assembly.plan`) uses the same boxes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import NamedTuple

import numpy as np

from rl_bridge.errors import IncompleteCoverage, RangeBeyondSegment, RanksDisagree
from rl_bridge.manifest.dtypes import dtype_nbytes
from rl_bridge.manifest.parallel import Piece, Placement
from rl_bridge.manifest.table import collector_paused

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First indices, and the indices behind the last ones."""

# Overlaps are looked for in so many rows at a time: 1024 x 20,000 x dims bytes at most.
_ROWS = 1024
_FEW = 6
# Nobody cuts a tensor into more boxes. Comparing each with each must take seconds at most.
_MAX_BOXES = 20_000
_MAX_INT = 2**63 - 1


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


def hull(one: Box, other: Box) -> Box:
    """The smallest box that holds both."""
    return tuple(map(min, one[0], other[0])), tuple(map(max, one[1], other[1]))


def _subtract(box: Box, shared: Box) -> list[Box]:
    """What is left of `box` without a part of it: disjoint boxes, in order of their indices."""
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

    For error messages: it takes long only if there are many boxes and no gap.
    """
    waiting = [(whole, list(boxes))]
    while waiting:
        box, others = waiting.pop()
        if is_empty(box):
            continue
        shared = [part for other in others if (part := intersect(box, other)) is not None]
        if not shared:
            return box
        taken, *rest = shared
        waiting += [(left, rest) for left in reversed(_subtract(box, taken))]
    return None


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two of `boxes` that share elements, by their places; None if all are disjoint."""
    kept = [place for place, box in enumerate(boxes) if not is_empty(box)]
    # Arrays do not pay for a few. (Boxes without dimensions are one element: two of them overlap.)
    for one, other in combinations(kept[:_FEW], 2):
        if intersect(boxes[one], boxes[other]) is not None:
            return one, other
    if len(kept) <= _FEW:
        return None
    kept.sort(key=lambda place: boxes[place][0][0])
    low = np.array([boxes[place][0] for place in kept], np.int64)
    high = np.array([boxes[place][1] for place in kept], np.int64)
    for begin in range(0, len(kept), _ROWS):
        rows = slice(begin, begin + _ROWS)
        # Boxes are sorted by their first index, so those that begin behind all of these meet none.
        end = int(np.searchsorted(low[:, 0], high[rows, 0].max()))
        meets = (low[rows, None] < high[None, :end]) & (low[None, :end] < high[rows, None])
        pairs = np.argwhere(meets.all(axis=2))
        pairs = pairs[pairs[:, 0] + begin < pairs[:, 1]]
        if len(pairs):
            first, second = pairs[0]
            return kept[begin + int(first)], kept[int(second)]
    return None


# ---- the proof ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTensor:
    """A tensor of the model, as all ranks together hold it.

    Attributes:
        name: the state-dict name.
        dtype: wire name.
        shape: dimensions.

    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return prod(self.shape) * dtype_nbytes(self.dtype, tensor=self.name)


class Held(NamedTuple):
    """One piece: the rank that holds it, and in which of its own tensors."""

    rank: int
    local: str
    dtype: str
    shape: tuple[int, ...]
    piece: Piece


class _Pattern(NamedTuple):
    """What a piece's soundness depends on; 40,000 tensors have a few dozen of these."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local_offset: tuple[int, ...]
    is_flat: bool
    replica: int
    local_shape: tuple[int, ...]


def held_pieces(
    ranks: Sequence[Mapping[str, Placement]], *, allow_ties: bool = False
) -> dict[str, list[Held]]:
    """Whole tensor's name -> every piece of it, by rank.

    Args:
        ranks: the placements of each rank.
        allow_ties: pieces of different tensors may lie at the same place of a rank's own tensor,
            because two names share it.

    Raises:
        RangeBeyondSegment: a piece reaches beyond its whole tensor or the rank's own tensor.
        IncompleteCoverage: two pieces lie at the same place of a rank's own tensor.

    """
    with collector_paused():
        found: dict[str, list[Held]] = {}
        sound: set[object] = set()
        for rank, placements in enumerate(ranks):
            for local, placement in placements.items():
                shape, dtype = placement.shape, placement.dtype
                for piece in placement.pieces:
                    name = piece.name
                    pattern = (
                        *(piece.global_shape, piece.offset, piece.shape, piece.local_offset),
                        *(piece.is_flat, piece.replica, shape),
                    )
                    if pattern not in sound:
                        _check_piece(rank, local, _Pattern(*pattern), name)
                        sound.add(pattern)
                    held = Held(rank, local, dtype, shape, piece)
                    if name in found:
                        found[name].append(held)
                    else:
                        found[name] = [held]
                if len(placement.pieces) > 1:
                    if allow_ties:
                        for name in {piece.name for piece in placement.pieces}:
                            own = [piece for piece in placement.pieces if piece.name == name]
                            _check_local(rank, local, shape, own)
                    else:
                        _check_local(rank, local, shape, placement.pieces)
        return found


def prove_coverage(held: Mapping[str, Sequence[Held]]) -> dict[str, WholeTensor]:
    """Prove that every element of every tensor is held exactly once; returns the whole tensors.

    Args:
        held: as `held_pieces` gives it.

    Raises:
        RanksDisagree: on a tensor's dtype or shape.
        IncompleteCoverage: a range is missing, or doubled, or a replica repeats nothing.

    """
    with collector_paused():
        wholes: dict[str, WholeTensor] = {}
        proven: set[object] = set()
        for name in sorted(held):
            pieces = held[name]
            _check_agreement(name, pieces)
            first = pieces[0]
            key = (
                first.piece.global_shape,
                *((p.offset, p.shape, p.is_flat, p.replica) for _, _, _, _, p in pieces),
            )
            if key not in proven:
                _prove_tensor(name, pieces)
                proven.add(key)
            wholes[name] = WholeTensor(name=name, dtype=first.dtype, shape=first.piece.global_shape)
        return wholes


def piece_boxes(piece: Piece) -> list[Box]:
    """The boxes of the whole tensor that a piece consists of; none if it is empty."""
    if piece.is_flat:
        start = piece.offset[0]
        return flat_boxes(start, start + piece.shape[0], piece.global_shape)
    return [box_of(piece.offset, piece.shape)] if prod(piece.shape) else []


# ---- one piece ----------------------------------------------------------------------------------


def _check_piece(rank: int, local: str, pattern: _Pattern, name: str) -> None:
    who = f"rank {rank}: tensor {local!r}: its piece of {name!r}"
    numbers = (*pattern.global_shape, *pattern.offset, *pattern.shape, *pattern.local_offset)
    if any(type(n) is not int or n < 0 for n in (*numbers, *pattern.local_shape, pattern.replica)):
        raise RangeBeyondSegment(
            f"{who} has numbers that are no int of 0 or more: {pattern._asdict()}. Give plain "
            "ints, such as tuple(tensor.shape)."
        )
    if max(prod(max(n, 1) for n in pattern.global_shape), *numbers, 0) > _MAX_INT >> 4:
        raise RangeBeyondSegment(
            f"{who} does not fit 63 bits: {pattern._asdict()}. Give the placement as it is."
        )
    whole, mine = pattern.global_shape, pattern.local_shape
    if pattern.is_flat:
        whole, mine = (prod(whole),), (prod(mine),)
    dims = {len(whole), len(mine), len(pattern.offset), len(pattern.shape)}
    if len(dims | {len(pattern.local_offset)}) != 1:
        raise RangeBeyondSegment(
            f"{who} has offset {list(pattern.offset)}, shape {list(pattern.shape)}, local offset "
            f"{list(pattern.local_offset)} in a tensor of shape {list(pattern.local_shape)}, and "
            f"the whole has {list(pattern.global_shape)}: expected one number per dimension each. "
            "Use is_flat=True for ranges of elements."
        )
    for what, offset, limit in (("", pattern.offset, whole), ("own ", pattern.local_offset, mine)):
        box = box_of(offset, pattern.shape)
        if any(hi > size for hi, size in zip(box[1], limit, strict=True)):
            raise RangeBeyondSegment(
                f"{who} is said to lie at {shown(box)} of the {what or 'whole '}tensor, which "
                f"has the shape {list(limit)}. Give the offsets and shapes of this rank's shard."
            )


def _check_local(rank: int, local: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
    boxes: list[Box] = []
    names: list[str] = []
    for piece in pieces:
        start = piece.local_offset[0] if piece.is_flat else 0
        mine = (
            flat_boxes(start, start + piece.shape[0], shape)
            if piece.is_flat
            else [box_of(piece.local_offset, piece.shape)]
        )
        boxes += mine
        names += [piece.name] * len(mine)
    overlap = find_overlap(boxes)
    if overlap is not None:
        one, other = overlap
        raise IncompleteCoverage(
            f"rank {rank}: tensor {local!r}: its pieces of {names[one]!r} and {names[other]!r} lie "
            f"at the same place of it, {shown(boxes[one])} and {shown(boxes[other])}. Give each "
            "piece its own local_offset."
        )


# ---- one tensor ---------------------------------------------------------------------------------


def _check_agreement(name: str, pieces: Sequence[Held]) -> None:
    first = pieces[0]
    dtype, shape = first.dtype, first.piece.global_shape
    for one in pieces:
        if one.dtype == dtype and one.piece.global_shape == shape:
            continue
        if one.dtype != dtype:
            raise RanksDisagree(
                f"tensor {name!r}: rank {first.rank} holds it as {dtype}, rank {one.rank} as "
                f"{one.dtype}. Cast it to one dtype on every rank before publishing."
            )
        raise RanksDisagree(
            f"tensor {name!r}: rank {first.rank} says that the whole has the shape {list(shape)}, "
            f"rank {one.rank} says {list(one.piece.global_shape)}. Give the same model on every "
            "rank."
        )


def _prove_tensor(name: str, pieces: Sequence[Held]) -> None:
    # Empty shards are sound wherever they are said to lie.
    counted = [one for one in pieces if one.piece.replica == 0 and 0 not in one.piece.shape]
    _prove_boxes(name, counted, pieces[0].piece.global_shape)
    originals = {_range(one) for one in counted}
    for one in pieces:
        if one.piece.replica and prod(one.piece.shape) and _range(one) not in originals:
            raise IncompleteCoverage(
                f"tensor {name!r}: rank {one.rank} names {_where(one)} replica "
                f"{one.piece.replica}, but no rank holds exactly this range as replica 0. Cut "
                "replicas as the copy that counts is cut."
            )


def _range(one: Held) -> tuple[object, ...]:
    return one.piece.is_flat, one.piece.offset, one.piece.shape


def _where(one: Held) -> str:
    return _place(box_of(one.piece.offset, one.piece.shape), is_flat=one.piece.is_flat)


def _place(box: Box, *, is_flat: bool) -> str:
    return f"elements {shown(box)} in row-major order" if is_flat else shown(box)


def _prove_boxes(name: str, pieces: Sequence[Held], shape: tuple[int, ...]) -> None:
    # If all are ranges of elements, these are boxes of one dimension.
    is_flat = all(one.piece.is_flat for one in pieces)
    if is_flat and _follow_each_other(pieces, prod(shape)):
        return  # as nearly always: the rest finds out what is wrong
    boxes: list[Box] = []
    owners: list[Held] = []
    for one in pieces:
        piece = one.piece
        mine = [box_of(piece.offset, piece.shape)] if is_flat else piece_boxes(piece)
        boxes += mine
        owners += [one] * len(mine)
    if len(boxes) > _MAX_BOXES:
        raise IncompleteCoverage(
            f"tensor {name!r} is cut into {len(boxes)} boxes, expected at most {_MAX_BOXES}. Cut "
            "it along fewer dimensions."
        )
    overlap = find_overlap(boxes)
    if overlap is not None:
        first, second = overlap
        shared = intersect(boxes[first], boxes[second]) or boxes[first]
        both = sorted((owners[first], owners[second]), key=lambda held: held.rank)
        raise IncompleteCoverage(_doubled(name, _place(shared, is_flat=is_flat), *both))
    # Disjoint and inside: then nothing is missing if, and only if, the counts agree.
    if sum(map(volume, boxes)) != prod(shape):
        whole = box_of((0,), (prod(shape),)) if is_flat else box_of((0,) * len(shape), shape)
        gap = find_gap(whole, boxes) or whole
        raise IncompleteCoverage(_missing(name, _place(gap, is_flat=is_flat), shape))


def _follow_each_other(pieces: Sequence[Held], size: int) -> bool:
    end = 0
    for start, num in sorted((one.piece.offset[0], one.piece.shape[0]) for one in pieces):
        if start != end:
            return False
        end += num
    return end == size


def _missing(name: str, where: str, shape: tuple[int, ...]) -> str:
    return (
        f"tensor {name!r} of shape {list(shape)}: no rank holds {where}. Publish from every rank "
        "that has a part of it, and name the copy that counts replica 0."
    )


def _doubled(name: str, where: str, one: Held, other: Held) -> str:
    return (
        f"tensor {name!r}: {where} is held twice, by rank {one.rank} (in {one.local!r}) and rank "
        f"{other.rank} (in {other.local!r}), both as replica 0. Name one of the two replica 1, or "
        "give each rank its own range."
    )
