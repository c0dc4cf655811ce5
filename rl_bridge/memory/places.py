"""Where tensors' bytes lie, and what can read and write them there: the CPU, or a device.

Publishing, verifying, installing and proving are made of passes over bytes. A place gives the pass
that runs where the bytes are, and makes tensors that look at them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.memory import vm
from rl_bridge.memory.passes import Addresses, BytePlan
from rl_bridge.memory.tensors import not_plain


class Pass(Protocol):
    """A pass over the bytes of many tensors: see `passes.BytePlan`, which is the CPU's."""

    total_nbytes: int

    @property
    def non_finite(self) -> npt.NDArray[np.bool_]:
        """By tensor: the last digest found NaN or Inf in it. Empty if there were no dtypes."""

    def __len__(self) -> int:
        """Count the tensors."""

    def digest(self, src: Addresses, *, num_threads: int | None = None) -> bytes:
        """Digest the bytes at `src`: 16 bytes per tensor."""

    def copy(self, src: Addresses, dst: Addresses, *, num_threads: int | None = None) -> None:
        """Copy each tensor."""

    def copy_digest(
        self, src: Addresses, dst: Addresses, *, num_threads: int | None = None
    ) -> bytes:
        """Copy and digest in one pass."""


class Place(ABC):
    """Memory of one kind."""

    device: torch.device

    @abstractmethod
    def plan(self, nbytes: npt.NDArray[np.uint64], dtypes: Sequence[str] | None = None) -> Pass:
        """The pass over tensors of these sizes; with their dtypes it looks for NaN and Inf."""

    @abstractmethod
    def tensor(self, owner: Any, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Look at `nbytes` bytes at `offset` of a pin's buffer: one dimension, no copy."""

    @abstractmethod
    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """Look at bytes at an address that the caller keeps alive: uint8, one dimension."""

    def clear(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """Zero ranges that the caller keeps alive."""
        for address, nbytes in zip(addresses, sizes, strict=True):
            self.bytes_at(address, nbytes).zero_()

    @abstractmethod
    def private_ranges(self, address: int, nbytes: int) -> list[tuple[int, int]] | None:
        """Pages of a mapped version that this process wrote to; None if that is unknown."""

    def not_plain(self, tensor: torch.Tensor, *, is_source: bool = False) -> str | None:
        """Say why a tensor's bytes are not plain memory here, with the remedy; None if they are.

        One that is only a source may also be a lazy view, which torch resolves, or lie on an
        accelerator, from which torch brings it to the CPU.
        """
        is_carried = is_source and self.device.type == "cpu"
        return not_plain(
            tensor, self.device, takes_lazy_views=is_source, takes_accelerators=is_carried
        )


class CPUPlace(Place):
    """Memory of this process."""

    device = torch.device("cpu")

    def plan(self, nbytes: npt.NDArray[np.uint64], dtypes: Sequence[str] | None = None) -> BytePlan:
        """The compiled pass, on several threads."""
        return BytePlan(nbytes, dtypes=dtypes)

    def tensor(self, owner: Any, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Look at memory; the tensor's storage keeps `owner` alive."""
        return torch.frombuffer(owner, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """Look at memory."""
        return vm.tensor_at(address, nbytes)

    def clear(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """Zero ranges."""
        vm.clear(addresses, sizes)

    def private_ranges(self, address: int, nbytes: int) -> list[tuple[int, int]] | None:
        """Ask the kernel."""
        return vm.private_ranges(address, nbytes)


CPU_PLACE = CPUPlace()
