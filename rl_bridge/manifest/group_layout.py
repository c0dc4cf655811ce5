"""`GroupLayout`: what the ranks of an update group hold together, the same for a whole run.

For each rank it has the layout of the rank's part, and where the part's tensors lie in the whole
ones. A layout that exists is proven to cover every tensor (`rl_bridge.manifest.coverage`). It is
kept in columns, as `TensorTable` is.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import StrictInt, StrictStr, model_validator

from rl_bridge.errors import (
    IncompleteCoverage,
    MalformedManifest,
    RangeBeyondSegment,
    ShapeMismatch,
)
from rl_bridge.manifest.canonical import RESEND, Frozen, JSONValue
from rl_bridge.manifest.coverage import Held, WholeTensor, held_pieces, prove_coverage
from rl_bridge.manifest.digest import RootPlan
from rl_bridge.manifest.group_digests import DigestPlan
from rl_bridge.manifest.parallel import Piece, Placement
from rl_bridge.manifest.table import Layout, TensorTable, collector_paused

_Numbers = tuple[tuple[StrictInt, ...], ...]


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
            msg = (
                f"the columns of a part's pieces have the lengths {sorted(lengths)}, and flags "
                f"{self.flat[:16]!r}: expected one length, and 0 or 1 for each piece. {RESEND}"
            )
            raise MalformedManifest(msg)
        num = len(self.table.names)
        if self.rows and not 0 <= min(self.rows) <= max(self.rows) < num:
            msg = f"a piece lies in a tensor that its part does not have, of {num}. {RESEND}"
            raise RangeBeyondSegment(msg)
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
            msg = (
                f"the group has {len(self.parts)} parts, {len(self.names)} names and "
                f"{len(self.shapes)} shapes: expected a part of each rank, and as many names as "
                f"shapes. {RESEND}"
            )
            raise MalformedManifest(msg)
        if list(self.names) != sorted(set(self.names)) or not self.names:
            msg = f"the group's tensor names are not sorted, or there are none. {RESEND}"
            raise MalformedManifest(msg)
        num = len(self.names)
        for rank, part in enumerate(self.parts):
            if part.names and not 0 <= min(part.names) <= max(part.names) < num:
                msg = f"rank {rank} has a piece of a tensor that the group does not have. {RESEND}"
                raise RangeBeyondSegment(msg)
        if len(self.wholes) != num:
            lost = sorted(set(self.names) - self.wholes.keys())
            msg = f"no rank holds anything of tensor {lost[0]!r}. {RESEND}"
            raise IncompleteCoverage(msg)
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


def _part(
    rank: int, table: TensorTable, placements: Mapping[str, Placement], places: Mapping[str, int]
) -> PartLayout:
    strangers = sorted(table.rows.keys() ^ placements.keys())
    if strangers:
        name = strangers[0]
        lacks = "no placement" if name in table.rows else "a placement and was not published"
        msg = (
            f"rank {rank}: tensor {name!r} has {lacks}. Give one placement for each tensor that "
            "the rank publishes."
        )
        raise IncompleteCoverage(msg)
    rows: list[int] = []
    pieces: list[Piece] = []
    for name in sorted(placements):
        placement = placements[name]
        row = table.rows[name]
        found = table.dtypes[row], table.shapes[row]
        if (placement.dtype, tuple(placement.shape)) != found:
            msg = (
                f"rank {rank}: tensor {name!r} was published as {found[0]}{list(found[1])}, its "
                f"placement says {placement.dtype}{list(placement.shape)}. Take both from the "
                "same tensor."
            )
            raise ShapeMismatch(msg)
        rows += [row] * len(placement.pieces)
        pieces += placement.pieces
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
