"""The no-op and wrong-payload detector: what is suspicious about an update after another."""

import pytest

from rl_bridge import WeightUpdateManifest
from rl_bridge.manifest.compare import compare
from rl_bridge.manifest.table import TensorTable
from tests.helpers import make_manifest

Layout = dict[str, tuple[str, tuple[int, ...]]]
THREE: Layout = {"a": ("float32", (2,)), "b": ("float32", (2,)), "empty": ("float32", (0,))}


def version(
    number: int,
    digests: str,
    *,
    layout: Layout = THREE,
    trainable: set[str] | None = None,
    ties: dict[str, str] | None = None,
) -> WeightUpdateManifest:
    """A manifest whose tensors have one letter each for their digests."""
    flags = None if trainable is None else frozenset(trainable)
    table = TensorTable.pack(layout, trainable=flags, ties=ties)
    block = "".join(letter * 16 for letter in digests).encode()
    return make_manifest(table, weight_version=number, digests=block)


@pytest.mark.parametrize(
    ("digests", "trainable"),
    [("xyw", None), ("Xyz", {"a"}), ("XYz", {"a", "b", "empty"})],
    ids=["not-declared", "frozen", "empty"],
)
def test_a_tensor_may_stay_as_it_is_where_it_is(digests: str, trainable: set[str] | None) -> None:
    before, after = version(1, "xyz", trainable=trainable), version(2, digests, trainable=trainable)
    assert compare(before, after) == []


def test_a_changed_layout_is_compared_by_name() -> None:
    more: Layout = {"0-new": ("float32", (3,)), **THREE}
    before = version(1, "xyz", trainable={"a"})
    after = version(2, "nxYz", layout=more, trainable={"0-new", "a", "b", "empty"})
    (finding,) = compare(before, after)
    assert "1 trainable tensors did not change: a." in finding
    assert compare(before, version(2, "nxYz", layout=more)) == []


def test_declaring_more_trainable_tensors_changes_the_layout_and_still_compares() -> None:
    (finding,) = compare(version(1, "xyz"), version(2, "xYz", trainable={"a"}))
    assert "did not change: a." in finding


def test_a_name_that_is_new_or_gone_is_not_narrowed() -> None:
    before: Layout = {"a": ("float32", (1,)), "gone": ("float64", (1,))}
    after: Layout = {"a": ("float32", (1,)), "new": ("int8", (1,))}
    renamed: Layout = {"b": ("float32", (1,)), "new": ("int8", (1,))}
    first, second, third = (
        version(number, digests, layout=layout)
        for number, (digests, layout) in enumerate((("xy", before), ("XY", after), ("uv", renamed)))
    )
    assert compare(first, second) == compare(second, third) == []


def test_narrowing_and_unchanged_trainable_tensors_are_both_told_tied_names_too() -> None:
    before: Layout = {"a": ("float32", (2,)), "b": ("float32", (2,))}
    after: Layout = {"a": ("float32", (2,)), "b": ("bfloat16", (2,))}
    unchanged, narrower = compare(
        version(1, "xy", layout=before, ties={"head": "b"}),
        version(2, "xz", layout=after, ties={"head": "b"}, trainable={"a"}),
    )
    assert "did not change: a." in unchanged
    assert "2 tensors: b (float32 to bfloat16), head (float32 to bfloat16)" in narrower


def test_a_long_list_of_names_is_cut() -> None:
    layout: Layout = {f"t{index}": ("int8", (1,)) for index in range(8)}
    before = version(1, "abcdefgh", layout=layout, trainable=set(layout))
    after = version(2, "abcdefgH", layout=layout, trainable=set(layout))
    (finding,) = compare(before, after)
    assert "t0, t1, t2, t3, t4 and 2 more" in finding
