"""An engine that imports updates itself, over a transport that copies: its driver reads no byte."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch

from rl_bridge import RolloutExecutor, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import (
    BridgeClosed,
    ChecksumMismatch,
    DigestMismatch,
    StaleUpdate,
    WeightBridgeError,
)
from rl_bridge.lifecycle import State
from rl_bridge.testing.peer import Peer, hashes
from rl_bridge.testing.processes import Child, watchdog
from rl_bridge.transports.wire.arenas import Arrivals
from tests.bridge.engines import Verifying

__all__ = ["Rig", "UnreadUpdates"]

SIZE = 2 << 20
"""Bytes of the largest tensor."""
FEW = 64 << 10
"""Bytes: more than what is kept of a version that is not read."""
DEADLINE_S = 4.0
# What a loaded machine may take beyond a deadline before it counts as a hang.
SLACK_S = 20.0


def weights(version: int) -> dict[str, torch.Tensor]:
    """A state dict whose bytes follow from the version."""
    return {
        "large": torch.arange(SIZE // 8, dtype=torch.int64) * (2 * version + 1),
        "scale": torch.tensor(0.5 + version),
    }


def expected(version: int) -> dict[str, str]:
    """What `hashes` says of a version."""
    return hashes(weights(version))


class Trainer(Peer):
    """Publishes these weights, and holds the last two versions."""

    _before: tuple[str, ...] = ()

    def publish_version(self, version: int) -> str:
        for update_id in self._before[:-1]:
            self.release(update_id)
        manifest = self._bridge.publish(weights(version), weight_version=version)
        self._before = (*self._before[-1:], manifest.update_id)
        return manifest.to_json()


class Rig:
    """A trainer in a process of its own, an engine with a bridge, and its driver with another."""

    def __init__(self, transport: str) -> None:
        options: dict[str, Any] = {"timeout_s": DEADLINE_S}
        self.trainer = Child(
            Trainer, transport_class=transport, transport_kwargs=options, worker="trainer"
        )
        self.ranks = make_weight_bridge(transport, source_worker="engine", **options)
        self.driver = make_weight_bridge(transport, source_worker="driver", **options)
        self.adapter = Verifying(weights(0), self.ranks)
        self.executor = RolloutExecutor(
            weight_bridge=self.driver, weight_install_adapter=self.adapter, suspicious="off"
        )
        self.trainer.ready()

    def publish(self, version: int) -> WeightUpdateManifest:
        text = self.trainer.call("publish_version", version=version)
        return WeightUpdateManifest.from_json(text)

    def update(self, version: int) -> Mapping[str, torch.Tensor]:
        manifest = self.publish(version)
        tensors = self.executor.update_weights(manifest)
        assert hashes(self.adapter.engine) == expected(version)
        return tensors

    def release(self, manifest: WeightUpdateManifest) -> None:
        self.trainer.call("release", update_id=manifest.update_id)

    def told(self, manifest: WeightUpdateManifest) -> dict[str, str]:
        reports = self.trainer.call("reports", update_id=manifest.update_id)
        return {report["worker"]: report["state"] for report in reports}

    def between(self, manifest: WeightUpdateManifest, act: Any) -> None:
        """Have an engine that verifies nothing ask for the tensors, and do something before."""
        self.adapter.claims = manifest.root
        plain = self.adapter.prepare

        def prepare(manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
            plain(manifest, tensors)
            act()

        self.adapter.prepare = prepare  # type: ignore[method-assign]

    def close(self) -> None:
        for end in (self.executor, self.driver, self.ranks):
            end.close()
        self.trainer.kill()


class UnreadUpdates:
    """The scenarios; each transport that copies has a class of them."""

    transport: ClassVar[str]

    @staticmethod
    def arrivals(rig: Rig) -> Arrivals:
        """The memory of the driver's end for versions of the trainer's."""
        raise NotImplementedError

    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        made = Rig(self.transport)
        try:
            yield made
        finally:
            made.close()

    def test_the_driver_has_no_memory_for_what_it_does_not_read(self, rig: Rig) -> None:
        for version in range(1, 6):
            rig.update(version)
            assert self.arrivals(rig)._ring.nbytes < FEW

    def test_it_is_a_consumer_like_any_other(self, rig: Rig) -> None:
        manifest = rig.publish(1)
        rig.executor.update_weights(manifest)
        assert rig.told(manifest) == {"driver": "acknowledged", "engine": "verified"}
        rig.executor.release_weights()
        assert rig.told(manifest)["driver"] == "released"

    def test_an_adapter_that_asks_for_the_bytes_gets_verified_ones(self, rig: Rig) -> None:
        for version in range(1, 5):
            manifest = rig.publish(version)
            rig.adapter.claims = manifest.root  # its install reads what it is given
            tensors = rig.executor.update_weights(manifest)
            assert hashes(rig.adapter.engine) == hashes(tensors) == expected(version)
            rig.release(manifest)
        assert len(self.arrivals(rig)._ring) < 5

    def test_bytes_are_fetched_when_the_first_tensor_is_asked_for(self, rig: Rig) -> None:
        tensors = rig.update(1)
        assert set(tensors) == set(weights(1))
        assert self.arrivals(rig)._ring.nbytes < FEW
        assert hashes(tensors) == expected(1)
        rig.update(2)
        assert hashes(tensors) == expected(1), "they are this side's own"

    def test_the_same_bridge_may_import_it_with_all_of_its_bytes(self, rig: Rig) -> None:
        manifest = rig.publish(1)
        tensors = rig.executor.update_weights(manifest)
        assert hashes(rig.driver.import_update(manifest)) == expected(1)
        assert hashes(tensors) == expected(1)
        assert rig.driver.update_state(manifest) is State.ACKNOWLEDGED

    def test_a_version_that_was_released_before_it_was_asked_for_is_stale(self, rig: Rig) -> None:
        first = rig.update(1)
        manifest = rig.publish(2)
        second = rig.executor.update_weights(manifest)
        with pytest.raises(StaleUpdate, match="was released here before"):
            first["scale"]
        rig.release(manifest)
        with watchdog(DEADLINE_S + SLACK_S), pytest.raises(StaleUpdate, match="released it"):
            second["scale"]
        assert rig.executor.active_weight_version == 2
        rig.update(3)

    def test_an_update_whose_publisher_lets_go_of_it_in_between_is_undone(self, rig: Rig) -> None:
        rig.update(1)
        manifest = rig.publish(2)
        rig.between(manifest, lambda: rig.release(manifest))
        with watchdog(DEADLINE_S + SLACK_S), pytest.raises(StaleUpdate, match="released it"):
            rig.executor.update_weights(manifest)
        assert hashes(rig.adapter.engine) == expected(1)
        assert rig.executor.active_weight_version == 1

    def test_an_update_whose_publisher_dies_in_between_is_undone(self, rig: Rig) -> None:
        rig.update(1)
        manifest = rig.publish(2)
        rig.between(manifest, rig.trainer.kill)
        with watchdog(DEADLINE_S + SLACK_S), pytest.raises(WeightBridgeError) as caught:
            rig.executor.update_weights(manifest)
        assert manifest.update_id in str(caught.value) or "publisher" in str(caught.value)
        assert hashes(rig.adapter.engine) == expected(1)
        assert rig.executor.active_weight_version == 1

    def test_a_manifest_that_was_changed_on_its_way_is_refused(self, rig: Rig) -> None:
        good = rig.publish(1)
        digests = bytes([good.digests[0] ^ 1]) + good.digests[1:]
        with pytest.raises(ChecksumMismatch):
            rig.executor.update_weights(good.model_copy(update={"digests": digests}))
        with pytest.raises(DigestMismatch, match="header"):
            rig.executor.update_weights(good.model_copy(update={"metadata": {"step": 9}}))
        assert rig.adapter.calls == []
        rig.executor.update_weights(good)
        assert hashes(rig.adapter.engine) == expected(1)

    def test_the_mapping_does_not_keep_a_bridge(self, rig: Rig) -> None:
        tensors = rig.update(1)
        rig.executor.close()
        rig.driver.close()
        with pytest.raises(BridgeClosed):
            tensors["scale"]
