"""`GroupLayout`: what the ranks of an update group hold together, the same for a whole run.

For each rank it has the layout of the rank's part, and where the part's tensors lie in the whole
ones. A layout that exists is proven to cover every tensor (`rl_bridge.manifest.coverage`). It is
kept in columns, as `TensorTable` is.

How the digests of whole tensors follow from what the ranks digested, without a byte read again, is
a `DigestPlan`, made once per layout. It knows for each whole tensor which of three ways it takes:

``whole``   one rank holds the tensor as it is: its digest is the tensor's.
``leaves``  the ranks' ranges lie one behind the other and are cut where leaves are: their leaf
            digests, in order, make the digest that the tensor would have unsharded.
``cut``     anything else: XXH3-128 over the digest of the ranges' canonical JSON and the digests of
            the tensors that hold them, in order of the ranges. It says which content was published,
            but not what an unsharded tensor's digest is.

For ``leaves`` the leaf lists of the parts are needed (`rl_bridge.manifest.table`).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import StrictInt, StrictStr, model_validator

from rl_bridge.errors import (
    IncompleteCoverage,
    MalformedManifest,
    RangeBeyondSegment,
    ShapeMismatch,
)
from rl_bridge.manifest.canonical import RESEND, Frozen, JSONValue, canonical_json
from rl_bridge.manifest.coverage import Held, WholeTensor, held_pieces, prove_coverage
from rl_bridge.manifest.digest import (
    DIGEST,
    DIGEST_NBYTES,
    LEAF_NBYTES,
    RootPlan,
    digest_bytes,
    digest_rows,
    rows_differ,
    tensor_digest,
)
from rl_bridge.manifest.dtypes import dtype_nbytes
from rl_bridge.manifest.parallel import Piece, Placement
from rl_bridge.manifest.table import Layout, TensorTable, collector_paused

_Numbers = tuple[tuple[StrictInt, ...], ...]
_Rows = npt.NDArray[np.uint8]
_EMPTY = digest_bytes(b"")


# ---- digests of whole tensors -------------------------------------------------------------------


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
        raise MalformedManifest(
            f"the leaf list of rank {one.part} is missing, and digests of whole tensors are made "
            "of it. Send it with the part."
        )
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


# ---- the layout ---------------------------------------------------------------------------------


class PartLayout(Frozen):
    """One rank's part: its tensors, and the pieces in columns, one entry per piece.

    Attributes:
        table: layout of the part.
        rows: stored tensor that the piece lies in.
        names: whole tensor that it is of, as a place in the group's names.
        offsets: as in `Piece`; so are the rest.
        shapes: see there.
        local_offsets: see there.
        flat: one character per piece, 1 for ranges of elements.
        replicas: see there.

    """

    flat: StrictStr
    local_offsets: _Numbers
    names: tuple[StrictInt, ...]
    offsets: _Numbers
    replicas: tuple[StrictInt, ...]
    rows: tuple[StrictInt, ...]
    shapes: _Numbers
    table: TensorTable

    @model_validator(mode="after")
    def _check(self) -> Self:
        columns = (self.flat, self.local_offsets, self.names, self.offsets)
        lengths = {*map(len, (*columns, self.replicas, self.rows, self.shapes))}
        if len(lengths) != 1 or set(self.flat) - {"0", "1"}:
            raise MalformedManifest(
                f"the columns of a part's pieces have the lengths {sorted(lengths)}, and flags "
                f"{self.flat[:16]!r}: expected one length, and 0 or 1 for each piece. {RESEND}"
            )
        num = len(self.table.names)
        if self.rows and not 0 <= min(self.rows) <= max(self.rows) < num:
            raise RangeBeyondSegment(
                f"a piece lies in a tensor that its part does not have, of {num}. {RESEND}"
            )
        return self

    def document(self) -> dict[str, JSONValue]:
        """Plain JSON form."""
        names = type(self).model_fields
        return {name: getattr(self, name) for name in names if name != "table"} | {
            "table": self.table.document()
        }


class GroupLayout(Layout):
    """All parts, by rank, and the whole tensors that they make.

    Valid from birth: every element of every tensor is in exactly one piece that counts.

    Raises:
        WeightManifestValidationError: one subclass for each way to break that.

    """

    KIND: ClassVar[str] = "group's layout"

    names: tuple[StrictStr, ...]
    parts: tuple[PartLayout, ...]
    shapes: _Numbers

    @classmethod
    def build(
        cls, tables: Sequence[TensorTable], placements: Sequence[Mapping[str, Placement]]
    ) -> Self:
        """Join what each rank published with what it says about it; both are by rank.

        Raises:
            IncompleteCoverage: a tensor without a placement, or the ranges do not cover.
            ShapeMismatch: a placement is not of the tensor that was published.
            RanksDisagree: on a tensor's dtype or shape.

        """
        pieces = [p for rank in placements for one in rank.values() for p in one.pieces]
        shapes = {piece.name: piece.global_shape for piece in pieces}
        names = tuple(sorted(shapes))
        places = {name: place for place, name in enumerate(names)}
        parts = [
            _part(rank, table, placed, places)
            for rank, (table, placed) in enumerate(zip(tables, placements, strict=True))
        ]
        if any(piece.global_shape != shapes[piece.name] for piece in pieces):
            prove_coverage(held_pieces(placements))  # names the ranks that disagree
        return cls(names=names, parts=tuple(parts), shapes=tuple(shapes[name] for name in names))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.parts or len(self.names) != len(self.shapes):
            raise MalformedManifest(
                f"the group has {len(self.parts)} parts, {len(self.names)} names and "
                f"{len(self.shapes)} shapes: expected a part of each rank, and as many names as "
                f"shapes. {RESEND}"
            )
        if list(self.names) != sorted(set(self.names)) or not self.names:
            raise MalformedManifest(
                f"the group's tensor names are not sorted, or there are none. {RESEND}"
            )
        num = len(self.names)
        for rank, part in enumerate(self.parts):
            if part.names and not 0 <= min(part.names) <= max(part.names) < num:
                raise RangeBeyondSegment(
                    f"rank {rank} has a piece of a tensor that the group does not have. {RESEND}"
                )
        if len(self.wholes) != num:
            lost = sorted(set(self.names) - self.wholes.keys())
            raise IncompleteCoverage(f"no rank holds anything of tensor {lost[0]!r}. {RESEND}")
        return self

    @cached_property
    def held(self) -> Mapping[str, list[Held]]:
        """Whole tensor's name -> its pieces, by rank; `Held.local` is the stored tensor's name."""
        with collector_paused():
            placements = [_placements(self, part) for part in self.parts]
            return MappingProxyType(held_pieces(placements, allow_ties=True))

    @cached_property
    def wholes(self) -> Mapping[str, WholeTensor]:
        """The whole tensors, by name.

        Raises:
            WeightManifestValidationError: the pieces do not cover them.

        """
        return MappingProxyType(prove_coverage(self.held))

    @cached_property
    def table(self) -> TensorTable:
        """The whole tensors, as one publisher would lay them out."""
        wholes = self.wholes
        return TensorTable.pack({name: (wholes[name].dtype, wholes[name].shape) for name in wholes})

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Place of each name."""
        return MappingProxyType({name: place for place, name in enumerate(self.names)})

    @property
    def world_size(self) -> int:
        """How many ranks publish."""
        return len(self.parts)

    @cached_property
    def tables(self) -> tuple[TensorTable, ...]:
        """Layout of each part."""
        return tuple(part.table for part in self.parts)

    @cached_property
    def trainable(self) -> npt.NDArray[np.bool_]:
        """Per whole tensor: some rank declared a part of it trainable, and it is not empty."""
        flags = np.zeros(len(self.names), bool)
        for part in self.parts:
            declared = part.table.trainable
            if declared is not None:
                rows = np.frombuffer(declared.encode("ascii"), np.uint8) == ord("1")
                flags[np.array(part.names, np.int64)[rows[np.array(part.rows, np.int64)]]] = True
        flags[[0 in shape for shape in self.shapes]] = False
        return flags

    @cached_property
    def digest_plan(self) -> DigestPlan:
        """How the digests of whole tensors follow from those of the parts."""
        return DigestPlan(self.wholes, self.held, self.tables)

    @cached_property
    def root_plan(self) -> RootPlan:
        """The prepared canonical lines of the whole tensors."""
        return self.table.root_plan

    def document(self) -> dict[str, JSONValue]:
        """Plain JSON form; `text` is its canonical text."""
        return {
            "names": self.names,
            "parts": [part.document() for part in self.parts],
            "shapes": self.shapes,
        }


