"""From a state dict to a packed arena: which tensor goes where, decided once and reused every step.

A `PackPlan` holds the layout and everything derived from it. Taking the same tensors again costs a
comparison, not a plan: names, memory addresses, shapes, dtypes and strides must be as before.

An arena of the CPU ends with its leaf list (`rl_bridge.manifest.table`), and with its column list
(`rl_bridge.manifest.columns`) if its publisher makes one. The pass that digests the tensors makes
both; they are written when the tensors are in, so they describe the sealed bytes.
"""

import ctypes
from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
import xxhash

from rl_bridge.errors import (
    ChecksumMismatch,
    IncompatibleUpdate,
    MalformedManifest,
    WeightBridgeUnavailableError,
    did_you_mean,
)
from rl_bridge.manifest.digest import DIGEST_NBYTES, LENGTH_NBYTES, digests_differ
from rl_bridge.manifest.dtypes import DTYPE_NBYTES, dtype_nbytes
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable, collector_paused, row_major_stride
from rl_bridge.memory.passes import Addresses, BytePlan
from rl_bridge.memory.places import CPU_PLACE, Place
from rl_bridge.memory.tensors import TensorFacts, is_lazy_view, is_on_accelerator, tensor_key


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_name(tensor: torch.Tensor) -> str:
    """Wire name of a tensor's dtype."""
    return _name_of(tensor.dtype)


def wire_dtype(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor travels: only floating-point tensors are cast."""
    return own if asked is None or not own.is_floating_point else asked


def checked_dtype(dtype: object) -> torch.dtype | None:
    """Check the dtype that a user asks for.

    Raises:
        TypeError: it is no floating-point dtype of torch.

    """
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype!r}: expected one such as torch.bfloat16, or None.")
    dtype_nbytes(_name_of(dtype))
    return dtype


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw_elements(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements, as they are stored, as integers: then torch copies every bit.

    As themselves it would normalise bools, and for some dtypes it has no copy at all.
    """
    tensor = tensor.detach()
    # Without a lazy conjugation or negation.
    if tensor.is_conj():
        tensor = tensor.conj()  # a second lazy conjugation takes the first one away
    if tensor.is_neg():
        tensor = tensor._neg_view()  # noqa: SLF001 - torch has no public name for it
    if tensor.element_size() not in _SAME_SIZE:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_SAME_SIZE[tensor.element_size()])


