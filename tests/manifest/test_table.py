"""The layout part: packed, valid from birth, described on demand, remembered by its digest."""

import dataclasses
import gc
from contextlib import suppress
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.errors import (
    DuplicateTensorName,
    MalformedManifest,
    NegativeRange,
    OverlappingRange,
    RangeBeyondSegment,
    RangeOverflow,
    ShapeMismatch,
    UnknownDtype,
    WeightManifestValidationError,
)
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.digest import text_digest
from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.manifest.table import (
    ALIGNMENT,
    DescriptorMap,
    TensorDescriptor,
    TensorTable,
    collector_paused,
    row_major_stride,
)
from tests.helpers import make_table

LAYOUTS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=6),
    st.tuples(
        st.sampled_from(sorted(DTYPE_NBYTES)),
        st.lists(st.integers(0, 40), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=100)
@given(LAYOUTS)
def test_packing_leaves_no_gap_and_no_overlap(tensors: dict[str, Any]) -> None:
    table = TensorTable.pack(tensors)
    assert list(table.names) == sorted(tensors)
    end = 0
    for name, offset, nbytes in zip(table.names, table.offsets, table.nbytes, strict=True):
        dtype, shape = tensors[name]
        assert offset == end
        assert offset % ALIGNMENT == 0
        assert nbytes == prod(shape) * DTYPE_NBYTES[dtype]
        end = -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT
    assert table.arena_nbytes == end
    assert table.total_nbytes == sum(table.nbytes)


@settings(deadline=None, max_examples=60)
@given(LAYOUTS)
def test_a_layout_comes_back_from_its_text(tensors: dict[str, Any]) -> None:
    table = TensorTable.pack(tensors)
    again = TensorTable(**table.document())
    assert again == table
    assert again.text == table.text == canonical_json(table.document())
    assert again.digest == text_digest(table.text)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 5), max_size=5))
def test_strides_are_those_of_a_contiguous_tensor(shape: list[int]) -> None:
    assert row_major_stride(shape) == torch.empty(shape).stride()


def test_declared_trainable_tensors_are_flagged_in_layout_order() -> None:
    table = make_table(trainable=frozenset({"weight"}))
    assert table.trainable == "01"
    assert make_table().trainable is None


# ---- descriptors --------------------------------------------------------------------------------


def test_a_descriptor_says_what_and_where_a_tensor_is() -> None:
    table = make_table({"b": ("int8", (3,)), "w": ("bfloat16", (2, 5))}, device="cpu")
    digests = bytes(range(32))
    assert table.descriptor("w", digests) == TensorDescriptor(
        name="w",
        shape=(2, 5),
        dtype="bfloat16",
        stride=(5, 1),
        device="cpu",
        numel=10,
        nbytes=20,
        offset=256,
        checksum=digests[16:].hex(),
    )


def test_the_descriptors_are_a_mapping_over_all_names() -> None:
    table = make_table(ties={"a-tie": "weight"})
    found = DescriptorMap(table, bytes(32))
    assert list(found) == ["bias", "weight", "a-tie"]
    assert len(found) == 3
    assert found["a-tie"].tied_to == "weight"
    assert dataclasses.replace(found["a-tie"], name="weight", tied_to=None) == found["weight"]
    assert "nothing" not in found
    assert repr(found) == "<3 tensor descriptors>"
    with pytest.raises(KeyError):
        found["nothing"]


# ---- immutability -------------------------------------------------------------------------------


def test_a_layout_is_immutable() -> None:
    table = make_table(ties={"head": "weight"})
    with pytest.raises(AttributeError):
        table.names = ("x",)  # type: ignore[misc]  # that is the point
    with pytest.raises(TypeError):
        table.ties["x"] = "bias"
    with pytest.raises(TypeError):
        table.rows["x"] = 1  # type: ignore[index]  # that is the point
    for column in (table.offset_column, table.nbytes_column):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            column.flags.writeable = True


# ---- damage -------------------------------------------------------------------------------------

