"""The manifest of a group: what its root says; none is taken that was altered or does not fit."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge import make_weight_bridge
from rl_bridge.errors import (
    DigestMismatch,
    IncompleteCoverage,
    LayoutUnknown,
    MalformedManifest,
    RangeBeyondSegment,
    RanksDisagree,
    ShapeMismatch,
    WeightManifestValidationError,
)
from rl_bridge.groups import GroupBridge, Piece
from rl_bridge.manifest import coverage
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.coverage import held_pieces, prove_coverage
from rl_bridge.manifest.digest import LEAF_NBYTES, text_digest
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.model import LayoutCache
from rl_bridge.manifest.parallel import Placement
from tests.groups.meshes import Shards, cut, flat_cut, model, numbered, placed
from tests.groups.rig import trainers

LEAF = LEAF_NBYTES // 4  # elements of int32
SHAPES = {"embed": (7, 5), "layer.w": (6, 8), "norm": (5,)}
DIMS = {"embed": 0, "layer.w": 1, "norm": None}


def published(ranks: list[Shards]) -> GroupManifest:
    with trainers(len(ranks), "local-clone") as group:
        return group.publish(ranks, 1)


def unsharded_root(whole: dict[str, torch.Tensor]) -> str:
    with make_weight_bridge("local-clone") as bridge:
        return bridge.publish(whole, weight_version=1).root


@cache
def manifest() -> GroupManifest:
    return published(cut(model(SHAPES), 2, DIMS))


# ---- the root -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num", "less", "is_at_leaves"), [(1, 5, True), (3, 1, True), (2, 5, False)]
)
def test_only_where_ranges_are_cut_at_leaves_the_root_is_the_unsharded_one(
    num: int, less: int, is_at_leaves: bool
) -> None:
    # Flat ranges of whole leaves, the last one ragged; rows of a quarter leaf, four to a leaf.
    whole = model({"flat": (num * 2 * LEAF - less,), "rows": (8 * num, LEAF // 4), "one": (3,)})
    flat = flat_cut({"flat": whole["flat"]}, num)
    rows = cut({"rows": whole["rows"], "one": whole["one"]}, num, {"rows": 0})
    ranks = [({**a, **c}, {**b, **d}) for (a, b), (c, d) in zip(flat, rows, strict=True)]
    made = published(ranks)
    assert made.is_unsharded_root is is_at_leaves
    assert (made.root == unsharded_root(whole)) is is_at_leaves


def test_a_range_that_begins_inside_a_leaf_of_its_tensor_makes_no_unsharded_root() -> None:
    a, b = numbered((10,)), numbered((2 * LEAF,), 100)
    ranks: list[Shards] = []
    for rank in range(2):
        fused = torch.cat([a.chunk(2)[rank], b.chunk(2)[rank]])
        pieces = [
            Piece(
                name=name,
                global_shape=tuple(whole.shape),
                offset=(rank * num,),
                shape=(num,),
                local_offset=(at,),
            )
            for name, whole, num, at in (("a", a, 5, 0), ("b", b, LEAF, 5))
        ]
        ranks.append(({"ab": fused}, {"ab": placed(fused, *pieces)}))
    made = published(ranks)
    assert made.layout.digest_plan.kinds[made.layout.places["b"]] == "cut"
    with trainers(2) as group, GroupBridge() as bridge:
        found = bridge.import_update(group.publish(ranks, 1))
        assert torch.equal(found["b"], b)


# ---- there and back -----------------------------------------------------------------------------


def test_the_update_part_is_small_and_needs_the_layout() -> None:
    made = manifest()
    small = made.to_json(layout=False)
    assert GroupManifest.from_json(small + "\n") == made
    GroupManifest.known_layouts = LayoutCache(8)  # as in another process
    with pytest.raises(LayoutUnknown, match="Send one full manifest"):
        GroupManifest.from_json(small)
    assert GroupManifest.from_json(made.to_json()) == made


# ---- what is altered ----------------------------------------------------------------------------


def altered(change: Callable[[dict[str, Any]], object], *, seal: bool = True) -> str:
    """The manifest's text after a change; with `seal`, digests of the layout are made to fit."""
    document = json.loads(manifest().to_json())
    change(document)
    if seal:
        document["header"]["layout_digest"] = text_digest(canonical_json(document["layout"]))
    head = f'{{"format":"rl_bridge.group/3","header":{canonical_json(document["header"])}'
    return f'{head},"layout":{canonical_json(document["layout"])}}}'