def _laziness(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()


def _check_source(name: str, tensor: torch.Tensor, place: Place) -> None:
    """Refuse what cannot travel as the bytes of a tensor of that place."""
    if dtype_name(tensor) not in DTYPE_NBYTES:
        dtype_nbytes(dtype_name(tensor), tensor=name)
    reason = place.not_plain(tensor, is_source=True)
    if reason is not None:
        raise WeightBridgeUnavailableError(f"tensor {name!r} {reason}.")


def _check_trainable(trainable: frozenset[str], tensors: Mapping[str, torch.Tensor]) -> None:
    strange = [kind.__name__ for kind in set(map(type, trainable)) if not issubclass(kind, str)]
    if strange:
        raise IncompatibleUpdate(
            f"trainable holds a {strange[0]}, expected names. Write, for a model's parameters, "
            "[name for name, p in model.named_parameters() if p.requires_grad]."
        )
    unknown = sorted(trainable - tensors.keys())
    if unknown:
        raise IncompatibleUpdate(
            f"trainable names tensors that the update does not hold: {unknown[:5]}, expected some "
            f"of its {len(tensors)} names.{did_you_mean(unknown[0], tensors)}"
        )


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
            key = tensor_key(tensor), _laziness(tensor)
            others = others_at.setdefault(address, [])
            twins = [
                twin
                for twin in (first, *others)
                if (tensor_key(stored[twin]), _laziness(stored[twin])) == key
            ]
            if twins:
                ties[name] = twins[0]
                continue
            others.append(name)
        stored[name] = tensor
    return stored, ties


class PackPlan:
    """How one set of tensors is packed into an arena.

    Attributes:
        table: the layout.
        byte_plan: the pass over its tensors.
        leaf_list: of what was packed, or digested in place, last; empty if the layout has none.
        column_list: likewise.
        columns_digest: of `column_list`, for the manifest's header; empty where there is none.

    """

    columns_digest = ""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        trainable: frozenset[str] | None = None,
        *,
        place: Place = CPU_PLACE,
        columns: bool = False,
        looks: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Lay out `tensors`.

        Args:
            tensors: what to publish: dense tensors of any strides, lazy views included.
            trainable: names that a training step is expected to change; None if not declared.
            place: where the arena lies, and all of them; into an arena on the CPU, tensors of an
                accelerator go as well.
            columns: make a column list, too, if any tensor can be cut and `place` is the CPU's.
            looks: look for NaN and Inf in what is packed.
            dtype: to which floating-point tensors are cast as they are packed; None leaves them as
                they are.

        Raises:
            WeightBridgeUnavailableError: a tensor that cannot travel this way; nothing was touched.
            UnknownDtype: a dtype outside the table.
            IncompatibleUpdate: `trainable` names a tensor that is not there.

        """
        self._place = place
        self._looks = looks
        self._dtype = dtype
        self.leaf_list = self.column_list = np.empty(0, np.uint8)
        with collector_paused():
            self._lay_out(tensors, trainable, columns=columns)

    def _lay_out(
        self,
        tensors: Mapping[str, torch.Tensor],
        trainable: frozenset[str] | None,
        *,
        columns: bool,
    ) -> None:
        stored, ties = _stored_and_tied(tensors, self._place)
        if trainable is not None:
            _check_trainable(trainable, tensors)
            trainable = frozenset(ties.get(name, name) for name in trainable)
        self.trainable = trainable
        is_on_cpu = self._place.device.type == "cpu"
        table = TensorTable.pack(
            {
                name: (_name_of(wire_dtype(tensor.dtype, self._dtype)), tuple(tensor.shape))
                for name, tensor in stored.items()
            },
            ties=ties,
            trainable=trainable,
            device=self._place.device.type,
            leaves=is_on_cpu,
            columns=is_on_cpu and columns,
        )
        self.table = WeightUpdateManifest.known_layouts.add(table)
        column = self.table.nbytes_column
        cuts = self.table.column_blocks if self.table.columns else None
        dtypes = self.table.dtypes if self._looks else None
        self._leaf_plan = BytePlan(column, dtypes=dtypes, cuts=cuts) if self.table.leaves else None
        self._leaves_offset = self.table.leaves_offset
        self.byte_plan = (
            self._place.plan(column, dtypes) if self._leaf_plan is None else self._leaf_plan
        )
        self._names = tuple(tensors)
        position = {name: index for index, name in enumerate(self._names)}
        order = [position[name] for name in self.table.names]
        values = list(tensors.values())
        self._facts = TensorFacts(values)
        # Strided tensors and lazy views are gathered by torch, straight into the arena, and
        # digested there. So are those that are cast, or come from an accelerator: what is digested,
        # and looked at for NaN, is what travels.
        self._carried: list[tuple[int, int]] = []
        self._cast: list[tuple[int, int]] = []
        self._gathered: list[tuple[int, int]] = []
        is_dense = [tensor.is_contiguous() and not is_lazy_view(tensor) for tensor in values]
        for row, index in enumerate(order):
            tensor = values[index]
            if is_on_cpu and tensor.numel() and is_on_accelerator(tensor):
                self._carried.append((row, index))
            elif tensor.numel() and wire_dtype(tensor.dtype, self._dtype) is not tensor.dtype:
                self._cast.append((row, index))
            elif not is_dense[index]:
                self._gathered.append((row, index))
        # What torch needs to look at them in an arena, by elements.
        size = 1 if self._dtype is None else self._dtype.itemsize
        self._cast_views = [
            (shape, row_major_stride(shape), self.table.offsets[row] // size)
            for row, _ in self._cast
            for shape in (self.table.shapes[row],)
        ]
        # Next time, these could come with another laziness over the same memory.
        self._laziness = {
            index: _laziness(tensor)
            for index, tensor in enumerate(values)
            # (One element is contiguous, whatever its stride.)
            if not is_dense[index] or tensor.is_complex() or tensor.numel() == 1
        }
        self._sources: Addresses = np.array(
            [values[index].data_ptr() for index in order], np.uint64
        )

    def fits(
        self,
        tensors: Mapping[str, torch.Tensor],
        trainable: frozenset[str] | None,
        dtype: torch.dtype | None = None,
    ) -> bool:
        """Whether `tensors` are the same views of the same memory as those planned for."""
        if trainable is not None:
            trainable = frozenset(self.table.ties.get(name, name) for name in trainable)
        return (
            self.trainable == trainable
            and self._dtype is dtype
            and tuple(tensors) == self._names
            and self._facts.hold(values := list(tensors.values()))
            and all(_laziness(values[i]) == known for i, known in self._laziness.items())
        )

    def pack(
        self, tensors: Mapping[str, torch.Tensor], address: int, *, num_threads: int | None = None
    ) -> bytes:
        """Copy `tensors` into the arena at `address` and digest them in the same pass.

        Behind them it writes their leaf list, if the layout has one: `table.arena_nbytes` bytes.

        Returns:
            16 bytes per stored tensor, in layout order.

        """
        targets = self.table.offset_column + np.uint64(address)
        sources = self._sources
        if self._gathered or self._cast or self._carried:
            sources = sources.copy()
            values = list(tensors.values())
            for row, index in self._gathered:
                target = self._place.bytes_at(int(targets[row]), self.table.nbytes[row])
                elements = raw_elements(values[index].detach().resolve_conj().resolve_neg())
                target.view(elements.dtype).view(elements.shape).copy_(elements)
                sources[row] = targets[row]
            if self._dtype is not None and self._cast:
                rows = [row for row, _ in self._cast]
                self._write_cast([values[index] for _, index in self._cast], address)
                sources[rows] = targets[rows]
            for row, index in self._carried:
                target = self._place.bytes_at(int(targets[row]), self.table.nbytes[row])
                given = values[index].detach()
                # Cast where it lies: then fewer bytes leave the accelerator. Torch's copy from
                # there is over when it returns, and comes behind what its current stream does.
                dtype = wire_dtype(given.dtype, self._dtype)
                target.view(dtype).view(given.shape).copy_(given.to(dtype))
                sources[row] = targets[row]
        digests = self.byte_plan.copy_digest(sources, targets, num_threads=num_threads)
        self._note_lists(sources)
        self.write_lists(address + self._leaves_offset)
        return digests

    def _write_cast(self, given: list[torch.Tensor], address: int) -> None:
        """Cast tensors into the arena at an address."""
        assert self._dtype is not None, "something is cast"
        size = self._dtype.itemsize
        arena = self._place.bytes_at(address, self.table.leaves_offset // size * size)
        arena = arena.view(self._dtype)
        start = arena.storage_offset()
        views = [
            arena.as_strided(shape, stride, start + offset)
            for shape, stride, offset in self._cast_views
        ]
        with torch.no_grad():
            # One call for all: a loop over small tensors takes longer than their copies.
            torch._foreach_copy_(views, given)

    def digest_in_place(self, *, num_threads: int | None = None) -> bytes:
        """Digest the planned tensors where they lie; `write_lists` then writes their leaf list.

        Returns:
            16 bytes per stored tensor, in layout order.

        Raises:
            WeightBridgeUnavailableError: one of them is strided, on an accelerator, or to be cast.

        """
        for rows, why in (
            (self._carried, "is on an accelerator"),
            (self._cast, f"would be cast to {self._dtype}"),
            (self._gathered, "is strided or a lazy view"),
        ):
            if rows:
                raise WeightBridgeUnavailableError(
                    f"tensor {self.table.names[rows[0][0]]!r} {why}, so it cannot be read where it "
                    "lies. Leave in_place out, and it is copied."
                )
        digests = self.byte_plan.digest(self._sources, num_threads=num_threads)
        self._note_lists(self._sources)
        return digests

    @property
    def non_finite(self) -> tuple[str, ...]:
        """Names of the stored tensors in which the last pass found NaN or Inf."""
        rows = np.flatnonzero(self.byte_plan.non_finite).tolist()
        return tuple(self.table.names[row] for row in rows)

    def _note_lists(self, sources: Addresses) -> None:
        if self._leaf_plan is not None:
            self.leaf_list = self._leaf_plan.take_block()
            self.column_list = self._leaf_plan.take_columns(sources)
            if self.table.columns:
                self.columns_digest = xxhash.xxh3_128_hexdigest(self.column_list.data)

    def write_lists(self, address: int) -> None:
        """Write the lists of the last pass: `table.lists_nbytes` bytes of the CPU's memory."""
        for one in (self.leaf_list, self.column_list):
            if len(one):
                ctypes.memmove(address, one.ctypes.data, len(one))
            address += len(one)

    def clear_padding(self, address: int) -> None:
        """See `clear_padding`."""
        clear_padding(self.table, address, self._place)


def clear_padding(table: TensorTable, address: int, place: Place) -> None:
    """Zero the bytes between tensors, so that an arena's content follows from its tensors."""
    behind = np.array([table.leaves_offset, table.arena_nbytes], np.uint64)
    starts = np.append(table.offset_column, behind[:1])
    ends = starts + np.append(table.nbytes_column, np.uint64(table.lists_nbytes))
    gaps = np.append(starts[1:], behind[1:]) - ends
    found = np.flatnonzero(gaps)
    place.clear((ends[found] + np.uint64(address)).tolist(), gaps[found].tolist())


def checked_columns(part: WeightUpdateManifest, block: bytes) -> bytes:
    """The column list of `part`, if it has the digest that the header says."""
    expected = part.table.columns_nbytes
    if not part.table.columns or len(block) != expected:
        raise MalformedManifest(
            f"update {part.update_id}: its column list has {len(block)} bytes, expected "
            f"{expected}. Send the part as it was published."
        )
    found = xxhash.xxh3_128_hexdigest(block)
    if found != part.columns:
        raise ChecksumMismatch(
            f"column list checksum mismatch in version {part.weight_version}: its digest is "
            f"{found}, the manifest says {part.columns}. The update is corrupt: publish again."
        )
    return block


def checked_block(part: WeightUpdateManifest, block: bytes) -> bytes:
    """The leaf list of `part`, if its tensors' digests are what it makes them."""
    table = part.table
    if not table.leaves or len(block) != table.leaves_nbytes:
        expected = f"{table.leaves_nbytes} bytes" if table.leaves else "none"
        raise MalformedManifest(
            f"update {part.update_id}: its leaf list has {len(block)} bytes, expected {expected}. "
            "Send the part as it was published."
        )
    made = BytePlan(table.nbytes_column).combine(block)
    differs = digests_differ(made, part.digests)
    # The pass fills in the lengths that it knows; those in the list must be the same.
    ends = (table.leaf_starts + table.leaf_counts * DIGEST_NBYTES)[:, None]
    lengths = np.frombuffer(block, np.uint8)[ends + np.arange(LENGTH_NBYTES)]
    differs |= np.ascontiguousarray(lengths).view("<u8").ravel() != table.nbytes_column
    if differs.any():
        name = table.names[int(np.flatnonzero(differs)[0])]
        raise ChecksumMismatch(
            f"tensor checksum mismatch for {name!r} in version {part.weight_version}: its leaf "
            "list does not make its digest. The update is corrupt: publish again."
        )
    return block
