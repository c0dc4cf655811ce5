"""Which part of a whole tensor a rank holds, as torch itself would cut."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.trainers.gather import box_piece, flat_piece
from rl_bridge.trainers.meshes import Cut, cut_evenly, replica_of, shard_box

PARTS = st.integers(1, 5)


@given(st.integers(0, 20), PARTS)
def test_a_dimension_is_cut_as_torch_cuts_it(size: int, parts: int) -> None:
    chunks = list(torch.arange(size).chunk(parts))
    chunks += [torch.arange(0)] * (parts - len(chunks))
    found = [cut_evenly(size, parts, index) for index in range(parts)]
    assert [list(range(begin, begin + length)) for begin, length in found] == [
        chunk.tolist() for chunk in chunks
    ]


@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    mesh=st.lists(PARTS, min_size=1, max_size=3),
    data=st.data(),
)
def test_the_boxes_of_a_mesh_cover_a_tensor_once_per_replica(
    shape: list[int], mesh: list[int], data: st.DataObject
) -> None:
    cuts = [
        Cut(
            data.draw(st.none() | st.integers(0, len(shape) - 1)), is_inner=data.draw(st.booleans())
        )
        for _ in mesh
    ]
    counts: dict[int, torch.Tensor] = {}
    for coordinate in itertools.product(*map(range, mesh)):
        offset, box = shard_box(shape, mesh, coordinate, cuts)
        replica = replica_of(mesh, coordinate, cuts)
        count = counts.setdefault(replica, torch.zeros(shape))
        count[tuple(slice(b, b + n) for b, n in zip(offset, box, strict=True))] += 1
    assert sorted(counts) == list(
        range(math.prod(n for n, cut in zip(mesh, cuts, strict=True) if cut.dim is None))
    )
    assert all(bool((count == 1).all()) for count in counts.values())


def test_an_inner_cut_cuts_what_the_others_left() -> None:
    # Fully sharded over tensor parallelism: the mesh's first dimension cuts last.
    mesh, cuts = (2, 2), (Cut(0, is_inner=True), Cut(0))
    found = [shard_box((8,), mesh, at, cuts)[0][0] for at in itertools.product(range(2), range(2))]
    assert found == [0, 4, 2, 6]


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [(-5, 2, (0, 2)), (2, 99, (2, 6)), (-5, 99, (0, 6)), (6, 9, None), (-3, 0, None)],
)
def test_a_range_is_cut_to_its_tensor(
    begin: int, end: int, expected: tuple[int, int] | None
) -> None:
    piece = flat_piece("w", (2, 3), begin, end)
    found = None if piece is None else (piece.offset[0], piece.offset[0] + piece.shape[0])
    assert found == expected


def test_a_box_fills_the_rank_s_own_tensor_unless_it_says_where_it_lies() -> None:
    assert box_piece("w", (4, 4), (2, 0), (2, 4)).local_offset == (0, 0)
    assert box_piece("w", (4, 4), (2, 0), (2, 4), local_offset=(3, 0)).local_offset == (3, 0)
