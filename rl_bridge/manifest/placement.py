"""Where a rank's tensors lie in the whole tensors: no bytes, no torch.

A trainer's rank holds parts of tensors. Each of its tensors consists of one or more *pieces*; a
piece is a box of a whole tensor, or a range of its elements in row-major order (``is_flat``), which
is how ZeRO-3 and FSDP1 cut. Fused tensors that are cut per rank (gate and up of one rank side by
side) have several pieces.
"""

from dataclasses import dataclass

__all__ = ["Piece", "Placement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One box of a whole tensor, and where it lies in the rank's own tensor.

    Attributes:
        name: of the whole tensor.
        global_shape: shape of the whole tensor.
        offset: first index in each dimension of the whole; one number where `is_flat`.
        shape: of the box; one number where `is_flat`.
        local_offset: first index of the box in the rank's own tensor, same dimensions as `shape`.
        is_flat: `offset`, `shape` and `local_offset` count elements in row-major order.
        replica: 0 for the copy that counts, k for the k-th further copy of the same elements.

    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local_offset: tuple[int, ...]
    is_flat: bool = False
    replica: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What one tensor of a rank consists of.

    Attributes:
        dtype: wire name, such as ``bfloat16``.
        shape: of the rank's own tensor, as it travels.
        pieces: what it holds; together they fill it, except for padding.

    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
