"""Parts that lie on several ranks become whole tensors on each of them.

Each rank first writes what it holds into its own copy of the whole tensors (`gather`). Then each
rank's part is broadcast to all others: large parts directly, small ones together in a buffer, the
window. Only contiguous memory is given to the backend, because Gloo silently sends wrong bytes of
other memory. The makers of pieces (`whole_piece`, `box_piece`, `flat_piece`) say where a part lies.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_bridge.manifest.parallel import Piece

_WINDOW_NBYTES = 32 << 20
_WINDOWS_PER_CHUNK = 16
# Every tensor begins at a multiple of it in the window, so that a view of any dtype is aligned.
_ALIGNMENT = 16


def window_nbytes(chunk_nbytes: int) -> int:
    """Bytes of the window, the buffer in which small parts travel together."""
    nbytes = min(_WINDOW_NBYTES, chunk_nbytes // _WINDOWS_PER_CHUNK)
    return max(_ALIGNMENT, nbytes // _ALIGNMENT * _ALIGNMENT)


def _exchange(
    parts: Sequence[tuple[int, Sequence[torch.Tensor]]],
    *,
    rank: int,
    group: "torch.distributed.ProcessGroup",
    window: int,
    device: torch.device,
) -> None:
    """Give every rank of `group` what each one wrote. A collective: all ranks call it.

    If a peer is gone, the group's own deadline ends it.

    Args:
        parts: a rank of the world, and views of what it wrote in the whole tensors; the same ranks,
            shapes and order on all ranks.
        rank: this rank, of the world.
        group: whose ranks take part.
        window: bytes of the window.
        device: where the backend of `group` sends from.

    """
    scratch: torch.Tensor | None = None
    for source, views in parts:
        waiting: list[torch.Tensor] = []
        size = 0
        for view in _slabs(views, window):
            if _goes_directly(view, window, device):
                torch.distributed.broadcast(_bytes(view), src=source, group=group)
                continue
            nbytes = _aligned(view.numel() * view.element_size())
            if waiting and size + nbytes > window:
                scratch = _together(waiting, scratch, window, device)
                _broadcast(waiting, scratch, source, rank=rank, group=group)
                waiting, size = [], 0
            waiting.append(view)
            size += nbytes
        if waiting:
            scratch = _together(waiting, scratch, window, device)
            _broadcast(waiting, scratch, source, rank=rank, group=group)


def _goes_directly(view: torch.Tensor, window: int, device: torch.device) -> bool:
    is_large = view.numel() * view.element_size() * 2 >= window
    return is_large and view.is_contiguous() and view.device.type == device.type


def _together(
    views: Sequence[torch.Tensor], scratch: torch.Tensor | None, window: int, device: torch.device
) -> torch.Tensor:
    """A buffer for all of `views`: the one that is there, unless it is too small."""
    needed = sum(_aligned(view.numel() * view.element_size()) for view in views)
    if scratch is None or scratch.numel() < needed:
        scratch = torch.empty(max(needed, window), dtype=torch.uint8, device=device)
    return scratch


def _broadcast(
    views: Sequence[torch.Tensor],
    scratch: torch.Tensor,
    source: int,
    *,
    rank: int,
    group: "torch.distributed.ProcessGroup",
) -> None:
    end, slots = 0, []
    for view in views:
        nbytes = view.numel() * view.element_size()
        slots.append(scratch[end : end + nbytes].view(view.dtype).view(view.shape))
        end += _aligned(nbytes)
    if rank == source:
        for slot, view in zip(slots, views, strict=True):
            slot.copy_(view)
    torch.distributed.broadcast(scratch[:end], src=source, group=group)
    if rank != source:
        for slot, view in zip(slots, views, strict=True):
            view.copy_(slot)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _bytes(view: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes: backends know few dtypes."""
    return view.view(-1).view(torch.uint8)


