"""FSDP1's flat parameters: which elements of which tensor a rank holds; no other module reads them.

Each unit of FSDP1 lays its parameters one behind the other, with padding, and cuts the row into one
range per rank. torch has public names for gathering only, so this reads the flat parameter's own
fields; what does not look as expected is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.extractors.gathering import Split
from rl_bridge.extractors.layouts import flat_piece, whole_piece
from rl_bridge.extractors.names import Naming, clean_name
from rl_bridge.manifest.placement import Piece

__all__ = ["FLAT_KEY", "FlatTensor", "FlatUnit", "flat_units"]

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
