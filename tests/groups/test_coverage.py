"""Coverage: every element exactly once, or a refusal that names the range and the ranks."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.errors import IncompleteCoverage, RangeBeyondSegment, RanksDisagree
from rl_bridge.manifest.coverage import (
    WholeTensor,
    box_of,
    find_gap,
    find_overlap,
    flat_boxes,
    held_pieces,
    prove_coverage,
)
from rl_bridge.manifest.parallel import Piece, Placement
from tests.groups.meshes import boxes, cut, cuts, flat_cut, numbered, shapes


def rank_with(*pieces: Piece, dtype: str = "int8") -> dict[str, Placement]:
    return {
        f"own.{i}": Placement(dtype=dtype, shape=p.shape, pieces=(p,)) for i, p in enumerate(pieces)
    }


def box_piece(offset: tuple[int, ...], shape: tuple[int, ...], **fields: object) -> Piece:
    known: dict[str, object] = {"name": "w", "global_shape": (4, 6)} | fields
    return Piece(offset=offset, shape=shape, local_offset=(0,) * len(shape), **known)  # type: ignore[arg-type]


def flat_piece(start: int, num: int, **fields: object) -> Piece:
    return box_piece((start,), (num,), is_flat=True, **fields)


def prove(*ranks: dict[str, Placement]) -> dict[str, WholeTensor]:
    return prove_coverage(held_pieces(ranks))


# ---- what covers --------------------------------------------------------------------------------


@given(st.data())
def test_every_uneven_mesh_covers_and_without_a_box_that_is_not_empty_it_does_not(
    data: st.DataObject,
) -> None:
    shape = data.draw(shapes())
    pieces = [
        box_piece(
            tuple(one.start for one in where),
            tuple(one.stop - one.start for one in where),
            global_shape=shape,
        )
        for where in boxes(shape, data.draw(cuts(shape)))
    ]
    assert prove(*(rank_with(one) for one in pieces))["w"].shape == shape
    if not prod(shape):
        return
    pieces.remove(data.draw(st.sampled_from([one for one in pieces if prod(one.shape)])))
    with pytest.raises(IncompleteCoverage, match=r"tensor 'w' .*: no rank holds (elements )?\["):
        prove(*(rank_with(one) for one in pieces), rank_with(flat_piece(0, 0, global_shape=shape)))


@given(st.data())
def test_ranges_of_elements_and_boxes_may_meet_in_one_tensor(data: st.DataObject) -> None:
    shape = data.draw(shapes().filter(lambda shape: shape and prod(shape)))
    rows = data.draw(st.integers(0, shape[0]))
    inner = prod(shape[1:])
    middle = data.draw(st.integers(rows * inner, prod(shape)))
    pieces = [
        box_piece((0,) * len(shape), (rows, *shape[1:]), global_shape=shape),
        flat_piece(rows * inner, middle - rows * inner, global_shape=shape),
        flat_piece(middle, prod(shape) - middle, global_shape=shape),
    ]
    prove(*(rank_with(one) for one in pieces))


def test_replicas_count_once() -> None:
    whole = {"w": numbered((4, 6)), "scale": numbered(())}
    ranks = cut(whole, 3, {"w": 1, "scale": None})
    assert prove(*(placements for _, placements in ranks)).keys() == {"scale", "w"}


def test_padding_of_a_flat_shard_is_nobodys_element() -> None:
    ranks = flat_cut({"w": numbered((5, 3))}, 4, pad=2)
    assert prove(*(placements for _, placements in ranks))["w"].nbytes == 60


# ---- what does not ------------------------------------------------------------------------------


WHOLE = box_piece((0, 0), (4, 6))
TOP = box_piece((0, 0), (2, 6))
HELD: dict[str, tuple[list[Piece], str]] = {
    "a missing range": (
        [TOP, box_piece((3, 0), (1, 6))],
        r"'w' of shape \[4, 6\]: no rank holds \[2:3, 0:6\]",
    ),
    "a missing corner": (
        [TOP, box_piece((2, 0), (2, 4)), box_piece((3, 4), (1, 2))],
        r"no rank holds \[2:3, 4:6\]",
    ),
    "a missing range of elements": (
        [flat_piece(0, 10), flat_piece(10, 10)],
        r"holds elements \[20:24\] in row-major order",
    ),
    "a doubled range": (
        [box_piece((0, 0), (3, 6)), box_piece((2, 0), (2, 6))],
        r"\[2:3, 0:6\] is held twice, by rank 0 .* rank 1",
    ),
    "a doubled range of elements": (
        [flat_piece(0, 14), flat_piece(10, 14)],
        r"elements \[10:14\] in row-major order is held twice, by rank 0 .* rank 1",
    ),
    "a doubled corner": (
        [TOP, box_piece((2, 0), (2, 4)), box_piece((1, 3), (3, 3))],
        r"is held twice, by rank [01] .* rank 2",
    ),
    "two copies that both count": ([WHOLE] * 2, "Name one of the two replica 1"),
    "a replica of no piece": (
        [WHOLE, box_piece((0, 0), (2, 6), replica=1)],
        r"rank 1 names \[0:2, 0:6\] replica 1",
    ),
    "only replicas": ([box_piece((0, 0), (4, 6), replica=1)], "no rank holds"),
}


@pytest.mark.parametrize("case", HELD)
def test_a_gap_or_an_overlap_is_refused_with_its_range_and_ranks(case: str) -> None:
    held, text = HELD[case]
    with pytest.raises(IncompleteCoverage, match=text):
        prove(*map(rank_with, held))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (
            [rank_with(TOP, dtype="float32"), rank_with(box_piece((2, 0), (2, 6)))],
            "rank 0 holds it as float32, rank 1 as int8",
        ),
        (
            [rank_with(WHOLE), rank_with(box_piece((0, 0), (1, 6), global_shape=(5, 6)))],
            r"rank 1 says \[5, 6\]",
        ),
    ],
    ids=["dtype", "shape"],
)
def test_ranks_that_disagree_on_a_tensor_are_named(
    ranks: list[dict[str, Placement]], text: str
) -> None:
    with pytest.raises(RanksDisagree, match=text):
        prove(*ranks)


@pytest.mark.parametrize(
    "wrong",
    [
        box_piece((3, 0), (2, 6)),
        box_piece((-1, 0), (2, 6)),
        box_piece((0,), (2,)),
        flat_piece(20, 5),
        flat_piece(0, 4, global_shape=(2**40, 2**40)),
        box_piece((0, 0), (True, 6)),
    ],
)
def test_a_piece_that_cannot_be_is_refused(wrong: Piece) -> None:
    with pytest.raises(RangeBeyondSegment, match=r"rank 0: tensor 'own\.0'"):
        prove(rank_with(wrong))


def test_a_piece_beyond_the_ranks_own_tensor_is_refused() -> None:
    ranks = {"own": Placement(dtype="int8", shape=(1, 6), pieces=(box_piece((0, 0), (2, 6)),))}
    with pytest.raises(RangeBeyondSegment, match="of the own tensor"):
        prove(ranks)


def test_two_pieces_at_one_place_of_a_ranks_tensor_are_refused() -> None:
    pieces = (box_piece((0, 0), (2, 6)), box_piece((2, 0), (2, 6)))
    with pytest.raises(IncompleteCoverage, match="Give each piece its own local_offset"):
        prove({"own": Placement(dtype="int8", shape=(4, 6), pieces=pieces)})


# ---- boxes --------------------------------------------------------------------------------------


def cells(box: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...]) -> set[int]:
    """Numbers of a box's elements: an independent way to look at it."""
    where = tuple(slice(lo, hi) for lo, hi in zip(*box, strict=True))
    return set(numbered(shape)[where].flatten().tolist())


