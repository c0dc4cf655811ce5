"""A group's manifest: its parts are of one group, and its layout has something of every tensor."""

import json
from typing import Any

import pytest

from rl_bridge.errors import IncompleteCoverage, RanksDisagree
from rl_bridge.manifest.coverage import box_of, find_gap, flat_boxes
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_layout import GroupLayout
from tests.groups.meshes import cut, model
from tests.groups.rig import trainers

SHAPES = {"embed": (7, 5), "norm": (5,)}


@pytest.fixture(scope="module")
def manifest() -> GroupManifest:
    with trainers(2, "local-clone") as group:
        return group.publish(cut(model(SHAPES), 2, {"embed": 0, "norm": None}), 1)


def made_of(made: GroupManifest, **changes: Any) -> GroupManifest:
    fields = {name: getattr(made, name) for name in GroupManifest.model_fields}
    return GroupManifest(**{**fields, **changes})


def test_fewer_parts_than_ranks_are_refused(manifest: GroupManifest) -> None:
    with pytest.raises(RanksDisagree, match="1 parts, its layout is of 2 ranks"):
        made_of(manifest, parts=manifest.parts[:1])


def test_two_parts_with_one_id_are_refused(manifest: GroupManifest) -> None:
    first, second = manifest.parts
    twin = second.model_copy(update={"update_id": first.update_id})
    with pytest.raises(RanksDisagree, match="the same id"):
        made_of(manifest, parts=(first, twin))


def test_a_tensor_that_no_rank_holds_is_named(manifest: GroupManifest) -> None:
    document = json.loads(manifest.layout.text)
    document["names"].append("zzz")
    document["shapes"].append([1])
    with pytest.raises(IncompleteCoverage, match="no rank holds anything of tensor 'zzz'"):
        GroupLayout(**document)


def test_a_box_without_elements_has_no_gap_and_no_range_of_them_no_boxes() -> None:
    assert find_gap(box_of((0, 0), (0, 4)), []) is None
    assert find_gap(box_of((0, 0), (2, 4)), []) == box_of((0, 0), (2, 4))
    assert flat_boxes(3, 3, (2, 4)) == []
