"""Weights of a model that PyTorch's FSDP cuts: FSDP2 (``fully_shard``, DTensor) and FSDP1.

FSDP2 leaves every parameter in its place, as a DTensor: `rl_bridge.trainers.meshes` says which part
of it a rank holds. Each unit of FSDP1 lays its parameters one behind the other in a flat parameter,
with padding, and gives each rank one range of it. torch has public names for gathering only, so
`FlatUnit` reads the flat parameter's own fields, and refuses what does not look as expected; no
other module reads them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Unpack

import torch

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.manifest.parallel import Piece
from rl_bridge.trainers.base import ExtractorOptions, RankTensor, WeightExtractor, require_untied
from rl_bridge.trainers.gather import (
    Shared,
    Split,
    flat_piece,
    gather,
    whole_piece,
    window_nbytes,
)
from rl_bridge.trainers.meshes import (
    MeshView,
    cutting_dims,
    gathered_by_torch,
    is_dtensor,
    largest_mesh,
    local_of,
    split_of,
)
from rl_bridge.trainers.modules import (
    Factor,
    ModuleSlots,
    Naming,
    Slot,
    Unmerged,
    clean_name,
    factor_name,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_FLAT_KEY = "_flat_param"  # where FSDP1 keeps a flat parameter in its module


# What torch knows of each parameter inside a flat one; it has no public names for it.
_ROWS = attrgetter("_fqns", "_shapes", "_contiguities", "_param_extensions")
_PADDING = attrgetter("_numels_with_padding", "_is_padding_mask")
_TIES = attrgetter("_shared_param_infos")
_HANDLE = attrgetter("_handle")


class FlatUnit:
    """One unit of FSDP1, as one of its ranks sees it.

    Attributes:
        is_cut: the ranks hold ranges of it; else each holds a copy.
        device: where the unit computes, and its process group sends from.
        rank: this rank, of the world.
        replica: number of this rank's copy of what it holds.
        paths: of the parameters inside, without the words of wrappers.
        numbers: the same path -> number of the tensor that is published of it.
        tensors: what is published of it; tied ones have the number of an earlier one in the unit.

    """

    def __init__(
        self,
        prefix: str,
        unit: torch.nn.Module,
        naming: Naming,
        trained: AbstractSet[str] = frozenset(),
    ) -> None:
        """Read the unit's description; no bytes."""
        handle: Any = _HANDLE(unit)
        self._flat: Any = handle.flat_param
        self._group = handle.process_group
        self._index: int = handle.rank
        self._world: int = handle.world_size if handle.uses_sharded_strategy else 1
        self.is_cut = self._world > 1
        ranks = torch.distributed.get_process_group_ranks(self._group)
        self.rank: int = ranks[self._index]
        self._group_ranks = ranks
        self.device = torch.device(handle.device)
        across = getattr(unit, "_inter_node_pg", None)
        self._across = torch.distributed.get_process_group_ranks(across) if across else [self.rank]
        # The ranks that hold the same range as each rank of the group, as far as they are known:
        # only a mesh says it for ranges other than this rank's.
        mesh = getattr(unit, "_device_mesh", None) if across else None
        self._copies = {rank: (rank,) for rank in ranks} | {self.rank: tuple(self._across)}
        if mesh is not None:
            columns = mesh.mesh.t().tolist()
            self._copies = {
                column[self._across.index(self.rank)]: tuple(column) for column in columns
            }
        self.replica: int = self._across.index(self.rank) if self.is_cut else self.number
        total = sum(_PADDING(self._flat)[0])
        self._range_numel = -(-total // self._world)
        self.paths: set[str] = set()
        self.numbers: dict[str, int] = {}
        self.tensors: list[RankTensor] = []
        self._begins: list[int] = []
        self._trained = {clean_name(path) for path in trained}
        self._describe(prefix, naming)
        if self._range_numel != self.held().numel():
            raise IncompatibleUpdate(
                f"unit {prefix or 'of the root'!r} of FSDP holds {self.held().numel()} elements "
                f"on this rank, expected {self._range_numel} of {total}. Extract between two "
                "steps, outside of summon_full_params."
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that is known to hold the unit, or a part or a copy of it."""
        return tuple(sorted({rank for copies in self._copies.values() for rank in copies}))

    @property
    def number(self) -> int:
        """Number of this rank among all that hold the model."""
        return self._across.index(self.rank) * len(self._group_ranks) + self._index

    def split(self, number: int) -> Split:
        """How the ranks of the unit share a tensor, if it is cut."""
        one = self.tensors[number]
        parts = self._parts(one.name, one.shape, self._begins[number])
        return Split(
            group=self._group,
            device=self.device,
            parts=tuple((rank, (piece,)) for rank, piece in parts),
        )

    def held(self) -> torch.Tensor:
        """This rank's range of the flat parameter, padding included."""
        # torch puts the range aside when the unit is first used; until then the parameter is it.
        aside: torch.Tensor | None = getattr(self._flat, "_local_shard", None)
        flat: torch.Tensor = self._flat
        return (flat if aside is None else aside).detach()

    def now(self) -> list[torch.Tensor | None]:
        """What this rank holds of each tensor at this moment."""
        held = self.held()
        return [self._part_of(held, number) for number in range(len(self.tensors))]

    def now_of(self, number: int) -> torch.Tensor | None:
        """The same of one tensor."""
        return self._part_of(self.held(), number)

    def _part_of(self, held: torch.Tensor, number: int) -> torch.Tensor | None:
        shape, at = self.tensors[number].shape, self._begins[number]
        own = self._index * self._range_numel if self.is_cut else 0
        begin = max(at - own, 0)
        end = min(at + math.prod(shape) - own, self._range_numel)
        if not self.is_cut:
            return held[begin:end].view(shape)
        return held[begin:end] if begin < end else None

    def _parts(self, name: str, shape: tuple[int, ...], begin: int) -> Iterator[tuple[int, Piece]]:
        """The ranks of the unit that hold elements of a tensor, and what they hold."""
        for index, rank in enumerate(self._group_ranks):
            low = index * self._range_numel - begin
            high = low + self._range_numel
            piece = flat_piece(name, shape, low, high, replica=self.replica)
            if piece is not None:
                yield rank, piece

    def _describe(self, prefix: str, naming: Naming) -> None:
        flat: Any = self._flat
        numbers: dict[str, int] = {}
        numels, is_padding = _PADDING(flat)
        begins = [
            begin
            for begin, is_gap in zip(accumulate(numels, initial=0), is_padding, strict=False)
            if not is_gap
        ]
        parameters = attrgetter("_params")(flat) or [flat] * len(begins)
        rows = zip(*_ROWS(flat), begins, parameters, strict=True)
        for fqn, shape, is_plain, extension, begin, parameter in rows:
            path = _joined(prefix, fqn)
            if not is_plain or extension is not None:
                raise IncompatibleUpdate(
                    f"tensor {path!r} does not lie row by row in its flat parameter. Make it "
                    "contiguous before wrapping the model with FSDP, or use fully_shard."
                )
            name = self._named(path, naming)
            if name is not None:
                numbers[path] = self.numbers[clean_name(path)] = len(self.tensors)
                trains = bool(parameter.requires_grad) or clean_name(path) in self._trained
                self._add(name, tuple(shape), begin, is_trainable=trains)
        for key, _, module, first_key, _, first_module in _TIES(flat):
            name = self._named(_joined(prefix, module, key), naming)
            number = numbers.get(_joined(prefix, first_module, first_key))
            if name is not None and number is not None:
                one, begin = self.tensors[number], self._begins[number]
                self.numbers[clean_name(_joined(prefix, module, key))] = len(self.tensors)
                self._add(name, one.shape, begin, is_trainable=one.is_trainable, tied_to=number)

    def _add(
        self,
        name: str,
        shape: tuple[int, ...],
        begin: int,
        *,
        is_trainable: bool,
        tied_to: int | None = None,
    ) -> None:
        """Note a tensor that begins at an element of the flat parameter."""
        if self.is_cut:
            parts = dict(self._parts(name, shape, begin))
            piece = parts.get(self.rank)
            # As far as they are known here.
            owners = tuple(sorted(one for rank in parts for one in self._copies[rank]))
        else:
            piece = whole_piece(name, shape, self.replica)
            owners = tuple(self._group_ranks)
        self._begins.append(begin)
        self.tensors.append(
            RankTensor(
                name=name,
                shape=shape,
                dtype=self.held().dtype,
                local_shape=None if piece is None else piece.shape,
                pieces=() if piece is None else (piece,),
                owners=owners,
                is_whole=not self.is_cut,
                is_trainable=is_trainable,
                tied_to=tied_to,
            )
        )

    def _named(self, path: str, naming: Naming) -> str | None:
        self.paths.add(clean_name(path))
        return naming(path)


def flat_units(
    model: torch.nn.Module, naming: Naming, trained: AbstractSet[str] = frozenset()
) -> list[FlatUnit]:
    """The units of FSDP1 in `model`; none if it is not wrapped that way.

    `trained` are the paths of frozen weights into which trained adapters are merged.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    return [
        FlatUnit(prefix, module, naming, trained)
        for prefix, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel) and _HANDLE(module) is not None
    ]


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


class FSDPWeightExtractor(WeightExtractor):
    """Weights of a model under FSDP1 or FSDP2, tensor-parallel DTensors included.

    Every rank makes one for its own part. It publishes the sharded parameters in the dtype that the
    optimizer sees, without mixed precision's copies and the padding of flat parameters. Extract
    between two steps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        mesh: "DeviceMesh | None" = None,
        **options: Unpack[ExtractorOptions],
    ) -> None:
        """Make an extractor; nothing is read yet, no rank is asked.

        Args:
            model: after it was wrapped; peft may be around or inside.
            mesh: of all ranks that hold the model; by default the largest among its tensors'.
            options: those of every `WeightExtractor`: ``adapter=``, ``chunk_nbytes=`` and others.

        Raises:
            IncompatibleUpdate: `model` is no module.

        """
        super().__init__(**options)
        given: object = model
        if not isinstance(given, torch.nn.Module):
            raise IncompatibleUpdate(
                f"cannot extract from a {type(model).__name__}, expected a module. Pass the model."
            )
        self._model = model
        self._mesh = mesh
        self._units: list[FlatUnit] = []
        self._factor_places: dict[str, tuple[FlatUnit, int]] = {}
        self._is_dtensor: list[bool] = []
        self._is_empty: list[bool] = []
        self._cut_often: set[str] = set()
        self._splits: dict[int, Split] = {}
        self._live: Sequence[torch.Tensor] = []  # those of FSDP2, as they were last looked at

    # ---- what is there

    def _tensors_known(self) -> Sequence[RankTensor]:
        naming = self._names = self._naming_of(self._model)
        self._splits = {}
        self._reshard()
        self._units = flat_units(self._model, naming, naming.trained_paths)
        of_factors = flat_units(self._model, factor_name) if naming.is_merging else []
        self._factor_places = {
            path: (unit, number) for unit in of_factors for path, number in unit.numbers.items()
        }
        flat = {path for unit in self._units for path in unit.paths}
        self._slots = ModuleSlots(self._model, naming)
        self._slots.select(lambda slot: slot.key != _FLAT_KEY and clean_name(slot.path) not in flat)
        known = list(self._known_slots())
        self._is_empty = [one.local_shape is None for one in known]
        for unit in self._units:
            first = len(known)
            known += [
                one if one.tied_to is None else replace(one, tied_to=first + one.tied_to)
                for one in unit.tensors
            ]
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
            shard = view.shard(slot.name, tensor)  # type: ignore[arg-type]  # just asked
            piece, owners = shard.piece(slot.name, shape), shard.owners
            local = None if piece is None else shard.shape
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
            is_trainable=tensor.requires_grad or slot.path in self._names.trained_paths,
            tied_to=tied_to,
        )

    # ---- bytes

    def _tensors_now(self) -> Sequence[torch.Tensor | None] | None:
        tensors = self._slots.tensors()
        if tensors is not None and not self._is_sharded(tensors):
            # A forward pass may have left whole parameters in the place of sharded ones.
            self._reshard()
            tensors = self._slots.tensors()
        if tensors is None or not self._is_sharded(tensors):
            return None
        flat = [tensor for unit in self._units for tensor in unit.now()]
        if merged := self._merged(flat):
            slots = self._slots.slots
            tensors = [merged.get(slot.path, one) for slot, one in zip(slots, tensors, strict=True)]
        self._live = tensors
        facts = zip(tensors, self._is_dtensor, self._is_empty, strict=True)
        now: list[torch.Tensor | None] = [
            None if is_empty else local_of(tensor) if is_dtensor else tensor
            for tensor, is_dtensor, is_empty in facts
        ]
        return now + flat

    def _merged(self, flat: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Weights with their adapters merged in, by path; those in flat parameters go into `flat`.

        What a rank holds of a flat parameter needs the whole matrices A and B: the ranks gather
        these, one layer after the other, and nothing of the weights.
        """
        if not self._units:
            return self._names.merged()
        firsts = accumulate((len(unit.tensors) for unit in self._units), initial=0)
        places = {
            path: (unit, number, first + number)
            for unit, first in zip(self._units, firsts, strict=False)
            for path, number in unit.numbers.items()
        }
        found: dict[str, torch.Tensor] = {}
        for one in self._names.unmerged():
            factors = self._whole_factors(one)
            if (place := places.get(clean_name(one.path))) is None:
                found[one.path] = one.merged(factors=factors)
                continue
            unit, number, at = place
            require_untied(self._all_known(), len(self._slots.slots) + at)
            held = flat[at]
            if held is not None:
                pieces = unit.tensors[number].pieces
                begin = pieces[0].offset[0] if pieces[0].is_flat else None
                flat[at] = one.merged(held, begin=begin, factors=factors)
        return found

    def _whole_factors(self, one: Unmerged) -> dict[Factor, torch.Tensor]:
        """The matrices of a layer's adapters, gathered; a collective of their units."""
        found: dict[Factor, torch.Tensor] = {}
        cut: list[Shared] = []
        for factor, path in one.factors().items():
            if path not in self._factor_places:  # FSDP was told to ignore it: each rank has it
                found[factor] = one.live(factor).detach()
                continue
            unit, number = self._factor_places[path]
            known, held = unit.tensors[number], unit.now_of(number)
            if known.is_whole:
                found[factor] = held  # type: ignore[assignment]  # so this rank holds it
            else:
                whole = torch.empty(known.shape, dtype=known.dtype, device=unit.device)
                found[factor] = whole
                cut.append((whole, unit.split(number), held))
        gather(cut, window=window_nbytes(self._chunk_nbytes))
        return found

    def _is_sharded(self, tensors: Sequence[torch.Tensor]) -> bool:
        from torch.distributed.tensor import DTensor

        return [isinstance(tensor, DTensor) for tensor in tensors] == self._is_dtensor

    def _reshard(self) -> None:
        for module in self._model.modules():
            if hasattr(module, "set_reshard_after_backward"):  # fully_shard wrapped it
                module.reshard()  # type: ignore[operator]  # so it has this method

    # ---- whole tensors

    def _split(self, source: int) -> Split | Callable[[torch.Tensor], object]:
        if source not in self._splits:
            number = source - len(self._is_dtensor)
            if number >= 0:
                at = [(unit, place) for unit in self._units for place in range(len(unit.tensors))]
                unit, place = at[number]
                self._splits[source] = unit.split(place)
            elif self._slots.slots[source].name in self._cut_often:
                return lambda view: view.copy_(gathered_by_torch(self._live[source], view.dtype))  # type: ignore[arg-type]  # cut, so one
            else:
                slot = self._slots.slots[source]
                self._splits[source] = split_of(slot.name, slot.tensor())  # type: ignore[arg-type]  # whole ones are not cut
        return self._splits[source]

    def _aside_nbytes(self, known: RankTensor, dtype: torch.dtype) -> int:
        # torch's own gather holds the parts, the whole, and the whole put in order.
        is_by_torch = known.name in self._cut_often
        return 3 * math.prod(known.shape) * dtype.itemsize if is_by_torch else 0
