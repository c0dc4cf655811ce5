"""An imported update as a mapping: what bridges return and installers take."""

from collections.abc import Iterator, Mapping
from typing import NoReturn

import numpy as np
import torch

from rl_bridge.errors import WeightUpdateRejectedError
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.passes import Addresses
from rl_bridge.memory.pins import Pin, tensor_in

__all__ = ["ImportedTensors"]


class ImportedTensors(Mapping[str, torch.Tensor]):
    """An imported update: name -> tensor, each made when it is asked for.

    Tied names give the same tensor. The mapping and every tensor from it keep the version's bytes
    alive, also after ``release``; writing to a tensor changes this process's copy only.
    """

    def __init__(self, table: TensorTable, pin: Pin) -> None:
        """Look at a pinned arena through its layout."""
        self.table = table
        self._pin: Pin | None = pin
        self._made: dict[int, torch.Tensor] = {}

    @property
    def pin(self) -> Pin:
        """The memory behind it.

        Raises:
            WeightUpdateRejectedError: the update was refused or undone, and its memory given back.

        """
        if self._pin is None:
            msg = "these are the tensors of an update that was refused or undone: they are gone."
            raise WeightUpdateRejectedError(msg)
        return self._pin

    @property
    def is_forgotten(self) -> bool:
        """Whether `forget` was called."""
        return self._pin is None

    def forget(self) -> None:
        """Let go of the memory, whoever still holds the mapping: a kept exception, for instance.

        Tensors that were taken from it keep their bytes.
        """
        self._pin = None
        self._made = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Make, or find, one tensor."""
        row = self.table.rows[name]
        tensor = self._made.get(row)
        if tensor is None:
            table = self.table
            tensor = tensor_in(
                self.pin,
                table.offsets[row],
                table.nbytes[row],
                table.dtypes[row],
                table.shapes[row],
            )
            tensor = self._made.setdefault(row, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        """Go over the names, stored ones first, each part sorted."""
        return iter(self.table.rows)

    def __len__(self) -> int:
        """Count the names, tied ones included."""
        return len(self.table.rows)

    def __repr__(self) -> str:
        """Say how many there are rather than printing weights."""
        return f"<{len(self)} imported tensors, {self.table.total_nbytes} bytes>"

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            TypeError: always.

        """
        msg = (
            f"{len(self)} imported tensors cannot be pickled or copied as they are: they lie in "
            "memory of a publisher. Copy the tensors, {name: t.clone() for name, t in ...items()}, "
            "or send the manifest and import it in the other process."
        )
        raise TypeError(msg)

    @property
    def addresses(self) -> Addresses:
        """Address of each stored tensor's bytes, uint64, in layout order."""
        return self.table.offset_column + np.uint64(self.pin.address)
