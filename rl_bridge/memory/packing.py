"""From a state dict to a packed arena: which tensor goes where, decided once and reused every step.

A `PackPlan` holds the layout and everything derived from it. Taking the same tensors again costs a
comparison, not a plan: names, memory addresses, shapes, dtypes and strides must be as before.
"""

from collections.abc import Mapping

import numpy as np
import torch

from rl_bridge.errors import IncompatibleUpdate, WeightBridgeUnavailableError
from rl_bridge.manifest.collector import collector_paused
from rl_bridge.manifest.dtypes import DTYPE_NBYTES, dtype_nbytes
from rl_bridge.manifest.table import KNOWN_LAYOUTS, TensorTable
from rl_bridge.memory.facts import TensorFacts, tensor_key
from rl_bridge.memory.passes import Addresses
from rl_bridge.memory.places import CPU_PLACE, Place
from rl_bridge.memory.plain import is_lazy_view

__all__ = ["PackPlan", "clear_padding", "dtype_name", "raw_elements"]


class _DtypeNames(dict[torch.dtype, str]):
    """Names by dtype, made when first asked for: printing one costs a microsecond."""

    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_DTYPE_NAMES = _DtypeNames()


def dtype_name(tensor: torch.Tensor) -> str:
    """Wire name of a tensor's dtype."""
    return _DTYPE_NAMES[tensor.dtype]


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw_elements(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements as integers: then torch copies every bit as it is.

    As themselves it would normalise bools, and for some dtypes it has no copy at all.
    """
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.conj()  # lazily once more: what is stored
    if tensor.is_neg():
        tensor = tensor._neg_view()  # noqa: SLF001 - torch has no public name for it
    if tensor.element_size() not in _SAME_SIZE:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_SAME_SIZE[tensor.element_size()])


def _check_source(name: str, tensor: torch.Tensor, place: Place) -> None:
    """Refuse what cannot travel as the bytes of a tensor of that place."""
    if dtype_name(tensor) not in DTYPE_NBYTES:
        dtype_nbytes(dtype_name(tensor), tensor=name)
    reason = place.not_plain(tensor)
    if reason is not None:
        msg = f"tensor {name!r} {reason}."
        raise WeightBridgeUnavailableError(msg)


def _check_trainable(trainable: frozenset[str], tensors: Mapping[str, torch.Tensor]) -> None:
    strange = [kind.__name__ for kind in set(map(type, trainable)) if not issubclass(kind, str)]
    if strange:
        msg = (
            f"trainable holds a {strange[0]}, expected names. Write, for a model's parameters, "
            "[name for name, p in model.named_parameters() if p.requires_grad]."
        )
        raise IncompatibleUpdate(msg)
    unknown = sorted(trainable - tensors.keys())
    if unknown:
        msg = f"trainable names tensors that the update does not hold: {unknown[:5]}."
        raise IncompatibleUpdate(msg)


def _stored_and_tied(
    tensors: Mapping[str, torch.Tensor], place: Place
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tell tensors to store, by name in order, from names tied to one of them."""
    stored: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    # By address first: whole keys are only made where two tensors start at the same byte.
    first_at: dict[int, str] = {}
    others_at: dict[int, list[str]] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        _check_source(name, tensor, place)
        address = tensor.data_ptr()
        first = first_at.setdefault(address, name)
        if first is not name and tensor.numel():
            key = tensor_key(tensor)
            others = others_at.setdefault(address, [])
            twins = [twin for twin in (first, *others) if tensor_key(stored[twin]) == key]
            if twins:
                ties[name] = twins[0]
                continue
            others.append(name)
        stored[name] = tensor
    return stored, ties


class PackPlan:
    """How one set of tensors is packed into an arena."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        trainable: frozenset[str] | None = None,
        *,
        place: Place = CPU_PLACE,
    ) -> None:
        """Lay out `tensors`.

        Args:
            tensors: what to publish: dense tensors, of any strides.
            trainable: names that a training step is expected to change; None if not declared.
            place: where all of them, and the arena, lie.

        Raises:
            WeightBridgeUnavailableError: a tensor that cannot travel this way; nothing was touched.
            UnknownDtype: a dtype outside the table.
            IncompatibleUpdate: `trainable` names a tensor that is not there.

        """
        self._place = place
        with collector_paused():
            self._lay_out(tensors, trainable)

    def _lay_out(
        self, tensors: Mapping[str, torch.Tensor], trainable: frozenset[str] | None
    ) -> None:
        stored, ties = _stored_and_tied(tensors, self._place)
        if trainable is not None:
            _check_trainable(trainable, tensors)
            trainable = frozenset(ties.get(name, name) for name in trainable)
        self.trainable = trainable
        table = TensorTable.pack(
            {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in stored.items()},
            ties=ties,
            trainable=trainable,
            device=self._place.device.type,
        )
        self.table = KNOWN_LAYOUTS.add(table)
        self.byte_plan = self._place.plan(self.table.nbytes_column)
        self._names = tuple(tensors)
        position = {name: index for index, name in enumerate(self._names)}
        self._order = [position[name] for name in self.table.names]
        values = list(tensors.values())
        self._facts = TensorFacts(values)
        is_dense = [tensor.is_contiguous() for tensor in values]
        # Strided tensors are gathered by torch, straight into the arena, and digested there.
        self._gathered = [
            (row, index) for row, index in enumerate(self._order) if not is_dense[index]
        ]
        # Those that could come as a lazy conjugate or negative of the same memory next time.
        self._may_be_lazy = [
            index
            for index, tensor in enumerate(values)
            # (One element is contiguous, whatever its stride.)
            if not is_dense[index] or tensor.is_complex() or tensor.numel() == 1
        ]
        pointers = np.array([values[index].data_ptr() for index in self._order], np.uint64)
        self._sources: Addresses = pointers

    def fits(self, tensors: Mapping[str, torch.Tensor], trainable: frozenset[str] | None) -> bool:
        """Whether `tensors` are the same views of the same memory as those planned for."""
        if trainable is not None:
            trainable = frozenset(self.table.ties.get(name, name) for name in trainable)
        return (
            self.trainable == trainable
            and tuple(tensors) == self._names
            and self._facts.hold(values := list(tensors.values()))
            and not any(is_lazy_view(values[i]) for i in self._may_be_lazy)
        )

    def pack(
        self, tensors: Mapping[str, torch.Tensor], address: int, *, num_threads: int | None = None
    ) -> bytes:
        """Copy `tensors` into the arena at `address` and digest them in the same pass.

        Returns:
            16 bytes per stored tensor, in layout order.

        """
        targets = self.table.offset_column + np.uint64(address)
        sources = self._sources
        if self._gathered:
            sources = sources.copy()
            values = list(tensors.values())
            for row, index in self._gathered:
                target = self._place.bytes_at(int(targets[row]), self.table.nbytes[row])
                elements = raw_elements(values[index])
                target.view(elements.dtype).view(elements.shape).copy_(elements)
                sources[row] = targets[row]
        return self.byte_plan.copy_digest(sources, targets, num_threads=num_threads)

    def digest_in_place(
        self, tensors: Mapping[str, torch.Tensor], *, num_threads: int | None = None
    ) -> bytes:
        """Digest `tensors` where they lie.

        Returns:
            16 bytes per stored tensor, in layout order.

        Raises:
            WeightBridgeUnavailableError: one of them is strided.

        """
        del tensors  # those that it was made of
        if self._gathered:
            name = self.table.names[self._gathered[0][0]]
            msg = (
                f"tensor {name!r} is not contiguous, so it cannot be read where it lies. Make it "
                "contiguous, or have it copied: without in_place."
            )
            raise WeightBridgeUnavailableError(msg)
        return self.byte_plan.digest(self._sources, num_threads=num_threads)

    def clear_padding(self, address: int) -> None:
        """See `clear_padding`."""
        clear_padding(self.table, address, self._place)


def clear_padding(table: TensorTable, address: int, place: Place = CPU_PLACE) -> None:
    """Zero the bytes between tensors, so that an arena's content follows from its tensors."""
    ends = table.offset_column + table.nbytes_column
    gaps = np.append(table.offset_column, np.uint64(table.arena_nbytes))[1:] - ends
    found = np.flatnonzero(gaps)
    starts = (ends[found] + np.uint64(address)).tolist()
    place.clear(starts, gaps[found].tolist())
