"""From a state dict to a packed arena: which tensor goes where, decided once and reused every step.

A `PackPlan` holds the layout and everything derived from it. Taking the same tensors again costs a
comparison, not a plan: names, memory addresses, shapes, dtypes and strides must be as before.

A rank's part of a group has its leaf digests as one more tensor, `LEAVES`. The pass that digests
the part computes them anyway. They are put into the arena when the other tensors are in: the bytes
that they describe are the sealed ones.
"""

from collections.abc import Mapping
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.errors import (
    ChecksumMismatch,
    IncompatibleUpdate,
    MalformedManifest,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest.digest import DIGEST_NBYTES, digest_bytes, digests_differ
from rl_bridge.manifest.dtypes import DTYPE_NBYTES, dtype_nbytes
from rl_bridge.manifest.group_digests import (
    LEAVES,
    LENGTH_NBYTES,
    LeafIndex,
    leaf_block_nbytes,
    leaf_index,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable, collector_paused
from rl_bridge.memory.passes import Addresses, BytePlan, native_module
from rl_bridge.memory.places import CPU_PLACE, Place
from rl_bridge.memory.tensors import TensorFacts, is_lazy_view, tensor_key


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_name(tensor: torch.Tensor) -> str:
    """Wire name of a tensor's dtype."""
    return _name_of(tensor.dtype)


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
    reason = place.not_plain(tensor, takes_lazy_views=True)
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
            tensors: what to publish: dense tensors of any strides, lazy views included.
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
        self.table = WeightUpdateManifest.known_layouts.add(table)
        self.byte_plan = self._place.plan(self.table.nbytes_column)
        self._names = tuple(tensors)
        position = {name: index for index, name in enumerate(self._names)}
        order = [position[name] for name in self.table.names]
        values = list(tensors.values())
        self._facts = TensorFacts(values)
        is_dense = [tensor.is_contiguous() and not is_lazy_view(tensor) for tensor in values]
        # Strided tensors and lazy views are gathered by torch, straight into the arena, and
        # digested there.
        self._gathered = [(row, index) for row, index in enumerate(order) if not is_dense[index]]
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

    def fits(self, tensors: Mapping[str, torch.Tensor], trainable: frozenset[str] | None) -> bool:
        """Whether `tensors` are the same views of the same memory as those planned for."""
        if trainable is not None:
            trainable = frozenset(self.table.ties.get(name, name) for name in trainable)
        return (
            self.trainable == trainable
            and tuple(tensors) == self._names
            and self._facts.hold(values := list(tensors.values()))
            and all(_laziness(values[i]) == known for i, known in self._laziness.items())
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
                elements = raw_elements(values[index].detach().resolve_conj().resolve_neg())
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
                f"tensor {name!r} is strided or a lazy view, so it cannot be read where it lies. "
                "Make it contiguous, or have it copied: without in_place."
            )
            raise WeightBridgeUnavailableError(msg)
        return self.byte_plan.digest(self._sources, num_threads=num_threads)

    def clear_padding(self, address: int) -> None:
        """See `clear_padding`."""
        clear_padding(self.table, address, self._place)


def clear_padding(table: TensorTable, address: int, place: Place) -> None:
    """Zero the bytes between tensors, so that an arena's content follows from its tensors."""
    ends = table.offset_column + table.nbytes_column
    gaps = np.append(table.offset_column, np.uint64(table.arena_nbytes))[1:] - ends
    found = np.flatnonzero(gaps)
    starts = (ends[found] + np.uint64(address)).tolist()
    place.clear(starts, gaps[found].tolist())


class LeafPlan(BytePlan):
    """A pass that keeps the leaf digests of its last run."""

    def _note(self, table: npt.NDArray[np.uint8]) -> None:
        self._table = table

    @property
    def leaf_counts(self) -> npt.NDArray[np.int64]:
        """Leaves of each tensor."""
        return (self._start[1:] - self._start[:-1]).astype(np.int64)

    def take_block(self) -> npt.NDArray[np.uint8]:
        """The leaf list of the last run, as `rl_bridge.manifest.group_digests` describes it."""
        table, self._table = self._table, np.empty(0, np.uint8)
        return table

    def combine(self, block: bytes, index: LeafIndex) -> bytes:
        """The digests that a leaf list makes; that of the list itself means nothing."""
        start = int(index.starts[index.row])
        own = self._table_nbytes - index.nbytes
        table = np.zeros(self._table_nbytes, np.uint8)
        table[:start] = np.frombuffer(block, np.uint8)[:start]
        table[start + own :] = np.frombuffer(block, np.uint8)[start:]
        return self._combine(table)

    def leaves(self, src: Addresses, *, num_threads: int | None = None) -> npt.NDArray[np.uint8]:
        """Digest the leaves of the bytes at `src`: uint8, shape [leaves, 16], tensor by tensor."""
        self.digest(src, num_threads=num_threads)
        block = self.take_block()
        starts = self._start[:-1].astype(np.int64) * DIGEST_NBYTES
        # Behind each tensor's leaves stands its length, which is no digest.
        ends = self._start[1:].astype(np.int64) * DIGEST_NBYTES + 8 * np.arange(len(starts))
        keep = np.ones(len(block), bool)
        keep[(ends[:, None] + np.arange(8)).ravel()] = False
        return block[keep].reshape(-1, DIGEST_NBYTES)


class LeafPackPlan(PackPlan):
    """A plan whose tensors include `LEAVES`: what that one holds is written here."""

    def _lay_out(
        self, tensors: Mapping[str, torch.Tensor], trainable: frozenset[str] | None
    ) -> None:
        super()._lay_out(tensors, trainable)
        self.byte_plan = self._leaf_plan = LeafPlan(self.table.nbytes_column)
        self._index = LeafIndex(self.table)  # refuses a block of another size: see `LeafSource`

    def pack(
        self, tensors: Mapping[str, torch.Tensor], address: int, *, num_threads: int | None = None
    ) -> bytes:
        """Copy and digest `tensors`; then write their leaf list, and digest that."""
        digests = super().pack(tensors, address, num_threads=num_threads)
        return self._with_leaves(digests, tensors, address)

    def digest_in_place(
        self, tensors: Mapping[str, torch.Tensor], *, num_threads: int | None = None
    ) -> bytes:
        """Digest `tensors` where they lie; then write their leaf list, and digest that."""
        digests = super().digest_in_place(tensors, num_threads=num_threads)
        return self._with_leaves(digests, tensors, None)

    def _with_leaves(
        self, made: bytes, tensors: Mapping[str, torch.Tensor], address: int | None
    ) -> bytes:
        digests = bytearray(made)
        noted = self._leaf_plan.take_block()
        index = self._index
        start = int(index.starts[index.row])
        behind = start + len(noted) - index.nbytes  # the list's own stretch is no part of it
        block = np.concatenate((noted[:start], noted[behind:]))
        if index.nbytes:
            mine = tensors[LEAVES]  # `LeafSource.block`, which the other ranks are told
            mine.copy_(torch.from_numpy(block))
            if address is not None:
                at = address + self.table.offsets[index.row]
                self._place.bytes_at(at, index.nbytes).copy_(mine)
        at = index.row * DIGEST_NBYTES
        digests[at : at + DIGEST_NBYTES] = digest_bytes(block.data)
        return bytes(digests)


class LeafSource:
    """Adds a tensor for the leaf list to what a rank publishes; its memory stays the same."""

    def __init__(self) -> None:
        """Begin with no tensors known."""
        self._plan: PackPlan | None = None
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def block(self) -> bytes:
        """The leaf list of what was packed last."""
        return self._block.numpy().tobytes()

    def add(
        self, tensors: Mapping[str, torch.Tensor], trainable: frozenset[str] | None
    ) -> dict[str, torch.Tensor]:
        """`tensors` of the CPU and the leaf list, of the right size and without content yet."""
        nbytes = 0
        if tensors:
            if self._plan is None or not self._plan.fits(tensors, trainable):
                self._plan = PackPlan(tensors, trainable)
            nbytes = leaf_block_nbytes(self._plan.table.nbytes)
        if self._block.numel() != nbytes:
            self._block = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        return {**tensors, LEAVES: self._block}


def checked_block(part: WeightUpdateManifest, block: bytes) -> bytes:
    """The leaf list of `part`, if its tensors' digests are what it makes them."""
    table = part.table
    index = leaf_index(table)
    if index is None or len(block) != index.nbytes:
        expected = "none" if index is None else f"{index.nbytes} bytes"
        msg = (
            f"update {part.update_id}: its leaf list has {len(block)} bytes, expected {expected}. "
            "Send the part as it was published."
        )
        raise MalformedManifest(msg)
    if native_module() is None:
        made = index.digests(block)
    else:
        made = LeafPlan(table.nbytes_column).combine(block, index)
    differs = digests_differ(made, part.digests)
    # The pass fills in the lengths that it knows; those in the list must be the same.
    ends = (index.starts + index.counts * DIGEST_NBYTES)[:, None] + np.arange(LENGTH_NBYTES)
    ends[index.row] = 0
    lengths = np.frombuffer(block or bytes(LENGTH_NBYTES), np.uint8)[ends]
    differs |= np.ascontiguousarray(lengths).view("<u8").ravel() != table.nbytes_column
    differs[index.row] = False
    if differs.any():
        name = table.names[int(np.flatnonzero(differs)[0])]
        msg = (
            f"tensor checksum mismatch for {name!r} in version {part.weight_version}: its leaf "
            "list does not make its digest. The update is corrupt: publish again."
        )
        raise ChecksumMismatch(msg)
    return block


def pack_plan(
    tensors: Mapping[str, torch.Tensor], trainable: frozenset[str] | None, *, place: Place
) -> PackPlan:
    """The plan for `tensors`: with a leaf list where they ask for one."""
    kind = LeafPackPlan if LEAVES in tensors else PackPlan
    return kind(tensors, trainable, place=place)
