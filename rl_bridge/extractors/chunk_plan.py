"""A chunk that is the same in every update: what is in it is decided once, the bytes change."""

import math
from collections.abc import Callable, Sequence

import torch

from rl_bridge.extractors.chunks import BufferPlan, PackedTensors, WeightChunk, wire_name
from rl_bridge.manifest.placement import Piece, Placement

__all__ = ["ChunkPlan", "Entry", "entry"]


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
