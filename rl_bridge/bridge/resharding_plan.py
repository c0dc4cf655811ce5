"""`ReshardPlan`: which bytes of which parts make what a consumer wants. Arithmetic, made once.

A pure function of two layouts: the group's and the consumer's. It holds no memory and no manifest,
so one plan serves every version of a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

from rl_bridge.bridge.resharding import WantedLayout, WantedTensor, WholeSlice
from rl_bridge.bridge.resharding_copies import BoxCopy, Copies, copies_for, merged
from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.manifest.collector import collector_paused
from rl_bridge.manifest.coverage import Held
from rl_bridge.manifest.digest import DIGEST_NBYTES, LEAF_NBYTES
from rl_bridge.manifest.dtypes import dtype_nbytes
from rl_bridge.manifest.group_boxes import box_of, find_gap, find_overlap, shown
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.group_leaves import leaf_index
from rl_bridge.manifest.table import TensorTable

__all__ = ["PartNeeds", "PlacedBox", "ReshardPlan", "make_plan"]

_Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A copy that lies in rows: first bytes in the two arenas, and the box."""

    part: int
    source: int
    target: int
    item: int
    box: BoxCopy


@dataclass(frozen=True, slots=True)
class PartNeeds:
    """What is read of one part, and verified before.

    Attributes:
        part: its rank.
        rows: stored tensors that are read.
        has_leaves: whether single leaves can be verified; else whole tensors are.
        starts: first byte, in the part's arena, of each range that is verified.
        nbytes: size of each.
        range_rows: stored tensor that each lies in.
        expected: first byte, in the part's leaf list, of each leaf of these ranges.

    """

    part: int
    rows: tuple[int, ...]
    has_leaves: bool
    starts: _Column
    nbytes: _Column
    range_rows: tuple[int, ...]
    expected: _Column


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """How a consumer's tensors are made of a group's parts.

    Attributes:
        group_digest: of the group's layout.
        wanted_digest: of the consumer's.
        table: the consumer's arena.
        parts: what is read of each part that is needed, by rank.
        run_parts: part of each contiguous copy; the three columns behind it are in bytes.
        run_sources: first byte in the part's arena.
        run_targets: first byte in the consumer's.
        run_nbytes: size.
        boxes: the other copies.
        wholes: row of the consumer's table -> whole tensor that it is, as it is.
        needed_nbytes: bytes that are copied.
        verified_nbytes: bytes that are read to verify these.

    """

    group_digest: str
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
        """Bytes verified for each byte needed: 1.0 where every cut is between leaves."""
        return self.verified_nbytes / self.needed_nbytes if self.needed_nbytes else 1.0


def make_plan(group: GroupLayout, wanted: WantedLayout) -> ReshardPlan:
    """Plan how `wanted` is made of `group`.

    Raises:
        IncompatibleUpdate: a tensor or a range that the group does not hold, a wanted tensor that
            its sources do not fill exactly once, or sources of several dtypes.

    """
    with collector_paused():
        return _Planner(group).plan(wanted)


@dataclass(slots=True)
class _Run:
    """The columns of the contiguous copies, while they are made."""

    parts: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)


