"""The group's manifest: what its root says, and that no altered one gets through."""

import base64
import copy
import json
import pickle
from collections.abc import Callable
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
    WeightManifestValidationError,
)
from rl_bridge.groups import GroupBridge, Piece
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.digest import LEAF_NBYTES, text_digest
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_digests import LEAVES
from tests.groups.meshes import Shards, chunked, cut, flat_cut, model, numbered, placed
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


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_where_ranges_are_cut_at_leaves_the_root_is_the_unsharded_one(num: int) -> None:
    # Flat ranges of whole leaves, the last one ragged; rows of a quarter leaf, four to a leaf.
    whole = model({"flat": (num * 2 * LEAF - 5,), "rows": (8 * num, LEAF // 4), "one": (3,)})
    flat = flat_cut({"flat": whole["flat"]}, num)
    rows = cut({"rows": whole["rows"], "one": whole["one"]}, num, {"rows": 0})
    ranks = [({**a, **c}, {**b, **d}) for (a, b), (c, d) in zip(flat, rows, strict=True)]
    bounds = chunked(num * 2 * LEAF - 5, num)
    made = published(ranks)
    is_at_leaves = all(bound % LEAF == 0 for bound in bounds[:-1])
    assert made.is_unsharded_root is is_at_leaves
    assert (made.root == unsharded_root(whole)) is is_at_leaves


def test_replicas_and_whole_tensors_need_no_leaves() -> None:
    whole = model({"a": (3, 3), "b": ()})
    made = published(cut(whole, 3, {}))
    assert made.is_unsharded_root
    assert made.root == unsharded_root(whole)


def test_roots_of_cuts_inside_leaves_differ_for_different_contents() -> None:
    one, same, other = (published(cut(model(SHAPES, n), 2, DIMS)) for n in (0, 0, 1))
    assert one.root == same.root != other.root
    assert not one.is_unsharded_root
    assert one.whole_digest("embed") is None
    assert one.whole_digest("norm") is not None


@pytest.mark.parametrize("shift", [0, 1])
def test_the_root_is_the_unsharded_one_only_where_cuts_are_at_leaves(shift: int) -> None:
    whole = {"w": numbered((2 * LEAF,))}
    ranks = cut(whole, 2, {"w": 0})
    if shift:  # one element more on rank 0
        moved = [whole["w"][: LEAF + 1], whole["w"][LEAF + 1 :]]
        ranks = []
        for part, at in zip(moved, (0, LEAF + 1), strict=True):
            shards, placements = cut({"w": whole["w"]}, 1, {"w": 0})[0]
            piece = placements["w"].pieces[0]
            placed = type(piece)(
                name="w",
                global_shape=piece.global_shape,
                offset=(at,),
                shape=(len(part),),
                local_offset=(0,),
            )
            shards["w"] = part.clone()
            kind = type(placements["w"])
            placements["w"] = kind(dtype="int32", shape=(len(part),), pieces=(placed,))
            ranks.append((shards, placements))
    assert published(ranks).is_unsharded_root is (shift == 0)


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
    assert made.whole_digest("b") is None
    with trainers(2) as group, GroupBridge() as bridge:
        found = bridge.import_update(group.publish(ranks, 1))
        assert torch.equal(found["b"], b)


# ---- there and back -----------------------------------------------------------------------------


def test_copies_and_pickles_are_the_manifest() -> None:
    made = manifest()
    assert copy.copy(made) is made
    assert copy.deepcopy(made) is made
    assert pickle.loads(pickle.dumps(made)) == made
    assert len({made, GroupManifest.from_json(made.to_json().encode())}) == 1
    assert "2 ranks 3 tensors" in repr(made)


def test_the_update_part_is_small_and_needs_the_layout() -> None:
    made = manifest()
    small = made.to_json(layout=False)
    assert GroupManifest.from_json(small + "\n") == made
    GroupManifest.known_layouts.clear()
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
    head = f'{{"format":"rl_bridge.group/1","header":{canonical_json(document["header"])}'
    return f'{head},"layout":{canonical_json(document["layout"])}}}'


def refused(text: str) -> WeightManifestValidationError:
    with pytest.raises(WeightManifestValidationError) as caught:
        GroupManifest.from_json(text)
    return caught.value


def part(document: dict[str, Any], rank: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = document["layout"]["parts"][rank]
    return found


def test_the_helper_alters_nothing_by_itself() -> None:
    assert altered(lambda _: None) == manifest().to_json()


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
    (lambda d: d["header"].__setitem__("root", None), MalformedManifest),
    (lambda d: d["header"].__setitem__("update_id", "0" * 32), DigestMismatch),
    (lambda d: d["header"].__setitem__("group_id", "0" * 32), DigestMismatch),
    (lambda d: d["header"].__setitem__("update_id", "../x"), MalformedManifest),
    (lambda d: d["header"].__setitem__("weight_version", 2), RanksDisagree),
    (lambda d: d["header"].__setitem__("weight_version", True), MalformedManifest),
    (lambda d: d["header"].__setitem__("metadata", 3), MalformedManifest),
    (lambda d: d["header"].__setitem__("digests", "!"), MalformedManifest),
    (lambda d: d["header"].__setitem__("more", 1), MalformedManifest),
    (lambda d: d["header"].pop("created_at"), MalformedManifest),
    (lambda d: d["header"].__setitem__("created_at", 1), MalformedManifest),
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


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format":"rl_bridge.manifest/1"', "é"])
def test_text_of_no_group_manifest_is_refused(text: str) -> None:
    assert isinstance(refused(text), MalformedManifest)


def test_a_group_manifest_of_no_text_is_refused() -> None:
    with pytest.raises(MalformedManifest):
        GroupManifest.from_json(5)  # type: ignore[arg-type]
    with pytest.raises(MalformedManifest):
        GroupManifest(update_id="x")  # type: ignore[call-arg]  # that is the point


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
        table = part(document)["table"]
        row = table["names"].index(LEAVES)
        table["shapes"][row][0] -= 1
        table["nbytes"][row] -= 1

    assert "expected uint8 of" in str(refused(altered(change)))
