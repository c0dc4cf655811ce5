"""How vLLM's backends pack tensors into buffers: by the same rule on both sides, sent by neither.

``nccl`` closes a buffer behind the tensor with which it holds more than its size; ``ipc``, whose
one buffer has exactly that size, before the tensor that no longer fits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rl_bridge.errors import IncompatibleUpdate

__all__ = [
    "DEFAULT_BUFFER_NBYTES",
    "PackedBuffer",
    "flat_bytes",
    "full_buffers",
    "overfull_buffers",
]

DEFAULT_BUFFER_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PackedBuffer:
    """Tensors that lie in one buffer, one behind the other.

    Attributes:
        names: of the tensors.
        sizes: bytes of each.

    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(self.sizes)

    def fill(self, memory: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors to the start of `memory`, which is uint8."""
        offset = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            memory[offset : offset + size].copy_(flat_bytes(tensors[name]))
            offset += size


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in row-major order, as bytes."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def overfull_buffers(names: Sequence[str], sizes: Sequence[int], limit: int) -> list[PackedBuffer]:
    """Cut as ``nccl`` does: a buffer ends behind the tensor that makes it larger than `limit`."""
    made: list[PackedBuffer] = []
    first, total = 0, 0
    for index, size in enumerate(sizes):
        total += size
        if total > limit or index == len(sizes) - 1:
            made.append(_cut(names, sizes, first, index + 1))
            first, total = index + 1, 0
    return made


def full_buffers(names: Sequence[str], sizes: Sequence[int], limit: int) -> list[PackedBuffer]:
    """Cut as ``ipc`` does: no buffer is larger than `limit`.

    Raises:
        IncompatibleUpdate: a tensor is.

    """
    made: list[PackedBuffer] = []
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if size > limit:
            msg = (
                f"tensor {names[index]!r} has {size} bytes, the buffer {limit}. Give it at least "
                f"{size}."
            )
            raise IncompatibleUpdate(msg)
        if total + size > limit:
            made.append(_cut(names, sizes, first, index))
            first, total = index, 0
        total += size
    if total:
        made.append(_cut(names, sizes, first, len(sizes)))
    return made


def _cut(names: Sequence[str], sizes: Sequence[int], first: int, end: int) -> PackedBuffer:
    return PackedBuffer(tuple(names[first:end]), tuple(sizes[first:end]))
