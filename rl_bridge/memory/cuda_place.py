"""Memory of a GPU: tensors over it, and the pass that runs on it."""

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.errors import SegmentError
from rl_bridge.memory.device.address_pass import AddressPass
from rl_bridge.memory.places import Pass, Place

__all__ = ["CUDAPlace", "cuda_place"]


class _Bytes:
    """Memory as torch takes it: ``__cuda_array_interface__``, version 3.

    torch keeps this object for as long as the storage that it makes of it, and this object keeps
    `owner`. https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    """

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner = owner
        # torch refuses memory that is marked as read-only; what keeps writers out is its mapping.
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class CUDAPlace(Place):
    """Memory of one GPU."""

    def __init__(self, ordinal: int) -> None:
        """Name the GPU by its number in this process."""
        self.device = torch.device("cuda", ordinal)

    def plan(self, nbytes: npt.NDArray[np.uint64]) -> Pass:
        """The pass on this GPU, on torch's current stream."""
        return AddressPass(nbytes, self.device)

    def tensor(self, owner: Any, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Look at memory; the tensor's storage keeps `owner` alive."""
        return self._wrapped(owner, ctypes.addressof(owner) + offset, nbytes).view(dtype)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """Look at memory."""
        return self._wrapped(None, address, nbytes)

    def private_ranges(self, address: int, nbytes: int) -> list[tuple[int, int]] | None:
        """None is this process's own: versions are mapped to be read only."""
        del address, nbytes
        return []

    def _wrapped(self, owner: Any, address: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        found = torch.as_tensor(_Bytes(owner, address, nbytes), device=self.device)
        if found.data_ptr() != address or found.device != self.device:
            # torch copies, without a word, where it takes the memory for another device's.
            msg = (
                f"memory at {address:#x} is not on {self.device}: torch took it for "
                f"{found.device}. Publish and import on one GPU."
            )
            raise SegmentError(msg)
        return found


@lru_cache(maxsize=64)
def cuda_place(ordinal: int) -> CUDAPlace:
    """The place of a GPU; one object for each, so that places can be compared."""
    return CUDAPlace(ordinal)
