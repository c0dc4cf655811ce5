"""Reading a part of a sealed arena: which bytes a reader needs, and what verifies them.

A digest covers a whole tensor, and a reader of some rows of it does not want to read the rest. The
arena therefore ends with its leaf list (`rl_bridge.manifest.table`). The reader compares the list
with the tensors' digests, and each leaf that it needs with the list: that proves these bytes as
well as reading all of them would. If it needs some columns of a tensor, it reads and verifies
column blocks instead, by the column list (`rl_bridge.manifest.columns`), if they are fewer bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rl_bridge.errors import ChecksumMismatch, StaleUpdate
from rl_bridge.manifest.columns import Blocks, bits_of
from rl_bridge.manifest.digest import DIGEST_NBYTES, LEAF_NBYTES, digest_rows, rows_differ
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.packing import checked_block, checked_columns
from rl_bridge.memory.passes import BytePlan, block_digests, blocks_at
from rl_bridge.memory.vm import tensor_at

_Column = npt.NDArray[np.int64]
# The cost of a piece of a row beside its bytes, in bytes: short ones are not worth reading alone.
_PIECE_NBYTES = 256

LeafRange = tuple[int, int, int, int]
"""First leaf of a tensor, and the one behind the last; then the first byte of each row that is
needed, and the one behind the last.
"""


class Scope(Enum):
    """What is read of an update where it is imported, if it is not a part."""

    ALL = auto()
    """All of it; of a version of several parts, what the bridge assembles."""
    LEASE = auto()
    """Nothing: the update is held, and others read and verify it."""


@dataclass(frozen=True, eq=False)
class PartNeeds:
    """The ranges of one part that are read, and those that are verified.

    Attributes:
        part: its rank.
        has_leaves: single leaves are verified, by the part's leaf list; else whole tensors are,
            because every needed tensor is whole or the part has no list.
        starts: first byte, in the part's arena, of each range that is verified.
        nbytes: size of each.
        rows: stored tensor that each lies in.
        expected: first byte, in the part's leaf list, of each leaf of these ranges.
        blocks: column blocks that are verified; other tensors than those of the ranges.
        read_starts: first byte, in the part's arena, of each range that is read: what is verified,
            and the lists of digests for it; ascending, no two of them meet.
        read_nbytes: size of each.

    """

    part: int
    has_leaves: bool
    starts: _Column
    nbytes: _Column
    rows: _Column
    expected: _Column
    blocks: Blocks
    read_starts: _Column
    read_nbytes: _Column

    @classmethod
    def of(
        cls,
        table: TensorTable,
        leaves: Sequence[tuple[int, int, int, int, int]],
        *,
        part: int = 0,
    ) -> "PartNeeds":
        """Plan for a reader of `leaves`: row of the table, and a `LeafRange` of it."""
        sizes = table.nbytes_column.astype(np.int64)
        offsets = table.offset_column.astype(np.int64)
        wanted = np.array(leaves, np.int64).reshape(len(leaves), 5)
        counts = table.leaf_counts
        blocks, pieces = _in_columns(table, wanted)
        by_leaves = ~np.isin(wanted[:, 0], blocks.tensors)
        rows, first, end = _joined(wanted[by_leaves, :3], counts)
        # The manifest has the digests of whole tensors.
        has_leaves = table.leaves and bool((end - first != counts[rows]).any())
        if not has_leaves:
            rows = np.unique(rows)
            first, end = np.zeros_like(rows), counts[rows]
        expected = np.empty(0, np.int64)
        if has_leaves:
            num = end - first
            within = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
            starts = table.leaf_starts[rows] + first * DIGEST_NBYTES
            expected = np.repeat(starts, num) + within * DIGEST_NBYTES
        begins = offsets[rows] + first * LEAF_NBYTES
        nbytes = np.minimum(sizes[rows], end * LEAF_NBYTES) - first * LEAF_NBYTES
        read = np.concatenate((np.stack((begins, nbytes), 1), pieces))
        if has_leaves:
            read = np.concatenate((read, [[table.leaves_offset, table.leaves_nbytes]]))
        if len(pieces):
            read = np.concatenate((read, [[table.columns_offset, table.columns_nbytes]]))
        read_starts, read_nbytes = _met(read[read[:, 1] > 0])
        return cls(
            part=part,
            has_leaves=has_leaves,
            starts=begins,
            nbytes=nbytes,
            rows=rows,
            expected=expected,
            blocks=blocks,
            read_starts=read_starts,
            read_nbytes=read_nbytes,
        )

    def __eq__(self, other: object) -> bool:
        """Whether the same is read and verified."""
        return isinstance(other, PartNeeds) and all(
            np.array_equal(getattr(self, one.name), getattr(other, one.name))
            for one in fields(self)
        )

    def __hash__(self) -> int:
        return hash(self.read_starts.tobytes())

    def of_rows(self, rows: Sequence[int]) -> "PartNeeds":
        """These, but only what lies in some stored tensors is verified."""
        is_in = np.isin(self.rows, rows)
        in_blocks = np.isin(self.blocks.tensors, rows)
        expected = self.expected
        if self.has_leaves:
            expected = expected[np.repeat(is_in, -(-self.nbytes // LEAF_NBYTES))]
        return replace(
            self,
            starts=self.starts[is_in],
            nbytes=self.nbytes[is_in],
            rows=self.rows[is_in],
            expected=expected,
            blocks=Blocks(*(column[in_blocks] for column in self.blocks)),
        )

    @property
    def verified_nbytes(self) -> int:
        """Bytes of tensors that are read and verified."""
        return int(self.nbytes.sum() + (self.blocks.rows * self.blocks.widths).sum())

    @property
    def end(self) -> int:
        """The first byte of the part's arena behind everything that is read."""
        return int(self.read_starts[-1] + self.read_nbytes[-1]) if len(self.read_starts) else 0

    @cached_property
    def _pass(self) -> BytePlan | None:
        return BytePlan(self.nbytes.astype(np.uint64)) if len(self.nbytes) else None

    def verify(self, part: WeightUpdateManifest, base: int, *, num_threads: int | None) -> None:
        """Verify what is needed of a part whose arena is at `base`, in memory of the CPU.

        Raises:
            ChecksumMismatch: it is not what was published, or a list of digests is not.
            StaleUpdate: a trainer wrote to what lay in its own tensors.
            MalformedManifest: a list of digests has another size.

        """
        if self._pass is not None:
            self._verify_ranges(self._pass, part, base, num_threads)
        if len(self.blocks.rows):
            self._verify_blocks(part, base, num_threads)

    def _verify_ranges(
        self, verify: BytePlan, part: WeightUpdateManifest, base: int, num_threads: int | None
    ) -> None:
        addresses = (self.starts + base).astype(np.uint64)
        if not self.has_leaves:
            found = digest_rows(verify.digest(addresses, num_threads=num_threads))
            differs = rows_differ(found, digest_rows(part.digests)[self.rows])
            if differs.any():
                raise self._damaged(part, int(np.flatnonzero(differs)[0]))
            return
        listed = leaf_list(part, base)
        leaves = verify.leaves(addresses, num_threads=num_threads)
        differs = _differ(leaves, listed, self.expected)
        if differs.any():
            ends = np.cumsum(verify.leaf_counts)
            place = int(np.searchsorted(ends, np.flatnonzero(differs)[0], side="right"))
            raise self._damaged(part, place)

    def _verify_blocks(
        self, part: WeightUpdateManifest, base: int, num_threads: int | None
    ) -> None:
        table, blocks = part.table, self.blocks
        memory = tensor_at(base + table.columns_offset, table.columns_nbytes)
        listed = checked_columns(part, memory.numpy().tobytes())
        given = blocks_at(blocks, table.offset_column + np.uint64(base))
        found = block_digests(given, num_threads=num_threads)
        differs = _differ(found, listed, blocks.expected)
        if differs.any():
            place = np.flatnonzero(differs)[0]
            row, start = int(blocks.tensors[place]), int(blocks.starts[place])
            reach = int((blocks.rows[place] - 1) * blocks.pitches[place] + blocks.widths[place])
            raise damaged(part, self.part, row, table.offsets[row] + start, reach)

    def _damaged(self, part: WeightUpdateManifest, place: int) -> ChecksumMismatch | StaleUpdate:
        start, nbytes = int(self.starts[place]), int(self.nbytes[place])
        return damaged(part, self.part, int(self.rows[place]), start, nbytes)


