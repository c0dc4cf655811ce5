"""From a box that is wanted and a piece that is held to bytes: what to copy, and which leaves.

All of it is arithmetic on one tensor's shape and cuts. Of 40,000 tensors few differ in these, so
what is found here is kept by the planner and used again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl_bridge.manifest.coverage import Held, piece_boxes
from rl_bridge.manifest.digest import LEAF_NBYTES
from rl_bridge.manifest.group_boxes import Box, box_of, intersect
from rl_bridge.manifest.table import row_major_stride

__all__ = ["BoxCopy", "Copies", "RunCopy", "copies_for"]

# From this size on, rows of a box are copied like tensors of their own, by the compiled pass.
_ROW_NBYTES = 32_768


@dataclass(frozen=True, slots=True)
class RunCopy:
    """Bytes that lie one behind the other in both places.

    Attributes:
        held: which piece, by its place among those of the tensor.
        source: first byte in the rank's tensor.
        target: first byte in the wanted tensor.
        nbytes: how many.

    """

    held: int
    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """A box that lies in rows; all numbers count elements.

    Attributes:
        held: which piece, by its place among those of the tensor.
        source: first element in the rank's tensor.
        target: first element in the wanted tensor.
        shape: of the box, with as few dimensions as will do.
        source_strides: of the rank's tensor.
        target_strides: of the wanted tensor.

    """

    held: int
    source: int
    target: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copies:
    """What fills one box of a wanted tensor.

    Attributes:
        runs: contiguous copies.
        boxes: the others.
        leaves: held piece -> ranges of leaves of the rank's tensor that cover what is copied of it.
        nbytes: bytes that are copied.

    """

    runs: tuple[RunCopy, ...]
    boxes: tuple[BoxCopy, ...]
    leaves: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    nbytes: int


def copies_for(
    pieces: Sequence[Held],
    *,
    offset: Sequence[int],
    shape: Sequence[int],
    at: Sequence[int],
    target_shape: Sequence[int],
    item: int,
) -> Copies:
    """What to copy for the box of the whole at `offset`, into a tensor of `target_shape` at `at`.

    Args:
        pieces: of the whole tensor; replicas are not read.
        offset: first index of the box.
        shape: of the box.
        at: first index in the wanted tensor.
        target_shape: of the wanted tensor.
        item: bytes of an element.

    """
    wanted = box_of(offset, shape)
    target_strides = row_major_stride(target_shape)
    shift = [a - o for a, o in zip(at, offset, strict=True)]
    runs: list[RunCopy] = []
    boxes: list[BoxCopy] = []
    leaves: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    nbytes = 0
    for place, held in enumerate(pieces):
        if held.piece.replica:
            continue
        touched: list[tuple[int, int]] = []
        for box in piece_boxes(held.piece):
            shared = intersect(box, wanted)
            if shared is None:
                continue
            source, strides = _source_of(held, shared)
            low = [lo + s for lo, s in zip(shared[0], shift, strict=True)]
            target = sum(a * b for a, b in zip(low, target_strides, strict=True))
            dims = _collapsed(shared, strides, target_strides)
            nbytes += item * _count(dims)
            is_run, rows, row = _rows(dims, item)
            if is_run:
                runs += [
                    RunCopy(place, a * item, b * item, row * item)
                    for a, b in _offsets(rows, source, target)
                ]
            else:
                sizes, a_strides, b_strides = zip(*dims, strict=True)
                boxes.append(BoxCopy(place, source, target, sizes, a_strides, b_strides))
            touched += _leaves([(n, s * item) for n, s, _ in dims], source * item, item)
        if touched:
            leaves.append((place, tuple(merged(touched))))
    return Copies(tuple(runs), tuple(boxes), tuple(leaves), nbytes)


def merged(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges in order, those that meet joined."""
    start, end = -1, -1
    for low, high in sorted(ranges):
        if low > end:
            if end > start:
                yield start, end
            start, end = low, high
        end = max(end, high)
    if end > start:
        yield start, end


_Dim = tuple[int, int, int]
"""Size, and stride in both places; in elements."""


def _source_of(held: Held, box: Box) -> tuple[int, tuple[int, ...]]:
    """First element of `box` in the rank's tensor, and the strides to go on from there."""
    piece = held.piece
    if piece.is_flat:
        strides = row_major_stride(piece.global_shape)
        first = sum(a * b for a, b in zip(box[0], strides, strict=True))
        return first - piece.offset[0] + piece.local_offset[0], strides
    strides = row_major_stride(held.shape)
    mine = zip(box[0], piece.offset, piece.local_offset, strict=True)
    low = [index - offset + local for index, offset, local in mine]
    return sum(a * b for a, b in zip(low, strides, strict=True)), strides


def _collapsed(box: Box, source: Sequence[int], target: Sequence[int]) -> list[_Dim]:
    """The box's dimensions, outermost first, joined where both places allow it."""
    found: list[_Dim] = []
    for lo, hi, a, b in zip(*box, source, target, strict=True):
        if hi - lo == 1:
            continue
        if found and found[-1][1] == (hi - lo) * a and found[-1][2] == (hi - lo) * b:
            found[-1] = (found[-1][0] * (hi - lo), a, b)
        else:
            found.append((hi - lo, a, b))
    return found


def _count(dims: Sequence[_Dim]) -> int:
    total = 1
    for size, _, _ in dims:
        total *= size
    return total


def _rows(dims: Sequence[_Dim], item: int) -> tuple[bool, list[_Dim], int]:
    """Whether to copy row by row; the dimensions that count rows; the elements of one."""
    if not dims:
        return True, [], 1
    if dims[-1][1:] != (1, 1):
        return False, list(dims), 1
    rows, row = list(dims[:-1]), dims[-1][0]
    return not rows or row * item >= _ROW_NBYTES, rows, row


def _offsets(dims: Sequence[_Dim], source: int, target: int) -> Iterator[tuple[int, int]]:
    if not dims:
        yield source, target
        return
    (size, a, b), *rest = dims
    for i in range(size):
        yield from _offsets(rest, source + i * a, target + i * b)


def _leaves(dims: Sequence[tuple[int, int]], start: int, item: int) -> Iterator[tuple[int, int]]:
    """Ranges of leaves that hold a box of (size, stride) at `start`; all in bytes."""
    extent = item + sum((size - 1) * stride for size, stride in dims)
    # Where neighbours are less than a leaf apart no leaf in between is left out.
    if not dims or dims[0][1] <= LEAF_NBYTES:
        yield start // LEAF_NBYTES, -(-(start + extent) // LEAF_NBYTES)
        return
    (size, stride), *rest = dims
    for i in range(size):
        yield from _leaves(rest, start + i * stride, item)
