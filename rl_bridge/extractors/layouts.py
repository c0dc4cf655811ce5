"""Which part of a whole tensor a rank of a mesh holds: pure functions of shapes and coordinates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rl_bridge.manifest.placement import Piece

__all__ = ["Cut", "box_piece", "cut_evenly", "flat_piece", "replica_of", "shard_box", "whole_piece"]


@dataclass(frozen=True, slots=True)
class Cut:
    """How one dimension of a mesh cuts a tensor.

    Attributes:
        dim: of the tensor; None where this dimension of the mesh holds copies.
        is_inner: it cuts what the other dimensions of the mesh left (FSDP over tensor-parallel
            shards); without it, cuts apply in the mesh's order.

    """

    dim: int | None
    is_inner: bool = False


def cut_evenly(size: int, parts: int, index: int) -> tuple[int, int]:
    """Begin and length of part `index`, as ``torch.chunk`` cuts: the last parts may be short."""
    length = -(-size // parts)
    begin = min(index * length, size)
    return begin, min(length, size - begin)


def shard_box(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], cuts: Sequence[Cut]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First index and shape of the box that a rank holds.

    Args:
        shape: of the whole tensor.
        mesh_shape: ranks along each dimension of the mesh.
        coordinate: of the rank in the mesh.
        cuts: one for each dimension of the mesh.

    """
    offset, box = [0] * len(shape), list(shape)
    steps = list(zip(cuts, mesh_shape, coordinate, strict=True))
    ordered = [step for step in steps if not step[0].is_inner]
    for cut, parts, index in [*ordered, *(step for step in steps if step[0].is_inner)]:
        if cut.dim is not None:
            begin, length = cut_evenly(box[cut.dim], parts, index)
            offset[cut.dim] += begin
            box[cut.dim] = length
    return tuple(offset), tuple(box)


def replica_of(mesh_shape: Sequence[int], coordinate: Sequence[int], cuts: Sequence[Cut]) -> int:
    """The number of a rank among those that hold the same box; 0 for the first."""
    number = 0
    for cut, parts, index in zip(cuts, mesh_shape, coordinate, strict=True):
        if cut.dim is None:
            number = number * parts + index
    return number


def whole_piece(name: str, shape: Sequence[int], replica: int = 0) -> Piece:
    """The piece of a rank that holds all of a tensor."""
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
    """Elements `begin` to `end` of a whole tensor; None where that is nothing.

    Both are counted from the tensor's first element, and may lie outside of it: so flat buffers of
    several tensors are cut, and their padding.
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