def refused(text: str) -> WeightManifestValidationError:
    with pytest.raises(WeightManifestValidationError) as caught:
        GroupManifest.from_json(text)
    return caught.value


def part(document: dict[str, Any], rank: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = document["layout"]["parts"][rank]
    return found


ALTERED_LAYOUTS: list[tuple[Callable[[dict[str, Any]], object], type[Exception]]] = [
    (lambda d: part(d)["offsets"][0].__setitem__(0, 3), IncompleteCoverage),
    (lambda d: part(d)["replicas"].__setitem__(0, 1), IncompleteCoverage),
    (lambda d: part(d)["shapes"][0].__setitem__(0, 99), RangeBeyondSegment),
    (lambda d: part(d)["local_offsets"][0].__setitem__(0, -1), RangeBeyondSegment),
    (lambda d: part(d)["rows"].__setitem__(0, 99), RangeBeyondSegment),
    (lambda d: part(d)["rows"].__setitem__(0, -1), RangeBeyondSegment),
    (lambda d: part(d)["names"].__setitem__(0, 7), RangeBeyondSegment),
    (lambda d: part(d)["names"].__setitem__(0, -1), RangeBeyondSegment),
    (lambda d: part(d)["rows"].pop(), MalformedManifest),
    (lambda d: part(d).__setitem__("flat", "xyz"), MalformedManifest),
    (lambda d: part(d).__setitem__("more", 1), MalformedManifest),
    (lambda d: part(d)["offsets"].__setitem__(0, "no"), MalformedManifest),
    (lambda d: part(d)["offsets"][0].__setitem__(0, 1.0), MalformedManifest),
    (lambda d: part(d)["offsets"][0].__setitem__(0, 10**30), RangeBeyondSegment),
    (lambda d: d["layout"]["names"].reverse(), MalformedManifest),
    (lambda d: d["layout"]["names"].append("zzz"), MalformedManifest),
    (lambda d: d["layout"]["parts"].pop(), WeightManifestValidationError),
    (lambda d: d["layout"].__setitem__("parts", []), MalformedManifest),
    (lambda d: d["layout"]["shapes"][0].__setitem__(0, 2**62), WeightManifestValidationError),
    (
        lambda d: part(d)["table"]["names"].__setitem__(0, "rl_bridge.leavez"),
        WeightManifestValidationError,
    ),
    (lambda d: part(d)["table"].pop("nbytes"), MalformedManifest),
]


@pytest.mark.parametrize("number", range(len(ALTERED_LAYOUTS)))
def test_an_altered_layout_is_refused(number: int) -> None:
    change, kind = ALTERED_LAYOUTS[number]
    assert isinstance(refused(altered(change)), kind)
    assert isinstance(refused(altered(change, seal=False)), DigestMismatch)


def swap_parts(document: dict[str, Any]) -> None:
    document["header"]["parts"].reverse()


def other_digest(document: dict[str, Any]) -> None:
    raw = bytearray(base64.b64decode(document["header"]["digests"]))
    raw[0] ^= 1
    document["header"]["digests"] = base64.b64encode(raw).decode()


ALTERED_HEADERS: list[tuple[Callable[[dict[str, Any]], object], type[Exception]]] = [
    (swap_parts, WeightManifestValidationError),
    (other_digest, DigestMismatch),
    (lambda d: d["header"].__setitem__("root", "0" * 32), DigestMismatch),
    (lambda d: d["header"].__setitem__("update_id", "0" * 32), DigestMismatch),
    (lambda d: d["header"].__setitem__("publisher_id", "0" * 32), DigestMismatch),
    (lambda d: d["header"].__setitem__("weight_version", 2), RanksDisagree),
    (lambda d: d["header"]["parts"].pop(), MalformedManifest),
    (lambda d: d["header"].__setitem__("parts", {}), MalformedManifest),
    (lambda d: d["header"]["parts"].__setitem__(0, 7), MalformedManifest),
    (lambda d: d["header"]["parts"][0].__setitem__("weight_version", 9), RanksDisagree),
    (lambda d: d["header"]["parts"][0].__setitem__("root", "0" * 32), DigestMismatch),
    (
        lambda d: d["header"]["parts"].__setitem__(1, d["header"]["parts"][0]),
        WeightManifestValidationError,
    ),
    (
        lambda d: d["header"]["parts"][1]["metadata"]["layout"].__setitem__("world_size", 3),
        RanksDisagree,
    ),
]


@pytest.mark.parametrize("number", range(len(ALTERED_HEADERS)))
def test_an_altered_header_is_refused(number: int) -> None:
    change, kind = ALTERED_HEADERS[number]
    assert isinstance(refused(altered(change)), kind)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format":"rl_bridge.manifest/3"', "é"])
def test_text_of_no_group_manifest_is_refused(text: str) -> None:
    assert isinstance(refused(text), MalformedManifest)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_no_single_character_can_be_changed(data: st.DataObject) -> None:
    text = manifest().to_json()
    place = data.draw(st.integers(0, len(text) - 1))
    char = data.draw(st.sampled_from('0123456789abcdef{}[],:" tn-'))
    if text[place] == char:
        return
    changed = text[:place] + char + text[place + 1 :]
    try:
        made = GroupManifest.from_json(changed)
    except WeightManifestValidationError:
        return
    # Only what is for people alone may differ: names, times, where the bytes are.
    assert (made.root, made.layout_digest) == (manifest().root, manifest().layout_digest)


def test_a_leaf_list_of_another_size_is_refused() -> None:
    def change(document: dict[str, Any]) -> None:
        part(document)["table"]["arena_nbytes"] -= 256

    assert "its tensors and their leaf list need" in str(refused(altered(change)))


# ---- parts and layouts that do not fit each other ------------------------------------------------


@cache
def ranks() -> list[Shards]:
    return cut(model(SHAPES), 2, DIMS)


def made_of(**changes: Any) -> GroupManifest:
    made = manifest()
    fields = {name: getattr(made, name) for name in GroupManifest.model_fields}
    return GroupManifest(**{**fields, **changes})


def test_what_it_is_made_of_makes_it_again() -> None:
    assert made_of() == manifest()


def test_two_copies_have_one_header_digest_and_another_group_has_another() -> None:
    assert len(manifest().header_digest) == 16
    assert GroupManifest.from_json(manifest().to_json()).header_digest == manifest().header_digest
    assert made_of(metadata={"step": 1}).header_digest != manifest().header_digest


# ---- parts --------------------------------------------------------------------------------------


def test_parts_of_another_layout_are_refused() -> None:
    other = published(cut(model({"embed": (9, 5), "norm": (5,)}), 2, DIMS))
    with pytest.raises(DigestMismatch, match="rank 0: its part has the layout"):
        made_of(parts=other.parts)


def test_fewer_parts_than_ranks_are_refused() -> None:
    with pytest.raises(RanksDisagree, match="1 parts, its layout is of 2 ranks"):
        made_of(parts=manifest().parts[:1])


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

Placements = dict[str, Placement]


def longer(theirs: Placements) -> None:
    (piece,) = theirs["embed"].pieces
    theirs["embed"] = replace(theirs["embed"], pieces=(replace(piece, global_shape=(8, 5)),))


def wider(theirs: Placements) -> None:
    theirs["norm"] = replace(theirs["norm"], dtype="float64")


CHANGED: dict[str, tuple[Callable[[Placements], object], type[Exception], str]] = {
    "another whole": (longer, RanksDisagree, "embed"),
    "no placement": (
        lambda theirs: theirs.pop("norm"),
        IncompleteCoverage,
        "rank 1: tensor 'norm' has no placement",
    ),
    "no tensor": (
        lambda theirs: theirs.update(more=theirs["norm"]),
        IncompleteCoverage,
        "rank 1: tensor 'more' has a placement and no",
    ),
    "another dtype": (wider, ShapeMismatch, "rank 1: tensor 'norm' is int32"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_placements_that_do_not_fit_what_was_published_are_refused(case: str) -> None:
    change, kind, text = CHANGED[case]
    mine, theirs = (dict(placements) for _, placements in ranks())
    change(theirs)
    with pytest.raises(kind, match=text):
        GroupLayout.build(manifest().layout.tables, [mine, theirs])


def test_a_tensor_that_no_rank_holds_is_named() -> None:
    document = json.loads(manifest().layout.text)
    document["names"].append("zzz")
    document["shapes"].append([1])
    with pytest.raises(IncompleteCoverage, match="no rank holds anything of tensor 'zzz'"):
        GroupLayout(**document)


@pytest.mark.parametrize("change", ["[]", "{text} ", "{text}x", "spaced"])
def test_the_text_of_a_layout_has_one_spelling(change: str) -> None:
    text = manifest().layout.text
    spaced = json.dumps(json.loads(text))
    with pytest.raises(MalformedManifest):
        GroupLayout.from_text(spaced if change == "spaced" else change.format(text=text))


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
    assert one.tensors["empty"].checksum == other.tensors["empty"].checksum
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
