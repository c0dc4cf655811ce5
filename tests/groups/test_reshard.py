"""Resharding: whatever the cuts, each consumer gets its bytes, and only what it needs is read."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.assembly.assemble import Assembly
from rl_bridge.assembly.plan import ReshardPlan, make_plan
from rl_bridge.assembly.wanted import (
    ExpertParallel,
    Fused,
    PipelineParallel,
    TensorParallel,
    Wanted,
    WantedLayout,
    WantedTensor,
    WholeSlice,
    everything,
    parallel,
    slices,
)
from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.parallel import Piece, Placement
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.packing import dtype_name
from tests.groups.meshes import (
    Shards,
    boxes,
    cut,
    cuts,
    flat_cut,
    model,
    numbered,
    piece,
    placed,
    shapes,
)


def layout_of(ranks: list[Shards]) -> GroupLayout:
    """The layout that these ranks would publish."""
    tables = []
    for tensors, _ in ranks:
        known = {name: (dtype_name(one), tuple(one.shape)) for name, one in tensors.items()}
        tables.append(TensorTable.pack(known, leaves=True))
    return GroupLayout.build(tables, [placements for _, placements in ranks])


def carried_out(plan: ReshardPlan, ranks: list[Shards]) -> dict[str, torch.Tensor]:
    """What the plan's copies make of the ranks' tensors; nothing is verified here."""
    arenas = []
    for (tensors, _), table in zip(ranks, plan_tables(plan, ranks), strict=True):
        arena = np.zeros(max(table.arena_nbytes, 1), np.uint8)
        for name, tensor in tensors.items():
            row = table.rows[name]
            if tensor.numel():
                held = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                arena[table.offsets[row] : table.offsets[row] + table.nbytes[row]] = held
        arenas.append(arena)
    out = np.full(max(plan.table.arena_nbytes, 1), 0xEE, np.uint8)
    bases = np.array([arena.ctypes.data for arena in arenas], np.uint64)
    Assembly(plan, layout_of(ranks))._copy(bases, out.ctypes.data)
    found = {}
    for name, row in plan.table.rows.items():
        start = plan.table.offsets[row]
        raw = torch.from_numpy(out[start : start + plan.table.nbytes[row]].copy())
        dtype = getattr(torch, plan.table.dtypes[row])
        shape = plan.table.shapes[row]
        found[name] = (
            raw.view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
        )
    return found


def plan_tables(plan: ReshardPlan, ranks: list[Shards]) -> tuple[TensorTable, ...]:
    return layout_of(ranks).tables


def reshard(ranks: list[Shards], wanted: Wanted) -> dict[str, torch.Tensor]:
    layout = layout_of(ranks)
    return carried_out(make_plan(layout, wanted(layout.wholes)), ranks)


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


# ---- any cut, any wish --------------------------------------------------------------------------


@st.composite
def cut_over_ranks(draw: st.DrawFn, whole: torch.Tensor, name: str) -> list[Shards]:
    """A tensor cut by an uneven mesh; each box lies in a rank's tensor, with others or alone."""
    mesh = list(boxes(whole.shape, draw(cuts(tuple(whole.shape)))))
    num = draw(st.integers(1, 4))
    ranks: list[Shards] = [({}, {}) for _ in range(num)]
    for number, where in enumerate(mesh):
        tensors, placements = ranks[draw(st.integers(0, num - 1))]
        local = f"own.{number}"
        tensors[local] = whole[where].contiguous().clone()
        placements[local] = placed(tensors[local], piece(name, whole, where))
    return ranks


@st.composite
def wish(draw: st.DrawFn, shape: tuple[int, ...]) -> list[slice]:
    found = []
    for size in shape:
        low = draw(st.integers(0, size))
        found.append(slice(low, draw(st.integers(low, size))))
    return found


@given(st.data())
@settings(deadline=None)
def test_any_box_comes_out_of_any_mesh(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_dims=4, max_size=5))
    whole = numbered(shape, 7)
    ranks = data.draw(cut_over_ranks(whole, "w"))
    where = data.draw(wish(shape))
    same(reshard(ranks, slices({"w": where})), {"w": whole[tuple(where)]})