def require_placed(
    rank: int,
    held: Mapping[str, tuple[str, tuple[int, ...]]],
    placements: Mapping[str, Placement],
) -> None:
    """Compare a rank's placements with the dtypes and shapes of what it holds, by name."""
    strangers = sorted(held.keys() ^ placements.keys())
    if strangers:
        lacks = "no placement" if strangers[0] in held else "a placement and no content"
        raise IncompleteCoverage(
            f"rank {rank}: tensor {strangers[0]!r} has {lacks} ({len(strangers)} such tensors). "
            "Give one placement for each tensor that the rank publishes."
        )
    for name, (dtype, shape) in held.items():
        placement = placements[name]
        if (placement.dtype, tuple(placement.shape)) != (dtype, shape):
            raise ShapeMismatch(
                f"rank {rank}: tensor {name!r} is {dtype}{list(shape)}, its placement says "
                f"{placement.dtype}{list(placement.shape)}. Take both from the same tensor."
            )


def _part(
    rank: int, table: TensorTable, placements: Mapping[str, Placement], places: Mapping[str, int]
) -> PartLayout:
    held = {name: (table.dtypes[row], table.shapes[row]) for name, row in table.rows.items()}
    require_placed(rank, held, placements)
    rows: list[int] = []
    pieces: list[Piece] = []
    for name in sorted(placements):
        rows += [table.rows[name]] * len(placements[name].pieces)
        pieces += placements[name].pieces
    return PartLayout(
        flat="".join("1" if piece.is_flat else "0" for piece in pieces),
        local_offsets=tuple(tuple(piece.local_offset) for piece in pieces),
        names=tuple(places[piece.name] for piece in pieces),
        offsets=tuple(tuple(piece.offset) for piece in pieces),
        replicas=tuple(piece.replica for piece in pieces),
        rows=tuple(rows),
        shapes=tuple(tuple(piece.shape) for piece in pieces),
        table=table,
    )


def _placements(layout: GroupLayout, part: PartLayout) -> dict[str, Placement]:
    """The columns as placements, by stored tensor: tied names are pieces of the same one."""
    table = part.table
    found: dict[int, list[Piece]] = {}
    columns = zip(
        *(part.rows, part.names, part.offsets, part.shapes),
        *(part.local_offsets, part.flat, part.replicas),
        strict=True,
    )
    for row, place, offset, shape, local_offset, flat, replica in columns:
        piece = Piece(
            name=layout.names[place],
            global_shape=layout.shapes[place],
            offset=offset,
            shape=shape,
            local_offset=local_offset,
            is_flat=flat == "1",
            replica=replica,
        )
        found.setdefault(row, []).append(piece)
    return {
        table.names[row]: Placement(
            dtype=table.dtypes[row], shape=table.shapes[row], pieces=tuple(pieces)
        )
        for row, pieces in found.items()
    }
