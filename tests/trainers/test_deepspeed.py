"""DeepSpeed's three stages on two ranks: parts, whole tensors, no padding, no surprise."""

from collections.abc import Callable
from typing import Any

import pytest

from rl_bridge.testing.processes import free_port
from tests.trainers import deepspeed_cases
from tests.trainers_torch.worlds import World, assembled, placements_of, reference


@pytest.fixture
def two(worlds: Callable[[int, str], World]) -> World:
    return worlds(2, "deepspeed_cases")


WHOLE = reference(deepspeed_cases.plain())
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


@STAGES
def test_the_parts_of_all_ranks_are_the_model_and_only_a_gather_asks_others(
    two: World, stage: int
) -> None:
    reports = two.run("report", stage=stage)
    assert assembled(reports) == WHOLE
    for name, (*_, owners, _, _) in reports[0]["metadata"].items():
        assert owners == [r for r, report in enumerate(reports) if name in report["tensors"]]
    for report in reports:
        assert report["full"] == WHOLE
        assert report["asked"][0] == 0
        assert (report["asked"][1] > 0) == (stage == 3)
    if stage < 3:  # ranks hold copies
        for rank, report in enumerate(reports):
            (piece,) = placements_of(report)["up.weight"].pieces
            assert (piece.shape, piece.replica, piece.is_flat) == ((3, 7), rank, False)
    metadata, trainable = reports[0]["metadata"], reports[0]["trainable"]
    assert metadata["head.weight"][4] == "embed.weight"
    assert "down.weight" not in trainable
    assert "up.weight" in trainable


@STAGES
def test_weights_in_sixteen_bits_come_as_they_compute(two: World, stage: int) -> None:
    reports = two.run("report", stage=stage, kind="bfloat16")
    whole = assembled(reports)
    cast = reference(deepspeed_cases.plain(), "bfloat16")
    parameters = dict(deepspeed_cases.plain().named_parameters())
    assert {name: whole[name] for name in parameters} == {name: cast[name] for name in parameters}
    assert [report["full"] for report in reports] == [whole, whole]


@pytest.mark.parametrize("stage", [2, 3])
def test_tensors_travel_in_the_dtype_that_is_asked_for(two: World, stage: int) -> None:
    cast = reference(deepspeed_cases.plain(), "bfloat16")
    reports = two.run("report", stage=stage, dtype="bfloat16")
    assert assembled(reports) == cast
    assert [report["full"] for report in reports] == [cast, cast]


@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        pytest.param(3, {"stage3_param_persistence_threshold": 0}, id="3-none-persists"),
        pytest.param(3, {"stage3_param_persistence_threshold": 1 << 20}, id="3-all-persist"),
        pytest.param(3, {"zero_hpz_partition_size": 2}, id="3-second-partition"),
        pytest.param(3, {"offload_param": {"device": "cpu"}}, id="3-offload"),
    ],
)
def test_an_update_sees_the_optimizer_s_steps(two: World, stage: int, zero: dict[str, Any]) -> None:
    """Those of tensors too that ZeRO-3 keeps whole on every rank because they are small."""
    reports = two.run("trained", stage=stage, zero=zero)
    found = assembled(reports)
    assert [report["full"] for report in reports] == [found, found]
    for name, values in reports[0]["whole"].items():
        assert found[name][2] == values, name
    assert found["up.bias"] != WHOLE["up.bias"]
    assert found["gain"] != WHOLE["gain"]
    assert found["down.weight"] == WHOLE["down.weight"], "it is frozen"


def test_gathering_takes_no_more_memory_than_one_chunk(two: World) -> None:
    limit, largest = 8 << 20, 1 << 20
    for peak, count in two.run("peak", stage=3, chunk_nbytes=limit):
        assert count > 4
        # Each of Gloo's two threads may still hold the last tensor that it worked on.
        assert limit // 4 < peak <= limit + 2 * largest


def test_publishing_as_a_group_takes_one_slot_of_the_shard_and_gathers_nothing(
    two: World,
) -> None:
    for peak, shard, asked in two.run("peak_of_publishing", port=free_port()):
        assert asked == []
        assert shard // 2 < peak <= shard + (2 << 20)
        assert shard == 32 << 20, "half of the model"


def test_deepspeed_begins_without_ninja_where_its_extension_is_switched_off(two: World) -> None:
    """It would compile one for shared memory, and fail where there is no ninja."""
    assert all(two.run("has_no_ninja"))


def test_an_unknown_layout_is_refused(two: World) -> None:
    for answer in two.run("refusals"):
        assert "expected a DeepSpeed engine" in answer["module"]
        assert "tensor parallelism of 2 is not supported" in answer["tensor_parallel"]
        assert "expert layers" in answer["experts"]
        assert "MiCS, mics_shard_size=1, is not supported" in answer["mics"]
        assert "'up.weight' is cut over ranks [" in answer["own_group"]