@given(st.data())
def test_a_range_of_elements_is_its_boxes(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_dims=4, max_size=4))
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    found = flat_boxes(start, stop, shape)
    assert sorted(cell for box in found for cell in cells(box, shape)) == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert find_overlap(found) is None


@st.composite
def any_box(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    low = tuple(draw(st.integers(0, size)) for size in shape)
    return low, tuple(draw(st.integers(lo, size)) for lo, size in zip(low, shape, strict=True))


@given(st.data())
def test_gaps_and_overlaps_are_found_wherever_they_are(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_size=4))
    some = data.draw(st.lists(any_box(shape), max_size=5))
    whole = box_of((0,) * len(shape), shape)
    held = [cells(box, shape) for box in some]
    gap = find_gap(whole, some)
    missing = cells(whole, shape).difference(*held)
    assert (gap is not None) == bool(missing)
    assert gap is None or cells(gap, shape) <= missing
    overlap = find_overlap(some)
    assert (overlap is not None) == (sum(map(len, held)) > len(set().union(*held)))
    assert overlap is None or held[overlap[0]] & held[overlap[1]]


def test_an_overlap_is_found_behind_many_boxes_that_have_none() -> None:
    row = [box_of((at, 0), (1, 2)) for at in range(2000)]
    assert find_overlap(row) is None
    assert find_overlap([*row, box_of((1999, 1), (1, 1))]) == (1999, 2000)


def test_a_box_without_elements_has_no_gap_and_no_range_of_them_no_boxes() -> None:
    assert find_gap(box_of((0, 0), (0, 4)), []) is None
    assert find_gap(box_of((0, 0), (2, 4)), []) == box_of((0, 0), (2, 4))
    assert flat_boxes(3, 3, (2, 4)) == []
