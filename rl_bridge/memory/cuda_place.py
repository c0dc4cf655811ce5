"""Memory of a GPU: tensors over it, and the pass that runs on it."""

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.memory.device.address_pass import AddressPass
from rl_bridge.memory.device.engines import bytes_at
from rl_bridge.memory.places import Pass, Place

__all__ = ["CUDAPlace", "cuda_place"]


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
        address = ctypes.addressof(owner) + offset
        return bytes_at(address, nbytes, self.device, owner=owner).view(dtype)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """Look at memory."""
        return bytes_at(address, nbytes, self.device)

    def private_ranges(self, address: int, nbytes: int) -> list[tuple[int, int]] | None:
        """None is this process's own: versions are mapped to be read only."""
        del address, nbytes
        return []


@lru_cache(maxsize=64)
def cuda_place(ordinal: int) -> CUDAPlace:
    """The place of a GPU; one object for each, so that places can be compared."""
    return CUDAPlace(ordinal)
