"""A reader of some columns over NIXL: the pieces of rows that it needs arrive, verified, alone."""

import pytest
import torch

from rl_bridge import WeightUpdateManifest
from rl_bridge.bridge.consumer import ImportedShare
from rl_bridge.errors import StaleUpdate
from rl_bridge.memory.parts import PartNeeds
from tests.machines.nixl_roles import Between, both, overwrite, publisher_end

WEIGHT = torch.randn(700, 8192).bfloat16()
"""A row has 16 KiB, and each of its 16 strips 1 KiB."""


def strips_of(manifest: WeightUpdateManifest) -> PartNeeds:
    """What a reader of the columns from 2048 to 3072 needs."""
    return PartNeeds.of(manifest.table, [(0, 0, int(manifest.table.leaf_counts[0]), 4096, 6144)])


@pytest.mark.parametrize("in_place", [False, True])
def test_columns_are_read_by_their_pieces(in_place: bool) -> None:
    with both(trainer={"in_place": in_place}) as (publisher, consumer):
        for version in (1, 2):
            weight = WEIGHT + version
            manifest = publisher.publish({"w": weight}, weight_version=version)
            needs = strips_of(manifest)
            assert needs.verified_nbytes == 700 * 2048
            share = consumer.consumer.import_update(manifest, scope=needs)
            assert isinstance(share, ImportedShare)
            assert torch.equal(share["w"][:, 2048:3072], weight[:, 2048:3072])
            # What lies between the pieces did not arrive.
            assert not torch.equal(share["w"][:, 3072:4096], weight[:, 3072:4096])
            del share
            consumer.release_imported(manifest.update_id)
            publisher.release(manifest.update_id)


def test_strips_that_are_overwritten_while_they_are_read_are_refused() -> None:
    with both(timeout_s=0.5) as (publisher, consumer):
        weight = torch.cat((WEIGHT, WEIGHT))  # pieces of two reads
        first = publisher.publish({"w": weight}, weight_version=1)
        end = publisher_end(publisher)
        with (
            Between(lambda: overwrite(end, first), at="bytes", times=1) as seen,
            pytest.raises(StaleUpdate, match="wrote to it while it was read"),
        ):
            consumer.consumer.import_update(first, scope=strips_of(first))
        assert seen.calls == 1
        second = publisher.publish({"w": weight}, weight_version=2)
        share = consumer.consumer.import_update(second, scope=strips_of(second))
        assert torch.equal(share["w"][:, 2048:3072], weight[:, 2048:3072])


def test_strips_of_a_trainers_own_tensors_that_it_writes_to_are_refused() -> None:
    """It did not release them: the stamp stays as it was."""
    live = torch.cat((WEIGHT, WEIGHT))
    with both(trainer={"in_place": True}) as (publisher, consumer):
        first = publisher.publish({"w": live}, weight_version=1)
        with (
            Between(lambda: live[-1].add_(1), at="bytes", times=1) as seen,
            pytest.raises(StaleUpdate, match=r"of 'w' without releasing it \(in_place\)"),
        ):
            consumer.consumer.import_update(first, scope=strips_of(first))
        assert seen.calls == 1
        publisher.release(first)
        second = publisher.publish({"w": live}, weight_version=2)
        share = consumer.consumer.import_update(second, scope=strips_of(second))
        assert torch.equal(share["w"][:, 2048:3072], live[:, 2048:3072])
