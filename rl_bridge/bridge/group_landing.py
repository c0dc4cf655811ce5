"""Assembling without a copy: each range is read to where it belongs, and digested meanwhile.

That goes where whatever a consumer needs lies in long ranges, and a transport can read into an
arena of this side's own: ranks that hold rows of each tensor, say, for a consumer that wants all of
them. What is assembled is held against the digests that the group has for whole tensors; of tensors
for which it has none, each range is held against its part's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt

from rl_bridge.bridge.group_assembly import Assembly, damaged, known_wholes
from rl_bridge.bridge.resharding_plan import ReshardPlan
from rl_bridge.manifest.digest import DIGEST_NBYTES, LEAF_NBYTES
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.arrival_digest import BESIDE_NBYTES, ArrivalDigest, ArrivalPlan, Digester
from rl_bridge.memory.packing import clear_padding
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.slots import Slot
from rl_bridge.transports.base import PartRequest
from rl_bridge.transports.shared_memory import SharedPublisher

__all__ = ["ArenaLanding", "LandingPlan"]

_Column = npt.NDArray[np.int64]
# Of this size on average, and a range is worth a descriptor of its own: below, to read neighbours
# in one go and to copy them is faster.
_WORTH_NBYTES = LEAF_NBYTES
# Digested at a time.
_SLICE_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _PartRanges:
    """What is read of one part.

    Attributes:
        part: its rank.
        starts: first byte of each range in the part's arena, ascending.
        nbytes: size of each.
        targets: first byte of each in the consumer's arena.
        ends: behind each range, in the part's arena.
        left: first byte of the consumer's arena that may be missing as long as that many ranges are
            there, from none to all.

    """

    part: int
    starts: _Column
    nbytes: _Column
    targets: _Column
    ends: _Column
    left: _Column

    @classmethod
    def of(
        cls, part: int, starts: _Column, nbytes: _Column, targets: _Column, arena_nbytes: int
    ) -> Self:
        """Order ranges; `arena_nbytes` is the size of the consumer's arena."""
        order = np.argsort(starts, kind="stable")
        starts, nbytes, targets = starts[order], nbytes[order], targets[order]
        behind = np.append(targets, arena_nbytes)
        left = np.minimum.accumulate(behind[::-1])[::-1]
        return cls(part, starts, nbytes, targets, starts + nbytes, left)

    def reached(self, mark: int) -> int:
        """How much of the consumer's arena is there, for all that this part has to do with it."""
        num = int(np.searchsorted(self.ends, mark, side="right"))
        if num == len(self.ends) or mark <= self.starts[num]:
            return int(self.left[num])
        return int(min(self.left[num + 1], self.targets[num] + mark - self.starts[num]))


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Ranges that lie one behind the other at their part and here, each in one tensor.

    Attributes:
        parts: rank that has each.
        rows: tensor of its part that each is in.
        starts: first byte in the part's arena.
        targets: first byte in the consumer's arena.
        nbytes: size.
        wanted: row of the consumer's table that each is in.

    """

    parts: _Column
    rows: _Column
    starts: _Column
    targets: _Column
    nbytes: _Column
    wanted: _Column

    def where(self, chosen: npt.NDArray[np.bool_]) -> "_Pieces":
        """Some of them."""
        return _Pieces(*(getattr(self, one.name)[chosen] for one in fields(self)))

    def of(self, wanted: _Column) -> "_Pieces":
        """Those that these rows are made of."""
        return self.where(np.isin(self.wanted, wanted))

    def check(self, group: GroupManifest, address: int, num_threads: int | None) -> None:
        """Hold each, a whole tensor of its part, against what that says.

        Raises:
            ChecksumMismatch: one is another.

        """
        if not len(self.rows):
            return
        passes = BytePlan(self.nbytes.astype(np.uint64))
        made = passes.digest((self.targets + address).astype(np.uint64), num_threads=num_threads)
        for place, (part, row) in enumerate(zip(self.parts, self.rows, strict=True)):
            at, of = place * DIGEST_NBYTES, int(row) * DIGEST_NBYTES
            manifest = group.parts[part]
            if made[at : at + DIGEST_NBYTES] != manifest.digests[of : of + DIGEST_NBYTES]:
                start, nbytes = manifest.table.offsets[row], int(self.nbytes[place])
                raise damaged(manifest, int(part), int(row), start, nbytes)


def _pieces_of(plan: ReshardPlan, layout: GroupLayout) -> _Pieces:
    """A plan's copies; those of one range of elements, which come row by row, in one."""
    order = np.lexsort((plan.run_sources, plan.run_parts))
    parts, starts = plan.run_parts[order], plan.run_sources[order]
    targets, nbytes = plan.run_targets[order], plan.run_nbytes[order]
    # Of tensors that begin at one byte the last is the one that is not empty.
    wanted = np.searchsorted(plan.table.offset_column.astype(np.int64), targets, side="right") - 1
    rows = np.zeros_like(starts)
    for needs in plan.parts:
        mine = parts == needs.part
        offsets = layout.tables[needs.part].offset_column.astype(np.int64)
        rows[mine] = np.searchsorted(offsets, starts[mine], side="right") - 1
    goes_on = (parts[1:] == parts[:-1]) & (rows[1:] == rows[:-1]) & (wanted[1:] == wanted[:-1])
    goes_on &= starts[1:] == starts[:-1] + nbytes[:-1]
    goes_on &= targets[1:] == targets[:-1] + nbytes[:-1]
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    sizes = np.add.reduceat(nbytes, first)
    return _Pieces(parts[first], rows[first], starts[first], targets[first], sizes, wanted[first])


