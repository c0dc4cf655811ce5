"""`WeightExtractor`: what a trainer's rank holds, told without bytes, and then its bytes."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rl_bridge.errors import DuplicateTensorName, IncompatibleUpdate
from rl_bridge.manifest.parallel import Piece, Placement
from rl_bridge.manifest.table import collector_paused
from rl_bridge.trainers.chunks import (
    DEFAULT_CHUNK_NBYTES,
    BufferPlan,
    PackedTensors,
    WeightChunk,
    batches,
    checked_dtype,
    checked_threshold,
    module_of,
    wire_dtype,
    wire_name,
)

__all__ = [
    "ChunkPlan",
    "Entry",
    "RankTensor",
    "WeightExtractor",
    "WeightMetadata",
    "entry",
]

# ---- A chunk that is the same in every update: what is in it is decided once, the bytes change.


class Entry:
    """One tensor of a chunk.

    Attributes:
        name: under which it travels.
        source: number of the rank's tensor whose bytes these are; tied names have the same.
        dtype: in which it travels.
        shape: in which it travels.
        nbytes: in that dtype; 0 for a further name of a tensor that is there already.
        placement: where it lies in the whole tensors; None if it is whole.

    """

    __slots__ = ("dtype", "name", "nbytes", "placement", "shape", "source")

    def __init__(
        self,
        *,
        name: str,
        source: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        placement: Placement | None,
        is_tied: bool,
    ) -> None:
        """See the attributes; `is_tied` says that another entry has the bytes."""
        self.name = name
        self.source = source
        self.dtype = dtype
        self.shape = shape
        self.placement = placement
        self.nbytes = 0 if is_tied else math.prod(shape) * dtype.itemsize


def entry(
    name: str,
    source: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    pieces: Sequence[Piece] | None = None,
    is_tied: bool = False,
) -> Entry:
    """Make an entry; `pieces` are given where the tensor is a part."""
    placement = None
    if pieces is not None:
        placement = Placement(dtype=wire_name(dtype), shape=shape, pieces=tuple(pieces))
    return Entry(
        name=name,
        source=source,
        dtype=dtype,
        shape=shape,
        placement=placement,
        is_tied=is_tied,
    )


class ChunkPlan:
    """One chunk, known but for its bytes."""

    def __init__(self, entries: Sequence[Entry], module_name: str | None) -> None:
        """Plan a chunk of `entries`."""
        position: dict[int, int] = {}
        for one in entries:
            position.setdefault(one.source, len(position))
        first = {one.source: one for one in reversed(entries)}
        self.sources = tuple(position)
        self._dtypes = [first[source].dtype for source in position]
        self._shapes = [first[source].shape for source in position]
        self._positions = [position[one.source] for one in entries]
        self._names = [one.name for one in entries]
        self._dtype_names = [str(one.dtype) for one in entries]
        self._entry_shapes = [one.shape for one in entries]
        placed = [one.placement for one in entries if one.placement is not None]
        self._placements = placed if len(placed) == len(entries) else None
        self._module_name = module_name
        self._buffer = BufferPlan(list(zip(self._dtypes, self._shapes, strict=True)))
        self._offsets = tuple(self._buffer.offsets[at] for at in self._positions)
        self._is_tied = len(self._positions) != len(position)
        self._kept: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    def live(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The tensors themselves, one per source, if they can travel as they are."""
        for tensor, dtype in zip(tensors, self._dtypes, strict=True):
            if tensor.dtype is not dtype or not tensor.is_contiguous():
                return None
        return [one.detach() if one.requires_grad else one for one in tensors]

    def copied(
        self, tensors: Sequence[torch.Tensor], *, in_kept_buffer: bool = False
    ) -> WeightChunk:
        """A chunk of `tensors`, cast and packed into one buffer.

        Args:
            tensors: one per source.
            in_kept_buffer: into the one of the last call, whose chunk they overwrite.

        """

        def fill(views: Sequence[torch.Tensor]) -> None:
            # (All in one call: a loop takes as long as small copies do.)
            torch._foreach_copy_(list(views), list(tensors))

        device = tensors[0].device if tensors else None
        return self.filled(fill, device, in_kept_buffer=in_kept_buffer)

    def filled(
        self,
        fill: Callable[[list[torch.Tensor]], None],
        device: torch.device | None,
        *,
        in_kept_buffer: bool = False,
    ) -> WeightChunk:
        """A chunk in a buffer that `fill` writes, one view per source."""
        kept = self._kept if in_kept_buffer else None
        if kept is None or (device is not None and kept[0].device != device):
            kept = self._buffer.allocate(device)
        if in_kept_buffer:
            self._kept = kept
        buffer, views = kept
        fill(views)
        return self.chunk(views, PackedTensors(buffer=buffer, offsets=self._offsets))

    def chunk(
        self, tensors: Sequence[torch.Tensor], packing: PackedTensors | None = None
    ) -> WeightChunk:
        """A chunk of tensors that are as planned, one per source."""
        return WeightChunk.checked_before(
            names=self._names,
            dtypes=self._dtype_names,
            shapes=self._entry_shapes,
            tensors=[tensors[at] for at in self._positions] if self._is_tied else list(tensors),
            module_name=self._module_name,
            placements=self._placements,
            packing=packing,
        )


