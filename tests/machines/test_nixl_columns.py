"""A reader of some columns over NIXL: the pieces of rows that it needs arrive, verified, alone."""

import pytest
import torch

from rl_bridge.bridge.consumer import ImportedShare
from rl_bridge.memory.parts import PartNeeds
from tests.machines.nixl_roles import both

WEIGHT = torch.randn(700, 8192).bfloat16()
"""A row has 16 KiB, and each of its 16 strips 1 KiB."""


@pytest.mark.parametrize("in_place", [False, True])
def test_columns_are_read_by_their_pieces(in_place: bool) -> None:
    with both(trainer={"in_place": in_place}) as (publisher, consumer):
        for version in (1, 2):
            weight = WEIGHT + version
            manifest = publisher.publish({"w": weight}, weight_version=version)
            table = manifest.table
            needs = PartNeeds.of(table, [(0, 0, int(table.leaf_counts[0]), 4096, 6144)])
            assert needs.verified_nbytes == 700 * 2048
            share = consumer.consumer.import_update(manifest, needs=needs)
            assert isinstance(share, ImportedShare)
            assert torch.equal(share["w"][:, 2048:3072], weight[:, 2048:3072])
            # What lies between the pieces did not arrive.
            assert not torch.equal(share["w"][:, 3072:4096], weight[:, 3072:4096])
            del share
            consumer.release_imported(manifest.update_id)
            publisher.release(manifest.update_id)
