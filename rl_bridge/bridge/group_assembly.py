"""Assembling: verify the leaves that are needed, copy the boxes, digest what came out.

The parts are leased meanwhile: a publisher writes to none of them between the two.
"""

import ctypes
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.bridge.resharding_plan import PartNeeds, ReshardPlan
from rl_bridge.errors import ChecksumMismatch, DigestMismatch, WeightBridgeUnavailableError
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.group_leaves import LEAVES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.leaf_packing import LeafPlan, checked_block
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.places import CPU_PLACE
from rl_bridge.memory.vm import tensor_at
from rl_bridge.transports.base import Attachment

__all__ = ["Assembly", "AssemblyPlan", "damaged", "known_wholes", "require_sealed"]

_Column = npt.NDArray[np.int64]
_ITEMS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)} | {16: np.dtype("c16")}


class Assembly:
    """A plan, and the passes that it takes: made once per plan."""

    def __init__(self, plan: ReshardPlan, *, num_threads: int | None = None) -> None:
        """Prepare the passes."""
        self.plan = plan
        self._num_threads = num_threads
        self._verifies = [
            LeafPlan(needs.nbytes.astype(np.uint64)) if len(needs.nbytes) else None
            for needs in plan.parts
        ]
        self._copies = BytePlan(plan.run_nbytes.astype(np.uint64))
        # Of each part, the bytes up to the end of the last tensor that is read.
        self._reach = {
            needs.part: int((needs.starts + needs.nbytes).max())
            for needs in plan.parts
            if len(needs.starts)
        }
        self._digests = BytePlan(plan.table.nbytes_column)
        self._wholes: tuple[_Column, _Column] | None = None

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
                msg = (
                    f"version {group.weight_version}: the part of rank {rank} lies on "
                    f"{pin.place.device}; groups are assembled on the CPU. Publish it over "
                    "shared-memory."
                )
                raise WeightBridgeUnavailableError(msg)
            bases[rank] = pin.address
        for needs, verify in zip(self.plan.parts, self._verifies, strict=True):
            if verify is not None:
                self._verify(group.parts[needs.part], needs, verify, int(bases[needs.part]))
        self._copy(bases, address)
        targets = self.plan.table.offset_column + np.uint64(address)
        digests = self._digests.digest(targets, num_threads=self._num_threads)
        self.compare(group, digests)
        return digests

    def _verify(
        self, part: WeightUpdateManifest, needs: PartNeeds, verify: LeafPlan, base: int
    ) -> None:
        addresses = (needs.starts + base).astype(np.uint64)
        if not needs.has_leaves:
            found = verify.digest(addresses, num_threads=self._num_threads)
            given = _rows_of(part.digests)[needs.rows]
            if found != given.tobytes():
                differs = (_rows_of(found) != given).any(axis=1)
                raise _damaged(part, needs, int(np.flatnonzero(differs)[0]))
            return
        table = part.table
        row = table.rows[LEAVES]
        memory = tensor_at(base + table.offsets[row], table.nbytes[row])
        block = checked_block(part, memory.numpy().tobytes())
        listed = np.frombuffer(block, np.uint8)
        expected = listed[needs.expected[:, None] + np.arange(DIGEST_NBYTES)]
        leaves = verify.leaves(addresses, num_threads=self._num_threads)
        differs = (leaves != expected).any(axis=1)
        if differs.any():
            ends = np.cumsum(verify.leaf_counts)
            place = int(np.searchsorted(ends, np.flatnonzero(differs)[0], side="right"))
            raise _damaged(part, needs, place)

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
            # One call each, on no copy of anything: with tens of thousands of small tensors this is
            # all that their assembly consists of.
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
        rows, places = self._known(group.layout)
        found, expected = _rows_of(digests)[rows], _rows_of(group.digests)[places]
        if found.tobytes() == expected.tobytes():  # as a rule, and told in less time
            return rows[:0]
        differing: _Column = rows[(found != expected).any(axis=1)]
        return differing

    def compare(self, group: GroupManifest, digests: bytes) -> None:
        """Hold whole tensors against the digests that the group has for them.

        Raises:
            ChecksumMismatch: one is another.

        """
        differing = self.differing(group, digests)
        if len(differing):
            row = int(differing[0])
            name = self.plan.wholes[row]
            expected = _rows_of(group.digests)[group.layout.places[name]]
            msg = (
                f"tensor checksum mismatch for {name!r} in version {group.weight_version}: "
                f"the group has {expected.tobytes().hex()}, what was assembled has "
                f"{_rows_of(digests)[row].tobytes().hex()}. The placements are not those of the "
                "tensors, or memory is damaged: publish again."
            )
            raise ChecksumMismatch(msg)

    def _known(self, layout: GroupLayout) -> tuple[_Column, _Column]:
        if self._wholes is None:
            self._wholes = known_wholes(self.plan, layout)
        return self._wholes


def require_sealed(
    group: GroupManifest, headers: Mapping[int, bytes | None], bound: Collection[str]
) -> None:
    """Compare a group's manifest with what each rank sealed beside the bytes of its part.

    Each sealed the digest of the whole: who changes a version, a range or a part's header is found
    by any part that is read. A transport that sends bytes and digest in one go has sent that of the
    part's own header before there was a group: then that one is compared.

    Args:
        group: the version.
        headers: what lay beside the bytes of parts, by rank.
        bound: names of the transports that keep the digest.

    Raises:
        DigestMismatch: another manifest was sealed, or none where one has to be.

    """
    expected = group.header_digest
    for rank, header in headers.items():
        sealed = header or b""
        part = group.parts[rank]
        if not sealed and part.transport not in bound:
            continue
        if sealed == expected:
            continue  # as a rule: then nobody needs the part's own
        if sealed == part.header_digest:
            continue
        msg = (
            f"version {group.weight_version}: the group's manifest was changed on its way, or is "
            f"of another release: its digest is {expected.hex()}, rank {rank} sealed "
            f"{sealed.hex() or 'none'}. Import the manifest as it was published."
        )
        raise DigestMismatch(msg)


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


def known_wholes(plan: ReshardPlan, layout: GroupLayout) -> tuple[_Column, _Column]:
    """Which assembled tensors can be held against the group's digests.

    Returns:
        Rows of the consumer's table that are whole tensors of known digest, and their places there.

    """
    kinds = layout.digest_plan.kinds
    known = [(row, layout.places[name]) for row, name in plan.wholes.items()]
    pairs = np.array([(row, at) for row, at in known if kinds[at] != "cut"], np.int64)
    rows, places = pairs.reshape(-1, 2).T
    return rows, places


def damaged(
    part: WeightUpdateManifest, rank: int, row: int, start: int, nbytes: int
) -> ChecksumMismatch:
    """What to raise where bytes of a part are not what was published.

    Args:
        part: the part.
        rank: whose it is.
        row: tensor that they are in.
        start: first of them in the part's arena.
        nbytes: how many.

    """
    first = start - part.table.offsets[row]
    return ChecksumMismatch(
        f"tensor checksum mismatch for {part.table.names[row]!r} in version "
        f"{part.weight_version}, part of rank {rank}: bytes {first} to {first + nbytes} are not "
        "what was published. The update is corrupt or was overwritten: publish again."
    )


def _damaged(part: WeightUpdateManifest, needs: PartNeeds, place: int) -> ChecksumMismatch:
    start, nbytes = int(needs.starts[place]), int(needs.nbytes[place])
    return damaged(part, needs.part, int(needs.rows[place]), start, nbytes)


def _rows_of(digests: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_NBYTES)
