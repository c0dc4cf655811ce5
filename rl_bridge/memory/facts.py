"""Where tensors are and what they are, noted, to see cheaply whether that is still so.

Asked of every tensor before and after every update. Asking torch for five attributes of each of
40,000 tensors takes 10 ms; the compiled module asks through the function table that torch shows
other array libraries (DLPack 1.3, github.com/dmlc/dlpack), which takes a fifth of that.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import eq
from typing import Any

import torch

from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.memory.passes import native_module

__all__ = ["TensorFacts", "tensor_key"]

Key = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]

# Torch's table, a capsule; None before torch 2.10.
_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def tensor_key(tensor: torch.Tensor) -> Key:
    """Tell whether two tensors are the same view of the same memory: equal keys, equal views."""
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class TensorFacts:
    """Where some tensors are and what they are, to see cheaply whether that is still so."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note addresses, shapes, dtypes and strides."""
        # In the form that the compiled module compares, or else one key for each.
        self._record: bytes | None = _ask("tensor_facts", tensors)
        self._keys = None if self._record is not None else [tensor_key(t) for t in tensors]

    def hold(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether `tensors` are the same views of the same memory."""
        if self._record is not None:
            return bool(_ask("facts_hold", tensors, self._record))
        tensors = list(tensors)
        keys = self._noted()
        try:
            return len(tensors) == len(keys) and all(map(eq, map(tensor_key, tensors), keys))
        except RuntimeError:
            return False  # sparse by now, for instance: torch has no address to tell

    def hold_unnegated(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether they `hold`, and none of `tensors` reads as the negative of what is stored.

        A tensor object may become such a view of its memory, whatever its dtype, and be all the
        same otherwise. In one pass over them: two take half as long again.
        """
        if self._record is not None:
            return bool(_ask("facts_hold", tensors, self._record, torch.Tensor.is_neg))
        return self.hold(tensors) and not any(map(torch.Tensor.is_neg, tensors))

    def restore(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Make `tensors` again the views that they were, of the storages that they have now.

        Returns:
            Positions of those whose storage does not hold their old place any more.

        """
        lost = []
        for index, (tensor, key) in enumerate(zip(tensors, self._noted(), strict=True)):
            if tensor.numel() == 0 or tensor_key(tensor) == key:
                continue
            pointer, shape, strides, dtype = key
            storage = tensor.untyped_storage()
            extent = 1 + sum((dim - 1) * step for dim, step in zip(shape, strides, strict=True))
            offset = pointer - storage.data_ptr()
            if not 0 <= offset <= storage.nbytes() - extent * dtype.itemsize:
                lost.append(index)
                continue
            view = torch.empty(0, dtype=torch.uint8, device=storage.device).view(dtype)
            tensor.data = view.set_(storage, offset // dtype.itemsize, shape, strides)
        return lost

    def _noted(self) -> list[Key]:
        """What was noted, one key per tensor."""
        if self._keys is None:
            self._keys = list(_keys_in(self._record or b""))
        return self._keys


def _ask(question: str, *arguments: object) -> Any:
    """Ask the compiled module; None where it cannot tell: DLPack does not name every dtype."""
    native = native_module()
    if native is None or _EXCHANGE is None:
        return None
    try:
        return getattr(native, question)(_EXCHANGE, *arguments)
    except (BufferError, RuntimeError):
        return None


# As the compiled module writes them: address, offset, device type and number, dimensions, dtype;
# then the shape and the strides.
_FACT = struct.Struct("=QQiiiI")


def _keys_in(record: bytes) -> Iterator[Key]:
    at = 0
    while at < len(record):
        address, offset, _, _, ndim, dtype = _FACT.unpack_from(record, at)
        at += _FACT.size
        numbers = struct.unpack_from(f"={2 * ndim}q", record, at)
        at += 16 * ndim
        yield address + offset, numbers[:ndim], numbers[ndim:], _dtypes()[dtype]


def _learn_layout() -> None:
    """Tell the compiled module which of a tensor's words to ask memory for ahead of time."""
    native = native_module()
    if native is not None:
        sample = torch.empty(1, device="cpu")
        # Without these, as another torch may be, nothing is asked for ahead of time.
        addresses = (getattr(part, "_cdata", 0) for part in (sample, sample.untyped_storage()))
        native.learn_layout(torch.Tensor.__base__, sample, *addresses)


_learn_layout()


@lru_cache(maxsize=1)
def _dtypes() -> dict[int, torch.dtype]:
    """DLPack's number of each dtype, as the compiled module tells it."""
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    views = [memory.view(getattr(torch, name)) for name in DTYPE_NBYTES]
    records = [_ask("tensor_facts", [view]) for view in views]
    return {
        _FACT.unpack_from(record)[-1]: view.dtype
        for record, view in zip(records, views, strict=True)
        if record is not None
    }