class LandingPlan:
    """What goes where: made once per plan and layout of a group.

    Attributes:
        table: the consumer's arena.
        ranges: what is read of each part that is needed.

    """

    def __init__(
        self,
        assembly: Assembly,
        ranges: Sequence[_PartRanges],
        pieces: _Pieces,
        unknown: _Column,
    ) -> None:
        """See `make`."""
        self.table: TensorTable = assembly.plan.table
        self.ranges = tuple(ranges)
        self._assembly = assembly
        self._pieces = pieces
        self._always = pieces.of(unknown)
        self._digests = ArrivalPlan(self.table, _SLICE_NBYTES)

    @classmethod
    def make(cls, assembly: Assembly, layout: GroupLayout) -> Self | None:
        """Plan it; None where it cannot be done, or where copying is faster."""
        plan = assembly.plan
        if plan.boxes or not len(plan.run_nbytes):
            return None
        pieces = _pieces_of(plan, layout)
        if int(pieces.nbytes.sum()) < len(pieces.nbytes) * _WORTH_NBYTES:
            return None
        tables = layout.tables
        ranges = []
        is_whole = np.zeros(len(pieces.nbytes), bool)
        for needs in plan.parts:
            mine = pieces.parts == needs.part
            columns = (pieces.starts[mine], pieces.nbytes[mine], pieces.targets[mine])
            one = _PartRanges.of(needs.part, *columns, plan.table.arena_nbytes)
            if (one.ends[:-1] > one.starts[1:]).any():
                return None  # what is wanted twice is read once
            ranges.append(one)
            rows, table = pieces.rows[mine], tables[needs.part]
            begins, sizes = table.offset_column[rows], table.nbytes_column[rows]
            is_whole[mine] = (begins == pieces.starts[mine]) & (sizes == pieces.nbytes[mine])
        known, _ = known_wholes(plan, layout)
        unknown = np.setdiff1d(pieces.wanted, known)
        if not is_whole[np.isin(pieces.wanted, unknown)].all():
            return None  # nothing that it could be held against
        return cls(assembly, ranges, pieces.where(is_whole), unknown)

    def requests(self, group: GroupManifest) -> list[PartRequest]:
        """What is asked of each part."""
        return [
            PartRequest(
                manifest=group.parts[one.part],
                starts=one.starts,
                nbytes=one.nbytes,
                targets=one.targets,
            )
            for one in self.ranges
        ]

    def digest_at(self, address: int) -> ArrivalDigest:
        """What digests an arena while it arrives there."""
        return self._digests.start(address)

    def verify(
        self, group: GroupManifest, digests: bytes, address: int, num_threads: int | None
    ) -> None:
        """Hold what is at `address` against what was published.

        Raises:
            ChecksumMismatch: it is something else.

        """
        self._always.check(group, address, num_threads)
        differing = self._assembly.differing(group, digests)
        if len(differing):
            self._pieces.of(differing).check(group, address, num_threads)  # names the part
            self._assembly.compare(group, digests)


class ArenaLanding:
    """One version that is read to where it belongs. See `rl_bridge.transports._landing`."""

    def __init__(self, plan: LandingPlan, ring: SharedPublisher, num_threads: int | None) -> None:
        """Begin; no room is taken yet."""
        self._plan = plan
        self._ring = ring
        self._num_threads = num_threads
        self._slot: Slot | None = None
        self._digest: ArrivalDigest | None = None
        self._beside: Digester | None = None
        self._there: list[int] = []
        self._told = 0

    def reserve(self) -> Slot:
        """Take room; what came of the attempt before is forgotten."""
        self.stop()
        table = self._plan.table
        slot = self._ring.reserve(table, lambda address: clear_padding(table, address))
        try:
            self._there = [0] * len(self._plan.ranges)
            self._told = 0
            self._digest = self._plan.digest_at(slot.address)
            if table.arena_nbytes >= BESIDE_NBYTES:
                self._beside = Digester(self._digest)
                self._beside.start()
        except BaseException:
            self._ring.abandon(slot)
            raise
        return slot

    def arrived(self, place: int, mark: int) -> None:
        """Digest what is complete by now."""
        self._there[place] = self._plan.ranges[place].reached(mark)
        least = min(self._there)
        if least <= self._told:
            return
        self._told = least
        if self._beside is not None:
            self._beside.put(least)
        elif self._digest is not None:
            self._digest.advance(least)

    def abandon(self, slot: Slot) -> None:
        """Give room back."""
        self._ring.abandon(slot)

    def finish(self, group: GroupManifest, slot: Slot) -> bytes:
        """Verify what landed; returns 16 bytes per tensor of the plan's table.

        Raises:
            ChecksumMismatch: it is not what was published.

        """
        beside, digest = self._beside, self._digest
        self.stop()
        if beside is not None:
            beside.check()
        digests = None if digest is None else digest.digests()
        assert digests is not None, "a transport said that all is here"
        self._plan.verify(group, digests, slot.address, self._num_threads)
        return digests

    def stop(self) -> None:
        """Wait for digests that are under way. Idempotent."""
        if self._beside is not None:
            self._beside.stop()
        self._beside = self._digest = None  # behind it: it reads memory that may be given back
