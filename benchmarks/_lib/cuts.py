"""Tensors that are cut evenly over ranks."""

from typing import Any

__all__ = ["placement"]


def placement(name: str, whole: tuple[int, ...], dim: int, rank: int, ranks: int) -> Any:
    """Where a rank's part of a bfloat16 tensor lies in the whole."""
    from rl_bridge.groups import Piece, Placement

    shape = tuple(size // ranks if d == dim else size for d, size in enumerate(whole))
    offset = tuple(rank * size if d == dim else 0 for d, size in enumerate(shape))
    piece = Piece(
        name=name, global_shape=whole, offset=offset, shape=shape, local_offset=(0,) * len(whole)
    )
    return Placement(dtype="bfloat16", shape=shape, pieces=(piece,))
