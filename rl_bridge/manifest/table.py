"""The layout part of a manifest: which tensors there are and where each lies in the packed arena.

It is the same for every update of a run, so it is built once, sent once, and referred to by its own
digest. It is kept in columns: 40,000 tensors are then six JSON arrays instead of 40,000 objects.
Users read the columns as one `TensorDescriptor` per tensor, made when it is asked for.

An arena in memory of the CPU ends with its *leaf list*: for each stored tensor, in layout order,
the digests of its leaves and then its length in 8 bytes (little endian), so that a tensor's digest
is the digest of its stretch. The pass that digests the tensors computes all of it anyway. A reader
of a part checks the list against the tensors' digests; then it reads only the leaves that it needs.
Behind it may stand the *column list* (`rl_bridge.manifest.columns`), for readers of some columns.
"""

import gc
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import Annotated, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import (
    BeforeValidator,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from rl_bridge.errors import (
    DuplicateTensorName,
    MalformedManifest,
    NegativeRange,
    OverlappingRange,
    RangeBeyondSegment,
    RangeOverflow,
    ShapeMismatch,
)
from rl_bridge.manifest.canonical import (
    RESEND,
    Frozen,
    JSONValue,
    canonical_json,
    decode_json,
    freeze,
    malformed,
    thaw,
)
from rl_bridge.manifest.columns import ColumnBlocks
from rl_bridge.manifest.digest import (
    ALGORITHM,
    DIGEST_NBYTES,
    LEAF_NBYTES,
    LENGTH_NBYTES,
    RootPlan,
    text_digest,
)
from rl_bridge.manifest.dtypes import DTYPE_NBYTES, dtype_nbytes

# Bytes. GPU kernels load 16 at a time and IPC consumers want 256; on a CPU it costs nothing.
ALIGNMENT = 256
_MAX_INT = 2**63 - 1
_EASY = 2**50


def _align(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def row_major_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides (in elements) of a contiguous tensor, as torch counts them."""
    tail = accumulate((max(dim, 1) for dim in reversed(shape[1:])), lambda a, b: a * b, initial=1)
    return tuple(tail)[::-1] if shape else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDescriptor:
    """One tensor of an update: what it is, where it lies, and what its bytes must hash to.

    Attributes:
        name: the state-dict name.
        shape: dimensions.
        dtype: torch's name for it, without ``torch.``.
        stride: in elements; tensors travel row-major contiguous, whatever the source's strides.
        device: where the published bytes lie.
        numel: number of elements.
        nbytes: number of bytes.
        offset: first byte in the arena.
        checksum: X3T-128K digest, 32 hexadecimal digits.
        tied_to: the name whose bytes this tensor shares, or None.

    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    device: str
    numel: int
    nbytes: int
    offset: int
    checksum: str
    tied_to: str | None = None


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, if it is on, until the end of the block.

    While tens of thousands of objects are made, none of them is garbage. The collector's visits
    would find nothing, and take longer than the work. Freeing by reference counts goes on.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Layout(Frozen):
    """The layout part of a manifest, of either kind: named by the digest of its canonical text."""

    KIND: ClassVar[str]
    """What messages call it."""

    @abstractmethod
    def document(self) -> dict[str, JSONValue]:
        """Plain JSON form; `text` is its canonical text."""

    @property
    @abstractmethod
    def root_plan(self) -> RootPlan:
        """What makes a root of the digests of its tensors."""

    @cached_property
    def text(self) -> str:
        """Canonical JSON of the layout."""
        return canonical_json(self.document())

    @cached_property
    def digest(self) -> str:
        """XXH3-128 of `text`: the layout's name, 32 hexadecimal digits."""
        return text_digest(self.text)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `text` gave, and nothing else.

        Raises:
            MalformedManifest: it is not the canonical JSON of such a layout.
            WeightManifestValidationError: its other subclasses, one per reason.

        """
        with collector_paused():
            document, end = decode_json(text)
            if end != len(text) or not isinstance(document, dict):
                raise MalformedManifest(
                    f"the {cls.KIND} is not canonical JSON: it was rewritten. {RESEND}"
                )
            try:
                layout = cls(**document)
            except ValidationError as error:
                raise malformed(cls.KIND, error) from error
            # Compared with what this layout writes: a loose number, another order or a default
            # that was left out would give one layout two texts.
            if layout.text != text:
                raise MalformedManifest(
                    f"the {cls.KIND} is not canonical JSON, or leaves out fields: it was "
                    f"rewritten. {RESEND}"
                )
            return layout


class TensorTable(Layout):
    """The columns: one entry per stored tensor, sorted by name; tied names refer to stored ones.

    Valid from birth: names unique and sorted, sizes exact, ranges ordered, aligned and gapless.

    Raises:
        WeightManifestValidationError: one subclass for each way to break these rules.

    """

    KIND: ClassVar[str] = "manifest's layout"

    algorithm: StrictStr = ALGORITHM
    arena_nbytes: StrictInt
    columns: StrictBool = False
    """Whether the column list of its tensors stands behind the leaf list."""
    device: StrictStr = "cpu"
    dtypes: tuple[StrictStr, ...]
    leaves: StrictBool = False
    """Whether the arena ends with the leaf list of its tensors."""
    names: tuple[StrictStr, ...]
    nbytes: tuple[StrictInt, ...]
    offsets: tuple[StrictInt, ...]
    shapes: tuple[tuple[StrictInt, ...], ...]
    ties: Annotated[JSONValue, BeforeValidator(lambda value: freeze(value, where="ties"))] = None
    trainable: StrictStr | None = None
    """One character per stored tensor, 1 for those declared trainable; None where not declared."""

    @classmethod
    def pack(
        cls,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        *,
        ties: Mapping[str, str] | None = None,
        trainable: frozenset[str] | None = None,
        device: str = "cpu",
        leaves: bool = False,
        columns: bool = False,
    ) -> Self:
        """Lay out tensors (name -> dtype, shape) in one arena, sorted by name, 256-byte aligned.

        With `leaves`, their leaf list lies behind them; with `columns`, the column list behind it,
        if any of them can be cut.
        """
        names = tuple(sorted(tensors))
        dtypes = tuple(tensors[name][0] for name in names)
        shapes = tuple(tensors[name][1] for name in names)
        sizes = [
            prod(shape) * dtype_nbytes(dtype, tensor=name)
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
        ends = list(accumulate(map(_align, sizes), initial=0))
        flags = None
        if trainable is not None:
            flags = "".join("1" if name in trainable else "0" for name in names)
        behind = _leaf_list_nbytes(_num_leaves(sizes), len(sizes)) if leaves else 0
        if columns and ends[-1] <= _MAX_INT:  # else it is refused below
            listed = ColumnBlocks.of(shapes, dtypes, sizes).nbytes
            columns = listed > 0
            behind += listed
        return cls(
            arena_nbytes=_align(ends[-1] + behind),
            columns=columns,
            device=device,
            dtypes=dtypes,
            leaves=leaves,
            names=names,
            nbytes=tuple(sizes),
            offsets=tuple(ends[:-1]),
            shapes=shapes,
            ties=dict(ties or {}),
            trainable=flags,
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.algorithm != ALGORITHM:
            raise MalformedManifest(
                f"digest algorithm {self.algorithm!r} is unknown here, expected {ALGORITHM!r}. Use "
                "the same rl_bridge release on both sides."
            )
        columns = ("names", "dtypes", "nbytes", "offsets", "shapes")
        counts = {column: len(getattr(self, column)) for column in columns}
        if len(set(counts.values())) != 1:
            raise MalformedManifest(
                f"the columns of the layout differ in length: {counts}. {RESEND}"
            )
        if self.leaves and self.device != "cpu":
            raise MalformedManifest(
                f"an arena on {self.device!r} has no leaf list, the layout says it has. {RESEND}"
            )
        if self.columns and not self.leaves:
            raise MalformedManifest(
                f"the layout says that its arena has a column list and no leaf list. {RESEND}"
            )
        self._check_names()
        if not self._is_packed():
            self._explain_ranges()
        if self.trainable is not None and (
            len(self.trainable) != len(self.names) or set(self.trainable) - {"0", "1"}
        ):
            raise MalformedManifest(
                "the layout's trainable flags must be one 0 or 1 for each stored tensor, got "
                f"{self.trainable[:48]!r}. {RESEND}"
            )
        return self

    def _check_names(self) -> None:
        for before, name in zip(self.names, self.names[1:], strict=False):
            if name == before:
                raise DuplicateTensorName(f"tensor {name!r} appears twice in the layout. {RESEND}")
            if name < before:
                raise MalformedManifest(
                    f"tensor {name!r} stands after {before!r}, not sorted. {RESEND}"
                )
        if not isinstance(self.ties, Mapping):
            kind = type(self.ties).__name__
            raise MalformedManifest(
                f"ties is {kind}, expected a mapping of name to stored name. {RESEND}"
            )
        stored = set(self.names)
        for name, target in self.ties.items():
            if name in stored:
                raise DuplicateTensorName(
                    f"tensor {name!r} is stored and tied at once. Keep one of the two."
                )
            if not isinstance(target, str) or target not in stored:
                raise MalformedManifest(
                    f"tensor {name!r} is tied to {target!r}, which is not stored. {RESEND}"
                )

    def _is_packed(self) -> bool:
        """Whether all ranges are what `pack` makes of shapes and dtypes, looked at all at once.

        False if anything is unusual, sound or not: `_explain_ranges` then looks one by one.
        """
        if not self.names or not all(map(DTYPE_NBYTES.__contains__, self.dtypes)):
            return False
        numel = list(map(prod, self.shapes))
        dims = [dim for shape in set(self.shapes) for dim in shape]
        numbers = [*numel, *self.nbytes, *self.offsets, self.arena_nbytes, *dims]
        # Sums below must not overflow 64 bits, and an empty tensor hides its other dimensions.
        if min(numbers) < 0 or max(numbers) > _EASY or 0 in numel:
            return False
        items = np.fromiter(map(DTYPE_NBYTES.__getitem__, self.dtypes), np.int64, len(self.dtypes))
        nbytes = np.array(numel, np.int64) * items
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        ends = np.cumsum(room)
        behind = int(ends[-1])
        if self.leaves:
            behind += _leaf_list_nbytes(int((-(-nbytes // LEAF_NBYTES)).sum()), len(nbytes))
        if self.columns:
            behind += self.column_blocks.nbytes
        return bool(
            _align(behind) == self.arena_nbytes
            and (nbytes == np.array(self.nbytes, np.int64)).all()
            and (ends - room == np.array(self.offsets, np.int64)).all()
        )

    def _explain_ranges(self) -> None:
        end = 0
        columns = zip(self.names, self.dtypes, self.shapes, self.nbytes, self.offsets, strict=True)
        for name, dtype, shape, nbytes, offset in columns:
            if offset < 0 or nbytes < 0 or min(shape, default=0) < 0:
                raise NegativeRange(
                    f"tensor {name!r}: offset {offset}, {nbytes} bytes, shape {list(shape)}: none "
                    f"may be negative. {RESEND}"
                )
            # The product with zeros taken as ones: torch computes strides from it, so it must fit.
            if max(prod(dim or 1 for dim in shape) * 16, offset + nbytes) > _MAX_INT:
                raise RangeOverflow(
                    f"tensor {name!r}: shape {list(shape)} at offset {offset} does not fit 63 "
                    f"bits. {RESEND}"
                )
            expected = prod(shape) * dtype_nbytes(dtype, tensor=name)
            if nbytes != expected:
                raise ShapeMismatch(
                    f"tensor {name!r}: {dtype}{list(shape)} has {expected} bytes, the manifest "
                    f"says {nbytes}. {RESEND}"
                )
            if offset < end:
                raise OverlappingRange(
                    f"tensor {name!r} starts at byte {offset}, inside the one before it, which "
                    f"ends at {end}. {RESEND}"
                )
            if offset != end:
                raise MalformedManifest(
                    f"tensor {name!r} starts at byte {offset}, expected {end}: the arena has no "
                    f"gaps. {RESEND}"
                )
            if offset + nbytes > self.arena_nbytes:
                raise RangeBeyondSegment(
                    f"tensor {name!r} ends at byte {offset + nbytes}, beyond the arena of "
                    f"{self.arena_nbytes}. {RESEND}"
                )
            end = _align(offset + nbytes)
        self._check_end(end)

    def _check_end(self, end: int) -> None:
        """Compare the size of the arena with what is in it; its tensors end at `end`."""
        what = "its tensors need"
        if self.leaves:
            what = "its tensors and their leaf list need"
            end += _leaf_list_nbytes(_num_leaves(self.nbytes), len(self.nbytes))
        if self.columns:
            what = "its tensors, their leaf list and their column list need"
            end += self.column_blocks.nbytes
        end = _align(end)
        if end > _MAX_INT:
            raise RangeOverflow(f"the arena does not fit 63 bits: {what} {end} bytes. {RESEND}")
        if self.arena_nbytes != end:
            msg = f"the arena is said to have {self.arena_nbytes} bytes, {what} {end}. {RESEND}"
            raise RangeBeyondSegment(msg) if self.arena_nbytes < end else MalformedManifest(msg)

    def document(self) -> dict[str, JSONValue]:
        """Plain JSON form; `text` is its canonical text."""
        return {name: getattr(self, name) for name in type(self).model_fields} | {
            "ties": thaw(self.ties),
        }

    @cached_property
    def root_plan(self) -> RootPlan:
        """The prepared canonical lines of its tensors."""
        return RootPlan(self.names, self.dtypes, self.shapes, self.ties)

    @cached_property
    def rows(self) -> Mapping[str, int]:
        """Row of each name, tied names included (they have the row of what they share)."""
        rows = {name: row for row, name in enumerate(self.names)}
        rows |= {name: rows[target] for name, target in self.ties.items()}
        return MappingProxyType(rows)

    @cached_property
    def offset_column(self) -> npt.NDArray[np.uint64]:
        """Offsets in bytes, shape [tensors], uint64, read-only."""
        return _readonly(self.offsets)

    @cached_property
    def nbytes_column(self) -> npt.NDArray[np.uint64]:
        """Sizes in bytes, shape [tensors], uint64, read-only."""
        return _readonly(self.nbytes)

    @cached_property
    def total_nbytes(self) -> int:
        """Bytes of all stored tensors, without alignment and leaf list."""
        return sum(self.nbytes)

    @cached_property
    def leaf_counts(self) -> npt.NDArray[np.int64]:
        """Leaves of each stored tensor, shape [tensors], int64."""
        return -(-self.nbytes_column.astype(np.int64) // LEAF_NBYTES)

    @cached_property
    def leaf_starts(self) -> npt.NDArray[np.int64]:
        """First byte of each stored tensor's stretch in the leaf list, shape [tensors], int64."""
        sizes = self.leaf_counts * DIGEST_NBYTES + LENGTH_NBYTES
        starts: npt.NDArray[np.int64] = np.cumsum(sizes) - sizes
        return starts

    @property
    def leaves_offset(self) -> int:
        """First byte behind the tensors: of the leaf list, if there is one."""
        return _align(self.offsets[-1] + self.nbytes[-1]) if self.names else 0

    @cached_property
    def leaves_nbytes(self) -> int:
        """Size of the leaf list; 0 if there is none."""
        return _leaf_list_nbytes(int(self.leaf_counts.sum()), len(self.names)) if self.leaves else 0

    @cached_property
    def column_blocks(self) -> ColumnBlocks:
        """How its tensors are cut for the column list."""
        return ColumnBlocks.of(self.shapes, self.dtypes, self.nbytes)

    @property
    def columns_offset(self) -> int:
        """First byte behind the leaf list: of the column list, if there is one."""
        return self.leaves_offset + self.leaves_nbytes

    @property
    def columns_nbytes(self) -> int:
        """Size of the column list; 0 if there is none."""
        return self.column_blocks.nbytes if self.columns else 0

    @property
    def lists_nbytes(self) -> int:
        """Size of both lists, which lie at `leaves_offset`."""
        return self.leaves_nbytes + self.columns_nbytes

    def descriptor(self, name: str, digests: bytes) -> TensorDescriptor:
        """Describe one tensor, tied names included; a `KeyError` if there is none of that name."""
        row = self.rows[name]
        shape = self.shapes[row]
        return TensorDescriptor(
            name=name,
            shape=shape,
            dtype=self.dtypes[row],
            stride=row_major_stride(shape),
            device=self.device,
            numel=prod(shape),
            nbytes=self.nbytes[row],
            offset=self.offsets[row],
            checksum=digests[row * DIGEST_NBYTES : (row + 1) * DIGEST_NBYTES].hex(),
            tied_to=self.ties.get(name),
        )


def _num_leaves(nbytes: Sequence[int]) -> int:
    """Count the leaves of tensors of any sizes, those that do not fit 64 bits among them."""
    return sum(-(-size // LEAF_NBYTES) for size in nbytes)


def _leaf_list_nbytes(leaves: int, tensors: int) -> int:
    return leaves * DIGEST_NBYTES + tensors * LENGTH_NBYTES


def _readonly(values: Sequence[int]) -> npt.NDArray[np.uint64]:
    # Over immutable bytes: an array that owns its memory could be made writable again.
    return np.frombuffer(np.array(values, np.uint64).tobytes(), np.uint64)


class DescriptorMap(Mapping[str, TensorDescriptor]):
    """What users see as ``manifest.tensors``: name -> `TensorDescriptor`."""

    def __init__(self, table: TensorTable, digests: bytes) -> None:
        self._table = table
        self._digests = digests

    def __getitem__(self, name: str) -> TensorDescriptor:
        return self._table.descriptor(name, self._digests)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.rows)

    def __len__(self) -> int:
        return len(self._table.rows)

    def __repr__(self) -> str:
        return f"<{len(self)} tensor descriptors>"