@given(st.data())
@settings(deadline=None)
def test_any_box_comes_out_of_ranges_of_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_dims=4, max_size=5))
    whole = numbered(shape, 7)
    ranks = flat_cut({"w": whole}, data.draw(st.integers(1, 5)), pad=data.draw(st.integers(0, 3)))
    where = data.draw(wish(shape))
    same(reshard(ranks, slices({"w": where})), {"w": whole[tuple(where)]})


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex128]
)
def test_every_size_of_element_travels_bit_by_bit(dtype: torch.dtype) -> None:
    raw = torch.arange(6 * 8 * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    whole = {"w": (raw % 2 if dtype is torch.bool else raw).view(dtype).view(-1, 8)}
    ranks = cut(whole, 3, {"w": 0})
    found = reshard(ranks, slices({"w": [None, slice(2, 5)]}))["w"]
    expected = whole["w"][:, 2:5].contiguous()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


SHAPES = {
    "embed_tokens.weight": (12, 8),
    "layers.0.attn.q_proj.weight": (8, 8),
    "layers.0.attn.k_proj.weight": (4, 8),
    "layers.0.attn.v_proj.weight": (4, 8),
    "layers.0.attn.o_proj.weight": (8, 8),
    "layers.1.experts.0.w": (4, 4),
    "layers.1.experts.1.w": (4, 4),
    "layers.1.stacked": (2, 4, 4),
    "model.norm.weight": (8,),
    "scale": (),
}
ROWS = {"*.q_proj.weight": 0, "*.k_proj.weight": 0, "*.v_proj.weight": 0, "embed*": 0}
DIMS = {**ROWS, "*.o_proj.weight": 1}
QKV = Fused(
    "{}.qkv_proj.weight", ("{}.q_proj.weight", "{}.k_proj.weight", "{}.v_proj.weight"), dim=0
)


def trainer(num: int, version: int = 0) -> list[Shards]:
    dims = {name: TensorParallel(num, 0, DIMS).dim_of(name) for name in SHAPES}
    return cut(model(SHAPES, version), num, dims)


@pytest.mark.parametrize("trainers", [1, 2, 4])
@pytest.mark.parametrize("consumers", [1, 2, 4])
def test_tensor_parallel_ranks_become_others(trainers: int, consumers: int) -> None:
    whole = model(SHAPES)
    for rank in range(consumers):
        wanted = parallel(tensor=TensorParallel(consumers, rank, DIMS), fused=[QKV])
        found = reshard(trainer(trainers), wanted)

        def mine(name: str, dim: int, rank: int = rank) -> torch.Tensor:
            return whole[name].chunk(consumers, dim)[rank]

        head = "layers.0.attn."
        expected = {name: one for name, one in whole.items() if "_proj" not in name}
        expected["embed_tokens.weight"] = mine("embed_tokens.weight", 0)
        expected[head + "o_proj.weight"] = mine(head + "o_proj.weight", 1)
        qkv = [mine(f"{head}{letter}_proj.weight", 0) for letter in "qkv"]
        expected[head + "qkv_proj.weight"] = torch.cat(qkv)
        same(found, expected)


def test_stages_have_their_layers_and_together_everything() -> None:
    whole = model(SHAPES)
    names: list[str] = []
    for rank in range(2):
        found = reshard(trainer(2), parallel(pipeline=PipelineParallel(2, rank, 2)))
        same(found, {name: whole[name] for name in found})
        names += found
        assert ("embed_tokens.weight" in found) == (rank == 0)
        assert ("model.norm.weight" in found) == (rank == 1)
        assert ("layers.1.stacked" in found) == (rank == 1)
    assert {*names} == {*SHAPES}


def test_a_layer_or_an_expert_that_no_rank_would_have_is_refused() -> None:
    group = layout_of(cut(model({"layers.2.experts.3.w": (2, 2)}), 1, {}))
    for wanted in (
        parallel(pipeline=PipelineParallel(2, 0, num_layers=2)),
        parallel(expert=ExpertParallel(2, 0, num_experts=3)),
    ):
        with pytest.raises(IncompatibleUpdate, match=r"leaves it to no rank.*Give the model's num"):
            wanted(group.wholes)


def test_experts_go_to_their_ranks() -> None:
    whole = model(SHAPES)
    for rank in range(2):
        expert = ExpertParallel(2, rank, 2, stacked={"*.stacked": 0})
        found = reshard(trainer(2), parallel(expert=expert))
        assert f"layers.1.experts.{rank}.w" in found
        assert f"layers.1.experts.{1 - rank}.w" not in found
        assert torch.equal(found["layers.1.stacked"], whole["layers.1.stacked"][rank : rank + 1])


def test_a_fused_tensor_of_a_rank_is_taken_apart() -> None:
    q, k = numbered((6, 4)), numbered((4, 4), 100)
    ranks: list[Shards] = []
    for rank in range(2):
        mine = [q.chunk(2)[rank], k.chunk(2)[rank]]
        fused = torch.cat(mine)
        pieces = tuple(
            Piece(
                name=name,
                global_shape=tuple(whole.shape),
                offset=(rank * len(part), 0),
                shape=tuple(part.shape),
                local_offset=(at, 0),
            )
            for name, whole, part, at in (("q", q, mine[0], 0), ("k", k, mine[1], 3))
        )
        placement = Placement(dtype="int32", shape=(5, 4), pieces=pieces)
        ranks.append(({"qk": fused}, {"qk": placement}))
    same(reshard(ranks, everything()), {"q": q, "k": k})


# ---- what is read -------------------------------------------------------------------------------


def big(rows: int, num: int) -> list[Shards]:
    """A matrix whose rows are a quarter of a leaf."""
    return cut({"w": numbered((rows, 8192))}, num, {"w": 0})


def plan(ranks: list[Shards], wanted: Wanted) -> ReshardPlan:
    layout = layout_of(ranks)
    return make_plan(layout, wanted(layout.wholes))


def test_cuts_between_leaves_have_no_overfetch() -> None:
    found = plan(big(32, 2), slices({"w": [slice(8, 24)]}))
    assert found.overfetch == 1.0
    assert found.needed_nbytes == found.verified_nbytes == 16 * 32_768


def test_overfetch_counts_the_bytes_that_are_verified_beside_the_needed_ones() -> None:
    found = plan(big(32, 2), slices({"w": [slice(9, 11)]}))
    assert (found.needed_nbytes, found.verified_nbytes) == (2 * 32_768, 131_072)
    assert found.overfetch == 2.0


def test_rows_further_apart_than_a_leaf_are_verified_by_some_leaves_only() -> None:
    ranks = cut({"w": numbered((4, 200_000))}, 1, {"w": 0})
    found = plan(ranks, slices({"w": [None, slice(0, 10)]}))
    assert found.verified_nbytes <= 4 * 2 * 131_072
    assert found.needed_nbytes == 4 * 10 * 4


# ---- what cannot be had -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (slices({"nothing": None}), "'nothing' is wanted, and the group does not hold it"),
        (slices({"scale": [0]}), "of shape .* is no box of it"),
        (slices({"model.norm.weight": [slice(0, 8, 2)]}), "is no box of it"),
        (slices({"model.norm.weight": [8]}), "no index 8 in 8"),
        (slices({"model.norm.weight": [-9]}), "no index -9 in 8"),
        (slices({"model.norm.weight": slice(0, 4)}), "Give a list"),  # type: ignore[dict-item]
        (slices({"model.norm.weight": [True]}), "True is a bool"),
        (parallel(fused=[Fused("x", ("scales", "shifts"))]), "does not hold .'scales', 'shifts'"),
        (parallel(fused=[Fused("scale", ("layers.1.stacked",))]), "'scale' is wanted twice"),
        (parallel(pipeline=PipelineParallel(2, 0, 2, r"(layers)\.")), "has number layers"),
        (
            parallel(fused=[Fused("{}.gu", ("{}.q_proj.weight", "{}.up.weight"))]),
            r"does not hold \['layers.0.attn.up.weight'\]",
        ),
        (
            parallel(fused=[Fused("x", ("layers.1.stacked", "scale"))]),
            "cannot be joined in dimension 0",
        ),
        (parallel(fused=[Fused("x", ("scale", "scale"))]), "has no dimension 0"),
        (parallel(tensor=TensorParallel(3, 0, {"*.weight": 0})), "into 3 even shares"),
        (parallel(tensor=TensorParallel(2, 0, {"*norm*": 1})), "cannot be cut in dimension 1"),
    ],
)
def test_an_impossible_wish_is_refused_with_its_name(wanted: Wanted, text: str) -> None:
    with pytest.raises(IncompatibleUpdate, match=text):
        plan(trainer(2), wanted)


