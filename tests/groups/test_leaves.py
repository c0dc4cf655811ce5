"""The leaf list of an update: the digests that the pass computes anyway, in the arena."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge import make_weight_bridge
from rl_bridge.errors import ChecksumMismatch
from rl_bridge.manifest.digest import LEAF_NBYTES, leaf_digests
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory import passes
from rl_bridge.memory.packing import checked_block
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.vm import tensor_at
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
    tensors: dict[str, torch.Tensor], transport: str = "shared-memory", **ties: torch.Tensor
) -> tuple[WeightUpdateManifest, bytes]:
    """An update's manifest and the block that arrived with it."""
    state: dict[str, torch.Tensor] = {**tensors, **ties}
    with make_weight_bridge(transport, suspicious="off") as bridge:
        for version in (1, 2):  # the second time, everything is planned
            manifest = bridge.publish(state, weight_version=version)
            attachment = bridge.consumer.end.look(manifest)
            table = manifest.table
            at = attachment.tensors.pin.address + table.leaves_offset
            block = tensor_at(at, table.leaves_nbytes).numpy().tobytes()
            assert block == bridge.publisher.leaf_list
            assert set(attachment.tensors) == set(state) == set(manifest.tensors)
            attachment.tensors.forget()
            bridge.release(manifest)
        return manifest, block


@pytest.mark.usefixtures("pass_in_use")
@pytest.mark.parametrize("transport", ["shared-memory", "local-clone"])
def test_the_block_is_what_the_format_says(transport: str) -> None:
    tensors = {f"{'az'[n % 2]}.{n}": bytes_of(nbytes) for n, nbytes in enumerate(SIZES)}
    tensors["strided"] = numbered((40, 50)).t()
    manifest, block = published(tensors, transport)
    assert block == reference(tensors)
    assert checked_block(manifest, block) == block
    assert len(block) == manifest.table.leaves_nbytes


def test_tied_tensors_are_in_it_once() -> None:
    tensors = {"a": bytes_of(5000), "z": bytes_of(7)}
    manifest, block = published(tensors, other=tensors["a"])
    assert dict(manifest.table.ties) == {"other": "a"}
    assert block == reference(tensors)


@given(st.lists(st.integers(0, 3 * LEAF_NBYTES), min_size=1, max_size=4), st.data())
@settings(deadline=None, max_examples=25)
def test_every_leaf_of_any_tensors_is_told(sizes: list[int], data: st.DataObject) -> None:
    tensors = [bytes_of(nbytes).numpy() for nbytes in sizes]
    plan = BytePlan(np.array(sizes, np.uint64))
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
