"""How ranks shard a tensor that Megatron marked, half marked or did not mark; without Megatron."""

import pytest
import torch

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.trainers.megatron import Axis, Grid, shard_of


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
