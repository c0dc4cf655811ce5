"""Weights of a model that PyTorch's FSDP cuts: FSDP2 (``fully_shard``, DTensor) and FSDP1."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.extractors.base import RankTensor, WeightExtractor
from rl_bridge.extractors.chunks import DEFAULT_CHUNK_NBYTES
from rl_bridge.extractors.flat_parameters import FLAT_KEY, FlatUnit, flat_units
from rl_bridge.extractors.gathering import Split, gather, window_nbytes
from rl_bridge.extractors.layouts import whole_piece
from rl_bridge.extractors.meshes import (
    MeshView,
    cutting_dims,
    gathered_by_torch,
    is_dtensor,
    largest_mesh,
    split_of,
)
from rl_bridge.extractors.names import Adapters, clean_name, naming_of
from rl_bridge.extractors.slots import ModuleSlots, Slot

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FSDPExtractor", "FSDPWeightExtractor"]


class FSDPExtractor(WeightExtractor):
    """Weights of a model under FSDP1 or FSDP2, tensor-parallel DTensors included.

    Every rank makes one for its own part. What is published are the sharded parameters in the dtype
    that the optimizer sees; mixed precision's copies and the padding of flat parameters are not.
    Extract between two steps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        adapters: Adapters | str = Adapters.MERGED,
        mesh: "DeviceMesh | None" = None,
        chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
        keep_buffers: bool = False,
    ) -> None:
        """Make an extractor; nothing is read yet, no rank is asked.

        Args:
            model: after it was wrapped; peft may be around or inside.
            adapters: what is published of a model with peft adapters.
            mesh: of all ranks that hold the model; by default the largest among its tensors'.
            chunk_nbytes: bytes of one chunk.
            keep_buffers: cast into the same memory in every update; see `WeightExtractor`.

        Raises:
            IncompatibleUpdate: `model` is no module.

        """
        super().__init__(chunk_nbytes=chunk_nbytes, keep_buffers=keep_buffers)
        given: object = model
        if not isinstance(given, torch.nn.Module):
            msg = (
                f"cannot extract from a {type(model).__name__}, expected a module. Pass the model."
            )
            raise IncompatibleUpdate(msg)
        self._model = model
        self._adapters = adapters
        self._mesh = mesh
        self._units: list[FlatUnit] = []
        self._is_dtensor: list[bool] = []
        self._is_empty: list[bool] = []
        self._cut_often: set[str] = set()
        self._splits: dict[int, Split] = {}

    # ---- what is there

    def _tensors_known(self) -> Sequence[RankTensor]:
        naming = self._names = naming_of(self._model, self._adapters)
        self._splits = {}
        self._reshard()
        self._units = flat_units(self._model, naming)
        flat = {path for unit in self._units for path in unit.paths}
        self._slots = ModuleSlots(self._model, naming)
        self._slots.select(lambda slot: slot.key != FLAT_KEY and clean_name(slot.path) not in flat)
        known = list(self._known_slots())
        self._is_empty = [one.local_shape is None for one in known]
        for unit in self._units:
            known += _known_flat(unit, len(known))
        return known

    def _known_slots(self) -> Iterable[RankTensor]:
        slots = self._slots.slots
        tensors = [slot.tensor() for slot in slots]
        self._cut_often = set()
        self._is_dtensor = [is_dtensor(tensor) for tensor in tensors]
        view = MeshView(self._mesh or largest_mesh(tensors))
        for slot, tensor, tied_to in zip(slots, tensors, self._slots.ties(), strict=True):
            yield self._known_slot(slot, tensor, tied_to, view)

    def _known_slot(
        self, slot: Slot, tensor: torch.Tensor, tied_to: int | None, view: MeshView
    ) -> RankTensor:
        shape, is_whole = tuple(tensor.shape), True
        if is_dtensor(tensor):
            num_cuts = len(cutting_dims(slot.name, tensor))  # type: ignore[arg-type]  # just asked
            is_whole = not num_cuts
            if num_cuts > 1:
                self._cut_often.add(slot.name)
            shares = view.shares(slot.name, tensor)  # type: ignore[arg-type]  # just asked
            piece, owners = shares.piece(slot.name, shape), shares.owners
            local = None if piece is None else shares.shape
        elif self._units:
            number, owners = self._units[0].number, self._units[0].ranks
            piece, local = whole_piece(slot.name, shape, number), shape
        else:
            piece, owners, local = view.whole(slot.name, shape), view.ranks, shape
        return RankTensor(
            name=slot.name,
            shape=shape,
            dtype=tensor.dtype,
            local_shape=local,
            pieces=() if piece is None else (piece,),
            owners=owners,
            is_whole=is_whole,
            is_trainable=tensor.requires_grad,
            tied_to=tied_to,
        )

    # ---- bytes

    def _tensors_now(self) -> Sequence[torch.Tensor | None] | None:
        self._names.check()
        tensors = self._slots.tensors()
        if tensors is not None and not self._is_sharded(tensors):
            # A forward pass may leave whole parameters in their places; a state dict puts the
            # sharded ones back as well.
            self._reshard()
            tensors = self._slots.tensors()
        if tensors is None or not self._is_sharded(tensors):
            return None
        now: list[torch.Tensor | None] = [
            # (to_local makes a new object of each, and may communicate.)
            None if is_empty else tensor._local_tensor if is_dtensor else tensor  # type: ignore[attr-defined]  # noqa: SLF001
            for tensor, is_dtensor, is_empty in zip(
                tensors, self._is_dtensor, self._is_empty, strict=True
            )
        ]
        for unit in self._units:
            now += unit.now()
        return now

    def _is_sharded(self, tensors: Sequence[torch.Tensor]) -> bool:
        from torch.distributed.tensor import DTensor

        return [isinstance(tensor, DTensor) for tensor in tensors] == self._is_dtensor

    def _reshard(self) -> None:
        for module in self._model.modules():
            if hasattr(module, "set_reshard_after_backward"):  # what fully_shard made of it
                module.reshard()  # type: ignore[operator]  # so it has this method

    # ---- whole tensors

    def _fill(
        self,
        views: Sequence[torch.Tensor],
        sources: Sequence[int],
        tensors: Sequence[torch.Tensor | None],
    ) -> None:
        known = self._all_known()
        together: list[tuple[torch.Tensor, Split, torch.Tensor | None]] = []
        for view, source in zip(views, sources, strict=True):
            tensor = tensors[source]
            if known[source].is_whole:
                view.copy_(tensor)  # type: ignore[arg-type]  # so this rank holds it
            elif known[source].name in self._cut_often:
                view.copy_(gathered_by_torch(self._slots.slots[source].tensor(), view.dtype))  # type: ignore[arg-type]
            else:
                together.append((view, self._split(source), tensor))
        if together:
            views, splits, parts = zip(*together, strict=True)
            gather(
                views,
                splits,
                parts,
                rank=torch.distributed.get_rank(),
                window=window_nbytes(self._chunk_nbytes),
            )

    def _reserve_nbytes(self) -> int:
        return window_nbytes(self._chunk_nbytes)

    def _aside_nbytes(self, known: RankTensor, dtype: torch.dtype) -> int:
        # What torch gathers needs its parts, the whole, and the whole put in order.
        is_by_torch = known.name in self._cut_often
        return 3 * math.prod(known.shape) * dtype.itemsize if is_by_torch else 0

    def _split(self, source: int) -> Split:
        """Who holds what of a tensor that is cut once; found when it is first gathered."""
        if source not in self._splits:
            self._splits[source] = self._found_split(source)
        return self._splits[source]

    def _found_split(self, source: int) -> Split:
        number = source - len(self._is_dtensor)
        if number < 0:
            slot = self._slots.slots[source]
            return split_of(slot.name, slot.tensor())  # type: ignore[arg-type]  # whole ones are not cut
        tensors = [(unit, tensor) for unit in self._units for tensor in unit.tensors]
        unit, tensor = tensors[number]
        return unit.split(tensor)


def _known_flat(unit: FlatUnit, first: int) -> list[RankTensor]:
    """The tensors of one unit of FSDP1; `first` is the number of the first of them."""
    known = []
    for tensor in unit.tensors:
        piece = unit.piece(tensor)
        local = None if piece is None else piece.shape
        known.append(
            RankTensor(
                name=tensor.name,
                shape=tensor.shape,
                dtype=unit.dtype,
                local_shape=local,
                pieces=() if piece is None else (piece,),
                owners=unit.owners(tensor),
                is_whole=not unit.is_cut,
                is_trainable=tensor.is_trainable,
                tied_to=None if tensor.tied_to is None else first + tensor.tied_to,
            )
        )
    return known


FSDPWeightExtractor = FSDPExtractor
"""The same class, by the name that trainers know it under."""
