"""Assembling a consumer's tensors out of a group's parts.

`Assembly` works on parts that are attached here: it copies the needed bytes, verifies the leaves
that cover them, and digests the result. The parts are leased meanwhile, so that no publisher writes
to them between the copy and the check.

`LandingPlan` and `ArenaLanding` do without the copy: a transport reads each range straight to its
place in the consumer's arena, which is digested while it arrives. This works if all that a consumer
needs lies in long ranges, as with ranks that hold rows of each tensor, and a consumer of whole
tensors. The result is compared with the digests that the group has for whole tensors; of tensors
for which it has none, each range is compared with the digest of its part.
"""

import ctypes
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.assembly.plan import ReshardPlan
from rl_bridge.errors import ChecksumMismatch, DigestMismatch, WeightBridgeUnavailableError
from rl_bridge.manifest.digest import DIGEST_NBYTES, LEAF_NBYTES, digest_rows, rows_differ
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.arrival_digest import BESIDE_NBYTES, ArrivalDigest, ArrivalPlan, Digester
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.parts import damaged
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.places import CPU_PLACE
from rl_bridge.memory.slots import Slot
from rl_bridge.memory.views import Attachment
from rl_bridge.transports.base import PartRequest
from rl_bridge.transports.shared_memory import SharedPublisher

_Column = npt.NDArray[np.int64]
_ITEMS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)} | {16: np.dtype("c16")}
# Average size from which on a range is read by itself; it is faster to read smaller neighbours
# together and to copy them.
_WORTH_NBYTES = LEAF_NBYTES
# Digested at a time.
_SLICE_NBYTES = 8 << 20


class Assembly:
    """A plan, and the passes that it takes: made once per plan."""

    def __init__(
        self, plan: ReshardPlan, layout: GroupLayout, *, num_threads: int | None = None
    ) -> None:
        """Prepare the passes of a plan for groups of that layout."""
        self.plan = plan
        self.known = _known_wholes(plan, layout)
        self._num_threads = num_threads
        self._copies = BytePlan(plan.run_nbytes.astype(np.uint64))
        # For each part, the bytes up to the end of the last range that is read.
        self._reach = {needs.part: needs.end for needs in plan.parts}
        self._digests = BytePlan(plan.table.nbytes_column)

    def run(
        self, group: GroupManifest, attachments: Mapping[int, Attachment], address: int
    ) -> bytes:
        """Assemble a version at `address`; returns 16 bytes per tensor of the plan's table.

        Args:
            group: the version.
            attachments: of the needed parts, by rank.
            address: of the consumer's own memory.

        Raises:
            ChecksumMismatch: a leaf, or an assembled tensor, is not what was published.
            WeightBridgeUnavailableError: a part does not lie in memory of the CPU.

        """
        bases = np.zeros(group.world_size, np.uint64)
        for rank, attachment in attachments.items():
            pin = attachment.tensors.pin
            if pin.place is not CPU_PLACE:
                raise WeightBridgeUnavailableError(
                    f"version {group.weight_version}: the part of rank {rank} lies on "
                    f"{pin.place.device}; groups are assembled on the CPU. Publish it over "
                    "shared-memory."
                )
            bases[rank] = pin.address
        self._copy(bases, address)
        # Behind the copy: bytes that are good now were good when they were copied.
        for needs in self.plan.parts:
            base = int(bases[needs.part])
            needs.verify(group.parts[needs.part], base, num_threads=self._num_threads)
        targets = self.plan.table.offset_column + np.uint64(address)
        digests = self._digests.digest(targets, num_threads=self._num_threads)
        self.compare(group, digests)
        return digests

    def _copy(self, bases: npt.NDArray[np.uint64], address: int) -> None:
        plan = self.plan
        if len(plan.run_nbytes):
            sources = bases[plan.run_parts] + plan.run_sources.astype(np.uint64)
            targets = plan.run_targets.astype(np.uint64) + np.uint64(address)
            self._copies.copy(sources, targets, num_threads=self._num_threads)
        if plan.boxes:
            self._copy_boxes(bases, address)

    def _copy_boxes(self, bases: npt.NDArray[np.uint64], address: int) -> None:
        """Copy what lies in rows; as integers, so that every bit stays as it is."""
        target = (ctypes.c_char * self.plan.table.arena_nbytes).from_address(address)
        sources = {
            part: (ctypes.c_char * self._reach[part]).from_address(int(bases[part]))
            for part in {placed.part for placed in self.plan.boxes}
        }
        for part, source, at, item, box in self.plan.boxes:
            kind = _ITEMS[item]
            # One call for each box, without temporary arrays: with tens of thousands of small
            # tensors this loop is the whole assembly.
            here = np.ndarray(
                box.shape,
                kind,
                target,  # type: ignore[arg-type]  # a buffer, as numpy sees it
                at + box.target * item,
                [stride * item for stride in box.target_strides],
            )
            there = np.ndarray(
                box.shape,
                kind,
                sources[part],  # type: ignore[arg-type]
                source + box.source * item,
                [stride * item for stride in box.source_strides],
            )
            np.copyto(here, there)

    def differing(self, group: GroupManifest, digests: bytes) -> _Column:
        """Rows of the plan's table whose digests are not those that the group has for them."""
        rows, places = self.known
        found, expected = digest_rows(digests)[rows], digest_rows(group.digests)[places]
        return rows[rows_differ(found, expected)]

    def compare(self, group: GroupManifest, digests: bytes) -> None:
        """Compare whole tensors with the digests that the group has for them."""
        differing = self.differing(group, digests)
        if len(differing):
            row = int(differing[0])
            name = self.plan.wholes[row]
            expected = digest_rows(group.digests)[group.layout.places[name]]
            raise ChecksumMismatch(
                f"tensor checksum mismatch for {name!r} in version {group.weight_version}: "
                f"the group has {expected.tobytes().hex()}, what was assembled has "
                f"{digest_rows(digests)[row].tobytes().hex()}. The placements are not those of the "
                "tensors, or memory is damaged: publish again."
            )


