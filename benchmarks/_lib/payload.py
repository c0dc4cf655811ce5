"""The state dict under test: bf16 tensors of which every byte changes with every version.

A word of tensor ``i`` at position ``k`` is ``k * 40503 + i * 2053 + version * 0x0101`` modulo 2**16,
so both processes know what any element of any version must be without telling each other, and one
in-place addition moves both bytes of every word.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Payload", "PayloadSpec", "find_wrong_tensor"]

STEP = 0x0101
_POSITION_FACTOR = 40503
_TENSOR_FACTOR = 2053
_WORD = 1 << 16
_ITEMSIZE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSpec:
    """The shape of a payload; both processes build their side from it."""

    num_tensors: int
    rows: int
    cols: int

    @classmethod
    def for_nbytes(cls, nbytes: int, *, num_tensors: int = 300, cols: int = 1024) -> Self:
        """Return the spec of ``num_tensors`` equal tensors that comes nearest to ``nbytes``."""
        rows = max(1, round(nbytes / (num_tensors * cols * _ITEMSIZE)))
        return cls(num_tensors=num_tensors, rows=rows, cols=cols)

    @property
    def numel(self) -> int:
        """Elements per tensor."""
        return self.rows * self.cols

    @property
    def tensor_nbytes(self) -> int:
        """Bytes per tensor."""
        return self.numel * _ITEMSIZE

    @property
    def nbytes(self) -> int:
        """Bytes of the whole state dict."""
        return self.tensor_nbytes * self.num_tensors

    def names(self) -> list[str]:
        """Return the tensor names, in order."""
        return [f"model.layers.{index}.weight" for index in range(self.num_tensors)]

    def expected_words(self, index: int, version: int, positions: np.ndarray) -> np.ndarray:
        """Return what tensor ``index`` of ``version`` holds at ``positions``, as 16-bit words."""
        offset = (index * _TENSOR_FACTOR + version * STEP) % _WORD
        words = positions.astype(np.uint16) * np.uint16(_POSITION_FACTOR)
        return (words + np.uint16(offset)).view(np.int16)


@dataclass(slots=True, kw_only=True)
class Payload:
    """A live state dict in the trainer: updated in place, as an optimizer would."""

    spec: PayloadSpec
    version: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, spec: PayloadSpec, *, shared: bool = False) -> Self:
        """Allocate and fill version 0; ``shared`` puts each tensor into torch's shared memory."""
        positions = np.arange(spec.numel, dtype=np.uint32)
        payload = cls(spec=spec)
        for index, name in enumerate(spec.names()):
            words = torch.from_numpy(spec.expected_words(index, 0, positions))
            tensor = torch.empty(spec.rows, spec.cols, dtype=torch.bfloat16)
            tensor.view(torch.int16).copy_(words.view(spec.rows, spec.cols))
            payload.tensors[name] = tensor.share_memory_() if shared else tensor
        return payload

    def advance_to(self, version: int) -> None:
        """Rewrite every byte of every tensor in place so that it holds ``version``."""
        step = ((version - self.version) * STEP) % _WORD
        signed = step - _WORD if step >= _WORD // 2 else step
        for tensor in self.tensors.values():
            tensor.view(torch.int16).add_(signed)
        self.version = version


def find_wrong_tensor(
    tensors: Mapping[str, torch.Tensor], spec: PayloadSpec, version: int, *, full: bool = False
) -> str | None:
    """Return what is wrong with ``tensors`` as ``version``, or None.

    Looks at the first, middle and last element of every tensor, or with ``full`` at all of them.
    """
    names = spec.names()
    if list(tensors) != names and set(tensors) != set(names):
        return f"expected {len(names)} tensors, got {len(tensors)} with other names"
    last = spec.numel - 1
    positions = (
        np.arange(spec.numel, dtype=np.uint32)
        if full
        else np.array([0, spec.numel // 2, last], dtype=np.uint32)
    )
    index_tensor = torch.from_numpy(positions.astype(np.int64))
    for index, name in enumerate(names):
        words = tensors[name].view(torch.int16).reshape(-1)
        seen = words if full else words[index_tensor]
        if not np.array_equal(seen.numpy(), spec.expected_words(index, version, positions)):
            return f"{name} does not hold version {version}"
    return None
