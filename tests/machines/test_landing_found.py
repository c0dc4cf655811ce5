"""What a second reader found in versions that are read to where they belong, by symptom."""

from typing import Any, cast

import pytest
import torch

from rl_bridge.errors import ChecksumMismatch, TransferTimeout
from rl_bridge.groups import GroupBridge
from rl_bridge.groups.bridge import GroupEnd
from rl_bridge.groups.wanted import TensorParallel, parallel
from rl_bridge.manifest.canonical import thaw
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.slots import ARRIVING
from rl_bridge.transports.nixl.consumer import NIXLConsumer
from rl_bridge.transports.nixl.reading import Reading
from tests.groups.meshes import Shards, cut, model
from tests.groups.rig import trainers

SHAPES = {"a": (1024, 512), "b": (640, 1024), "n": (70_000,)}
ROWS = dict.fromkeys(SHAPES, 0)
INLINE: dict[str, Any] = {"serve": "inline"}


def shards(version: int) -> list[Shards]:
    """Rows of each tensor, for two ranks: 128 KiB of each and more."""
    return cut(model(SHAPES, version), 2, dict(ROWS))


def end_of(bridge: GroupBridge) -> GroupEnd:
    return bridge.consumer.end


def nixl_of(bridge: GroupBridge) -> NIXLConsumer:
    return cast("NIXLConsumer", end_of(bridge)._ends["nixl"])


def kept(bridge: GroupBridge) -> list[str | None]:
    """What is in each slot of the consumer's ring."""
    ring = end_of(bridge)._ring
    return [] if ring is None else [slot.update_id for slot in ring[1]._ring._slots]


def holds(found: Any, version: int) -> bool:
    return all(torch.equal(found[name], one) for name, one in model(SHAPES, version).items())


def test_a_manifest_that_leads_to_other_bytes_is_not_taken_for_what_was_digested() -> None:
    """Two shares of one version, alike in all but their bytes."""
    shares = [parallel(tensor=TensorParallel(2, rank, ROWS)) for rank in range(2)]
    with (
        trainers(2, "nixl", **INLINE) as ranks,
        GroupBridge(shares[0]) as bridge,
        GroupBridge(shares[1], source_rank=1) as other,
    ):
        manifest = ranks.publish(shards(1), 1)
        mine, theirs = bridge.resolve_update(manifest), other.resolve_update(manifest)
        assert mine.table.digest == theirs.table.digest
        document = {name: getattr(mine, name) for name in type(mine).model_fields}
        document |= {"metadata": thaw(mine.metadata), "handle": thaw(theirs.handle)}
        with pytest.raises(ChecksumMismatch, match="tensor checksum mismatch for 'a'"):
            bridge.import_update(WeightUpdateManifest(**document))


def test_reads_that_never_end_do_not_take_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that hangs, again and again; then one that does not."""

    def late(_: Reading) -> bool:
        raise TransferTimeout("nothing arrived")

    with trainers(2, "nixl", **INLINE) as ranks, GroupBridge(max_slots=2) as bridge:
        manifest = ranks.publish(shards(1), 1)
        assert holds(bridge.import_update(manifest), 1)
        bridge.acknowledge(manifest)
        monkeypatch.setattr(Reading, "in_flight", property(lambda _: True))
        monkeypatch.setattr(Reading, "drain", lambda _: False)
        for version in (2, 3):
            hung = ranks.publish(shards(version), version)
            with monkeypatch.context() as hanging:
                hanging.setattr(Reading, "step", late)
                with pytest.raises(TransferTimeout):
                    bridge.import_update(hung)
            assert kept(bridge) == [manifest.update_id, ARRIVING]
        monkeypatch.undo()
        assert holds(bridge.import_update(ranks.publish(shards(4), 4)), 4)
