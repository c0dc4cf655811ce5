"""`metadata["layout"]`: its defaults, its checks, and what one packed full state cannot carry."""

from typing import Any

import pytest

from rl_bridge import WeightLayout
from rl_bridge.errors import MalformedManifest, WeightBridgeUnavailableError

DEFAULTS = {
    "kind": "full-state",
    "world_size": 1,
    "rank": 0,
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "zero_stage": 0,
    "node_count": 1,
    "rdma_enabled": False,
}


def test_the_defaults_are_exactly_those_that_users_know() -> None:
    found = WeightLayout().to_metadata()
    assert found == DEFAULTS
    assert type(found["rdma_enabled"]) is bool


@pytest.mark.parametrize("metadata", [None, {}, {"layout": None}, {"step": 3}])
def test_what_is_left_out_gets_its_default(metadata: dict[str, object] | None) -> None:
    assert WeightLayout.from_metadata(metadata).to_metadata() == DEFAULTS


def test_degrees_that_came_later_are_written_only_where_they_say_something() -> None:
    layout = WeightLayout.from_metadata({"layout": {"pipeline_parallel_size": 2}})
    assert layout.to_metadata() == DEFAULTS | {"pipeline_parallel_size": 2}


def test_a_layout_comes_back_from_its_metadata() -> None:
    layout = WeightLayout(kind="replicated", world_size=8, rank=3, zero_stage=2)
    assert WeightLayout.from_metadata({"layout": layout.to_metadata()}) == layout


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (["full-state"], "list, expected a mapping"),
        ("full-state", "str, expected a mapping"),
        ({"kind": 3}, "kind"),
        ({"rank": True}, "rank"),
        ({"world_size": 2.0}, "world_size"),
        ({"rdma_enabled": 0}, "rdma_enabled"),
        ({"wrold_size": 2}, r"field wrold_size: no such field, got 2\. Its fields are"),
        ({7: 2}, "key 7 is int, expected str"),
        ({"kind": float("nan")}, "kind: nan cannot be written"),
    ],
    ids=["list", "text", "kind", "bool", "float", "int", "unknown-key", "int-key", "nan"],
)
def test_a_damaged_layout_is_malformed_and_names_the_field(layout: object, said: str) -> None:
    with pytest.raises(MalformedManifest, match=said):
        WeightLayout.from_metadata({"layout": layout})


@pytest.mark.parametrize("fields", [{"kind": 3}, {"wrold_size": 2}, {"self": 1}], ids=str)
def test_a_layout_that_is_made_by_hand_fails_with_an_error_of_ours(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedManifest, match=f"{next(iter(fields))}.*Its fields are kind"):
        WeightLayout(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "sharded"}, r"'sharded' is not supported.*gathered full-state"),
        ({"tensor_parallel_size": 2}, r"tensor-parallel.*degree 2.*gathered full-state"),
        ({"pipeline_parallel_size": 2}, r"pipeline-parallel"),
        ({"expert_parallel_size": 2}, r"expert-parallel"),
        ({"node_count": 2}, r"multi-node/RDMA weight transport is not implemented"),
        ({"rdma_enabled": True}, r"multi-node/RDMA weight transport is not implemented"),
    ],
    ids=["kind", "tensor", "pipeline", "expert", "nodes", "rdma"],
)
def test_what_cannot_be_carried_says_what_to_do(fields: dict[str, object], said: str) -> None:
    layout = WeightLayout.from_metadata({"layout": fields})
    with pytest.raises(WeightBridgeUnavailableError, match=said) as caught:
        layout.validate_supported()
    assert "as a group: GroupPublisher" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 1},
        {"rank": -1},
        {"world_size": 0},
        {"data_parallel_size": 0},
        {"zero_stage": 4},
        {"zero_stage": -1},
    ],
    ids=str,
)
def test_counts_that_contradict_each_other_are_malformed(fields: dict[str, object]) -> None:
    layout = WeightLayout.from_metadata({"layout": fields})
    with pytest.raises(MalformedManifest, match="weight layout"):
        layout.validate_supported()


@pytest.mark.parametrize("kind", ["full-state", "replicated"])
def test_a_gathered_state_of_many_ranks_is_supported(kind: str) -> None:
    WeightLayout(
        kind=kind, world_size=8, rank=7, data_parallel_size=8, zero_stage=3
    ).validate_supported()


@pytest.mark.parametrize("metadata", [["layout"], "layout", 3], ids=["list", "text", "number"])
def test_metadata_that_is_no_mapping_is_malformed(metadata: Any) -> None:
    with pytest.raises(MalformedManifest, match=r"metadata is a \w+, expected a mapping.*Pass a"):
        WeightLayout.from_metadata(metadata)
