"""A group that does not fit together is refused, whatever it is put together from."""

import json
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from rl_bridge.errors import (
    DigestMismatch,
    IncompleteCoverage,
    MalformedManifest,
    RanksDisagree,
    ShapeMismatch,
)
from rl_bridge.groups import Piece
from rl_bridge.manifest import coverage
from rl_bridge.manifest.coverage import held_pieces, prove_coverage
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.parallel import Placement
from tests.groups.meshes import Shards, cut, model, numbered, placed
from tests.groups.rig import trainers

SHAPES = {"embed": (7, 5), "norm": (5,)}
DIMS = {"embed": 0, "norm": None}


def published(ranks: list[Shards]) -> GroupManifest:
    with trainers(len(ranks), "local-clone") as group:
        return group.publish(ranks, 1)


@cache
def ranks() -> list[Shards]:
    return cut(model(SHAPES), 2, DIMS)


@cache
def manifest() -> GroupManifest:
    return published(ranks())


def made_of(**changes: Any) -> GroupManifest:
    made = manifest()
    fields = {name: getattr(made, name) for name in GroupManifest.model_fields}
    return GroupManifest(**{**fields, **changes})


def test_what_it_is_made_of_makes_it_again() -> None:
    assert made_of() == manifest()


def test_no_depth_of_nesting_escapes_as_a_recursion_error() -> None:
    # Between what the decoder takes and what everything behind it takes lie a few levels only.
    text = manifest().to_json()
    limit = sys.getrecursionlimit()
    seen = set()
    for depth in range(limit - 150, limit + 5):
        for field in ('"source_rank":0', '"zero_stage":0'):
            assert field in text
            key = field.partition(":")[0]
            nested = text.replace(field, f"{key}:{'[' * depth}1{']' * depth}", 1)
            with pytest.raises(MalformedManifest) as caught:
                GroupManifest.from_json(nested)
            seen.add("nests too deep" in str(caught.value))
    assert seen == {True, False}


def test_two_copies_have_one_header_digest_and_another_group_has_another() -> None:
    assert len(manifest().header_digest) == 16
    assert GroupManifest.from_json(manifest().to_json()).header_digest == manifest().header_digest
    assert made_of(metadata={"step": 1}).header_digest != manifest().header_digest


# ---- parts --------------------------------------------------------------------------------------


def test_fewer_parts_than_ranks_are_refused() -> None:
    with pytest.raises(RanksDisagree, match="1 parts, its layout is of 2 ranks"):
        made_of(parts=manifest().parts[:1])


def test_parts_of_another_layout_are_refused() -> None:
    other = published(cut(model({"embed": (9, 5), "norm": (5,)}), 2, DIMS))
    with pytest.raises(DigestMismatch, match="rank 0: its part has the layout"):
        made_of(parts=other.parts)


def test_two_parts_with_one_id_are_refused() -> None:
    first, second = manifest().parts
    twin = second.model_copy(update={"update_id": first.update_id})
    with pytest.raises(RanksDisagree, match="the same id"):
        made_of(parts=(first, twin))


def test_digests_that_the_parts_do_not_make_are_refused_also_with_a_root_that_fits() -> None:
    digests = bytearray(manifest().digests)
    digests[0] ^= 1
    root = manifest().layout.root_plan.root(bytes(digests)).hex()
    with pytest.raises(DigestMismatch, match="'embed' is not what its parts make"):
        made_of(digests=bytes(digests), root=root)


# ---- layouts ------------------------------------------------------------------------------------


def layout_of(*placements: dict[str, Any]) -> GroupLayout:
    return GroupLayout.build(manifest().layout.tables, placements)


def test_ranks_that_disagree_on_a_whole_tensor_are_named() -> None:
    mine, theirs = (dict(placements) for _, placements in ranks())
    (piece,) = theirs["embed"].pieces
    longer = replace(piece, global_shape=(8, 5))
    theirs["embed"] = replace(theirs["embed"], pieces=(longer,))
    with pytest.raises(RanksDisagree, match="embed"):
        layout_of(mine, theirs)


def test_a_tensor_without_a_placement_is_named() -> None:
    mine, theirs = (dict(placements) for _, placements in ranks())
    del theirs["norm"]
    with pytest.raises(IncompleteCoverage, match="rank 1: tensor 'norm' has no placement"):
        layout_of(mine, theirs)


def test_a_placement_without_a_tensor_is_named() -> None:
    mine, theirs = (dict(placements) for _, placements in ranks())
    theirs["more"] = theirs["norm"]
    with pytest.raises(IncompleteCoverage, match="rank 1: tensor 'more' has a placement and was"):
        layout_of(mine, theirs)


def test_a_placement_of_another_dtype_is_refused() -> None:
    mine, theirs = (dict(placements) for _, placements in ranks())
    theirs["norm"] = replace(theirs["norm"], dtype="float64")
    with pytest.raises(ShapeMismatch, match="rank 1: tensor 'norm' was published as"):
        layout_of(mine, theirs)


def test_a_tensor_that_no_rank_holds_is_named() -> None:
    document = json.loads(manifest().layout.text)
    document["names"].append("zzz")
    document["shapes"].append([1])
    with pytest.raises(IncompleteCoverage, match="no rank holds anything of tensor 'zzz'"):
        GroupLayout(**document)


@pytest.mark.parametrize("text", ["[]", "{} ", "{}x"])
def test_a_layout_that_is_no_object_alone_is_refused(text: str) -> None:
    with pytest.raises(MalformedManifest):
        GroupLayout.from_text(text)


def test_a_layout_in_another_spelling_is_refused() -> None:
    loose = json.dumps(json.loads(manifest().layout.text))
    with pytest.raises(MalformedManifest, match="rewritten"):
        GroupLayout.from_text(loose)


def test_a_tensor_cut_into_too_many_boxes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    quarters = [
        Piece(
            name="w", global_shape=(4, 4), offset=(row, column), shape=(2, 2), local_offset=(0, 0)
        )
        for row in (0, 2)
        for column in (0, 2)
    ]
    groups = [{"w": Placement(dtype="float32", shape=(2, 2), pieces=(one,))} for one in quarters]
    prove_coverage(held_pieces(groups))
    monkeypatch.setattr(coverage, "_MAX_BOXES", 3)
    with pytest.raises(IncompleteCoverage, match="'w' is cut into 4 boxes, expected at most 3"):
        prove_coverage(held_pieces(groups))


# ---- digests ------------------------------------------------------------------------------------


def test_empty_tensors_and_tensors_cut_alike_are_part_of_the_root() -> None:
    shapes = {"empty": (0, 3), "x": (7, 5), "y": (7, 5)}
    dims = {"empty": None, "x": 0, "y": 0}
    one, other = (published(cut(model(shapes, n), 2, dims)) for n in (0, 1))
    assert one.tensor_count == 3
    assert one.whole_digest("empty") == other.whole_digest("empty") is not None
    assert one.root != other.root


def test_a_replica_in_a_tensor_of_another_make_is_held_beside_the_original() -> None:
    a, b = numbered((4,)), numbered((6,), 50)
    fused = torch.cat([a, b])
    first = Piece(name="a", global_shape=(4,), offset=(0,), shape=(4,), local_offset=(0,))
    second = Piece(name="b", global_shape=(6,), offset=(0,), shape=(6,), local_offset=(4,))
    made = published(
        [
            ({"a": a}, {"a": placed(a, first)}),
            ({"ab": fused}, {"ab": placed(fused, replace(first, replica=1), second)}),
        ]
    )
    assert made.tensor_count == 2
