"""Weights of a model that PyTorch's FSDP cuts: FSDP2 (``fully_shard``, DTensor) and FSDP1."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.manifest.parallel import Piece
from rl_bridge.trainers.base import RankTensor, WeightExtractor
from rl_bridge.trainers.chunks import DEFAULT_CHUNK_NBYTES
from rl_bridge.trainers.gather import Split, flat_piece, gather, whole_piece, window_nbytes
from rl_bridge.trainers.meshes import (
    MeshView,
    cutting_dims,
    gathered_by_torch,
    is_dtensor,
    largest_mesh,
    split_of,
)
from rl_bridge.trainers.modules import (
    Adapters,
    ModuleSlots,
    Naming,
    Slot,
    clean_name,
    naming_of,
)

__all__ = [
    "FLAT_KEY",
    "FSDPWeightExtractor",
    "FlatTensor",
    "FlatUnit",
    "flat_units",
]

# ---- FSDP1's flat parameters: which elements of which tensor a rank holds; no other module reads
# them.
#
# Each unit of FSDP1 lays its parameters one behind the other, with padding, and cuts the row into
# one range per rank. torch has public names for gathering only, so this reads the flat parameter's
# own fields; what does not look as expected is refused.

FLAT_KEY = "_flat_param"
"""Where FSDP1 keeps a flat parameter in its module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTensor:
    """One parameter inside a flat one.

    Attributes:
        name: as published.
        shape: of the whole.
        begin: its first element in the flat parameter.
        numel: of the whole.
        is_trainable: it needs a gradient.
        tied_to: number, in the unit, of an earlier one that is the same tensor.

    """

    name: str
    shape: tuple[int, ...]
    begin: int
    numel: int
    is_trainable: bool
    tied_to: int | None = None