def _slabs(views: Sequence[torch.Tensor], window: int) -> Iterator[torch.Tensor]:
    """Split views until each is contiguous or fits into the window; leave out empty ones."""
    for view in views:
        if not view.numel():
            continue
        if view.is_contiguous() or view.numel() * view.element_size() <= window:
            yield view
            continue
        row = math.prod(view.shape[1:]) * view.element_size()
        if row > window:
            yield from _slabs(view.unbind(0), window)
        else:
            rows = window // row
            yield from (view[begin : begin + rows] for begin in range(0, len(view), rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the ranks of a process group share one tensor, which they hold once together."""

    group: "torch.distributed.ProcessGroup"
    device: torch.device  # where the backend of the group sends from
    parts: tuple[tuple[int, tuple[Piece, ...]], ...]
    """Rank of the world, and what it holds; every rank of the group that holds something."""


Shared = tuple[torch.Tensor, Split, torch.Tensor | None]
"""Where a whole tensor is written, how the ranks share it, and what this rank holds of it."""


def narrowed(tensor: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """A box of a tensor: a view."""
    for dim, (begin, length) in enumerate(zip(offset, shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, length)
    return tensor


def broadcast_json(value: Any, *, source: int, group: Any, device: torch.device) -> Any:
    """Give all ranks of a group what the rank `source` of the world has, as JSON.

    Nothing is unpickled. `device` is of memory that the group's backend sends.
    """
    text = bytearray(json.dumps(value), "utf-8")
    size = torch.tensor([len(text)], device=device)
    torch.distributed.broadcast(size, src=source, group=group)
    told = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if torch.distributed.get_rank() == source:
        told.copy_(torch.frombuffer(text, dtype=torch.uint8))
    torch.distributed.broadcast(told, src=source, group=group)
    return json.loads(bytes(told.tolist()))


def gather(tensors: Iterable[Shared], *, window: int) -> None:
    """Write whole tensors, casting what this rank holds. A collective of each group.

    Args:
        tensors: for each a view of its whole shape, contiguous; how the ranks share it, the same on
            all ranks of its group; and what this rank holds of it.
        window: bytes of a buffer for small parts.

    """
    rank = torch.distributed.get_rank()
    groups: dict[tuple[int, str], tuple[Split, dict[int, list[torch.Tensor]]]] = {}
    for view, split, tensor in tensors:
        key = id(split.group), str(split.device)
        _, parts = groups.setdefault(key, (split, {}))
        for owner, pieces in split.parts:
            for piece in pieces:
                whole = view.view(-1) if piece.is_flat else view
                target = narrowed(whole, piece.offset, piece.shape)
                if owner == rank and tensor is not None:
                    target.copy_(narrowed(tensor, piece.local_offset, piece.shape))
                parts.setdefault(owner, []).append(target)
    for split, parts in groups.values():
        _exchange(
            sorted(parts.items()), rank=rank, group=split.group, window=window, device=split.device
        )


def whole_piece(name: str, shape: Sequence[int], replica: int = 0) -> Piece:
    """A piece that is all of a tensor."""
    return box_piece(name, shape, (0,) * len(shape), shape, replica=replica)


def box_piece(
    name: str,
    global_shape: Sequence[int],
    offset: Sequence[int],
    shape: Sequence[int],
    *,
    replica: int = 0,
    local_offset: Sequence[int] | None = None,
) -> Piece:
    """A box of a whole tensor; it fills the rank's own tensor unless `local_offset` is given."""
    return Piece(
        name=name,
        global_shape=tuple(global_shape),
        offset=tuple(offset),
        shape=tuple(shape),
        local_offset=tuple(local_offset) if local_offset is not None else (0,) * len(shape),
        replica=replica,
    )


def flat_piece(
    name: str, global_shape: Sequence[int], begin: int, end: int, *, replica: int = 0
) -> Piece | None:
    """Elements `begin` to `end` of a whole tensor; None if there are none.

    Both count from the tensor's first element and may lie outside of the tensor, because flat
    buffers hold several tensors and padding.
    """
    begin, end = max(begin, 0), min(end, math.prod(global_shape))
    if begin >= end:
        return None
    return Piece(
        name=name,
        global_shape=tuple(global_shape),
        offset=(begin,),
        shape=(end - begin,),
        local_offset=(0,),
        is_flat=True,
        replica=replica,
    )
