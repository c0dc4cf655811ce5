"""`WeightExtractor`: what a rank of a trainer holds, first described, then read.

Metadata come first: names, shapes, dtypes and placements, without bytes and without a collective.
Bytes come second, in chunks. What a chunk holds is the same in every update, so it is decided once
(`ChunkPlan`); an update only reads the tensors of the moment into it.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from rl_bridge.errors import DuplicateTensorName, IncompatibleUpdate
from rl_bridge.manifest.adapter import AdapterSpec
from rl_bridge.manifest.parallel import Piece, Placement
from rl_bridge.manifest.table import collector_paused
from rl_bridge.memory.packing import checked_dtype, wire_dtype
from rl_bridge.trainers.chunks import (
    DEFAULT_CHUNK_NBYTES,
    BufferPlan,
    PackedTensors,
    WeightChunk,
    batches,
    checked_threshold,
    module_of,
    wire_name,
)
from rl_bridge.trainers.gather import Shared, Split, gather, window_nbytes
from rl_bridge.trainers.modules import Adapters, ModelNames, naming_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMetadata:
    """A whole tensor of the model, as far as this rank knows it without asking another one.

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
    """One tensor as a rank knows it: what an extractor's subclass describes to the base class.

    Attributes:
        name: under which this rank publishes it.
        shape: of the whole tensor.
        dtype: in which the trainer holds it.
        local_shape: of what this rank holds; None if it holds no element.
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

    def placement(self, asked: torch.dtype | None) -> Placement:
        """Where this rank's part lies in the whole tensors, cast to the dtype that is asked for."""
        assert self.local_shape is not None, "this rank holds a part of it"
        dtype = wire_name(wire_dtype(self.dtype, asked))
        return Placement(dtype=dtype, shape=self.local_shape, pieces=self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a chunk, as it travels."""

    name: str
    source: int  # number of the rank's tensor that has its bytes; of tied names the same
    dtype: torch.dtype
    shape: tuple[int, ...]
    placement: Placement | None = None  # where it lies in the whole tensors; None if it is whole
    is_tied: bool = False  # another entry has the bytes already

    @property
    def nbytes(self) -> int:
        """Bytes that it adds to a chunk."""
        return 0 if self.is_tied else math.prod(self.shape) * self.dtype.itemsize


class ChunkPlan:
    """One chunk, complete but for its bytes.

    Attributes:
        sources: numbers of the rank's tensors that fill it, each once.

    """

    def __init__(self, entries: Sequence[Entry], module_name: str | None) -> None:
        """Plan a chunk of `entries`."""
        position: dict[int, int] = {}
        for one in entries:
            position.setdefault(one.source, len(position))
        first = {one.source: one for one in reversed(entries)}
        self.sources = tuple(position)
        self._dtypes = [first[source].dtype for source in position]
        shapes = [first[source].shape for source in position]
        self._positions = [position[one.source] for one in entries]
        self._names = [one.name for one in entries]
        self._dtype_names = [str(one.dtype) for one in entries]
        self._shapes = [one.shape for one in entries]
        placed = [one.placement for one in entries if one.placement is not None]
        self._placements = placed if len(placed) == len(entries) else None
        self._module_name = module_name
        self._buffer = BufferPlan(list(zip(self._dtypes, shapes, strict=True)))
        self._offsets = tuple(self._buffer.offsets[at] for at in self._positions)
        self._is_tied = len(self._positions) != len(position)
        self._kept: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    def made_of(
        self, tensors: Sequence[torch.Tensor], *, in_kept_buffer: bool = False
    ) -> WeightChunk:
        """A chunk of the rank's own tensors, one per source; copied only if one needs a cast.

        With `in_kept_buffer` they are cast into the buffer of the last call: its chunk is
        overwritten.
        """
        fits = (
            tensor.dtype is dtype and tensor.is_contiguous()
            for tensor, dtype in zip(tensors, self._dtypes, strict=True)
        )
        if all(fits):
            return self._chunk([one.detach() if one.requires_grad else one for one in tensors])

        def fill(views: Sequence[torch.Tensor]) -> None:
            # One call for all: a loop over small tensors takes as long as their copies.
            torch._foreach_copy_(list(views), list(tensors))

        return self.filled(fill, tensors[0].device, in_kept_buffer=in_kept_buffer)

    def filled(
        self,
        fill: Callable[[list[torch.Tensor]], None],
        device: torch.device | None,
        *,
        in_kept_buffer: bool = False,
    ) -> WeightChunk:
        """A chunk in a buffer that `fill` writes to, one view per source."""
        kept = self._kept if in_kept_buffer else None
        if kept is None or (device is not None and kept[0].device != device):
            kept = self._buffer.allocate(device)
        if in_kept_buffer:
            self._kept = kept
        buffer, views = kept
        fill(views)
        return self._chunk(views, PackedTensors(buffer=buffer, offsets=self._offsets))

    def _chunk(
        self, tensors: Sequence[torch.Tensor], packing: PackedTensors | None = None
    ) -> WeightChunk:
        return WeightChunk.checked_before(
            names=self._names,
            dtypes=self._dtype_names,
            shapes=self._shapes,
            tensors=[tensors[at] for at in self._positions] if self._is_tied else list(tensors),
            module_name=self._module_name,
            placements=self._placements,
            packing=packing,
        )


class ExtractorOptions(TypedDict, total=False):
    """What every `WeightExtractor` takes; its constructor says what they mean."""

    adapters: Adapters | str
    adapter: str | None
    base_root: str
    chunk_nbytes: int
    keep_buffers: bool


class WeightExtractor(ABC):
    """A trainer's weights, as one rank of the trainer sees them.

    `metadata` and `placements` read no byte and ask no other rank. `local` yields this rank's own
    parts, chunk by chunk, and asks no other rank either, unless it merges adapters into weights
    that FSDP or ZeRO-3 cuts: what a rank adds to its part needs the other ranks' parts of the
    adapters. `full` yields whole tensors: every rank of the trainer has to iterate it, in step.

    Chunks hold whole modules (the projections of one attention stay together), together at most
    `chunk_nbytes`; a module that is larger goes alone. Tensors that need no cast are the trainer's
    own, without a copy: read them before its next step. A `dtype` is the one in which
    floating-point tensors travel; None leaves them as they are.

    A loop variable that still holds the last chunk keeps two chunks in memory: where memory is
    short, ``del`` it at the end of the loop's body.
    """

    def __init__(
        self,
        *,
        adapters: Adapters | str = Adapters.MERGED,
        adapter: str | None = None,
        base_root: str = "",
        chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
        keep_buffers: bool = False,
    ) -> None:
        """Make an extractor.

        Args:
            adapters: what is published of a model with peft adapters.
            adapter: publish one adapter under this name, and nothing else. It is peft's adapter of
                that name, or the only one that the model has.
            base_root: root of the base weights that this adapter was trained on; empty if that is
                not known.
            chunk_nbytes: bytes of one chunk, with all memory that making it takes.
            keep_buffers: `local` casts into the same memory in every update, and overwrites the
                tensors of the last update. This takes the memory of this rank's part once more, but
                no new page in later updates, and a bridge that publishes them need not plan anew.

        """
        self._adapters = adapters
        self._adapter = adapter
        self._base_root = base_root
        self._chunk_nbytes = checked_threshold(chunk_nbytes)
        self._keep_buffers = bool(keep_buffers)
        self._known: list[RankTensor] | None = None
        self._named: ModelNames | None = None
        self._plans: dict[tuple[torch.dtype | None, bool], list[ChunkPlan]] = {}

    def metadata(self, dtype: torch.dtype | None = None) -> Mapping[str, WeightMetadata]:
        """Every whole tensor that this rank knows of, by name; no bytes, no collective."""
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
        """Where this rank's own tensors lie in the whole ones; no bytes, no collective."""
        dtype = checked_dtype(dtype)
        known = self._all_known()
        return {one.name: one.placement(dtype) for one in known if one.local_shape is not None}

    def trainable_names(self) -> frozenset[str]:
        """Names of this rank's tensors that training changes; `publish` takes them."""
        return frozenset(
            one.name
            for one in self._all_known()
            if one.is_trainable and one.local_shape is not None
        )

    @property
    def adapter(self) -> AdapterSpec | None:
        """What belongs to the adapter that is published; None if it is a model's weights."""
        self._all_known()
        return None if self._named is None else self._named.spec

    def local(self, dtype: torch.dtype | None = None) -> Iterator[WeightChunk]:
        """Yield this rank's own parts. ``bridge.publish`` takes these chunks.

        No collective, but for adapters that are merged into weights that FSDP or ZeRO-3 cuts: their
        matrices are gathered, so every rank calls this.
        """
        plans, tensors = self._planned(checked_dtype(dtype), is_local=True)
        for plan in plans:
            yield _local_chunk(plan, tensors, in_kept_buffer=self._keep_buffers)

    def full(self, dtype: torch.dtype | None = None) -> Iterator[WeightChunk]:
        """Yield whole tensors, one chunk at a time. Every rank of the trainer iterates it."""
        plans, tensors = self._planned(checked_dtype(dtype), is_local=False)
        for plan in plans:
            yield self._full_chunk(plan, tensors)

    def extract_weights(self, dtype: torch.dtype | None = None) -> Iterator[WeightChunk]:
        """Do what `full` does, under the name that other trainers' extractors have for it."""
        return self.full(dtype)

    def refresh(self) -> None:
        """Look at the model anew, after its structure, names or layout were changed by hand."""
        self._known = None
        self._plans.clear()

    def _naming_of(self, model: torch.nn.Module) -> ModelNames:
        """How the tensors of `model` are called: what is published of it is decided here."""
        self._named = naming_of(
            model, self._adapters, adapter=self._adapter, base_root=self._base_root
        )
        return self._named

    # ---- what a subclass writes

    @abstractmethod
    def _tensors_known(self) -> Sequence[RankTensor]:
        """Describe every tensor that this rank knows of, without bytes.

        All ranks that gather together list the same tensors in the same order.
        """

    @abstractmethod
    def _tensors_now(self) -> Sequence[torch.Tensor | None] | None:
        """What this rank holds of each known tensor at this moment; None if it holds nothing of it.

        None instead of the sequence if the model changed since it was described.
        """

    @abstractmethod
    def _split(self, source: int) -> Split | Callable[[torch.Tensor], object]:
        """How the ranks share a tensor that is not whole.

        Or what writes the whole of it into a view, casting; a collective.
        """

    def _aside_nbytes(self, known: RankTensor, dtype: torch.dtype) -> int:  # noqa: ARG002 - subclasses use them
        """Bytes of temporary memory that filling in one tensor takes in addition to the chunk."""
        return 0

    # ---- plans

    def _all_known(self) -> list[RankTensor]:
        if self._named is not None and self._named.is_outdated:
            self.refresh()
        if self._known is None:
            known = list(self._tensors_known())
            names = [one.name for one in known]
            if len(set(names)) != len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise DuplicateTensorName(
                    f"tensor {twice!r} appears twice once the words of wrappers are left out. "
                    "Extract the two models that have it one after the other."
                )
            self._known = known
            _LOG.info("%s: %d tensors known", type(self).__name__, len(known))
        return self._known

    def _current(self) -> Sequence[torch.Tensor | None]:
        """The tensors of now, as the plans expect them; a changed model is described anew."""
        for is_last in (False, True):
            known = self._all_known()
            with collector_paused(), torch.no_grad():
                tensors = self._tensors_now()
                wrong = _first_unlike(known, tensors)
            if wrong is None and tensors is not None:
                if self._named is not None and self._named.is_merging:
                    _require_ties(known, tensors)
                return tensors
            if is_last:
                break
            self.refresh()
        raise IncompatibleUpdate(
            f"tensor {wrong!r} of this rank is not as its model says it should be. Extract between "
            "two steps, when no forward or backward pass is under way."
        )

    def _planned(
        self, dtype: torch.dtype | None, *, is_local: bool
    ) -> tuple[list[ChunkPlan], Sequence[torch.Tensor | None]]:
        """The chunks to make, of this rank's parts or of whole tensors, and the tensors of now."""
        tensors = self._current()
        key = dtype, is_local
        if key not in self._plans:
            self._plans[key] = self._plan(dtype, is_local=is_local)
        return self._plans[key], tensors

    def _plan(self, dtype: torch.dtype | None, *, is_local: bool) -> list[ChunkPlan]:
        known, entries = self._all_known(), []
        for index, one in enumerate(known):
            shape = one.local_shape if is_local else one.shape
            if shape is not None:
                entry = Entry(
                    name=one.name,
                    source=index if one.tied_to is None else one.tied_to,
                    dtype=wire_dtype(one.dtype, dtype),
                    shape=shape,
                    placement=one.placement(dtype) if is_local else None,
                    is_tied=one.tied_to is not None,
                )
                entries.append(entry)
        is_gathered = not is_local and any(not one.is_whole for one in known)
        reserve = window_nbytes(self._chunk_nbytes) if is_gathered else 0
        found = batches(
            # A tied name travels with the first name of its tensor, which has the bytes.
            ((module_of(known[one.source].name), one) for one in entries),
            size_of=lambda one: one.nbytes,
            limit=max(1, self._chunk_nbytes - reserve),
            extra_of=lambda one: self._aside_nbytes(known[one.source], one.dtype),
        )
        return [ChunkPlan(batch, module) for module, batch in found]

    def _fill(
        self,
        views: Sequence[torch.Tensor],
        sources: Sequence[int],
        tensors: Sequence[torch.Tensor | None],
    ) -> None:
        """Write the whole tensors of `sources` into `views`, casting; a collective."""
        known = self._all_known()
        cut: list[Shared] = []
        for view, source in zip(views, sources, strict=True):
            tensor = tensors[source]
            if known[source].is_whole:
                view.copy_(tensor)  # type: ignore[arg-type]  # so this rank holds it
            elif isinstance(split := self._split(source), Split):
                cut.append((view, split, tensor))
            else:
                split(view)
        gather(cut, window=window_nbytes(self._chunk_nbytes))

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
    # This makes thousands of small objects, none of which is garbage.
    with collector_paused(), torch.no_grad():
        held = [tensors[source] for source in plan.sources]
        return plan.made_of(held, in_kept_buffer=in_kept_buffer)  # type: ignore[arg-type]  # planned: this rank holds each of them


def _require_ties(known: Sequence[RankTensor], tensors: Sequence[torch.Tensor | None]) -> None:
    """Refuse merged weights that are tied to others: one name would get the other one's bytes."""
    for one, tensor in zip(known, tensors, strict=True):
        first = None if one.tied_to is None else tensors[one.tied_to]
        if tensor is not None and first is not None and tensor.data_ptr() != first.data_ptr():
            raise IncompatibleUpdate(tied_refusal(one.name, known[one.tied_to or 0].name))


def require_untied(known: Sequence[RankTensor], at: int) -> None:
    """Refuse to merge into tensor number `at` if it has two names; all ranks do so.

    Raises:
        IncompatibleUpdate: another one is the same tensor, whatever this rank holds of it.

    """
    first = at if (tied_to := known[at].tied_to) is None else tied_to
    for number, one in enumerate(known):
        if number != at and first in {number, one.tied_to}:
            raise IncompatibleUpdate(tied_refusal(known[at].name, one.name))


def tied_refusal(name: str, other: str) -> str:
    """What is said of an adapter of a tensor that has another name."""
    return (
        f"tensors {name!r} and {other!r} are one tensor, expected two where an adapter of one of "
        "them is merged: engines would apply it to both. Leave its layer out of target_modules, "
        'or publish the adapter alone (adapter="NAME").'
    )


def _first_unlike(
    known: Sequence[RankTensor], tensors: Sequence[torch.Tensor | None] | None
) -> str | None:
    """Name of the first tensor that is not as it was described."""
    if tensors is None or len(tensors) != len(known):
        return known[0].name if known else "?"
    for one, tensor in zip(known, tensors, strict=True):
        if tensor is None:
            if one.local_shape is not None:
                return one.name
        elif tensor.shape != one.local_shape or tensor.dtype is not one.dtype:
            return one.name
    return None
