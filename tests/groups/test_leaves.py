"""The leaf list of a part: the digests that the pass computes anyway, in the arena."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge import make_weight_bridge
from rl_bridge.errors import ChecksumMismatch, MalformedManifest
from rl_bridge.manifest.digest import LEAF_NBYTES, leaf_digests, tensor_digest
from rl_bridge.manifest.group_digests import LEAVES, LeafIndex, leaf_block_nbytes, leaf_index
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory import passes
from rl_bridge.memory.packing import LeafPackPlan, LeafPlan, LeafSource, checked_block
from tests.groups.meshes import numbered

SIZES = (0, 1, 1023, 1024, LEAF_NBYTES - 1, LEAF_NBYTES, LEAF_NBYTES + 1, 3 * LEAF_NBYTES + 77)


@pytest.fixture(params=["compiled", "python"])
def pass_in_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to digest; where there is no compiler, the same one twice."""
    if request.param == "python":
        monkeypatch.setattr(passes, "NATIVE", None)


def bytes_of(nbytes: int) -> torch.Tensor:
    return (numbered((nbytes,), nbytes) * 31 % 251).to(torch.uint8)


def reference(tensors: dict[str, torch.Tensor]) -> bytes:
    """The block, made from the digest's own definition."""
    found = b""
    for name in sorted(tensors):
        raw = tensors[name].contiguous().numpy().tobytes()
        found += leaf_digests(memoryview(raw)) + len(raw).to_bytes(8, "little")
    return found


def published(
    tensors: dict[str, torch.Tensor], **ties: torch.Tensor
) -> tuple[WeightUpdateManifest, bytes]:
    """A part's manifest and the block that arrived with it."""
    source = LeafSource()
    with make_weight_bridge("shared-memory", suspicious="off") as bridge:
        for version in (1, 2):  # the second time, everything is planned
            manifest = bridge.publish(source.add({**tensors, **ties}, None), weight_version=version)
            block = bridge.import_update(manifest)[LEAVES].numpy().tobytes()
            assert block == source.block
            bridge.release(manifest)
        return manifest, block


@pytest.mark.usefixtures("pass_in_use")
def test_the_block_is_what_the_format_says() -> None:
    # Names on both sides of the list's own, which lies in the middle of the layout.
    tensors = {f"{'az'[n % 2]}.{n}": bytes_of(nbytes) for n, nbytes in enumerate(SIZES)}
    tensors["strided"] = numbered((40, 50)).t()
    manifest, block = published(tensors)
    assert block == reference(tensors)
    assert checked_block(manifest, block) == block
    assert len(block) == leaf_block_nbytes([t.numel() * t.itemsize for t in tensors.values()])


def test_tied_tensors_are_in_it_once() -> None:
    tensors = {"a": bytes_of(5000), "z": bytes_of(7)}
    manifest, block = published(tensors, other=tensors["a"])
    assert dict(manifest.table.ties) == {"other": "a"}
    assert block == reference(tensors)


@given(st.lists(st.integers(0, 3 * LEAF_NBYTES), min_size=1, max_size=4), st.data())
@settings(deadline=None, max_examples=25)
def test_every_leaf_of_any_tensors_is_told(sizes: list[int], data: st.DataObject) -> None:
    tensors = [bytes_of(nbytes).numpy() for nbytes in sizes]
    plan = LeafPlan(np.array(sizes, np.uint64))
    found = plan.leaves(np.array([one.ctypes.data for one in tensors], np.uint64))
    expected = b"".join(leaf_digests(memoryview(one.tobytes())) for one in tensors)
    assert found.tobytes() == expected
    assert plan.leaf_counts.sum() == len(found)


@pytest.mark.usefixtures("pass_in_use")
@pytest.mark.parametrize("place", [0, 15, 16, 23, -1])
def test_a_changed_block_is_refused(place: int) -> None:
    manifest, block = published({"a": bytes_of(300_000), "z": bytes_of(7)})
    changed = bytearray(block)
    changed[place] ^= 1
    with pytest.raises(ChecksumMismatch, match=r"'[az]' in version 2: its leaf list"):
        checked_block(manifest, bytes(changed))


def test_a_block_of_another_size_is_refused() -> None:
    manifest, block = published({"a": bytes_of(300)})
    with pytest.raises(MalformedManifest, match="has 23 bytes, expected 24"):
        checked_block(manifest, block[1:])


def test_a_part_without_a_block_has_none_to_check() -> None:
    with make_weight_bridge("local-clone") as bridge:
        manifest = bridge.publish({"a": bytes_of(3)}, weight_version=1)
    assert leaf_index(manifest.table) is None
    with pytest.raises(MalformedManifest, match="expected none"):
        checked_block(manifest, b"")


@pytest.mark.parametrize("wrong", [("uint8", (23,)), ("int8", (24,)), ("uint8", (25,))])
def test_a_tensor_of_that_name_must_be_the_block(wrong: tuple[str, tuple[int, ...]]) -> None:
    with pytest.raises(MalformedManifest, match="Publish parts with GroupPublisher"):
        LeafIndex(TensorTable.pack({"a": ("int8", (300,)), LEAVES: wrong}))


def test_the_index_finds_each_tensors_leaves() -> None:
    tensors = {"a": bytes_of(2 * LEAF_NBYTES + 1), "z": bytes_of(9)}
    manifest, block = published(tensors)
    index = LeafIndex(manifest.table)
    for name, tensor in tensors.items():
        row = manifest.table.rows[name]
        leaves = index.leaves(block, row)
        assert tensor_digest(leaves, tensor.numel()).hex() == manifest.tensors[name].checksum
    assert index.leaves(block, index.row) == b""


def test_a_part_of_a_group_differs_from_a_plain_update_by_the_list_alone() -> None:
    tensors = {"a": bytes_of(5000), "z": bytes_of(7)}
    part, _ = published(tensors)
    with make_weight_bridge("shared-memory") as bridge:
        plain = bridge.publish(tensors, weight_version=1)
    for name in tensors:
        assert part.tensors[name].checksum == plain.tensors[name].checksum
    assert set(part.tensors) - set(plain.tensors) == {LEAVES}


@pytest.mark.usefixtures("pass_in_use")
def test_a_digest_in_place_makes_the_same_block_beside_the_tensors() -> None:
    tensors = {f"{'az'[n % 2]}.{n}": bytes_of(nbytes) for n, nbytes in enumerate(SIZES)}
    manifest, block = published(tensors)
    state = LeafSource().add(tensors, None)
    plan = LeafPackPlan(state)
    assert plan.digest_in_place(state) == manifest.digests
    assert state[LEAVES].numpy().tobytes() == block
