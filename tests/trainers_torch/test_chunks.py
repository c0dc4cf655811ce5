"""Chunks: what is in one, how modules are put together, how tensors lie in one buffer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge import WeightChunk, make_weight_bridge
from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.trainers.chunks import BufferPlan, batches, module_of

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]


def chunk(**changes: object) -> WeightChunk:
    tensor = torch.arange(6.0).view(2, 3)
    fields: dict[str, object] = {
        "names": ["w"],
        "dtypes": ["torch.float32"],
        "shapes": [[2, 3]],
        "tensors": [tensor],
    }
    return WeightChunk(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_chunk_tells_its_size() -> None:
    made = WeightChunk.of([("a", torch.zeros(2, 3)), ("b", torch.zeros(4, dtype=torch.int64))])
    assert (made.total_numel, made.total_size_bytes) == (10, 56)
    assert made.dtypes == ["torch.float32", "torch.int64"]
    assert made.shapes == [[2, 3], [4]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": ["w", "v"]}, "2 names, 1 dtypes"),
        ({"placements": []}, "one of each"),
        ({"dtypes": ["torch.float16"]}, "expected torch.float16"),
        ({"shapes": [[3, 2]]}, "expected torch.float32 of shape"),
        ({"tensors": [torch.zeros(3, 2).t()]}, "not contiguous"),
    ],
)
def test_a_chunk_that_contradicts_itself_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(IncompatibleUpdate, match=words):
        chunk(**changes)


def test_tensors_that_are_not_contiguous_are_copied_into_a_chunk() -> None:
    made = WeightChunk.of([("w", torch.arange(6.0).view(2, 3).t())])
    assert made.tensors[0].is_contiguous()
    assert made.tensors[0].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_chunk_is_published() -> None:
    with make_weight_bridge("local-clone") as bridge:
        assert [*bridge.publish(iter([chunk()]), weight_version=1).tensors] == ["w"]
        assert [*bridge.publish(chunk(), weight_version=2).tensors] == ["w"]


def test_a_chunk_that_is_taken_for_a_pair_says_what_to_go_over() -> None:
    made = WeightChunk.of([("a", torch.zeros(1)), ("b", torch.zeros(2))])
    with pytest.raises(TypeError, match=r"2 tensors and is no .* Go over chunk\.items\(\)"):
        for _, _ in [made]:
            pass
    assert [name for name, _ in made.items()] == ["a", "b"]


# ---- one buffer ----------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3).map(tuple)),
        max_size=6,
    )
)
def test_tensors_in_one_buffer_do_not_touch_each_other(
    kinds: list[tuple[torch.dtype, tuple[int, ...]]],
) -> None:
    plan = BufferPlan(kinds)
    buffer, views = plan.allocate(None)
    assert [(view.dtype, tuple(view.shape)) for view in views] == kinds
    buffer.zero_()
    for view in views:
        assert view.is_contiguous()
        raw = view.view(-1).view(torch.uint8)
        assert not raw.any()
        raw += 1
    assert bool(buffer.all())
    assert plan.nbytes == sum(view.numel() * view.element_size() for view in views)


def test_packing_says_where_each_tensor_lies() -> None:
    tied = torch.arange(3, dtype=torch.int64)
    made = WeightChunk.of([("half", torch.ones(3).half()), ("a", tied)])
    made = WeightChunk(
        names=[*made.names, "b"],
        dtypes=[*made.dtypes, "torch.int64"],
        shapes=[*made.shapes, [3]],
        tensors=[*made.tensors, made.tensors[1]],
    )
    packed = made.packed()
    assert packed.buffer.dtype is torch.uint8
    assert packed.offsets == (24, 0, 0), "wide items first; a tied tensor is there once"
    assert packed.buffer[24:30].view(torch.float16).tolist() == [1, 1, 1]


# ---- modules and thresholds ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn"),
        ("model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn"),
        ("model.layers.12.weight", "model.layers.12"),
        ("layers.0.up.weight", "layers.0"),
        ("lm_head.weight", "lm_head"),
        ("3.weight", "3"),
        ("gain", "gain"),
    ],
)
def test_the_module_of_a_tensor_is_the_one_around_its_layer(name: str, module: str) -> None:
    assert module_of(name) == module


def batched(items: str, limit: int, extra: int = 0) -> list[tuple[str | None, list[str]]]:
    """Each item is a module's letter and its size in bytes."""
    pairs = [(item[0], item) for item in items.split()]
    found = batches(
        pairs, size_of=lambda item: int(item[1:]), limit=limit, extra_of=lambda _: extra
    )
    return list(found)


def test_modules_are_put_together_up_to_the_limit() -> None:
    assert batched("a3 b3 c4 d1", 10) == [(None, ["a3", "b3", "c4"]), ("d", ["d1"])]


def test_a_module_larger_than_the_limit_goes_alone_and_whole() -> None:
    assert batched("a3 b6 b6 c3", 10) == [("a", ["a3"]), ("b", ["b6", "b6"]), ("c", ["c3"])]


def test_members_of_a_module_stay_together_even_where_others_stand_between() -> None:
    assert batched("q3 a3 q3", 6) == [("q", ["q3", "q3"]), ("a", ["a3"])]


def test_temporary_memory_counts_once_per_chunk() -> None:
    assert batched("a4 b4", 10, extra=2) == [(None, ["a4", "b4"])]
    assert batched("a4 b4", 10, extra=3) == [("a", ["a4"]), ("b", ["b4"])]


def test_an_empty_model_gives_no_chunk() -> None:
    assert batched("", 10) == []