def require_sealed(
    group: GroupManifest, headers: Mapping[int, bytes | None], bound: Collection[str]
) -> None:
    """Compare a group's manifest with what each rank sealed beside the bytes of its part.

    Each rank sealed the digest of the group's header, so that any part that is read shows a changed
    version, range or header. A transport that sends bytes and digest together has sent the digest
    of the part's own header, before there was a group: then that one is compared.

    Args:
        group: the version.
        headers: what lay beside the bytes of parts, by rank.
        bound: names of the transports that keep the digest.

    """
    expected = group.header_digest
    for rank, header in headers.items():
        sealed = header or b""
        part = group.parts[rank]
        if not sealed and part.transport not in bound:
            continue
        if sealed == expected:
            continue  # the usual case: the part's own digest need not be computed
        if sealed == part.header_digest:
            continue
        raise DigestMismatch(
            f"version {group.weight_version}: the group's manifest was changed on its way, or is "
            f"of another release: its digest is {expected.hex()}, rank {rank} sealed "
            f"{sealed.hex() or 'none'}. Import the manifest as it was published."
        )


class AssemblyPlan(PackPlan):
    """One assembly, in the form in which a transport's publishing end takes what it carries."""

    def __init__(
        self, assembly: Assembly, group: GroupManifest, attachments: Mapping[int, Attachment]
    ) -> None:
        """Assemble `group` out of `attachments` when it is time."""
        self.table = assembly.plan.table
        self._place = CPU_PLACE
        self._assembly = assembly
        self._group = group
        self._attachments = attachments

    def pack(
        self, tensors: Mapping[str, torch.Tensor], address: int, *, num_threads: int | None = None
    ) -> bytes:
        """Assemble at `address`."""
        del tensors, num_threads  # it has both
        return self._assembly.run(self._group, self._attachments, address)


def _known_wholes(plan: ReshardPlan, layout: GroupLayout) -> tuple[_Column, _Column]:
    """Which assembled tensors can be compared with the group's digests.

    Returns:
        Rows of the consumer's table that are whole tensors of known digest, and their places there.

    """
    kinds = layout.digest_plan.kinds
    known = [(row, layout.places[name]) for row, name in plan.wholes.items()]
    pairs = np.array([(row, at) for row, at in known if kinds[at] != "cut"], np.int64)
    rows, places = pairs.reshape(-1, 2).T
    return rows, places


