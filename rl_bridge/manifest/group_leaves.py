"""Leaf lists: a part's leaf digests, which travel as one more tensor of it.

A tensor's digest is made of the digests of its leaves. Who needs a slice of a tensor checks the
leaf list against the tensor's digest, and then reads only the leaves that cover the slice. The list
of a whole part is one block: of each stored tensor, in layout order, its leaf digests and then its
length in 8 bytes (little endian), so that each tensor's digest is the digest of its stretch.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from rl_bridge.errors import MalformedManifest
from rl_bridge.manifest.digest import DIGEST_NBYTES, LEAF_NBYTES
from rl_bridge.manifest.table import TensorTable

__all__ = ["LEAVES", "LENGTH_NBYTES", "LeafIndex", "leaf_block_nbytes", "leaf_index"]

LEAVES = "rl_bridge.leaves"
"""Name of the tensor that holds the block; no tensor of a model may have it."""
LENGTH_NBYTES = 8


def _counts(nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return -(-nbytes // LEAF_NBYTES)


def leaf_block_nbytes(nbytes: Sequence[int]) -> int:
    """Size of the block for tensors of these sizes."""
    counts = _counts(np.array(nbytes, np.int64))
    return int(counts.sum()) * DIGEST_NBYTES + LENGTH_NBYTES * len(counts)


class LeafIndex:
    """Where each tensor's stretch lies in the block.

    Attributes:
        row: of the block itself, in the layout.
        starts: first byte of each stored tensor's stretch, int64, shape [tensors].
        counts: leaves of each stored tensor, int64, shape [tensors]; 0 for the block itself.
        nbytes: size of the block.

    """

    def __init__(self, table: TensorTable) -> None:
        """Index the block that `table` says it has.

        Raises:
            MalformedManifest: a tensor of that name that cannot be the block.

        """
        self.row = table.rows[LEAVES]
        sizes = table.nbytes_column.astype(np.int64)
        self.counts = _counts(sizes)
        self.counts[self.row] = 0
        stretches = self.counts * DIGEST_NBYTES + LENGTH_NBYTES
        stretches[self.row] = 0
        self.starts = np.cumsum(stretches) - stretches
        self.nbytes = int(stretches.sum())
        found = (table.dtypes[self.row], table.nbytes[self.row])
        if found != ("uint8", self.nbytes) or LEAVES in table.ties:
            msg = (
                f"the tensor {LEAVES!r} is {found[0]} of {found[1]} bytes, expected uint8 of "
                f"{self.nbytes}: the leaf list of the other tensors. Publish parts with "
                "GroupPublisher, and give no tensor of a model this name."
            )
            raise MalformedManifest(msg)

    def leaves(self, block: bytes | memoryview, row: int) -> bytes:
        """Leaf digests of one stored tensor."""
        start = int(self.starts[row])
        return bytes(block[start : start + int(self.counts[row]) * DIGEST_NBYTES])

    def digests(self, block: bytes | memoryview) -> bytes:
        """What the block makes the tensors' digests: 16 bytes each, zeros for the block itself."""
        view = memoryview(block)
        ends = self.starts + self.counts * DIGEST_NBYTES + LENGTH_NBYTES
        digest = xxhash.xxh3_128_digest
        found = [
            digest(view[start:end])
            for start, end in zip(self.starts.tolist(), ends.tolist(), strict=True)
        ]
        found[self.row] = bytes(DIGEST_NBYTES)
        return b"".join(found)


def leaf_index(table: TensorTable) -> LeafIndex | None:
    """The index of a layout's leaf list; None where it has none.

    Raises:
        MalformedManifest: a tensor of that name that cannot be the block.

    """
    return LeafIndex(table) if LEAVES in table.rows else None
