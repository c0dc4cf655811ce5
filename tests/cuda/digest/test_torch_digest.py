"""X3T-128K in torch's operations, and the table of leaves: any sizes, any chunks, any alignment."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.cuda.digest_engines import TorchDigest
from rl_bridge.cuda.leaves import LeafTable
from rl_bridge.manifest.digest import LEAF_NBYTES, PAD_NBYTES, digest_bytes, leaf_digests
from rl_bridge.memory import passes

SIZES = st.lists(
    st.sampled_from([0, 1, PAD_NBYTES, PAD_NBYTES + 1, LEAF_NBYTES, LEAF_NBYTES + 1])
    | st.integers(0, 9000)
    | st.integers(0, 3 * LEAF_NBYTES),
    min_size=1,
    max_size=7,
)


def digests(parts: list[torch.Tensor], chunk_nbytes: int) -> bytes:
    table = LeafTable(np.array([len(part) for part in parts], np.uint64))
    out = torch.full((table.num_words,), -1, dtype=torch.int64)
    TorchDigest(table, torch.device("cpu"), chunk_nbytes=chunk_nbytes).run(parts, out)
    return table.combine(out.numpy())


@given(SIZES, st.integers(0, 3), st.sampled_from([1, 3000, 40_000, 300_000, 1 << 26]))
def test_it_is_the_reference_whatever_the_chunks_and_alignments(
    sizes: list[int], shift: int, chunk_nbytes: int
) -> None:
    data = np.random.default_rng(len(sizes)).integers(0, 256, sum(sizes) + shift, np.uint8)
    parts = list(torch.split(torch.from_numpy(data)[shift:], sizes))
    expected = b"".join(digest_bytes(part.numpy().tobytes()) for part in parts)
    assert digests(parts, chunk_nbytes) == expected


@pytest.mark.parametrize("chunk_nbytes", [1 << 20, 4 << 20])
def test_memory_for_it_is_bounded_by_the_chunk(
    chunk_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[int] = []
    for name in ("empty", "zeros"):
        make = getattr(torch, name)

        def counted(nbytes: int, make: object = make, **options: object) -> torch.Tensor:
            staged.append(nbytes)
            assert callable(make)
            return make(nbytes, **options)  # type: ignore[no-any-return]

        monkeypatch.setattr(torch, name, counted)
    data = torch.zeros(16 << 20, dtype=torch.uint8)
    staged.clear()
    digests([data, data[:5000], data[: 3 * LEAF_NBYTES + 1]], chunk_nbytes)
    assert len(staged) >= (16 << 20) // chunk_nbytes
    assert max(staged) == chunk_nbytes


# ---- the table of leaves ------------------------------------------------------------------------


def test_a_table_has_the_place_of_each_leaf_also_beyond_4_gib() -> None:
    sizes = np.array([5, 0, (5 << 30) + 1, LEAF_NBYTES], np.uint64)
    table = LeafTable(sizes)
    whole = (5 << 30) // LEAF_NBYTES
    assert len(table) == 1 + (whole + 1) + 1
    assert table.tensor[[0, 1, whole + 1, whole + 2]].tolist() == [0, 2, 2, 3]
    assert table.start[[0, 1, whole + 1, whole + 2]].tolist() == [0, 0, 5 << 30, 0]
    assert table.size[[0, 1, whole + 1, whole + 2]].tolist() == [5, LEAF_NBYTES, 1, LEAF_NBYTES]
    # Behind each tensor's digests, of two words each, is one word for its length.
    assert table.place[[0, 1, whole + 1, whole + 2]].tolist() == [
        0,
        2 + 1 + 1,
        2 + 1 + 1 + 2 * whole,
        2 + 1 + 1 + 2 * (whole + 1) + 1,
    ]
    assert table.num_words == 2 * len(table) + 4


def test_rows_are_64_bit_numbers_of_the_tensors_that_are_chosen() -> None:
    table = LeafTable(np.array([(5 << 30) + 1, 7], np.uint64))
    sources, behind = np.array([1 << 46, 3]), (5 << 30) + 256
    rows = table.rows(sources, np.array([True, True]))
    assert rows.dtype == np.int64
    assert rows.flags.c_contiguous
    assert rows[-2].tolist() == [(1 << 46) + (5 << 30), 5 << 30, 1, 2 * (len(table) - 2)]
    assert rows[-1].tolist() == [3, behind, 7, table.num_words - 3]
    assert table.rows(sources, np.array([False, True])).tolist() == [rows[-1].tolist()]


@pytest.mark.parametrize("is_native", [True, False])
def test_leaf_digests_and_lengths_combine_to_the_tensors_digest(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_native and passes.NATIVE is None:
        pytest.skip(str(passes.native_cause()))
    if not is_native:
        monkeypatch.setattr(passes, "NATIVE", None)
    sizes = [0, 1, 3 * LEAF_NBYTES + 5, 0, 4096]
    table = LeafTable(np.array(sizes, np.uint64))
    data = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    words = np.full(table.num_words, -1, np.int64)
    places = iter(table.place.tolist())
    for part in data:
        for start in range(0, len(part), LEAF_NBYTES):
            place = next(places)
            words[place : place + 2] = leaf(part[start : start + LEAF_NBYTES].tobytes())
    assert table.combine(words) == b"".join(digest_bytes(part.tobytes()) for part in data)


def leaf(data: bytes) -> np.ndarray:
    return np.frombuffer(leaf_digests(memoryview(data)), np.int64)
