"""Column blocks: what a reader of some columns of a tensor verifies.

A leaf is 128 KiB of consecutive bytes, so a reader of half of each row of a tensor would have to
read all of it. A tensor of two or more dimensions is therefore also cut the other way: the row (its
last dimension) into equal strips, and the rows into bands. A strip and a band intersect in a
block; its digest is XXH3-128 of its bytes, row after row. The digests of all blocks, tensor by
tensor, band by band, strip by strip, are the *column list*: it lies behind the leaf list of an
arena whose layout says so, and the header of the manifest has its digest.

Shape and dtype alone decide how a tensor is cut. One that is `TALL` is not: engines cut embeddings,
heads, and what widens a layer, by rows. Who needs columns of it reads leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rl_bridge.manifest.digest import DIGEST_NBYTES, LEAF_NBYTES
from rl_bridge.manifest.dtypes import DTYPE_NBYTES

BAND_NBYTES = 524_288
"""Most bytes of a band of two rows or more: so much of a tensor is in a core's cache at a time."""
STRIP_NBYTES = 256
"""Fewest bytes of a strip."""
TALL = 4
"""A tensor with more rows for each column than this is not cut."""
_STRIPS = (16, 8, 4, 2)

_Column = npt.NDArray[np.int64]


class Blocks(NamedTuple):
    """Some column blocks: one entry per block in each column.

    Attributes:
        tensors: stored tensor that it is in.
        starts: its first byte in the tensor.
        rows: how many it has.
        widths: bytes of one of its pieces: of a strip.
        pitches: how far a piece is behind the one before it: bytes of a row.
        expected: first byte of its digest in the column list.

    """

    tensors: _Column
    starts: _Column
    rows: _Column
    widths: _Column
    pitches: _Column
    expected: _Column


@dataclass(frozen=True, slots=True, eq=False)
class ColumnBlocks:
    """How the tensors of a layout are cut. Columns of int64, one entry per stored tensor.

    Attributes:
        strips: of a row; 0 where a tensor is not cut, and the other numbers mean nothing.
        rows: of the tensor.
        row_nbytes: size of a row.
        band_rows: rows of a band; the last band of a tensor may have fewer.
        starts: first byte of each tensor's stretch in the column list.
        nbytes: size of the column list.

    """

    strips: _Column
    rows: _Column
    row_nbytes: _Column
    band_rows: _Column
    starts: _Column
    nbytes: int

    @classmethod
    def of(
        cls, shapes: Sequence[Sequence[int]], dtypes: Sequence[str], nbytes: Sequence[int]
    ) -> "ColumnBlocks":
        """Cut tensors whose sizes fit 63 bits."""
        num = len(nbytes)
        items = np.fromiter(map(DTYPE_NBYTES.__getitem__, dtypes), np.int64, num)
        sizes = np.array(nbytes, np.int64).reshape(num)
        # One leaf is never worth a cut, and what is larger has no dimension of size 0.
        last = (
            shape[-1]
            if size > LEAF_NBYTES and len(shape) > 1 and shape[-2] <= TALL * shape[-1]
            else 0
            for shape, size in zip(shapes, nbytes, strict=True)
        )
        row = np.fromiter(last, np.int64, num) * items
        strips = np.zeros(num, np.int64)
        for count in _STRIPS:
            fits = (row % (count * items) == 0) & (row >= count * STRIP_NBYTES) & (row < sizes)
            strips[fits & (strips == 0)] = count
        row = np.where(strips, row, 1)
        rows = np.where(strips, sizes // row, 0)
        band_rows = np.maximum(BAND_NBYTES // row, 1)
        counts = -(-rows // band_rows) * strips * DIGEST_NBYTES
        starts = np.cumsum(counts) - counts
        return cls(strips, rows, row, band_rows, starts, int(counts.sum()))

    def blocks(self, tensors: _Column, bands: tuple[_Column, _Column], strips: _Column) -> Blocks:
        """Blocks of some tensors, in the order of the column list.

        Args:
            tensors: stored tensors that are cut, ascending.
            bands: of each, the first band and the last one + 1.
            strips: of each, a bit for each strip, the lowest for the first.

        """
        counts = bands[1] - bands[0]
        which = np.repeat(np.arange(len(tensors)), counts)
        band = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - bands[0], counts)
        chosen, strip = np.nonzero(bits_of(strips[which]))
        rows, band = tensors[which[chosen]], band[chosen]
        count, pitch, first = self.strips[rows], self.row_nbytes[rows], self.band_rows[rows] * band
        return Blocks(
            tensors=rows,
            starts=first * pitch + strip * (pitch // count),
            rows=np.minimum(self.band_rows[rows], self.rows[rows] - first),
            widths=pitch // count,
            pitches=pitch,
            expected=self.starts[rows] + (band * count + strip) * DIGEST_NBYTES,
        )

    def all_blocks(self) -> Blocks:
        """Every block, in the order of the column list."""
        tensors = np.flatnonzero(self.strips)
        ends = -(-self.rows[tensors] // self.band_rows[tensors])
        return self.blocks(tensors, (np.zeros_like(ends), ends), (1 << self.strips[tensors]) - 1)


def bits_of(strips: _Column) -> npt.NDArray[np.bool_]:
    """Strips of which each number has the bit: shape [numbers, 16]."""
    return strips[:, None] >> np.arange(_STRIPS[0]) & 1 > 0
