"""How the digests of whole tensors follow from what the ranks digested: no byte is read again.

A `DigestPlan`, made once per layout, knows for each whole tensor which of three ways it takes:

``whole``   one rank holds the tensor as it is: its digest is the tensor's.
``leaves``  the ranks' ranges lie one behind the other and are cut where leaves are: their leaf
            digests, in order, make the digest that the tensor would have unsharded.
``cut``     anything else: XXH3-128 over the digest of the ranges' canonical JSON and the digests of
            the tensors that hold them, in order of the ranges. It says which content was published,
            but not what an unsharded tensor's digest is.

For ``leaves`` the leaf lists of the parts are needed (`rl_bridge.manifest.table`).
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from rl_bridge.errors import MalformedManifest
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.coverage import Held, WholeTensor
from rl_bridge.manifest.digest import (
    DIGEST,
    DIGEST_NBYTES,
    LEAF_NBYTES,
    digest_bytes,
    digest_rows,
    rows_differ,
    tensor_digest,
)
from rl_bridge.manifest.dtypes import dtype_nbytes
from rl_bridge.manifest.table import TensorTable

_Rows = npt.NDArray[np.uint8]
_EMPTY = digest_bytes(b"")


# ---- the plan -----------------------------------------------------------------------------------


class _Stretch(NamedTuple):
    """Leaves of one part's tensor: as many bytes of the leaf list."""

    part: int
    first: int
    end: int


class _Cut(NamedTuple):
    """Tensors that are cut into equally many ranges."""

    places: npt.NDArray[np.int64]
    heads: _Rows  # digests of the ranges, shape [tensors, 16]
    rows: npt.NDArray[np.int64]  # of the ranges' own digests, shape [tensors, ranges]

    @classmethod
    def of(cls, tensors: Sequence[tuple[int, bytes, Sequence[int]]]) -> "_Cut":
        places, heads, rows = zip(*tensors, strict=True)
        return cls(np.array(places), digest_rows(b"".join(heads)), np.array(rows))

    def digests(self, all_rows: _Rows) -> _Rows:
        """The whole tensors' digests."""
        texts = np.empty((len(self.rows), 1 + self.rows.shape[1]), DIGEST)
        texts[:, 0] = self.heads.view(DIGEST)[:, 0]
        texts[:, 1:] = all_rows.view(DIGEST)[:, 0][self.rows]  # whole digests: ten times as fast
        return digest_rows(b"".join(map(xxhash.xxh3_128_digest, texts.view(np.uint8))))


class Replica(NamedTuple):
    """Two tensors, of two ranks, that must be equal."""

    name: str
    part: int
    row: int
    other_part: int
    other_row: int


