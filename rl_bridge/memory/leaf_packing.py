"""Packing with a leaf list: the pass that digests a part keeps the digests of its leaves.

They are computed anyway. Here they are put into the arena, as the tensor `LEAVES`, when the other
tensors are in: the bytes that they describe are the sealed ones.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.errors import ChecksumMismatch, MalformedManifest
from rl_bridge.manifest.digest import DIGEST_NBYTES, digest_bytes
from rl_bridge.manifest.group_leaves import (
    LEAVES,
    LENGTH_NBYTES,
    LeafIndex,
    leaf_block_nbytes,
    leaf_index,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.passes import Addresses, BytePlan, native_module
from rl_bridge.memory.places import CPU_PLACE, Place

__all__ = ["LeafPackPlan", "LeafPlan", "LeafSource", "checked_block", "pack_plan"]


class LeafPlan(BytePlan):
    """A pass that keeps the leaf digests of its last run."""

    def _note(self, table: npt.NDArray[np.uint8]) -> None:
        self._table = table

    @property
    def leaf_counts(self) -> npt.NDArray[np.int64]:
        """Leaves of each tensor."""
        return (self._start[1:] - self._start[:-1]).astype(np.int64)

    def take_block(self) -> npt.NDArray[np.uint8]:
        """The leaf list of the last run, as `rl_bridge.manifest.group_leaves` describes it."""
        table, self._table = self._table, np.empty(0, np.uint8)
        return table

    def combine(self, block: bytes, index: LeafIndex) -> bytes:
        """The digests that a leaf list makes; that of the list itself means nothing."""
        start = int(index.starts[index.row])
        own = self._table_nbytes - index.nbytes
        table = np.zeros(self._table_nbytes, np.uint8)
        table[:start] = np.frombuffer(block, np.uint8)[:start]
        table[start + own :] = np.frombuffer(block, np.uint8)[start:]
        return self._combine(table)

    def leaves(self, src: Addresses, *, num_threads: int | None = None) -> npt.NDArray[np.uint8]:
        """Digest the leaves of the bytes at `src`: uint8, shape [leaves, 16], tensor by tensor."""
        self.digest(src, num_threads=num_threads)
        block = self.take_block()
        starts = self._start[:-1].astype(np.int64) * DIGEST_NBYTES
        # Behind each tensor's leaves stands its length, which is no digest.
        ends = self._start[1:].astype(np.int64) * DIGEST_NBYTES + 8 * np.arange(len(starts))
        keep = np.ones(len(block), bool)
        keep[(ends[:, None] + np.arange(8)).ravel()] = False
        return block[keep].reshape(-1, DIGEST_NBYTES)


class LeafPackPlan(PackPlan):
    """A plan whose tensors include `LEAVES`: what that one holds is written here."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        trainable: frozenset[str] | None = None,
        *,
        place: Place = CPU_PLACE,
    ) -> None:
        """Lay out `tensors`, as `PackPlan` does.

        Raises:
            MalformedManifest: `LEAVES` has not the size of the leaf list: see `LeafSource`.

        """
        super().__init__(tensors, trainable, place=place)
        self._leaf_plan = LeafPlan(self.table.nbytes_column)
        self.byte_plan = self._leaf_plan
        self._index = LeafIndex(self.table)

    def pack(
        self, tensors: Mapping[str, torch.Tensor], address: int, *, num_threads: int | None = None
    ) -> bytes:
        """Copy and digest `tensors`; then write their leaf list, and digest that."""
        digests = super().pack(tensors, address, num_threads=num_threads)
        return self._with_leaves(digests, tensors, address)

    def digest_in_place(
        self, tensors: Mapping[str, torch.Tensor], *, num_threads: int | None = None
    ) -> bytes:
        """Digest `tensors` where they lie, then write their leaf list to `LEAVES`, and digest it.

        Raises:
            WeightBridgeUnavailableError: one of them is strided.

        """
        digests = super().digest_in_place(tensors, num_threads=num_threads)
        return self._with_leaves(digests, tensors, None)

    def _with_leaves(
        self, made: bytes, tensors: Mapping[str, torch.Tensor], address: int | None
    ) -> bytes:
        digests = bytearray(made)
        noted = self._leaf_plan.take_block()
        index = self._index
        start = int(index.starts[index.row])
        behind = start + len(noted) - index.nbytes  # the list's own stretch is no part of it
        block = np.concatenate((noted[:start], noted[behind:]))
        if index.nbytes:
            place, at = self._place, self.table.offsets[index.row]
            mine = tensors[LEAVES]  # also for who tells the other ranks
            target = mine if address is None else place.bytes_at(address + at, index.nbytes)
            target.copy_(torch.from_numpy(block))
            mine.copy_(target)
        at = index.row * DIGEST_NBYTES
        digests[at : at + DIGEST_NBYTES] = digest_bytes(block.data)
        return bytes(digests)