@pytest.mark.parametrize(
    ("sources", "text"),
    [
        ([], "made of "),
        ([WholeSlice("gone", (0,), (8,), (0,))], r"does not hold \['gone'\]"),
        ([WholeSlice("model.norm.weight", (0,), (9,), (0,))], "has no such box"),
        ([WholeSlice("model.norm.weight", (-1,), (8,), (0,))], "offset=.-1"),
        ([WholeSlice("model.norm.weight", (0,), (4,), (0,))], r"nothing fills \[4:8\]"),
        ([WholeSlice("model.norm.weight", (0,), (8,), (1,))], r"nothing fills \[0:1\]"),
        ([WholeSlice("model.norm.weight", (0,), (8,), (0,))] * 2, "fill the same range"),
        ([WholeSlice("layers.1.experts.0.w", (0, 0), (2, 4), (0, 0))], "another number"),
    ],
)
def test_a_wanted_tensor_must_be_filled_once(sources: list[WholeSlice], text: str) -> None:
    wanted = WantedLayout({"mine": WantedTensor((8,), tuple(sources))})
    with pytest.raises(IncompatibleUpdate, match=text):
        make_plan(layout_of(trainer(2)), wanted)


def test_sources_of_two_dtypes_are_refused() -> None:
    whole = {"a": numbered((4,)), "b": numbered((4,), dtype=torch.int64)}
    with pytest.raises(IncompatibleUpdate, match="several dtypes"):
        plan(cut(whole, 1, {}), parallel(fused=[Fused("ab", ("a", "b"))]))