# Two tensors: bias float32[5] at 0 (20 bytes), weight bfloat16[3, 5] at 256 (30 bytes).
BIG = 2**62
DAMAGE: dict[str, tuple[dict[str, object], type[WeightManifestValidationError], str]] = {
    "negative-offset": ({"offsets": [0, -256]}, NegativeRange, "'weight': offset -256"),
    "negative-nbytes": ({"nbytes": [-20, 30]}, NegativeRange, "'bias'.*-20 bytes"),
    "negative-dim": ({"shapes": [[-5], [3, 5]]}, NegativeRange, r"'bias'.*shape \[-5\]"),
    "two-negative-dims": ({"shapes": [[5], [-3, -5]]}, NegativeRange, "'weight'"),
    "overlap": ({"offsets": [0, 0]}, OverlappingRange, "'weight' starts at byte 0.*ends at 256"),
    "overlap-by-a-byte": ({"offsets": [0, 255]}, OverlappingRange, "'weight'"),
    "gap": ({"offsets": [0, 512], "arena_nbytes": 768}, MalformedManifest, "'weight'.*no gaps"),
    "late-start": ({"offsets": [256, 512], "arena_nbytes": 768}, MalformedManifest, "'bias'"),
    "beyond-arena": ({"arena_nbytes": 285}, RangeBeyondSegment, "'weight' ends at byte 286"),
    "arena-unaligned": ({"arena_nbytes": 286}, RangeBeyondSegment, "tensors need 512"),
    "arena-negative": ({"arena_nbytes": -1}, RangeBeyondSegment, "beyond the arena of -1"),
    "arena-too-large": ({"arena_nbytes": 513}, MalformedManifest, "513 bytes.*need 512"),
    "shape-overflow": ({"shapes": [[BIG, 2], [3, 5]]}, RangeOverflow, "'bias'.*63 bits"),
    "empty-but-overflowing": (
        {"shapes": [[0, BIG, 4], [3, 5]], "nbytes": [0, 30]},
        RangeOverflow,
        "'bias'",
    ),
    "offset-overflow": ({"offsets": [0, 2**63 - 8]}, RangeOverflow, "'weight'"),
    "nbytes-overflow": ({"nbytes": [20, 2**63]}, RangeOverflow, "'weight'"),
    "google-of-bytes": ({"nbytes": [20, 10**100]}, RangeOverflow, "'weight'"),
    "nbytes-too-small": (
        {"nbytes": [16, 30]},
        ShapeMismatch,
        r"float32\[5\] has 20 bytes.*says 16",
    ),
    "nbytes-too-large": ({"nbytes": [20, 32]}, ShapeMismatch, "'weight'"),
    "shape-too-large": ({"shapes": [[6], [3, 5]]}, ShapeMismatch, "'bias'"),
    "dtype-of-another-size": ({"dtypes": ["float64", "bfloat16"]}, ShapeMismatch, "'bias'"),
    "unknown-dtype": ({"dtypes": ["float32", "qint8"]}, UnknownDtype, "'weight': unknown.*'qint8'"),
    "duplicate-name": ({"names": ["bias", "bias"]}, DuplicateTensorName, "'bias' appears twice"),
    "unsorted-names": ({"names": ["weight", "bias"]}, MalformedManifest, "'bias' stands after"),
    "tie-to-nothing": ({"ties": {"x": "y"}}, MalformedManifest, "'x' is tied to 'y'"),
    "tie-to-a-tie": ({"ties": {"x": "weight", "y": "x"}}, MalformedManifest, "'y' is tied to 'x'"),
    "tie-of-a-stored": ({"ties": {"bias": "weight"}}, DuplicateTensorName, "'bias' is stored and"),
    "tie-to-an-object": ({"ties": {"x": {}}}, MalformedManifest, "'x' is tied to"),
    "tie-to-a-list": ({"ties": {"x": ["weight"]}}, MalformedManifest, "'x' is tied to"),
    "ties-no-mapping": ({"ties": ["x"]}, MalformedManifest, "ties is tuple"),
    "ties-null": ({"ties": None}, MalformedManifest, "ties is NoneType"),
    "other-algorithm": ({"algorithm": "sha256"}, MalformedManifest, "'sha256'.*'X3T-128K'"),
    "columns-differ": ({"nbytes": [20]}, MalformedManifest, "'nbytes': 1"),
    "flags-too-short": ({"trainable": "1"}, MalformedManifest, "trainable flags"),
    "flags-too-long": ({"trainable": "111"}, MalformedManifest, "trainable flags"),
    "flags-not-binary": ({"trainable": "1x"}, MalformedManifest, "trainable flags"),
}
COLUMNS = ("names", "dtypes", "nbytes", "offsets", "shapes")
EMPTY: dict[str, object] = {column: [] for column in COLUMNS}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_layout_has_its_own_error(damage: str) -> None:
    change, error, said = DAMAGE[damage]
    document = make_table().document() | change
    with pytest.raises(WeightManifestValidationError, match=said) as caught:
        TensorTable(**document)
    assert type(caught.value) is error


def test_a_layout_without_tensors_has_an_empty_arena() -> None:
    table = TensorTable(**{**make_table().document(), **EMPTY, "arena_nbytes": 0})
    assert table == TensorTable.pack({}) != TensorTable.pack({}, leaves=True)
    assert table.leaves_offset == TensorTable.pack({}, leaves=True).leaves_nbytes == 0


def test_a_leaf_list_that_ends_beyond_63_bits_is_refused() -> None:
    # The tensor's own bytes still fit.
    with pytest.raises(RangeOverflow, match="63 bits: its tensors and their leaf list need"):
        TensorTable.pack({"a": ("complex128", (2**59 - 16,))}, leaves=True)


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({"a": ("float31", (1,))}, UnknownDtype),
        ({"a": ("int8", (-1,))}, NegativeRange),
        ({"a": ("int8", (2**62, 2**62))}, RangeOverflow),
    ],
    ids=["dtype", "negative", "overflow"],
)
def test_packing_refuses_what_no_layout_can_say(
    tensors: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        TensorTable.pack(tensors)


# ---- the collector rests while tables are made ---------------------------------------------------


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_it_was_behind_the_block_and_behind_an_error(was_on: bool) -> None:
    is_on = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with suppress(KeyError), collector_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if is_on else gc.disable)()
