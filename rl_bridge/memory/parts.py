"""Reading a part of a sealed arena: which bytes a reader needs, and what verifies them.

A digest covers a whole tensor, and a reader of some rows of it does not want to read the rest. The
arena therefore ends with its leaf list (`rl_bridge.manifest.table`). The reader compares the list
with the tensors' digests, and each leaf that it needs with the list: that proves these bytes as
well as reading all of them would.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rl_bridge.errors import ChecksumMismatch
from rl_bridge.manifest.digest import DIGEST_NBYTES, LEAF_NBYTES, digest_rows
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.packing import LeafPlan, checked_block
from rl_bridge.memory.vm import tensor_at

_Column = npt.NDArray[np.int64]


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
        read_starts: first byte, in the part's arena, of each range that is read: the verified
            ranges and the leaf list; ascending, no two of them meet.
        read_nbytes: size of each.

    """

    part: int
    has_leaves: bool
    starts: _Column
    nbytes: _Column
    rows: _Column
    expected: _Column
    read_starts: _Column
    read_nbytes: _Column

    @classmethod
    def of(
        cls, table: TensorTable, leaves: Sequence[tuple[int, int, int]], *, part: int = 0
    ) -> "PartNeeds":
        """Those of a reader who needs `leaves`: row of the table, first leaf, last one + 1."""
        sizes = table.nbytes_column.astype(np.int64)
        offsets = table.offset_column.astype(np.int64)
        wanted = np.array(leaves, np.int64).reshape(-1, 3)
        counts = table.leaf_counts
        rows, first, end = _joined(wanted, counts)
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
        read = np.stack((begins, nbytes), 1)
        if has_leaves:
            read = np.concatenate((read, [[table.leaves_offset, table.leaves_nbytes]]))
        read_starts, read_nbytes = _met(read[read[:, 1] > 0])
        return cls(
            part=part,
            has_leaves=has_leaves,
            starts=begins,
            nbytes=nbytes,
            rows=rows,
            expected=expected,
            read_starts=read_starts,
            read_nbytes=read_nbytes,
        )

    def of_rows(self, rows: Sequence[int]) -> "PartNeeds":
        """These, but only what lies in some stored tensors is verified."""
        is_in = np.isin(self.rows, rows)
        expected = self.expected
        if self.has_leaves:
            expected = expected[np.repeat(is_in, -(-self.nbytes // LEAF_NBYTES))]
        return replace(
            self,
            starts=self.starts[is_in],
            nbytes=self.nbytes[is_in],
            rows=self.rows[is_in],
            expected=expected,
        )

    @cached_property
    def _pass(self) -> LeafPlan | None:
        return LeafPlan(self.nbytes.astype(np.uint64)) if len(self.nbytes) else None

    def verify(self, part: WeightUpdateManifest, base: int, *, num_threads: int | None) -> None:
        """Verify the ranges of a part whose arena is at `base`, in memory of the CPU.

        Raises:
            ChecksumMismatch: they are not what was published, or the leaf list is not.
            MalformedManifest: the leaf list has another size.

        """
        verify = self._pass
        if verify is None:
            return
        addresses = (self.starts + base).astype(np.uint64)
        if not self.has_leaves:
            found = digest_rows(verify.digest(addresses, num_threads=num_threads))
            differs = (found != digest_rows(part.digests)[self.rows]).any(axis=1)
            if differs.any():
                raise self._damaged(part, int(np.flatnonzero(differs)[0]))
            return
        listed = np.frombuffer(leaf_list(part, base), np.uint8)
        expected = listed[self.expected[:, None] + np.arange(DIGEST_NBYTES)]
        leaves = verify.leaves(addresses, num_threads=num_threads)
        differs = (leaves != expected).any(axis=1)
        if differs.any():
            ends = np.cumsum(verify.leaf_counts)
            place = int(np.searchsorted(ends, np.flatnonzero(differs)[0], side="right"))
            raise self._damaged(part, place)

    def _damaged(self, part: WeightUpdateManifest, place: int) -> ChecksumMismatch:
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
) -> ChecksumMismatch:
    """The error for bytes of a part that are not what was published."""
    first = start - part.table.offsets[row]
    whose = f", part of rank {rank}" if part.weight_layout.world_size > 1 else ""
    return ChecksumMismatch(
        f"tensor checksum mismatch for {part.table.names[row]!r} in version "
        f"{part.weight_version}{whose}: bytes {first} to {first + nbytes} are not what was "
        "published. The update is corrupt or was overwritten: publish again."
    )


def leaves_of(dims: Sequence[tuple[int, int]], start: int, item: int) -> Iterator[tuple[int, int]]:
    """Ranges of leaves of a tensor that hold a box of (size, stride) at `start`; all in bytes.

    The strides fall from each dimension to the next.
    """
    extent = item + sum((size - 1) * stride for size, stride in dims)
    # If neighbours are less than a leaf apart, every leaf in between is needed.
    if not dims or dims[0][1] <= LEAF_NBYTES:
        yield start // LEAF_NBYTES, -(-(start + extent) // LEAF_NBYTES)
        return
    (size, stride), *rest = dims
    for i in range(size):
        yield from leaves_of(rest, start + i * stride, item)


def _joined(ranges: _Column, counts: _Column) -> tuple[_Column, _Column, _Column]:
    """Ranges of leaves (row, first, end), in order, those of a row that meet joined into one."""
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
