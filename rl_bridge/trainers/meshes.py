"""Which rank of a device mesh holds which part of a DTensor; the one module that reads DTensors.

Each dimension of a mesh either cuts a tensor along one of its dimensions, as ``torch.chunk`` does,
or holds copies (`Cut`). From the cuts and a rank's coordinate follow its box and the number of its
copy. A model may have tensors on several meshes; `MeshView` numbers copies over the largest one.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.manifest.parallel import Piece
from rl_bridge.trainers.gather import Split, box_piece, whole_piece

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Cut:
    """How one dimension of a mesh cuts a tensor.

    Attributes:
        dim: of the tensor; None if this dimension of the mesh holds copies.
        is_inner: it is applied after the cuts of all other dimensions of the mesh (FSDP over
            tensor-parallel shards); the others are applied in the mesh's order.

    """

    dim: int | None
    is_inner: bool = False


def cut_evenly(size: int, parts: int, index: int) -> tuple[int, int]:
    """Begin and length of part `index`, as ``torch.chunk`` cuts; the last parts may be short."""
    length = -(-size // parts)
    begin = min(index * length, size)
    return begin, min(length, size - begin)


def shard_box(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], cuts: Sequence[Cut]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First index and shape of the box that a rank holds."""
    offset, box = [0] * len(shape), list(shape)
    steps = list(zip(cuts, mesh_shape, coordinate, strict=True))
    ordered = [step for step in steps if not step[0].is_inner]
    for cut, parts, index in [*ordered, *(step for step in steps if step[0].is_inner)]:
        if cut.dim is not None:
            begin, length = cut_evenly(box[cut.dim], parts, index)
            offset[cut.dim] += begin
            box[cut.dim] = length
    return tuple(offset), tuple(box)