class LeafSource:
    """Adds a tensor for the leaf list to what a rank publishes; its memory stays the same."""

    def __init__(self) -> None:
        """Begin with no tensors known."""
        self._plan: PackPlan | None = None
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def block(self) -> bytes:
        """The leaf list of what was packed last."""
        return self._block.numpy().tobytes()

    def add(
        self, tensors: Mapping[str, torch.Tensor], trainable: frozenset[str] | None
    ) -> dict[str, torch.Tensor]:
        """`tensors` of the CPU and the leaf list, of the right size and without content yet."""
        nbytes = 0
        if tensors:
            if self._plan is None or not self._plan.fits(tensors, trainable):
                self._plan = PackPlan(tensors, trainable)
            nbytes = leaf_block_nbytes(self._plan.table.nbytes)
        if self._block.numel() != nbytes:
            self._block = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        return {**tensors, LEAVES: self._block}


def checked_block(part: WeightUpdateManifest, block: bytes) -> bytes:
    """The leaf list of `part`, if its tensors' digests are what it makes them.

    Raises:
        MalformedManifest: the part has no leaf list, or one of another size.
        ChecksumMismatch: a tensor's digest is not that of its leaves.

    """
    table = part.table
    index = leaf_index(table)
    if index is None or len(block) != index.nbytes:
        expected = "none" if index is None else f"{index.nbytes} bytes"
        msg = (
            f"update {part.update_id}: its leaf list has {len(block)} bytes, expected {expected}. "
            "Send the part as it was published."
        )
        raise MalformedManifest(msg)
    found = np.frombuffer(_combined(table, index, block), np.uint8).reshape(-1, DIGEST_NBYTES)
    given = np.frombuffer(part.digests, np.uint8).reshape(-1, DIGEST_NBYTES)
    differs = (found != given).any(axis=1)
    # The pass fills in the lengths that it knows; those in the list must be the same.
    ends = (index.starts + index.counts * DIGEST_NBYTES)[:, None] + np.arange(LENGTH_NBYTES)
    ends[index.row] = 0
    lengths = np.frombuffer(block or bytes(LENGTH_NBYTES), np.uint8)[ends]
    differs |= np.ascontiguousarray(lengths).view("<u8").ravel() != table.nbytes_column
    differs[index.row] = False
    if differs.any():
        name = table.names[int(np.flatnonzero(differs)[0])]
        msg = (
            f"tensor checksum mismatch for {name!r} in version {part.weight_version}: its leaf "
            "list does not make its digest. The update is corrupt: publish again."
        )
        raise ChecksumMismatch(msg)
    return block


def _combined(table: TensorTable, index: LeafIndex, block: bytes) -> bytes:
    native = native_module()
    if native is None:
        return index.digests(block)
    return LeafPlan(table.nbytes_column).combine(block, index)


def pack_plan(
    tensors: Mapping[str, torch.Tensor], trainable: frozenset[str] | None, *, place: Place
) -> PackPlan:
    """The plan for `tensors`: with a leaf list where they ask for one."""
    kind = LeafPackPlan if LEAVES in tensors else PackPlan
    return kind(tensors, trainable, place=place)