def leaf_list(part: WeightUpdateManifest, base: int) -> bytes:
    """The leaf list of a part whose arena is at `base`, compared with its digests.

    Raises:
        ChecksumMismatch: it does not make the digests of the tensors.
        MalformedManifest: it has another size.

    """
    memory = tensor_at(base + part.table.leaves_offset, part.table.leaves_nbytes)
    return checked_block(part, memory.numpy().tobytes())


def damaged(
    part: WeightUpdateManifest, rank: int, row: int, start: int, nbytes: int
) -> ChecksumMismatch | StaleUpdate:
    """The error for bytes of a part that are not what was published."""
    first = start - part.table.offsets[row]
    whose = f", part of rank {rank}" if part.weight_layout.world_size > 1 else ""
    name, version = repr(part.table.names[row]), f"version {part.weight_version}{whose}"
    what = f"bytes {first} to {first + nbytes}"
    if part.handle.get("in_place"):  # nothing but the digests shows such a write
        return StaleUpdate(
            f"{version} is gone: its trainer wrote to {what} of {name} without releasing it "
            "(in_place). Release before the weights change, and publish again."
        )
    return ChecksumMismatch(
        f"tensor checksum mismatch for {name} in {version}: {what} are not what was published. "
        "The update is corrupt or was overwritten: publish again."
    )


