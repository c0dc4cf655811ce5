"""Tensors of tests: made from a seed, and their bytes, found without the library.

`bytes_of` is the oracle: the logical, row-major bytes of a tensor, found by walking its storage as
bytes. It uses neither the library nor torch's arithmetic on the dtype, so NaNs with a payload,
bools that are neither 0 nor 1 and signalling values count like any others.
"""

import ctypes
from collections.abc import Mapping
from math import prod

import torch

from rl_bridge.manifest.dtypes import DTYPE_NBYTES


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A contiguous tensor of random bytes: every bit pattern that the dtype's size allows.

    It lies on torch's default device, and its bytes are the same on each.
    """
    nbytes = prod(shape) * DTYPE_NBYTES[dtype]
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator("cpu").manual_seed(seed)
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator, device="cpu")
    return raw.to(torch.get_default_device()).view(kind).view(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's logical bytes, row-major."""
    size = tensor.element_size()
    if tensor.numel() == 0:
        return b""
    tensor = tensor.detach()
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage = storage.set_(tensor.untyped_storage())
    dense = storage.as_strided(
        (*tensor.shape, size),
        (*(step * size for step in tensor.stride()), 1),
        tensor.storage_offset() * size,
    )
    dense = dense.contiguous().cpu()
    return ctypes.string_at(dense.data_ptr(), dense.numel())


def contents_of(
    named: Mapping[str, torch.Tensor],
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything about some tensors that must survive a journey: dtype, shape and bytes."""
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), bytes_of(tensor))
        for name, tensor in named.items()
    }