# ---- the rest builds on the parts above

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMetadata:
    """A whole tensor of the model, as far as this rank knows it without asking.

    Attributes:
        name: under which engines know it.
        shape: of the whole.
        dtype: wire name, such as ``bfloat16``.
        owners: ranks of the trainer that hold a part or a copy of it.
        is_trainable: training is expected to change it.
        tied_to: another name of the same tensor, if it has one.

    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    owners: tuple[int, ...]
    is_trainable: bool
    tied_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensor:
    """One tensor as a rank knows it: what an extractor of a trainer tells its base class.

    Attributes:
        name: under which this rank publishes it.
        shape: of the whole tensor.
        dtype: in which the trainer holds it.
        local_shape: of what this rank holds; None where it holds no element.
        pieces: what this rank holds.
        owners: ranks that hold a part or a copy.
        is_whole: every rank that takes part in `full` holds all of it; the same on all of them.
        is_trainable: training is expected to change it.
        tied_to: number of an earlier one that is the same tensor.

    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    local_shape: tuple[int, ...] | None
    pieces: tuple[Piece, ...]
    owners: tuple[int, ...]
    is_whole: bool
    is_trainable: bool = False
    tied_to: int | None = None


class WeightExtractor(ABC):
    """A trainer's weights, as one rank of the trainer sees them.

    Metadata come first: `metadata` and `placements` touch no byte and ask no other rank. Bytes come
    second, chunk by chunk: `local` yields this rank's own parts without asking anybody; `full`
    yields whole tensors, and every rank of the trainer has to iterate it, in step.

    Chunks hold whole modules (the projections of one attention stay together), together at most
    `chunk_nbytes`; a module that is larger goes alone. Tensors that need no cast are the trainer's
    own, without a copy: read them before its next step.

    Two chunks live at once while a loop variable still holds the last one: ``del`` it at the end
    of the loop's body where memory is short.
    """

    def __init__(
        self, *, chunk_nbytes: int = DEFAULT_CHUNK_NBYTES, keep_buffers: bool = False
    ) -> None:
        """Make an extractor.

        Args:
            chunk_nbytes: bytes of one chunk, with all that is needed to make it.
            keep_buffers: `local` casts into the same memory in every update, and overwrites the
                last one's tensors: it takes this rank's part once more for good, but no new page
                in any further update, and a bridge that publishes them need not plan anew.

        """
        self._chunk_nbytes = checked_threshold(chunk_nbytes)
        self._keep_buffers = bool(keep_buffers)
        self._known: list[RankTensor] | None = None
        self._local_plans: dict[torch.dtype | None, list[ChunkPlan]] = {}
        self._full_plans: dict[torch.dtype | None, list[ChunkPlan]] = {}

    def metadata(self, dtype: torch.dtype | None = None) -> Mapping[str, WeightMetadata]:
        """Every whole tensor that this rank knows of, by name; no bytes, no collective.

        Args:
            dtype: in which floating-point tensors will travel; None for the trainer's own.

        """
        dtype = checked_dtype(dtype)
        known = self._all_known()
        found: dict[str, WeightMetadata] = {}
        for one in known:
            wholes = {piece.name: piece.global_shape for piece in one.pieces}
            for name, shape in (wholes or {one.name: one.shape}).items():
                found[name] = WeightMetadata(
                    name=name,
                    shape=shape,
                    dtype=wire_name(wire_dtype(one.dtype, dtype)),
                    owners=one.owners,
                    is_trainable=one.is_trainable,
                    tied_to=None if one.tied_to is None else known[one.tied_to].name,
                )
        return found

    def placements(self, dtype: torch.dtype | None = None) -> Mapping[str, Placement]:
        """Where this rank's own tensors lie in the whole ones; no bytes, no collective.

        Args:
            dtype: in which floating-point tensors will travel; None for the trainer's own.

        """
        dtype = checked_dtype(dtype)
        return {
            one.name: Placement(
                dtype=wire_name(wire_dtype(one.dtype, dtype)),
                shape=one.local_shape,
                pieces=one.pieces,
            )
            for one in self._all_known()
            if one.local_shape is not None
        }

    def trainable_names(self) -> frozenset[str]:
        """Names of this rank's tensors that training changes: `publish` takes them."""
        return frozenset(
            one.name
            for one in self._all_known()
            if one.is_trainable and one.local_shape is not None
        )

    def local(self, dtype: torch.dtype | None = None) -> Iterator[WeightChunk]:
        """Yield this rank's own parts; no collective. `bridge.publish` takes them.

        Args:
            dtype: to which floating-point tensors are cast; None leaves them as they are.

        """
        dtype = checked_dtype(dtype)
        tensors = self._current()
        if dtype not in self._local_plans:
            self._local_plans[dtype] = self._plan_local(dtype)
        for plan in self._local_plans[dtype]:
            yield _local_chunk(plan, tensors, in_kept_buffer=self._keep_buffers)

    def full(self, dtype: torch.dtype | None = None) -> Iterator[WeightChunk]:
        """Yield whole tensors, one chunk at a time. Every rank of the trainer iterates it.

        Args:
            dtype: to which floating-point tensors are cast; None leaves them as they are.

        """
        dtype = checked_dtype(dtype)
        tensors = self._current()
        if dtype not in self._full_plans:
            self._full_plans[dtype] = self._plan_full(dtype)
        for plan in self._full_plans[dtype]:
            yield self._full_chunk(plan, tensors)

    def extract_weights(self, dtype: torch.dtype | None = None) -> Iterator[WeightChunk]:
        """Do what `full` does: the name that trainers' own extractors have for it."""
        return self.full(dtype)

    def refresh(self) -> None:
        """Look at the model anew: after its structure, names or layout were changed by hand."""
        self._known = None
        self._local_plans.clear()
        self._full_plans.clear()

    # ---- what an extractor of a trainer fills in

    @abstractmethod
    def _tensors_known(self) -> Sequence[RankTensor]:
        """Look at the model: every tensor that this rank knows of, without bytes.

        All ranks that gather together list the same ones in the same order.
        """

    @abstractmethod
    def _tensors_now(self) -> Sequence[torch.Tensor | None] | None:
        """What this rank holds of each known tensor at this moment; None where that is nothing.

        None for all of them where the model is not as it was when it was looked at.
        """

    @abstractmethod
    def _fill(
        self,
        views: Sequence[torch.Tensor],
        sources: Sequence[int],
        tensors: Sequence[torch.Tensor | None],
    ) -> None:
        """Write whole tensors into `views`, casting; a collective.

        Args:
            views: one for each of `sources`, of the whole tensor's shape, in the wire dtype.
            sources: numbers of known tensors.
            tensors: what this rank holds of all known tensors.

        """

    def _reserve_nbytes(self) -> int:
        """Bytes that making any chunk takes beside the chunk."""
        return 0

    def _aside_nbytes(self, known: RankTensor, dtype: torch.dtype) -> int:  # noqa: ARG002 - for those that need some
        """Bytes that filling in one tensor takes for a moment beside the chunk."""
        return 0

    # ---- plans

    def _all_known(self) -> list[RankTensor]:
        if self._known is None:
            known = list(self._tensors_known())
            names = [one.name for one in known]
            if len(set(names)) != len(names):
                twice = next(name for name in names if names.count(name) > 1)
                msg = (
                    f"tensor {twice!r} appears twice once wrappers are looked through. Extract "
                    "the two models that have it one after the other."
                )
                raise DuplicateTensorName(msg)
            self._known = known
            _LOG.info("%s: %d tensors known", type(self).__name__, len(known))
        return self._known

    def _current(self) -> Sequence[torch.Tensor | None]:
        """The tensors of this moment as the plans expect them; else the model is looked at anew."""
        for is_last in (False, True):
            known = self._all_known()
            with collector_paused(), torch.no_grad():
                tensors = self._tensors_now()
                wrong = _first_unlike(known, tensors)
            if wrong is None and tensors is not None:
                return tensors
            if is_last:
                break
            self.refresh()
        msg = (
            f"tensor {wrong!r} of this rank is not as its model says it should be. Extract between "
            "two steps, when no forward or backward pass is under way."
        )
        raise IncompatibleUpdate(msg)

    def _plan_local(self, dtype: torch.dtype | None) -> list[ChunkPlan]:
        entries = [
            entry(
                one.name,
                index if one.tied_to is None else one.tied_to,
                wire_dtype(one.dtype, dtype),
                one.local_shape,
                pieces=one.pieces,
                is_tied=one.tied_to is not None,
            )
            for index, one in enumerate(self._all_known())
            if one.local_shape is not None
        ]
        return self._batched(entries, self._chunk_nbytes)

    def _plan_full(self, dtype: torch.dtype | None) -> list[ChunkPlan]:
        entries = [
            entry(
                one.name,
                index if one.tied_to is None else one.tied_to,
                wire_dtype(one.dtype, dtype),
                one.shape,
                is_tied=one.tied_to is not None,
            )
            for index, one in enumerate(self._all_known())
        ]
        return self._batched(entries, max(1, self._chunk_nbytes - self._reserve_nbytes()))

    def _batched(self, entries: Sequence[Entry], limit: int) -> list[ChunkPlan]:
        known = self._all_known()
        found = batches(
            # A further name of a tensor goes with its first one: its bytes are there.
            ((module_of(known[one.source].name), one) for one in entries),
            size_of=lambda one: one.nbytes,
            limit=limit,
            extra_of=lambda one: self._aside_nbytes(known[one.source], one.dtype),
        )
        return [ChunkPlan(batch, module) for module, batch in found]

    def _full_chunk(self, plan: ChunkPlan, tensors: Sequence[torch.Tensor | None]) -> WeightChunk:
        known = self._all_known()
        if all(known[source].is_whole for source in plan.sources):
            return _local_chunk(plan, tensors)
        held = next((tensor for tensor in tensors if tensor is not None), None)
        with torch.no_grad():
            return plan.filled(
                lambda views: self._fill(views, plan.sources, tensors),
                None if held is None else held.device,
            )


def _local_chunk(
    plan: ChunkPlan, tensors: Sequence[torch.Tensor | None], *, in_kept_buffer: bool = False
) -> WeightChunk:
    # Thousands of small objects are made, and none of them is garbage.
    with collector_paused(), torch.no_grad():
        held = [tensors[source] for source in plan.sources]
        live = plan.live(held)  # type: ignore[arg-type]  # planned: this rank holds each of them
        if live is not None:
            return plan.chunk(live)
        return plan.copied(held, in_kept_buffer=in_kept_buffer)  # type: ignore[arg-type]


def _first_unlike(
    known: Sequence[RankTensor], tensors: Sequence[torch.Tensor | None] | None
) -> str | None:
    """The first tensor that is not as planned."""
    if tensors is None or len(tensors) != len(known):
        return known[0].name if known else "?"
    for one, tensor in zip(known, tensors, strict=True):
        if tensor is None:
            if one.local_shape is not None:
                return one.name
        elif tensor.shape != one.local_shape or tensor.dtype is not one.dtype:
            return one.name
    return None
