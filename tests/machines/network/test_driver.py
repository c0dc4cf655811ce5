"""What crosses the cable to the driver of an engine whose ranks import for themselves."""

import pytest
import torch

from rl_bridge import RolloutExecutor, WeightUpdateManifest, make_weight_bridge
from rl_bridge.testing.peer import hashes
from rl_bridge.testing.processes import Child
from tests.bridge.engines import Verifying
from tests.machines.network.namespaces import machines, why_not
from tests.machines.roles import settle_in

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

MIB = 1 << 20
SIZE = 16 * MIB
UCX = {"UCX_TLS": "tcp"}
DEADLINE_S = 20.0


class Trainer:
    """Publishes 16 MiB whose bytes follow from the version."""

    def __init__(self, transport: str, namespace: str, address: str) -> None:
        settle_in(namespace, UCX)
        self.bridge = make_weight_bridge(
            transport, source_worker="trainer", suspicious="off", address=address
        )

    def publish(self, version: int) -> str:
        self.weights = {"w": torch.arange(SIZE // 8, dtype=torch.int64) * (2 * version + 1)}
        return self.bridge.publish(self.weights, weight_version=version).to_json()

    def holds(self) -> dict[str, str]:
        return hashes(self.weights)

    def close(self) -> None:
        self.bridge.close()


class Driver:
    """An executor whose engine imports by itself: here one that takes the root's word for it."""

    def __init__(self, transport: str, namespace: str) -> None:
        settle_in(namespace, UCX)
        self.bridge = make_weight_bridge(transport, source_worker="driver", timeout_s=DEADLINE_S)
        self.adapter = Verifying({}, self.bridge)
        self.executor = RolloutExecutor(
            weight_bridge=self.bridge, weight_install_adapter=self.adapter, suspicious="off"
        )

    def update(self, manifest: str) -> None:
        self.adapter.claims = WeightUpdateManifest.from_json(manifest).root
        self.adapter.install = lambda *_: None  # type: ignore[method-assign]
        self.tensors = self.executor.update_weights(manifest)

    def holds(self) -> dict[str, str]:
        """Ask for the tensors."""
        return hashes(self.tensors)

    def close(self) -> None:
        self.executor.close()
        self.bridge.close()


@pytest.mark.parametrize("transport", ["nixl", "broadcast"])
def test_no_weight_byte_crosses_the_cable_to_a_driver_that_does_not_ask_for_one(
    transport: str,
) -> None:
    with (
        machines() as (left, right),
        Child(
            Trainer, transport=transport, namespace=left.namespace, address=left.address
        ) as trainer,
        Child(Driver, transport=transport, namespace=right.namespace) as driver,
    ):
        for version in (1, 2, 3):
            manifest = trainer.call("publish", version=version)
            before = right.traffic(driver.ready().pid).received
            driver.call("update", manifest=manifest)
            crossed = right.traffic(driver.pid).received - before
            assert crossed < MIB, crossed
        assert driver.call("holds") == trainer.call("holds")
        assert SIZE < right.traffic(driver.pid).received - before < 1.2 * SIZE