def test_an_index_counts_from_either_end_and_keeps_its_dimension() -> None:
    whole = {"w": numbered((8, 4))}
    found = reshard(cut(whole, 2, {"w": 0}), slices({"w": [-1]}))
    same(found, {"w": whole["w"][7:8]})
    same(reshard(cut(whole, 2, {"w": 0}), slices({"w": [3]})), {"w": whole["w"][3:4]})


@pytest.mark.parametrize("pattern", [r"layers\.\d+", "("])
def test_a_pattern_must_find_a_number(pattern: str) -> None:
    for one in (PipelineParallel(2, 0, 4, pattern), ExpertParallel(2, 0, 4, pattern)):
        name = "pipeline" if isinstance(one, PipelineParallel) else "expert"
        with pytest.raises(ValueError, match=r"pattern=.*expected"):
            parallel(**{name: one})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "sources"), [("{}qkv", ("q", "k")), ("qkv", ("{}q",)), ("{}x", ("{}.{}",)), ("x", ())]
)
def test_a_fused_tensor_and_its_sources_have_the_same_gap(
    name: str, sources: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=r"expected one \{\} in each source"):
        Fused(name, sources)


@pytest.mark.parametrize("kind", [TensorParallel, PipelineParallel, ExpertParallel])
def test_a_rank_beyond_its_degree_is_refused(kind: type) -> None:
    name = {TensorParallel: "tensor", PipelineParallel: "pipeline", ExpertParallel: "expert"}[kind]
    with pytest.raises(ValueError, match="rank 2 of degree 2"):
        parallel(**{name: kind(2, 2, {} if kind is TensorParallel else 4)})
