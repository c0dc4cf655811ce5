"""`ReshardPlan`: which bytes of which parts make the tensors that a consumer wants.

A plan is a pure function of two layouts, the group's and the consumer's. It holds no memory and no
manifest, so one plan serves every version of a run.

`copies_for` goes from a wanted box and the pieces of a whole tensor to bytes: what to copy, and
which leaves of the digest cover it. Of 40,000 tensors few differ in shape and cuts, so the planner
keeps these results and uses them again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rl_bridge.assembly.wanted import WantedLayout, WantedTensor, WholeSlice
from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.manifest.coverage import (
    Box,
    Held,
    box_of,
    find_gap,
    find_overlap,
    intersect,
    piece_boxes,
    shown,
)
from rl_bridge.manifest.dtypes import dtype_nbytes
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.table import TensorTable, collector_paused, row_major_stride
from rl_bridge.memory.parts import LeafRange, PartNeeds, leaves_of

# The compiled pass copies rows of at least this size; numpy copies boxes of smaller rows.
_ROW_NBYTES = 32_768

_Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """A box to copy, or bytes that are contiguous in both places; all numbers count elements.

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

    @property
    def is_run(self) -> bool:
        """Whether it is contiguous in both places."""
        return self.source_strides == self.target_strides == (1,)


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies that fill one box of a wanted tensor.

    Attributes:
        boxes: what is copied.
        leaves: held piece -> ranges of leaves of the rank's tensor that cover the copied bytes.
        nbytes: bytes that are copied.

    """

    boxes: tuple[BoxCopy, ...]
    leaves: tuple[tuple[int, tuple[LeafRange, ...]], ...]
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
    boxes: list[BoxCopy] = []
    leaves: list[tuple[int, tuple[LeafRange, ...]]] = []
    nbytes = 0
    for place, held in enumerate(pieces):
        if held.piece.replica:
            continue
        touched: list[LeafRange] = []
        for box in piece_boxes(held.piece):
            shared = intersect(box, wanted)
            if shared is None:
                continue
            source, strides = _source_of(held, shared)
            low = [lo + s for lo, s in zip(shared[0], shift, strict=True)]
            target = sum(a * b for a, b in zip(low, target_strides, strict=True))
            dims = _collapsed(shared, strides, target_strides)
            nbytes += item * prod(size for size, _, _ in dims)
            is_run, rows, row = _rows(dims, item)
            if is_run:
                boxes += [
                    BoxCopy(place, a, b, (row,), (1,), (1,))
                    for a, b in _offsets(rows, source, target)
                ]
            else:
                sizes, a_strides, b_strides = zip(*dims, strict=True)
                boxes.append(BoxCopy(place, source, target, sizes, a_strides, b_strides))
            box_dims = [(n, s * item) for n, s, _ in dims]
            touched += leaves_of(box_dims, source * item, item, (1, *held.shape)[-1] * item)
        if touched:
            leaves.append((place, tuple(touched)))
    return Copies(tuple(boxes), tuple(leaves), nbytes)


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


class PlacedBox(NamedTuple):
    """A copy that lies in rows: first bytes in the two arenas, and the box."""

    part: int
    source: int
    target: int
    item: int
    box: BoxCopy


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """How a consumer's tensors are made of a group's parts.

    Attributes:
        wanted_digest: of the layout that is wanted.
        table: the consumer's arena.
        parts: what is read of each part that is needed, by rank.
        run_parts: part of each contiguous copy; the three columns behind it are in bytes.
        run_sources: first byte in the part's arena.
        run_targets: first byte in the consumer's.
        run_nbytes: size.
        boxes: the other copies.
        wholes: row of the consumer's table -> whole tensor that it is, unchanged.
        needed_nbytes: bytes that are copied.
        verified_nbytes: bytes that are read to verify them.

    """

    wanted_digest: str
    table: TensorTable
    parts: tuple[PartNeeds, ...]
    run_parts: _Column
    run_sources: _Column
    run_targets: _Column
    run_nbytes: _Column
    boxes: tuple[PlacedBox, ...]
    wholes: Mapping[int, str]
    needed_nbytes: int
    verified_nbytes: int

    @property
    def overfetch(self) -> float:
        """Bytes verified for each byte needed: 1.0 if every cut lies between leaves."""
        return self.verified_nbytes / self.needed_nbytes if self.needed_nbytes else 1.0


def make_plan(group: GroupLayout, wanted: WantedLayout) -> ReshardPlan:
    """Plan how `wanted` is made of `group`.

    Raises:
        IncompatibleUpdate: a tensor or a range that the group does not hold, a wanted tensor that
            its sources do not fill exactly once, or sources of several dtypes.

    """
    with collector_paused():
        return _Planner(group).plan(wanted)


class _Planner:
    def __init__(self, group: GroupLayout) -> None:
        self._group = group
        self._patterns: dict[object, int] = {}
        self._pattern_of: dict[str, int] = {}
        self._copies: dict[object, Copies] = {}
        self._sound: set[object] = set()
        self._leaves: list[list[tuple[int, int, int, int, int]]] = [[] for _ in group.parts]
        self._runs: list[tuple[int, int, int, int]] = []
        self._boxes: list[PlacedBox] = []
        self._needed = 0

    def plan(self, wanted: WantedLayout) -> ReshardPlan:
        group = self._group
        dtypes = {name: self._checked(name, one) for name, one in wanted.tensors.items()}
        table = TensorTable.pack(
            {name: (dtypes[name], one.shape) for name, one in wanted.tensors.items()}
        )
        wholes: dict[int, str] = {}
        for row, name in enumerate(table.names):
            one = wanted.tensors[name]
            for source in one.sources:
                self._add(one, source, table.offsets[row])
            if len(one.sources) == 1 and one.shape == group.wholes[one.sources[0].name].shape:
                wholes[row] = one.sources[0].name
        parts = tuple(
            PartNeeds.of(group.tables[part], leaves, part=part)
            for part, leaves in enumerate(self._leaves)
            if leaves
        )
        runs = np.array(self._runs, np.int64).reshape(-1, 4)
        return ReshardPlan(
            wanted_digest=wanted.digest,
            table=table,
            parts=parts,
            run_parts=np.ascontiguousarray(runs[:, 0]),
            run_sources=np.ascontiguousarray(runs[:, 1]),
            run_targets=np.ascontiguousarray(runs[:, 2]),
            run_nbytes=np.ascontiguousarray(runs[:, 3]),
            boxes=tuple(self._boxes),
            wholes=wholes,
            needed_nbytes=self._needed,
            verified_nbytes=sum(one.verified_nbytes for one in parts),
        )

    # ---- what is wanted -------------------------------------------------------------------------

    def _checked(self, name: str, wanted: WantedTensor) -> str:
        """The wanted tensor's dtype; its sources are there and fill it."""
        wholes = self._group.wholes
        missing = [source.name for source in wanted.sources if source.name not in wholes]
        if missing or not wanted.sources:
            raise IncompatibleUpdate(
                f"tensor {name!r} is wanted, made of {[s.name for s in wanted.sources]}, and the "
                f"group does not hold {missing}. Publish all of them, or ask for what there is."
            )
        found = {wholes[source.name].dtype for source in wanted.sources}
        if len(found) > 1:
            each = {source.name: wholes[source.name].dtype for source in wanted.sources}
            raise IncompatibleUpdate(
                f"tensor {name!r} is wanted, made of tensors of several dtypes: {each}. Publish "
                "them in one dtype."
            )
        key = (
            wanted.shape,
            *((s.offset, s.shape, s.at, wholes[s.name].shape) for s in wanted.sources),
        )
        if key not in self._sound:
            for source in wanted.sources:
                _check_inside(name, source, wholes[source.name].shape)
            _check_filled(name, wanted)
            self._sound.add(key)
        return found.pop()

    # ---- copies ---------------------------------------------------------------------------------

    def _add(self, wanted: WantedTensor, source: WholeSlice, target: int) -> None:
        group = self._group
        held = group.held[source.name]
        whole = group.wholes[source.name]
        item = dtype_nbytes(whole.dtype, tensor=source.name)
        key = (
            *(self._pattern(source.name, held), source.offset, source.shape, source.at),
            wanted.shape,
            item,
        )
        copies = self._copies.get(key)
        if copies is None:
            copies = self._copies[key] = copies_for(
                held,
                offset=source.offset,
                shape=source.shape,
                at=source.at,
                target_shape=wanted.shape,
                item=item,
            )
        self._needed += copies.nbytes
        tables = group.tables
        placed: list[tuple[int, int, int]] = []
        for one in held:
            table = tables[one.rank]
            row = table.rows[one.local]
            placed.append((one.rank, row, table.offsets[row]))
        for place, ranges in copies.leaves:
            rank, row, _ = placed[place]
            self._leaves[rank] += [(row, *leaf_range) for leaf_range in ranges]
        for box in copies.boxes:
            rank, _, offset = placed[box.held]
            if box.is_run:
                nbytes = box.shape[0] * item
                source_at, target_at = offset + box.source * item, target + box.target * item
                self._runs.append((rank, source_at, target_at, nbytes))
            else:
                self._boxes.append(PlacedBox(rank, offset, target, item, box))

    def _pattern(self, name: str, held: Sequence[Held]) -> int:
        """A number for how a tensor is cut: the same for all that are cut alike."""
        known = self._pattern_of.get(name)
        if known is None:
            key = tuple(
                (h.shape, *(p.global_shape, p.offset, p.shape), *(p.local_offset, p.is_flat), r)
                for h in held
                for p, r in ((h.piece, h.piece.replica),)
            )
            known = self._patterns.setdefault(key, len(self._patterns))
            self._pattern_of[name] = known
        return known


