"""Where tensors are and what they are, noted, to see cheaply whether that is still so.

Asked of every tensor before and after every update. Asking torch for five attributes of each of
40,000 tensors takes 10 ms; the compiled module asks through the function table that torch shows
other array libraries (DLPack 1.3, github.com/dmlc/dlpack), which takes a fifth of that.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter, eq, is_
from typing import Any

import torch

from rl_bridge.manifest.table import row_major_stride
from rl_bridge.memory.passes import native_module

__all__ = ["TensorFacts", "tensor_key"]

_SHAPE = attrgetter("shape")
_DTYPE = attrgetter("dtype")
# Torch's table, a capsule; None before torch 2.10.
_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def tensor_key(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Tell whether two tensors are the same view of the same memory: equal keys, equal views."""
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class TensorFacts:
    """Where some tensors are and what they are, to see cheaply whether that is still so.

    The comparison streams: it makes no list of 40,000 shapes, whose garbage would cost more than
    the comparison itself.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note addresses, shapes, dtypes and strides."""
        self._pointers = [tensor.data_ptr() for tensor in tensors]
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        # Asking whether a tensor is contiguous is half the price of asking for its strides.
        self._strides = None
        if not all(map(torch.Tensor.is_contiguous, tensors)):
            self._strides = [tensor.stride() for tensor in tensors]
        # The same once more, in the form that the compiled module compares.
        self._record = self._ask("tensor_facts", list(tensors))

    def hold(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether `tensors` are the same views of the same memory."""
        tensors = list(tensors)
        if self._record is not None:
            answer = self._ask("facts_hold", tensors, self._record)
            if answer is not None:
                return bool(answer)
        try:
            return (
                len(tensors) == len(self._pointers)
                and all(map(eq, map(torch.Tensor.data_ptr, tensors), self._pointers))
                and all(map(eq, map(_SHAPE, tensors), self._shapes))
                and all(map(is_, map(_DTYPE, tensors), self._dtypes))
                and self._same_strides(tensors)
            )
        except RuntimeError:
            return False  # sparse by now, for instance: torch has no address to tell

    @staticmethod
    def _ask(question: str, *arguments: object) -> Any:
        """Ask the compiled module; None where it cannot tell: DLPack does not name every dtype."""
        native = native_module()
        if native is None or _EXCHANGE is None:
            return None
        try:
            return getattr(native, question)(_EXCHANGE, *arguments)
        except (BufferError, RuntimeError):
            return None

    def restore(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Make `tensors` again the views that they were, of the storages that they have now.

        Returns:
            Positions of those whose storage does not hold their old place any more.

        """
        lost = []
        for index, tensor in enumerate(tensors):
            shape, dtype = self._shapes[index], self._dtypes[index]
            strides = row_major_stride(shape) if self._strides is None else self._strides[index]
            key = (self._pointers[index], tuple(shape), strides, dtype)
            if tensor.numel() == 0 or tensor_key(tensor) == key:
                continue
            storage = tensor.untyped_storage()
            extent = 1 + sum((dim - 1) * step for dim, step in zip(shape, strides, strict=True))
            offset = self._pointers[index] - storage.data_ptr()
            if not 0 <= offset <= storage.nbytes() - extent * dtype.itemsize:
                lost.append(index)
                continue
            view = torch.empty(0, dtype=torch.uint8).view(dtype)
            tensor.data = view.set_(storage, offset // dtype.itemsize, shape, strides)
        return lost

    def _same_strides(self, tensors: Sequence[torch.Tensor]) -> bool:
        if self._strides is None:
            return all(map(torch.Tensor.is_contiguous, tensors))
        return all(map(eq, map(torch.Tensor.stride, tensors), self._strides))