class FlatUnit:
    """One unit of FSDP1, as one of its ranks sees it."""

    def __init__(self, prefix: str, unit: torch.nn.Module, naming: Naming) -> None:
        """Read the unit's description; no bytes.

        Raises:
            IncompatibleUpdate: something about it is not understood.

        """
        handle: Any = unit._handle  # noqa: SLF001 - torch has no public name for any of this
        self._flat: Any = handle.flat_param
        self._group = handle.process_group
        self._index: int = handle.rank
        self._world: int = handle.world_size if handle.uses_sharded_strategy else 1
        self.is_cut = self._world > 1
        ranks = torch.distributed.get_process_group_ranks(self._group)
        self.rank: int = ranks[self._index]
        self._group_ranks = ranks
        self._device = torch.device(handle.device)
        across = getattr(unit, "_inter_node_pg", None)
        self._across = torch.distributed.get_process_group_ranks(across) if across else [self.rank]
        # Who holds the same range as each rank of the group: a mesh tells it for all of them.
        mesh = getattr(unit, "_device_mesh", None) if across else None
        self._copies = {rank: (rank,) for rank in ranks} | {self.rank: tuple(self._across)}
        if mesh is not None:
            columns = mesh.mesh.t().tolist()
            self._copies = {
                column[self._across.index(self.rank)]: tuple(column) for column in columns
            }
        self.replica: int = self._across.index(self.rank)
        if not self.is_cut:
            self.replica = self.number
        self.paths: set[str] = set()
        self.tensors = self._described(prefix, naming)
        total = sum(self._flat._numels_with_padding)  # noqa: SLF001
        self._share = -(-total // self._world)
        if self._share != self.shard().numel():
            msg = (
                f"unit {prefix or 'of the root'!r} of FSDP holds {self.shard().numel()} elements "
                f"on this rank, expected {self._share} of {total}. Extract between two steps, "
                "outside of summon_full_params."
            )
            raise IncompatibleUpdate(msg)

    @property
    def dtype(self) -> torch.dtype:
        """Of all its tensors, as the optimizer sees them."""
        return self.shard().dtype

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that this one knows to hold the unit, or a part or a copy of it."""
        return tuple(sorted({rank for copies in self._copies.values() for rank in copies}))

    @property
    def number(self) -> int:
        """Number of this rank among all that hold the model."""
        return self._across.index(self.rank) * len(self._group_ranks) + self._index

    def owners(self, tensor: FlatTensor) -> tuple[int, ...]:
        """Ranks that hold elements of a tensor, as far as they are known here."""
        if not self.is_cut:
            return tuple(self._group_ranks)
        return tuple(sorted(r for rank, _ in self._parts(tensor) for r in self._copies[rank]))

    def piece(self, tensor: FlatTensor) -> Piece | None:
        """What this rank holds of a tensor."""
        if not self.is_cut:
            return whole_piece(tensor.name, tensor.shape, self.replica)
        return self._range(tensor, self._index)

    def split(self, tensor: FlatTensor) -> Split:
        """How the ranks of the unit share a tensor, where it is cut."""
        parts = tuple((rank, (piece,)) for rank, piece in self._parts(tensor))
        return Split(group=self._group, device=self._device, parts=parts)

    def shard(self) -> torch.Tensor:
        """This rank's range of the flat parameter, padding included."""
        # It is put aside when the unit is first used; before that, the parameter is the range.
        aside: torch.Tensor | None = getattr(self._flat, "_local_shard", None)
        flat: torch.Tensor = self._flat
        return (flat if aside is None else aside).detach()

    def now(self) -> Iterator[torch.Tensor | None]:
        """What this rank holds of each tensor at this moment."""
        shard, own = self.shard(), self._index * self._share if self.is_cut else 0
        for tensor in self.tensors:
            begin = max(tensor.begin - own, 0)
            end = min(tensor.begin + tensor.numel - own, self._share)
            if not self.is_cut:
                yield shard[begin:end].view(tensor.shape)
            else:
                yield shard[begin:end] if begin < end else None

    def _parts(self, tensor: FlatTensor) -> list[tuple[int, Piece]]:
        ranges = ((rank, self._range(tensor, at)) for at, rank in enumerate(self._group_ranks))
        return [(rank, piece) for rank, piece in ranges if piece is not None]

    def _range(self, tensor: FlatTensor, index: int) -> Piece | None:
        begin = index * self._share - tensor.begin
        return flat_piece(
            tensor.name, tensor.shape, begin, begin + self._share, replica=self.replica
        )

    def _described(self, prefix: str, naming: Naming) -> list[FlatTensor]:
        flat: Any = self._flat
        found: list[FlatTensor] = []
        numbers: dict[str, int] = {}
        begins = _without_padding(flat._numels_with_padding, flat._is_padding_mask)  # noqa: SLF001
        rows = zip(
            flat._fqns,  # noqa: SLF001
            flat._shapes,  # noqa: SLF001
            flat._numels,  # noqa: SLF001
            flat._contiguities,  # noqa: SLF001
            flat._param_extensions,  # noqa: SLF001
            begins,
            flat._params or [flat] * len(begins),  # noqa: SLF001
            strict=True,
        )
        for fqn, shape, numel, is_plain, extension, begin, parameter in rows:
            path = _joined(prefix, fqn)
            if not is_plain or extension is not None:
                msg = (
                    f"tensor {path!r} does not lie row by row in its flat parameter. Make it "
                    "contiguous before wrapping the model with FSDP, or use fully_shard."
                )
                raise IncompatibleUpdate(msg)
            name = self._named(path, naming)
            if name is not None:
                numbers[path] = len(found)
                found.append(
                    FlatTensor(
                        name=name,
                        shape=tuple(shape),
                        begin=begin,
                        numel=numel,
                        is_trainable=bool(parameter.requires_grad),
                    )
                )
        for key, _, module, first_key, _, first_module in flat._shared_param_infos:  # noqa: SLF001
            name = self._named(_joined(prefix, module, key), naming)
            number = numbers.get(_joined(prefix, first_module, first_key))
            if name is not None and number is not None:
                found.append(replace(found[number], name=name, tied_to=number))
        return found

    def _named(self, path: str, naming: Naming) -> str | None:
        self.paths.add(clean_name(path))
        return naming(path)


def flat_units(model: torch.nn.Module, naming: Naming) -> list[FlatUnit]:
    """The units of FSDP1 in `model`; none where it is not wrapped so."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return [
        FlatUnit(prefix, module, naming)
        for prefix, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None  # noqa: SLF001
    ]


def _without_padding(numels: Sequence[int], is_padding: Sequence[bool]) -> list[int]:
    """Where each parameter begins in the row."""
    begins = list(accumulate(numels, initial=0))[:-1]
    return [begin for begin, is_gap in zip(begins, is_padding, strict=True) if not is_gap]


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


# ---- the rest builds on the parts above

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FSDPWeightExtractor(WeightExtractor):
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


"""The same class, by the name that trainers know it under."""