# ---- without a copy -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _PartRanges:
    """The ranges that are read of one part.

    Attributes:
        part: its rank.
        starts: first byte of each range in the part's arena, ascending.
        nbytes: size of each.
        targets: first byte of each in the consumer's arena.
        ends: first byte after each range, in the part's arena.
        left: by number of ranges that have arrived: the first byte of the consumer's arena that may
            be missing.

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
        """How much of the consumer's arena has arrived, as far as this part is concerned."""
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
        """Those that make these rows."""
        return self.where(np.isin(self.wanted, wanted))

    def check(self, group: GroupManifest, address: int, num_threads: int | None) -> None:
        """Compare each, which is a whole tensor of its part, with the part's digest."""
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
    """A plan's copies; rows that are contiguous at both ends are joined into one."""
    order = np.lexsort((plan.run_sources, plan.run_parts))
    parts, starts = plan.run_parts[order], plan.run_sources[order]
    targets, nbytes = plan.run_targets[order], plan.run_nbytes[order]
    # If several tensors begin at one byte, only the last of them is not empty.
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
    """The place of each range: made once per plan and layout of a group.

    Attributes:
        table: the consumer's arena.
        ranges: of each needed part.

    """

    def __init__(
        self,
        assembly: Assembly,
        ranges: Sequence[_PartRanges],
        pieces: _Pieces,
        unknown: _Column,
    ) -> None:
        self.table: TensorTable = assembly.plan.table
        self.ranges = tuple(ranges)
        self._assembly = assembly
        self._pieces = pieces
        self._always = pieces.of(unknown)
        self._digests = ArrivalPlan(self.table, _SLICE_NBYTES)

    @classmethod
    def make(cls, assembly: Assembly, layout: GroupLayout) -> Self | None:
        """Make the plan; None if it is impossible, or if copying is faster."""
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
                return None  # a range that is wanted twice must be copied
            ranges.append(one)
            rows, table = pieces.rows[mine], tables[needs.part]
            begins, sizes = table.offset_column[rows], table.nbytes_column[rows]
            is_whole[mine] = (begins == pieces.starts[mine]) & (sizes == pieces.nbytes[mine])
        unknown = np.setdiff1d(pieces.wanted, assembly.known[0])
        if not is_whole[np.isin(pieces.wanted, unknown)].all():
            return None  # there is no digest to compare with
        return cls(assembly, ranges, pieces.where(is_whole), unknown)

    def requests(self, group: GroupManifest) -> list[PartRequest]:
        """The ranges of each part, as the transport takes them."""
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
        """A digest of the arena at `address`, made while it arrives."""
        return self._digests.start(address)

    def verify(
        self, group: GroupManifest, digests: bytes, address: int, num_threads: int | None
    ) -> None:
        """Compare the arena at `address` with what was published.

        Raises:
            ChecksumMismatch: it differs.

        """
        self._always.check(group, address, num_threads)
        differing = self._assembly.differing(group, digests)
        if len(differing):
            self._pieces.of(differing).check(group, address, num_threads)  # names the part
            self._assembly.compare(group, digests)


class ArenaLanding:
    """One version that is read straight into its arena. See `rl_bridge.transports.base`."""

    def __init__(self, plan: LandingPlan, ring: SharedPublisher, num_threads: int | None) -> None:
        self._plan = plan
        self._ring = ring
        self._num_threads = num_threads
        self._slot: Slot | None = None
        self._digest: ArrivalDigest | None = None
        self._beside: Digester | None = None
        self._there: list[int] = []
        self._passed_on = 0

    def reserve(self) -> Slot:
        """Take a slot, and forget the attempt before."""
        self.stop()
        table = self._plan.table
        slot = self._ring.reserve(table)
        try:
            self._there = [0] * len(self._plan.ranges)
            self._passed_on = 0
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
        if least <= self._passed_on:
            return
        self._passed_on = least
        if self._beside is not None:
            self._beside.put(least)
        elif self._digest is not None:
            self._digest.advance(least)

    def abandon(self, slot: Slot) -> None:
        """Give a slot back."""
        self._ring.abandon(slot)

    def finish(self, group: GroupManifest, slot: Slot) -> bytes:
        """Verify the arena; returns 16 bytes per tensor of the plan's table.

        Raises:
            ChecksumMismatch: it is not what was published.

        """
        beside, digest = self._beside, self._digest
        self.stop()
        if beside is not None:
            beside.check()
        digests = None if digest is None else digest.digests()
        assert digests is not None, "the transport said that everything has arrived"
        self._plan.verify(group, digests, slot.address, self._num_threads)
        return digests

    def stop(self) -> None:
        """Wait for digests that are under way. Idempotent."""
        if self._beside is not None:
            self._beside.stop()
        self._beside = self._digest = None  # after the stop: its thread reads the slot