def replica_of(mesh_shape: Sequence[int], coordinate: Sequence[int], cuts: Sequence[Cut]) -> int:
    """Number of a rank's copy among the ranks that hold the same box; 0 for the first."""
    number = 0
    for cut, parts, index in zip(cuts, mesh_shape, coordinate, strict=True):
        if cut.dim is None:
            number = number * parts + index
    return number


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_of(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor: the same object each time, and no communication.

    ``to_local`` makes a new object in each call, and may communicate.
    """
    local: torch.Tensor = tensor._local_tensor  # noqa: SLF001 - torch has no public name for it
    return local


def cuts_of(name: str, tensor: "DTensor") -> tuple[Cut, ...]:
    """How the mesh of a DTensor cuts it.

    Raises:
        IncompatibleUpdate: partial sums, or a placement that is not known here.

    """
    from torch.distributed.tensor import Replicate, Shard

    cuts = []
    for placement in tensor.placements:
        kind = type(placement).__name__
        if isinstance(placement, Replicate):
            cuts.append(Cut(None))
        elif kind == "_StridedShard":
            cuts.append(Cut(placement.dim, is_inner=True))  # type: ignore[attr-defined]
        elif isinstance(placement, Shard) and kind == "Shard":
            cuts.append(Cut(placement.dim))
        else:
            raise IncompatibleUpdate(
                f"tensor {name!r} is laid out as {placement}, expected Shard or Replicate. "
                "Call redistribute on it before extracting."
            )
    return tuple(cuts)


def cutting_dims(name: str, tensor: "DTensor") -> list[int]:
    """The dimensions of a DTensor's mesh that cut it into more than one part."""
    return [
        dim
        for dim, cut in enumerate(cuts_of(name, tensor))
        if cut.dim is not None and tensor.device_mesh.size(dim) > 1
    ]


def split_of(name: str, tensor: "DTensor") -> Split:
    """Which rank holds what of a DTensor that exactly one dimension of its mesh cuts."""
    mesh, cuts = tensor.device_mesh, cuts_of(name, tensor)
    (dim,) = cutting_dims(name, tensor)
    coordinate = list(mesh.get_coordinate() or ())
    line = mesh.mesh
    for at in coordinate[:dim]:
        line = line[at]
    for at in reversed(coordinate[dim + 1 :]):
        line = line[..., at]
    ranks = line.tolist()
    parts = []
    for at, rank in enumerate(ranks):
        place = [*coordinate[:dim], at, *coordinate[dim + 1 :]]
        offset, box = shard_box(tensor.shape, mesh.shape, place, cuts)
        if 0 not in box:
            parts.append((rank, (box_piece(name, tensor.shape, offset, box),)))
    device = torch.device(mesh.device_type)
    return Split(group=mesh.get_group(dim), device=device, parts=tuple(parts))


def gathered_by_torch(tensor: "DTensor", dtype: torch.dtype) -> torch.Tensor:
    """The whole of a DTensor that several dimensions of its mesh cut; cast before it travels."""
    from torch.distributed.tensor import DTensor

    shape = tensor.shape
    strides = torch.empty(shape, device="meta").stride()
    cast = DTensor.from_local(
        local_of(tensor).to(dtype).contiguous(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=shape,
        stride=strides,
    )
    return cast.full_tensor()


def largest_mesh(tensors: Iterable[torch.Tensor]) -> "DeviceMesh | None":
    """The largest mesh among those of the DTensors; None if there is no DTensor."""
    meshes = [tensor.device_mesh for tensor in tensors if is_dtensor(tensor)]  # type: ignore[attr-defined]
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The box of one whole tensor that this rank holds, and the ranks that hold any element."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    replica: int  # number of this rank's copy
    owners: tuple[int, ...]

    def piece(self, name: str, whole: Sequence[int]) -> Piece | None:
        """This rank's box; None if it is empty and the tensor is not."""
        if 0 in self.shape and 0 not in whole:
            return None
        return box_piece(name, whole, self.offset, self.shape, replica=self.replica)


class MeshView:
    """The mesh of all ranks of a model, as one of them sees it."""

    def __init__(self, root: "DeviceMesh | None") -> None:
        """Look at `root`; None if the model has no DTensor: then one rank holds everything."""
        self._root = root
        self._ranks: list[int] = [0] if root is None else root.mesh.flatten().tolist()
        self._me = 0 if root is None else self._position(root)
        self._known: dict[Any, Shard] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the mesh."""
        return tuple(self._ranks)

    def whole(self, name: str, shape: Sequence[int]) -> Piece:
        """The piece of a tensor of which every rank of the mesh holds a copy."""
        return whole_piece(name, shape, self._me)

    def shard(self, name: str, tensor: "DTensor") -> Shard:
        """This rank's box of `tensor`; the same object for tensors that are cut alike.

        Raises:
            IncompatibleUpdate: a mesh or a layout that is not understood.

        """
        key = (tuple(tensor.shape), tensor.device_mesh, tensor.placements)
        if key not in self._known:
            self._known[key] = self._shard(name, tensor)
        return self._known[key]

    def _shard(self, name: str, tensor: "DTensor") -> Shard:
        mesh, cuts = tensor.device_mesh, cuts_of(name, tensor)
        shape, mesh_shape = tuple(tensor.shape), tuple(mesh.shape)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise IncompatibleUpdate(
                f"tensor {name!r} lives on a mesh that this rank is not part of. Extract it on the "
                "ranks of its mesh."
            )
        offset, box = shard_box(shape, mesh_shape, coordinate, cuts)
        local = tuple(local_of(tensor).shape)
        if local != box and not (0 in local and 0 in box):
            raise IncompatibleUpdate(
                f"tensor {name!r} of shape {shape} is cut as {tensor.placements}: rank "
                f"{coordinate} should hold {box}, and holds {local}. Call redistribute on it "
                "before extracting."
            )
        if 0 in shape:
            # torch gives the parts of an empty tensor shapes of its own.
            offset, box = (0,) * len(shape), local
        inside = replica_of(mesh_shape, coordinate, cuts)
        replicas = replica_of(mesh_shape, [size - 1 for size in mesh_shape], cuts) + 1
        members = mesh.mesh.flatten().tolist()
        filled = [
            rank
            for rank, at in zip(members, _coordinates(mesh_shape), strict=True)
            if 0 in shape or 0 not in shard_box(shape, mesh_shape, at, cuts)[1]
        ]
        number, owners = self._in_root(name, members, filled)
        return Shard(
            offset=offset,
            shape=box,
            replica=number * replicas + inside,
            owners=tuple(sorted(owners)),
        )

    def _in_root(
        self, name: str, members: Sequence[int], filled: Sequence[int]
    ) -> tuple[int, list[int]]:
        """Number of a tensor's mesh among the root's slices like it; the owners in all of them."""
        if self._root is None or set(members) == set(self._ranks):
            return 0, list(filled)
        shape = tuple(self._root.mesh.shape)
        place = dict(zip(self._ranks, _coordinates(shape), strict=True))
        dims = range(len(shape))
        if set(members) <= place.keys():
            fixed = [dim for dim in dims if len({place[rank][dim] for rank in members}) == 1]
            if math.prod(shape[dim] for dim in fixed) * len(members) == len(self._ranks):
                spread = [dim for dim in dims if dim not in fixed]
                held = {tuple(place[rank][dim] for dim in spread) for rank in filled}
                number = 0
                for dim in fixed:
                    number = number * shape[dim] + place[members[0]][dim]
                spots = {rank: tuple(place[rank][dim] for dim in spread) for rank in self._ranks}
                return number, [rank for rank, spot in spots.items() if spot in held]
        raise IncompatibleUpdate(
            f"tensor {name!r} lives on ranks {sorted(members)}, which are no slice of the model's "
            f"mesh {shape} of ranks {self._ranks}. Pass mesh=, the mesh of all ranks."
        )

    @staticmethod
    def _position(root: "DeviceMesh") -> int:
        coordinate = root.get_coordinate()
        if coordinate is None:
            raise IncompatibleUpdate(
                "this rank is not part of the model's mesh. Extract on the ranks of the mesh."
            )
        number = 0
        for size, at in zip(root.mesh.shape, coordinate, strict=True):
            number = number * size + at
        return number


def _coordinates(shape: Sequence[int]) -> Iterable[tuple[int, ...]]:
    return itertools.product(*(range(size) for size in shape))
