"""The state dict under test: bf16 tensors of which every byte changes with every version.

The word of tensor ``i`` at position ``k`` is ``k * 40503 + i * 2053 + version * 0x0101`` modulo
2**16, so both processes know what any element of any version must be without telling each other,
and one in-place addition moves both bytes of every word.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Payload", "PayloadSpec", "find_wrong_tensor"]

STEP = 0x0101
_POSITION_FACTOR = 40503
_TENSOR_FACTOR = 2053
_WORD = 1 << 16
_ITEMSIZE = 2
_SMALL = 8192


@functools.lru_cache(maxsize=4)
def _ramp(numel: int) -> npt.NDArray[np.uint16]:
    """Return the words of tensor 0, version 0."""
    return np.arange(numel, dtype=np.uint32).astype(np.uint16) * np.uint16(_POSITION_FACTOR)


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

    def all_words(
        self, version: int, positions: tuple[int, ...] | None = None
    ) -> npt.NDArray[np.int16]:
        """Return the words of every tensor of ``version``, there or everywhere, one row each."""
        ramp = _ramp(self.numel)
        chosen = ramp if positions is None else ramp[list(positions)]
        offsets = np.arange(self.num_tensors, dtype=np.uint32) * _TENSOR_FACTOR + version * STEP
        return (chosen[None, :] + offsets.astype(np.uint16)[:, None]).view(np.int16)

    def expected_words(self, index: int, version: int) -> npt.NDArray[np.int16]:
        """Return all words of tensor ``index`` of ``version``."""
        offset = (index * _TENSOR_FACTOR + version * STEP) % _WORD
        return (_ramp(self.numel) + np.uint16(offset)).view(np.int16)


@dataclass(slots=True, kw_only=True)
class Payload:
    """A live state dict in the trainer: updated in place, as an optimizer would."""

    spec: PayloadSpec
    version: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, spec: PayloadSpec, *, shared: bool = False) -> Self:
        """Allocate and fill version 0; ``shared`` puts each tensor into torch's shared memory."""
        payload = cls(spec=spec)
        for index, name in enumerate(spec.names()):
            tensor = torch.empty(spec.rows, spec.cols, dtype=torch.bfloat16)
            np.copyto(tensor.view(torch.int16).view(-1).numpy(), spec.expected_words(index, 0))
            payload.tensors[name] = tensor.share_memory_() if shared else tensor  # type: ignore[no-untyped-call]
        return payload

    def advance_to(self, version: int) -> None:
        """Rewrite every byte of every tensor in place so that it holds ``version``."""
        step = np.uint16(((version - self.version) * STEP) % _WORD)
        for tensor in self.tensors.values():
            # numpy keeps to one thread: torch's would spin for a while after the work and take a
            # core from whatever is timed next.
            words = tensor.view(torch.int16).numpy().view(np.uint16)
            np.add(words, step, out=words)
        self.version = version


def find_wrong_tensor(
    tensors: Mapping[str, torch.Tensor], spec: PayloadSpec, version: int, *, full: bool = False
) -> str | None:
    """Return what is wrong with ``tensors`` as ``version``, or None.

    Looks at the first, middle and last element of every tensor, or with ``full`` at all of them.
    """
    names = spec.names()
    if len(tensors) != len(names):
        return f"expected {len(names)} tensors, got {len(tensors)}"
    try:
        flat = [tensors[name].view(torch.int16).view(-1) for name in names]
    except KeyError as error:
        return f"tensor {error} is missing"
    if full and spec.numel > _SMALL:
        for index, words in enumerate(flat):
            if not np.array_equal(words.numpy(), spec.expected_words(index, version)):
                return f"{names[index]} does not hold version {version}"
        return None
    positions = None if full else (0, spec.numel // 2, spec.numel - 1)
    chosen = slice(None) if positions is None else torch.tensor(positions)
    # All tensors in one go: tens of thousands of little comparisons would take seconds.
    seen = torch.stack([words[chosen] for words in flat]).numpy()
    rows = np.flatnonzero((spec.all_words(version, positions) != seen).any(axis=1))
    return f"{names[rows[0]]} does not hold version {version}" if len(rows) else None
