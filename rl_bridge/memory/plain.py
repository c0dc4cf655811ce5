"""Which tensors are plain memory: their bytes lie where `data_ptr` says, all of them, as they are.

Everything that copies or digests by address asks here first. A tensor that is something else would
not fail later: it would read or write memory that is not its own.
"""

import torch
from torch.nn.parameter import is_lazy

__all__ = ["is_lazy_view", "not_plain"]

_CPU = torch.device("cpu")
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def is_lazy_view(tensor: torch.Tensor) -> bool:
    """Whether torch would conjugate or negate the stored elements when it reads them."""
    return tensor.is_conj() or tensor.is_neg()


def not_plain(tensor: torch.Tensor, device: torch.device = _CPU) -> str | None:
    """Say why a tensor is not plain memory of a device, with the remedy; None if it is."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        what = "a nested tensor" if tensor.is_nested else str(tensor.layout)
        return f"is {what}: use dense tensors"
    if tensor.device != device:
        if tensor.is_meta:
            remedy = "and has no bytes: materialise it first (to_empty, then load the weights)"
        elif device == _CPU:
            remedy = "and not on the CPU: copy it there first (.cpu())"
        else:
            remedy = f"and not on {device}: copy it there first (.to({str(device)!r}))"
        return f"is on {tensor.device} {remedy}"
    kind = type(tensor)
    if kind not in _PLAIN and (
        # A subclass that takes over dispatch is no plain memory: DTensor, FakeTensor, quantizers.
        kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or is_lazy(tensor)
    ):
        return f"is a {kind.__name__}: use plain tensors (a DTensor's full_tensor() or to_local())"
    if is_lazy_view(tensor):
        return "is a lazy conjugate or negative: call resolve_conj().resolve_neg() first"
    if tensor.numel() and not _has_its_storage(tensor):
        return "has lost its storage (freed or cut, by resharding or a sleeping engine): restore it"
    return None


def _has_its_storage(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        last = tensor.storage_offset() + tensor.numel() - 1
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((dim - 1) * step for dim, step in steps)
    nbytes = tensor.untyped_storage().nbytes()
    return (last + 1) * tensor.element_size() <= nbytes and bool(tensor.data_ptr())