def leaves_of(
    dims: Sequence[tuple[int, int]], start: int, item: int, row: int
) -> Iterator[LeafRange]:
    """Leaves of a tensor that hold a box of (size, stride) at `start`; all in bytes.

    The strides fall from each dimension to the next. `row` is the size of the tensor's last
    dimension.
    """
    extent = item + sum((size - 1) * stride for size, stride in dims)
    # If neighbours are less than a leaf apart, every leaf in between is needed.
    if not dims or dims[0][1] <= LEAF_NBYTES:
        low = start % row
        high = low + item + sum((size - 1) * stride for size, stride in dims if stride % row)
        columns = (low, high) if high <= row else (0, row)
        yield start // LEAF_NBYTES, -(-(start + extent) // LEAF_NBYTES), *columns
        return
    (size, stride), *rest = dims
    for i in range(size):
        yield from leaves_of(rest, start + i * stride, item, row)


def _in_columns(table: TensorTable, wanted: _Column) -> tuple[Blocks, _Column]:
    """Column blocks to read in place of leaves, and the pieces of rows (start, size) they are in.

    Each tensor has either: column blocks where they are fewer bytes than its leaves. They are the
    strips that some range needs, in the bands from the first that one needs to the last.
    """
    cuts = table.column_blocks
    if not table.columns:
        wanted = wanted[:0]
    wanted = wanted[cuts.strips[wanted[:, 0]] > 0]
    which, first, end, low, high = wanted.T
    tensors, which = np.unique(which, return_inverse=True)
    pitch, count = cuts.row_nbytes[tensors], cuts.strips[tensors]
    width, band = pitch // count, cuts.band_rows[tensors] * pitch
    strips = np.zeros_like(tensors)
    np.bitwise_or.at(strips, which, (1 << -(-high // width[which])) - (1 << low // width[which]))
    begin, stop = np.full_like(tensors, table.arena_nbytes), np.zeros_like(tensors)
    np.minimum.at(begin, which, first * LEAF_NBYTES // band[which])
    np.maximum.at(stop, which, -(-end * LEAF_NBYTES // band[which]))
    stop = np.minimum(stop, -(-cuts.rows[tensors] // cuts.band_rows[tensors]))  # a short last leaf
    from_row = begin * cuts.band_rows[tensors]
    num_rows = np.minimum(stop * cuts.band_rows[tensors], cuts.rows[tensors]) - from_row
    # A run of strips is one piece of a row.
    firsts, lasts = bits_of(strips & ~(strips << 1)), bits_of(strips & ~(strips >> 1))
    nbytes = bits_of(strips).sum(1) * width
    rows, first, end = _joined(wanted[:, :3], table.leaf_counts)
    by_leaves = np.zeros_like(tensors)
    np.add.at(by_leaves, np.searchsorted(tensors, rows), (end - first) * LEAF_NBYTES)
    chosen = num_rows * (nbytes + firsts.sum(1) * _PIECE_NBYTES) < by_leaves
    blocks = cuts.blocks(tensors[chosen], (begin[chosen], stop[chosen]), strips[chosen])
    which, run = np.nonzero(firsts & chosen[:, None])
    _, last = np.nonzero(lasts & chosen[:, None])
    counts = num_rows[which]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = table.offset_column.astype(np.int64)[tensors] + from_row * pitch
    starts = np.repeat(starts[which] + run * width[which], counts)
    starts += within * np.repeat(pitch[which], counts)
    return blocks, np.stack((starts, np.repeat((last + 1 - run) * width[which], counts)), 1)


def _differ(found: npt.NDArray[np.uint8], listed: bytes, at: _Column) -> npt.NDArray[np.bool_]:
    """Which digests are not those at some places of a list."""
    expected = np.frombuffer(listed, np.uint8)[at[:, None] + np.arange(DIGEST_NBYTES)]
    return rows_differ(found, expected)


def _joined(ranges: _Column, counts: _Column) -> tuple[_Column, _Column, _Column]:
    """Ranges of leaves (row, first, end), in order, those of a row that meet joined into one."""
    if not len(ranges):
        return ranges[:, 0], ranges[:, 0], ranges[:, 0]
    # Number all leaves of a part in one sequence, with one unused number between two rows.
    bases = np.cumsum(counts + 1) - (counts + 1)
    rows, first, end = ranges.T
    line = bases[rows]
    order = np.argsort(line + first, kind="stable")
    low, high = (line + first)[order], np.maximum.accumulate((line + end)[order])
    begins = np.flatnonzero(np.concatenate(([True], low[1:] > high[:-1])))
    ends = high[np.concatenate((begins[1:], [len(low)])) - 1]
    rows = rows[order][begins]
    return rows, low[begins] - bases[rows], ends - bases[rows]


def _met(ranges: _Column) -> tuple[_Column, _Column]:
    """Ranges of bytes (start, size) in order, those that meet joined into one."""
    if not len(ranges):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    starts, sizes = ranges[np.argsort(ranges[:, 0], kind="stable")].T
    ends = np.maximum.accumulate(starts + sizes)
    begins = np.flatnonzero(np.concatenate(([True], starts[1:] > ends[:-1])))
    low = starts[begins]
    return low, ends[np.concatenate((begins[1:], [len(starts)])) - 1] - low