class _Planner:
    def __init__(self, group: GroupLayout) -> None:
        self._group = group
        self._patterns: dict[object, int] = {}
        self._pattern_of: dict[str, int] = {}
        self._copies: dict[object, Copies] = {}
        self._sound: set[object] = set()
        self._leaves: list[dict[int, list[tuple[int, int]]]] = [{} for _ in group.parts]
        self._runs = _Run()
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
        parts = tuple(self._needs(part) for part, rows in enumerate(self._leaves) if rows)
        runs = self._runs
        return ReshardPlan(
            group_digest=group.digest,
            wanted_digest=wanted.digest,
            table=table,
            parts=parts,
            run_parts=np.array(runs.parts, np.int64),
            run_sources=np.array(runs.sources, np.int64),
            run_targets=np.array(runs.targets, np.int64),
            run_nbytes=np.array(runs.nbytes, np.int64),
            boxes=tuple(self._boxes),
            wholes=wholes,
            needed_nbytes=self._needed,
            verified_nbytes=sum(int(one.nbytes.sum()) for one in parts),
        )

    # ---- what is wanted -------------------------------------------------------------------------

    def _checked(self, name: str, wanted: WantedTensor) -> str:
        """The wanted tensor's dtype; its sources are there and fill it."""
        wholes = self._group.wholes
        missing = [source.name for source in wanted.sources if source.name not in wholes]
        if missing or not wanted.sources:
            msg = (
                f"tensor {name!r} is wanted, made of {[s.name for s in wanted.sources]}, and the "
                f"group does not hold {missing}. Publish all of them, or ask for what there is."
            )
            raise IncompatibleUpdate(msg)
        found = {wholes[source.name].dtype for source in wanted.sources}
        if len(found) > 1:
            each = {source.name: wholes[source.name].dtype for source in wanted.sources}
            msg = (
                f"tensor {name!r} is wanted, made of tensors of several dtypes: {each}. Publish "
                "them in one dtype."
            )
            raise IncompatibleUpdate(msg)
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
        tables, runs = group.tables, self._runs
        for place, ranges in copies.leaves:
            one = held[place]
            row = tables[one.rank].rows[one.local]
            self._leaves[one.rank].setdefault(row, []).extend(ranges)
        for run in copies.runs:
            one = held[run.held]
            table = tables[one.rank]
            runs.parts.append(one.rank)
            runs.sources.append(table.offsets[table.rows[one.local]] + run.source)
            runs.targets.append(target + run.target)
            runs.nbytes.append(run.nbytes)
        for box in copies.boxes:
            one = held[box.held]
            table = tables[one.rank]
            start = table.offsets[table.rows[one.local]]
            self._boxes.append(PlacedBox(one.rank, start, target, item, box))

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

    # ---- what is verified -----------------------------------------------------------------------

    def _needs(self, part: int) -> PartNeeds:
        table = self._group.tables[part]
        index = leaf_index(table)
        starts: list[int] = []
        nbytes: list[int] = []
        range_rows: list[int] = []
        expected: list[_Column] = []
        for row, ranges in sorted(self._leaves[part].items()):
            size, offset = table.nbytes[row], table.offsets[row]
            if index is None:
                starts.append(offset)
                nbytes.append(size)
                range_rows.append(row)
                continue
            for first, end in merged(ranges):
                starts.append(offset + first * LEAF_NBYTES)
                nbytes.append(min(size, end * LEAF_NBYTES) - first * LEAF_NBYTES)
                range_rows.append(row)
                expected.append(int(index.starts[row]) + np.arange(first, end) * DIGEST_NBYTES)
        return PartNeeds(
            part=part,
            rows=tuple(sorted(self._leaves[part])),
            has_leaves=index is not None,
            starts=np.array(starts, np.int64),
            nbytes=np.array(nbytes, np.int64),
            range_rows=tuple(range_rows),
            expected=np.concatenate(expected) if expected else np.empty(0, np.int64),
        )


def _check_inside(name: str, source: WholeSlice, whole: tuple[int, ...]) -> None:
    numbers = (*source.offset, *source.shape, *source.at)
    dims = {len(whole), len(source.offset), len(source.shape), len(source.at)}
    if (
        len(dims) != 1
        or any(type(number) is not int or number < 0 for number in numbers)
        or any(o + n > size for o, n, size in zip(source.offset, source.shape, whole, strict=True))
    ):
        msg = (
            f"tensor {name!r} is wanted, with {source} of a tensor of shape {list(whole)}, which "
            "has no such box. Give offsets and sizes of 0 or more, inside of the tensor."
        )
        raise IncompatibleUpdate(msg)


def _check_filled(name: str, wanted: WantedTensor) -> None:
    """Every element of a wanted tensor comes from one source."""
    whole = box_of((0,) * len(wanted.shape), wanted.shape)
    if any(len(source.at) != len(wanted.shape) for source in wanted.sources):
        msg = (
            f"tensor {name!r} of {len(wanted.shape)} dimensions is wanted, of sources that have "
            "another number of them. Give sources of as many dimensions."
        )
        raise IncompatibleUpdate(msg)
    boxes = [box_of(source.at, source.shape) for source in wanted.sources]
    beyond = [box for box in boxes if any(h > n for h, n in zip(box[1], wanted.shape, strict=True))]
    overlap = find_overlap(boxes)
    gap = find_gap(whole, boxes) if prod(wanted.shape) else None
    if beyond or overlap or gap:
        what = f"nothing fills {shown(gap)}" if gap else "a source reaches beyond it"
        if overlap:
            one, other = (wanted.sources[place].name for place in overlap)
            what = f"{one!r} and {other!r} fill the same range"
        msg = (
            f"tensor {name!r} of shape {list(wanted.shape)} is wanted, but {what}. Give sources "
            "that fill it, each element once."
        )
        raise IncompatibleUpdate(msg)
