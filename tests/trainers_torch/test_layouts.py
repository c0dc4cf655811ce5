"""Which part of a whole tensor a rank holds, as torch itself or Megatron would cut it."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.trainers.gather import flat_piece
from rl_bridge.trainers.megatron import Axis, Grid, shard_of
from rl_bridge.trainers.meshes import Cut, replica_of, shard_box

PARTS = st.integers(1, 5)


@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    mesh=st.lists(PARTS, min_size=1, max_size=3),
    data=st.data(),
)
def test_the_boxes_of_a_mesh_cover_a_tensor_once_per_replica(
    shape: list[int], mesh: list[int], data: st.DataObject
) -> None:
    cuts = [
        Cut(
            data.draw(st.none() | st.integers(0, len(shape) - 1)), is_inner=data.draw(st.booleans())
        )
        for _ in mesh
    ]
    counts: dict[int, torch.Tensor] = {}
    for coordinate in itertools.product(*map(range, mesh)):
        offset, box = shard_box(shape, mesh, coordinate, cuts)
        replica = replica_of(mesh, coordinate, cuts)
        count = counts.setdefault(replica, torch.zeros(shape))
        count[tuple(slice(b, b + n) for b, n in zip(offset, box, strict=True))] += 1
    assert sorted(counts) == list(
        range(math.prod(n for n, cut in zip(mesh, cuts, strict=True) if cut.dim is None))
    )
    assert all(bool((count == 1).all()) for count in counts.values())


def test_an_inner_cut_cuts_what_the_others_left() -> None:
    # Fully sharded over tensor parallelism: the mesh's first dimension cuts last.
    mesh, cuts = (2, 2), (Cut(0, is_inner=True), Cut(0))
    found = [shard_box((8,), mesh, at, cuts)[0][0] for at in itertools.product(range(2), range(2))]
    assert found == [0, 4, 2, 6]


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [(-5, 2, (0, 2)), (2, 99, (2, 6)), (-5, 99, (0, 6)), (6, 9, None), (-3, 0, None)],
)
def test_a_range_is_cut_to_its_tensor(
    begin: int, end: int, expected: tuple[int, int] | None
) -> None:
    piece = flat_piece("w", (2, 3), begin, end)
    found = None if piece is None else (piece.offset[0], piece.offset[0] + piece.shape[0])
    assert found == expected


# ---- Megatron's marks ----------------------------------------------------------------------------


def grid(tensor: int = 1, expert: int = 1) -> Grid:
    """The first rank's place, with so many ranks along two of the axes."""

    def axis(size: int = 1) -> Axis:
        return Axis(number=0, ranks=tuple(range(size)), group=None)

    return Grid(
        tensor=axis(tensor),
        data=axis(),
        expert=axis(expert),
        expert_tensor=axis(),
        expert_data=axis(),
        pipeline=axis(),
    )


def parameter(*shape: int, **marks: object) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(shape))
    for name, value in marks.items():
        setattr(made, name, value)
    return made


def test_a_cut_without_a_dimension_is_refused() -> None:
    """As in layers of state space models: taken for a copy, each rank would publish its part."""
    name = "decoder.layers.0.mixer.A_log"
    half = parameter(4, tensor_model_parallel=True)
    with pytest.raises(WeightBridgeUnavailableError, match=f"{name}' as cut over 2 ranks"):
        shard_of(name, half, grid(tensor=2))
    assert shard_of(name, half, grid()).shape == (4,)


def test_the_offsets_of_attention_are_cut_by_heads() -> None:
    name = "decoder.layers.0.self_attention.core_attention.softmax_offset"
    shard = shard_of(name, parameter(4), grid(tensor=2))
    assert (shard.shape, shard.is_cut) == ((8,), True)
    assert [piece.offset for pieces in shard.parts for piece in pieces] == [(0,), (4,)]
    assert shard_of(name, parameter(8), grid()).shape == (8,)


@pytest.mark.parametrize("ranks", [{"tensor": 2}, {"expert": 2}])
def test_experts_that_ranks_hold_in_one_matrix_are_refused(ranks: dict[str, int]) -> None:
    name = "decoder.layers.0.mlp.experts.weight1"
    marks = {"tensor_model_parallel": True, "partition_dim": 1}
    with pytest.raises(WeightBridgeUnavailableError, match="all experts of a rank"):
        shard_of(name, parameter(4, 6, **marks), grid(**ranks))
    assert shard_of(name, parameter(4, 6, **marks), grid()).shape == (4, 6)