class DigestPlan:
    """Made once per layout.

    Attributes:
        kinds: per whole tensor, in order of the names: ``whole``, ``leaves`` or ``cut``.
        replicas: pairs of tensors that must be equal.

    """

    def __init__(
        self,
        wholes: Mapping[str, WholeTensor],
        held: Mapping[str, Sequence[Held]],
        tables: Sequence[TensorTable],
    ) -> None:
        """Look at every tensor of a layout whose coverage is proven."""
        self._tables = tables
        self._single: list[tuple[int, int]] = []
        self._leafy: list[tuple[int, int, list[_Stretch]]] = []
        # How many ranges -> the places of tensors of so many, and what their digests are made of.
        self._cut: dict[int, list[tuple[int, bytes, list[int]]]] = {}
        self._heads: dict[object, bytes] = {}
        counts = [len(table.names) for table in tables]
        self._bases = [sum(counts[:part]) for part in range(len(counts))]
        self._empty: list[int] = []
        kinds = []
        for place, (name, whole) in enumerate(wholes.items()):
            counted = [h for h in held[name] if not h.piece.replica and 0 not in h.piece.shape]
            kinds.append(self._add(place, whole, counted))
        self.kinds = tuple(kinds)
        self.replicas = _replicas(held, tables)
        self._singles = np.array(self._single, np.int64).reshape(-1, 2)
        self._cuts = [_Cut.of(cut) for cut in self._cut.values()]
        self._num = len(kinds)
        # The last version's digests, and what they make: who builds a manifest checks it as well.
        self._last: tuple[bytes, _Rows] = b"", np.empty((0, DIGEST_NBYTES), np.uint8)

    @property
    def is_unsharded(self) -> bool:
        """Whether every digest is the one that the tensor has unsharded, and so is the root."""
        return "cut" not in self.kinds

    def compute(
        self, digests: Sequence[bytes], blocks: Sequence[bytes | memoryview | None]
    ) -> bytes:
        """The digests of the whole tensors, 16 bytes each, in order of their names.

        Args:
            digests: of each part, in its layout's order.
            blocks: leaf list of each part; None if no digest is made of it.

        Raises:
            MalformedManifest: a list that is needed is missing.

        """
        found = self._without_leaves(digests)
        for place, nbytes, stretches in self._leafy:
            leaves = b"".join(_stretch(blocks[one.part], one) for one in stretches)
            found[place] = np.frombuffer(tensor_digest(leaves, nbytes), np.uint8)
        return found.tobytes()

    def differing(self, digests: Sequence[bytes], claimed: bytes) -> list[int]:
        """Which of the `claimed` digests the parts' own contradict, by place.

        Those of kind ``leaves`` are left out: they need the leaf lists.
        """
        found = self._without_leaves(digests)
        differs = rows_differ(found, digest_rows(claimed))
        differs[[place for place, _, _ in self._leafy]] = False
        return np.flatnonzero(differs).tolist()

    def unequal(self, digests: Sequence[bytes]) -> list[Replica]:
        """Replicas whose digests differ."""
        tables = [digest_rows(block) for block in digests]
        return [
            one
            for one in self.replicas
            if (tables[one.part][one.row] != tables[one.other_part][one.other_row]).any()
        ]

    def _without_leaves(self, digests: Sequence[bytes]) -> _Rows:
        given = b"".join(digests)
        if given == self._last[0]:
            return self._last[1].copy()
        all_rows = digest_rows(given)
        found = np.zeros((self._num, DIGEST_NBYTES), np.uint8)
        found[self._singles[:, 0]] = all_rows[self._singles[:, 1]]
        found[self._empty] = np.frombuffer(_EMPTY, np.uint8)
        for cut in self._cuts:
            found[cut.places] = cut.digests(all_rows)
        self._last = given, found
        return found.copy()

    def _add(self, place: int, whole: WholeTensor, counted: Sequence[Held]) -> str:
        rows = [self._tables[one.rank].rows[one.local] for one in counted]
        if not counted:
            self._empty.append(place)
            return "whole"
        if len(counted) == 1 and prod(counted[0].shape) == prod(whole.shape):
            self._single.append((place, self._bases[counted[0].rank] + rows[0]))
            return "whole"
        stretches = self._stretches(whole, counted, rows)
        if stretches is not None:
            self._leafy.append((place, whole.nbytes, stretches))
            return "leaves"
        pieces = sorted(zip(counted, rows, strict=True), key=lambda pair: pair[0].piece.offset)
        head = self._head([one for one, _ in pieces])
        held_by = [self._bases[one.rank] + row for one, row in pieces]
        self._cut.setdefault(len(pieces), []).append((place, head, held_by))
        return "cut"

    def _head(self, pieces: Sequence[Held]) -> bytes:
        """The digest of the ranges, kept: 40,000 tensors are cut in a few ways only."""
        ranges = tuple(
            (p.is_flat, p.offset, p.shape, p.local_offset, shape) for _, _, _, shape, p in pieces
        )
        head = self._heads.get(ranges)
        if head is None:
            text = canonical_json(ranges).encode("ascii")
            head = self._heads[ranges] = xxhash.xxh3_128_digest(text)
        return head

    def _stretches(
        self, whole: WholeTensor, counted: Sequence[Held], rows: Sequence[int]
    ) -> list[_Stretch] | None:
        """The leaf digests that make the whole's, in order; None if a cut is beside a leaf."""
        item = dtype_nbytes(whole.dtype, tensor=whole.name)
        found: list[tuple[int, _Stretch]] = []
        for one, row in zip(counted, rows, strict=True):
            table = self._tables[one.rank]
            ranges = _byte_ranges(one, item)
            if not table.leaves or ranges is None:
                return None
            start, mine, nbytes = ranges
            is_last = start + nbytes == whole.nbytes
            ends_there = mine + nbytes == prod(one.shape) * item
            if start % LEAF_NBYTES or mine % LEAF_NBYTES:
                return None
            if nbytes % LEAF_NBYTES and not (is_last and ends_there):
                return None
            first = int(table.leaf_starts[row]) + mine // LEAF_NBYTES * DIGEST_NBYTES
            end = first - (-nbytes // LEAF_NBYTES) * DIGEST_NBYTES
            found.append((start, _Stretch(one.rank, first, end)))
        return [stretch for _, stretch in sorted(found)]


def _stretch(block: bytes | memoryview | None, one: _Stretch) -> bytes:
    if block is None:
        msg = (
            f"the leaf list of rank {one.part} is missing, and digests of whole tensors are made "
            "of it. Send it with the part."
        )
        raise MalformedManifest(msg)
    return bytes(block[one.first : one.end])


def _byte_ranges(one: Held, item: int) -> tuple[int, int, int] | None:
    """First byte in the whole, first byte in the rank's tensor, size; None if it is in rows."""
    piece = one.piece
    if piece.is_flat:
        return piece.offset[0] * item, piece.local_offset[0] * item, piece.shape[0] * item
    inner = piece.shape[1:]
    if inner != piece.global_shape[1:] or inner != one.shape[1:]:
        return None
    step = prod(inner) * item
    return piece.offset[0] * step, piece.local_offset[0] * step, piece.shape[0] * step


def _replicas(
    held: Mapping[str, Sequence[Held]], tables: Sequence[TensorTable]
) -> tuple[Replica, ...]:
    """Pairs of tensors with the same pieces, one of which holds replicas.

    A replica inside a tensor whose other pieces differ has no digest to compare.
    """
    if not any(one.piece.replica for pieces in held.values() for one in pieces):
        return ()
    contents: dict[tuple[int, str], list[object]] = {}
    for pieces in held.values():
        for one in pieces:
            p = one.piece
            what = (p.name, p.is_flat, p.offset, p.shape, p.local_offset, one.shape)
            contents.setdefault((one.rank, one.local), []).append(what)
    found = []
    for name, pieces in held.items():
        originals = {
            (p.piece.is_flat, p.piece.offset, p.piece.shape): p
            for p in pieces
            if not p.piece.replica
        }
        for one in pieces:
            original = originals.get((one.piece.is_flat, one.piece.offset, one.piece.shape))
            if not one.piece.replica or original is None:
                continue
            if contents[one.rank, one.local] == contents[original.rank, original.local]:
                row = tables[original.rank].rows[original.local]
                other = tables[one.rank].rows[one.local]
                found.append(Replica(name, original.rank, row, one.rank, other))
    return tuple(found)
