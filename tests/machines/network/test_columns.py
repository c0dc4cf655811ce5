"""What crosses the cable to a reader of some columns."""

import pytest
import torch

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.memory.parts import PartNeeds
from rl_bridge.testing.processes import Child
from tests.machines.network.namespaces import machines, why_not
from tests.machines.roles import settle_in

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

UCX = {"UCX_TLS": "tcp"}
WEIGHT = torch.arange(4096 * 1024, dtype=torch.int32).view(4096, 1024)
"""Rows of 4 KiB: over the loopback, halves of two rows are read together."""
HALF = WEIGHT.nbytes // 2


class Trainer:
    """Publishes what holds the version in every element."""

    def __init__(self, namespace: str, address: str) -> None:
        settle_in(namespace, UCX)
        self.bridge = make_weight_bridge(
            "nixl", source_worker="trainer", suspicious="off", address=address
        )

    def publish(self, version: int) -> str:
        return self.bridge.publish({"w": WEIGHT + version}, weight_version=version).to_json()

    def close(self) -> None:
        self.bridge.close()


class Reader:
    """Reads the left half of each row."""

    def __init__(self, namespace: str) -> None:
        settle_in(namespace, UCX)
        self.bridge = make_weight_bridge("nixl", source_worker="reader")

    def reads(self, text: str) -> bool:
        manifest = WeightUpdateManifest.from_json(text)
        table = manifest.table
        needs = PartNeeds.of(table, [(0, 0, int(table.leaf_counts[0]), 0, 2048)])
        found = self.bridge.consumer.import_update(manifest, scope=needs)["w"][:, :512]
        return torch.equal(found, WEIGHT[:, :512] + manifest.weight_version)

    def close(self) -> None:
        self.bridge.close()


def test_little_but_the_columns_that_are_read_crosses_the_cable() -> None:
    with (
        machines() as (left, right),
        Child(Trainer, namespace=left.namespace, address=left.address) as trainer,
        Child(Reader, namespace=right.namespace) as reader,
    ):
        for version in (1, 2, 3):
            manifest = trainer.call("publish", version=version)
            before = right.traffic(reader.ready().pid).received
            assert reader.call("reads", text=manifest)
            crossed = right.traffic(reader.pid).received - before
            assert HALF < crossed < 1.3 * HALF, crossed
