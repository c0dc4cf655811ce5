"""Column blocks: how tensors are cut, and that every way to digest them gives the same list."""

import numpy as np
import pytest
import torch
import xxhash

from rl_bridge.errors import (
    ChecksumMismatch,
    MalformedManifest,
    RangeBeyondSegment,
    RangeOverflow,
    WeightManifestValidationError,
)
from rl_bridge.manifest.columns import ColumnBlocks
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory import passes, vm
from rl_bridge.memory.packing import (
    PackPlan,
    checked_columns,
)
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.views import anonymous_pin
from tests.helpers import make_manifest

TENSORS = {
    "expert": torch.randn(4, 30, 3000),
    "long": torch.arange(3 * 300_000, dtype=torch.int32).view(3, -1),
    "narrow": torch.randn(40_000, 4),
    "odd": torch.randn(2999, 301).bfloat16(),
    "small": torch.randn(10, 1000),
    "square": torch.randn(1792, 1792).bfloat16(),
    "stacked": torch.randn(3, 1024, 256).bfloat16(),
    "strided": torch.randn(1200, 999)[:, :512],
    "tall": torch.randn(1025, 256).bfloat16(),
    "turned": torch.randn(1000, 1100).t(),
    "vector": torch.randn(100_000),
}
CUT = {"expert": 8, "long": 16, "square": 8, "stacked": 2, "strided": 8, "turned": 8}


def reference(plan: PackPlan) -> bytes:
    """The column list, as the page of the format says it."""
    found = b""
    cuts = plan.table.column_blocks
    for row, name in enumerate(plan.table.names):
        strips, band = int(cuts.strips[row]), int(cuts.band_rows[row])
        if strips:
            tensor = TENSORS[name].contiguous()
            matrix = tensor.view(-1, tensor.shape[-1]).view(torch.uint8).numpy()
            for low in range(0, len(matrix), band):
                for piece in np.split(matrix[low : low + band], strips, axis=1):
                    found += xxhash.xxh3_128_digest(piece.tobytes())
    return found


@pytest.fixture(scope="module")
def plan() -> PackPlan:
    return PackPlan(TENSORS, columns=True)


def test_shape_and_dtype_alone_decide_how_a_tensor_is_cut(plan: PackPlan) -> None:
    strips = plan.table.column_blocks.strips
    found = {name: int(n) for name, n in zip(plan.table.names, strips, strict=True) if n}
    assert found == CUT
    assert (plan.table.column_blocks.rows[plan.table.rows["expert"]]) == 4 * 30


@pytest.mark.parametrize("num_threads", [1, 3])
def test_packing_writes_the_list_behind_the_leaf_list(plan: PackPlan, num_threads: int) -> None:
    table = plan.table
    pin = anonymous_pin(table.arena_nbytes)
    plan.pack(TENSORS, pin.address, num_threads=num_threads)
    written = vm.tensor_at(pin.address + table.columns_offset, table.columns_nbytes)
    expected = reference(plan)
    assert written.numpy().tobytes() == plan.column_list.tobytes() == expected
    assert plan.columns_digest == xxhash.xxh3_128_hexdigest(expected)
    at = table.offset_column + np.uint64(pin.address)
    blocks = passes.blocks_at(table.column_blocks.all_blocks(), at)
    assert passes.block_digests(blocks, num_threads=num_threads).tobytes() == expected
    plain = BytePlan(table.nbytes_column, cuts=table.column_blocks, native=False)
    plain.digest(at)
    assert plain.take_columns(at).tobytes() == expected


def test_without_a_compiled_module_the_list_is_the_same(
    plan: PackPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "NATIVE", None)
    slow = PackPlan(TENSORS, columns=True)
    pin = anonymous_pin(slow.table.arena_nbytes)
    slow.pack(TENSORS, pin.address)
    assert slow.column_list.tobytes() == reference(plan)


def test_tensors_that_none_can_cut_have_no_list() -> None:
    tensors = {name: TENSORS[name] for name in TENSORS.keys() - CUT.keys()}
    plan = PackPlan(tensors, columns=True)
    assert not plan.table.columns
    assert plan.columns_digest == ""
    assert plan.table == PackPlan(tensors).table


def test_the_list_changes_neither_digests_nor_places(plan: PackPlan) -> None:
    without = PackPlan(TENSORS)
    tables = [one.table for one in (plan, without)]
    pins = [anonymous_pin(table.arena_nbytes) for table in tables]
    one, other = (
        p.pack(TENSORS, pin.address) for p, pin in zip((plan, without), pins, strict=True)
    )
    assert one == other
    assert tables[0].offsets == tables[1].offsets
    assert tables[0].root_plan.root(one) == tables[1].root_plan.root(other)
    assert tables[0].arena_nbytes > tables[1].arena_nbytes


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda block: block[:-1], MalformedManifest),
        (lambda block: bytes([block[0] ^ 1]) + block[1:], ChecksumMismatch),
    ],
)
def test_a_damaged_list_is_refused(plan: PackPlan, damage: object, error: type) -> None:
    manifest = make_manifest(plan.table, columns=xxhash.xxh3_128_hexdigest(reference(plan)))
    assert checked_columns(manifest, reference(plan)) == reference(plan)
    with pytest.raises(error):
        checked_columns(manifest, damage(reference(plan)))  # type: ignore[operator]


# ---- layouts that others made -------------------------------------------------------------------

HUGE = {"a": ("complex128", (2, 2**58 - 8))}


def test_a_list_that_ends_beyond_63_bits_is_refused() -> None:
    with pytest.raises(RangeOverflow, match="and their column list need"):
        TensorTable.pack(HUGE, leaves=True, columns=True)


@pytest.mark.parametrize(
    "tensors",
    [{"a": ("int8", (0, 2**70))}, {"a": ("int8", (-2, -(2**40)))}, {"a": ("int8", (2**40, 2**40))}],
)
def test_absurd_shapes_are_refused_by_type(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    with pytest.raises(WeightManifestValidationError):
        TensorTable.pack(tensors, leaves=True, columns=True)


@pytest.mark.parametrize("by", [-256, 256])
def test_an_arena_of_another_size_than_its_lists_need_is_refused(plan: PackPlan, by: int) -> None:
    document = plan.table.document()
    document["arena_nbytes"] += by
    error = RangeBeyondSegment if by < 0 else MalformedManifest
    with pytest.raises(error, match="leaf list and their column list need"):
        TensorTable(**document)


def test_a_layout_that_hides_its_list_is_refused(plan: PackPlan) -> None:
    with pytest.raises(MalformedManifest, match="is said to have"):
        TensorTable(**plan.table.document() | {"columns": False})


def test_forty_thousand_tensors_are_cut_at_once() -> None:
    num = 40_000
    cuts = ColumnBlocks.of([(512, 1024)] * num, ["bfloat16"] * num, [1 << 20] * num)
    assert len(cuts.all_blocks().rows) * 16 == cuts.nbytes == num * 8 * 2 * 16
