"""Ways to cut tensors over ranks, with values that tell where each element comes from."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import prod

import torch
from hypothesis import strategies as st

from rl_bridge.manifest.parallel import Piece, Placement

SHAPES = {"embed": (8, 6), "layer.w": (6, 8), "norm": (5,), "scale": ()}
DIMS: dict[str, int | None] = {"embed": 0, "layer.w": 1, "norm": None, "scale": None}

Shards = tuple[dict[str, torch.Tensor], dict[str, Placement]]
"""What one rank publishes: its own tensors, and where they lie."""


def numbered(
    shape: Sequence[int], start: int = 0, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """A tensor in which every element has a value of its own."""
    return torch.arange(start, start + prod(shape), dtype=torch.int64).to(dtype).view(tuple(shape))


def model(shapes: Mapping[str, Sequence[int]], version: int = 0) -> dict[str, torch.Tensor]:
    """Whole tensors whose values are unique among all of them, and among versions."""
    found = {}
    start = version * 1_000_003
    for name, shape in shapes.items():
        found[name] = numbered(shape, start)
        start += prod(shape)
    return found


def share(
    whole: Mapping[str, torch.Tensor], degree: int, rank: int, dims: Mapping[str, int | None]
) -> dict[str, torch.Tensor]:
    """What one of `degree` ranks holds that cut each tensor evenly, along its dimension if any."""
    return {
        name: one if (dim := dims.get(name)) is None else one.chunk(degree, dim)[rank].contiguous()
        for name, one in whole.items()
    }


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Whether all names and values are the same."""
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in wanted.items()
    )


def chunked(size: int, num: int) -> list[int]:
    """Bounds of an uneven cut into `num` ranges; the last ones may be empty."""
    step = -(-size // num) if size else 0
    return [min(i * step, size) for i in range(num + 1)]


def boxes(shape: Sequence[int], bounds: Mapping[int, Sequence[int]]) -> Iterator[tuple[slice, ...]]:
    """Every box of the mesh that has these bounds; dimensions that are not named stay whole."""
    per_dim = [list(pairwise(bounds.get(dim, (0, size)))) for dim, size in enumerate(shape)]
    for ranges in product(*per_dim):
        yield tuple(slice(lo, hi) for lo, hi in ranges)


def piece(name: str, whole: torch.Tensor, where: tuple[slice, ...], replica: int = 0) -> Piece:
    """The piece that a rank holds as a tensor of its own."""
    return Piece(
        name=name,
        global_shape=tuple(whole.shape),
        offset=tuple(one.start for one in where),
        shape=tuple(one.stop - one.start for one in where),
        local_offset=(0,) * whole.dim(),
        replica=replica,
    )


def cut(
    whole: Mapping[str, torch.Tensor], num_ranks: int, dims: Mapping[str, int | None]
) -> list[Shards]:
    """Cut each tensor along one dimension; None: every rank holds it, as replicas."""
    ranks: list[Shards] = [({}, {}) for _ in range(num_ranks)]
    for name, tensor in whole.items():
        dim = dims.get(name)
        everything = tuple(slice(0, size) for size in tensor.shape)
        bounds = [] if dim is None else list(pairwise(chunked(tensor.shape[dim], num_ranks)))
        for rank, (tensors, placements) in enumerate(ranks):
            where = everything
            if dim is not None:
                where = (*everything[:dim], slice(*bounds[rank]), *everything[dim + 1 :])
            held = piece(name, tensor, where, 0 if dim is not None else rank)
            tensors[name] = tensor[where].contiguous().clone()
            placements[name] = placed(tensors[name], held)
    return ranks


def shards(version: int, num: int = 2) -> list[Shards]:
    """A version of a small model, cut over `num` ranks."""
    return cut(model(SHAPES, version), num, DIMS)


def placed(tensor: torch.Tensor, *pieces: Piece) -> Placement:
    """The placement of a rank's own tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Placement(dtype=dtype, shape=tuple(tensor.shape), pieces=pieces)


def flat_cut(whole: Mapping[str, torch.Tensor], num_ranks: int, *, pad: int = 0) -> list[Shards]:
    """Cut each tensor into ranges of elements, as ZeRO-3 does; `pad` elements behind each."""
    ranks: list[Shards] = [({}, {}) for _ in range(num_ranks)]
    for name, tensor in whole.items():
        bounds = chunked(tensor.numel(), num_ranks)
        for rank, (tensors, placements) in enumerate(ranks):
            lo, hi = bounds[rank : rank + 2]
            shard = torch.full((hi - lo + pad,), -1, dtype=tensor.dtype)
            shard[: hi - lo] = tensor.flatten()[lo:hi]
            tensors[name] = shard
            held = Piece(
                name=name,
                global_shape=tuple(tensor.shape),
                offset=(lo,),
                shape=(hi - lo,),
                local_offset=(0,),
                is_flat=True,
            )
            placements[name] = placed(shard, held)
    return ranks


@st.composite
def shapes(draw: st.DrawFn, max_dims: int = 3, max_size: int = 7) -> tuple[int, ...]:
    """Shapes, empty ones and scalars too."""
    return tuple(draw(st.lists(st.integers(0, max_size), max_size=max_dims)))


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], max_cuts: int = 3) -> dict[int, list[int]]:
    """Bounds of an uneven mesh over `shape`; some of its boxes are empty."""
    return {
        dim: [0, *sorted(draw(st.lists(st.integers(0, size), max_size=max_cuts))), size]
        for dim, size in enumerate(shape)
    }
