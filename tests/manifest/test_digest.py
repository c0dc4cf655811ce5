"""The digest X3T-128K against an independent reading of its definition."""

import json
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_bridge.manifest.digest as made_by
from rl_bridge.errors import MalformedManifest
from rl_bridge.manifest.digest import (
    ALGORITHM,
    DIGEST_NBYTES,
    LEAF_NBYTES,
    PAD_NBYTES,
    RootPlan,
    digest_bytes,
    leaf_digests,
)

BORDERS = sorted(
    {
        size + delta
        for size in (0, PAD_NBYTES, 2 * PAD_NBYTES, LEAF_NBYTES, LEAF_NBYTES + PAD_NBYTES)
        for delta in (-1, 0, 1)
        if size + delta >= 0
    }
    | {2 * LEAF_NBYTES, 2 * LEAF_NBYTES + 1, 3 * LEAF_NBYTES - 1}
)


def independent(data: bytes) -> bytes:
    """The definition of the docs, read again: no code shared with the library."""
    leaves = []
    position = 0
    while position < len(data):
        leaf = data[position : position + 131_072]
        while len(leaf) % 1024:
            leaf += b"\0" * (1024 - len(leaf) % 1024)
        low_first = xxhash.xxh3_128(leaf, seed=0)
        leaves.append(struct.pack(">QQ", *divmod(low_first.intdigest(), 2**64)))
        position += 131_072
    text = b"".join(leaves) + struct.pack("<Q", len(data))
    return struct.pack(">QQ", *divmod(xxhash.xxh3_128(text, seed=0).intdigest(), 2**64))


def pattern(nbytes: int, seed: int = 0) -> bytes:
    return bytes((index * 7 + seed) % 251 for index in range(nbytes))


def independent_root(rows: Sequence[tuple[str, str, Sequence[int], bytes]]) -> bytes:
    lines = ""
    for name, dtype, shape, digest in sorted(rows, key=lambda row: row[0].encode("utf-8")):
        lines += json.dumps([name, dtype, list(shape), digest.hex()], separators=(",", ":")) + "\n"
    return bytes(xxhash.xxh3_128_digest(lines.encode("ascii")))


def plan(*names: str, ties: dict[str, str] | None = None) -> RootPlan:
    return RootPlan(names, ["int8"] * len(names), [(2,)] * len(names), ties)


# ---- digests of bytes ---------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", BORDERS)
def test_the_digest_is_the_definitions_at_each_border(nbytes: int) -> None:
    data = pattern(nbytes)
    assert digest_bytes(data) == independent(data)


def test_an_empty_tensor_has_no_leaf_and_a_digest() -> None:
    assert leaf_digests(memoryview(b"")) == b""
    assert digest_bytes(b"").hex() == "2c0a8a99dc147d5445c3b49d035665b2"


def test_items_of_more_than_a_byte_are_digested_as_bytes() -> None:
    shorts = memoryview(b"\1\0\2\0").cast("H")
    assert digest_bytes(shorts) == digest_bytes(b"\1\0\2\0")


def test_the_algorithms_name_and_numbers_are_the_formats() -> None:
    assert (ALGORITHM, LEAF_NBYTES, PAD_NBYTES, DIGEST_NBYTES) == ("X3T-128K", 131072, 1024, 16)


# ---- roots --------------------------------------------------------------------------------------

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        NAMES,
        st.tuples(
            st.sampled_from(["int8", "bfloat16"]),
            st.lists(st.integers(0, 10**6), max_size=3),
            st.binary(min_size=16, max_size=16),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_the_root_is_the_definitions(rows: dict[str, tuple[str, list[int], bytes]]) -> None:
    found = RootPlan(list(rows), [r[0] for r in rows.values()], [r[1] for r in rows.values()])
    expected = independent_root([(name, *row) for name, row in rows.items()])
    assert found.root(b"".join(row[2] for row in rows.values())) == expected


def test_a_tie_has_a_line_of_its_own() -> None:
    digests = pattern(32)
    found = plan("a", "b", ties={"z": "a"}).root(digests)
    rows = [("a", digests[:16]), ("b", digests[16:]), ("z", digests[:16])]
    assert found == independent_root([(name, "int8", (2,), digest) for name, digest in rows])


def test_threads_that_ask_one_plan_at_once_get_each_its_root() -> None:
    names = [f"layer.{index}" for index in range(3000)]
    shared = plan(*names)
    blocks = [bytes([seed]) * (DIGEST_NBYTES * len(names)) for seed in range(8)]
    expected = [plan(*names).root(block) for block in blocks]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(shared.root, blocks * 20)) == expected * 20


def test_a_root_is_made_while_another_one_is_being_made() -> None:
    """As in a child that was forked in the middle of one, where that never ends."""
    shared = plan("a", "b")
    expected = plan("a", "b").root(pattern(32))
    with made_by._FILLING:
        assert shared.root(pattern(32)) == expected


@pytest.mark.parametrize("nbytes", [0, 15, 17, 32])
def test_a_block_of_another_length_is_refused(nbytes: int) -> None:
    with pytest.raises(MalformedManifest, match=f"{nbytes} bytes, expected 16"):
        plan("a").root(bytes(nbytes))