def _check_inside(name: str, source: WholeSlice, whole: tuple[int, ...]) -> None:
    numbers = (*source.offset, *source.shape, *source.at)
    dims = {len(whole), len(source.offset), len(source.shape), len(source.at)}
    if (
        len(dims) != 1
        or any(type(number) is not int or number < 0 for number in numbers)
        or any(o + n > size for o, n, size in zip(source.offset, source.shape, whole, strict=True))
    ):
        raise IncompatibleUpdate(
            f"tensor {name!r} is wanted, with {source} of a tensor of shape {list(whole)}, which "
            "has no such box. Give offsets and sizes of 0 or more, inside of the tensor."
        )


def _check_filled(name: str, wanted: WantedTensor) -> None:
    """Every element of a wanted tensor comes from one source."""
    whole = box_of((0,) * len(wanted.shape), wanted.shape)
    if any(len(source.at) != len(wanted.shape) for source in wanted.sources):
        raise IncompatibleUpdate(
            f"tensor {name!r} of {len(wanted.shape)} dimensions is wanted, of sources that have "
            "another number of them. Give sources of as many dimensions."
        )
    boxes = [box_of(source.at, source.shape) for source in wanted.sources]
    beyond = [box for box in boxes if any(h > n for h, n in zip(box[1], wanted.shape, strict=True))]
    overlap = find_overlap(boxes)
    gap = find_gap(whole, boxes) if prod(wanted.shape) else None
    if beyond or overlap or gap:
        what = f"nothing fills {shown(gap)}" if gap else "a source reaches beyond it"
        if overlap:
            one, other = (wanted.sources[place].name for place in overlap)
            what = f"{one!r} and {other!r} fill the same range"
        raise IncompatibleUpdate(
            f"tensor {name!r} of shape {list(wanted.shape)} is wanted, but {what}. Give sources "
            "that fill it, each element once."
        )
