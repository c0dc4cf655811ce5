"""Defects that a second reader found before anybody met them; each test fails without its mend."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    SharedMemoryTensorBridge,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.bridge import ConsumerReport
from rl_bridge.errors import (
    BridgeClosed,
    ChecksumMismatch,
    IncompatibleUpdate,
    StaleUpdate,
    TransportUnavailable,
    WeightUpdateRejectedError,
)
from rl_bridge.lifecycle import Event, Role, State, Transition
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.transports.shared_memory import SharedMemory


@pytest.fixture
def trainer() -> Iterator[SharedMemoryTensorBridge]:
    with SharedMemoryTensorBridge(source_worker="trainer", suspicious="off") as bridge:
        yield bridge


@pytest.fixture
def rollout() -> Iterator[SharedMemoryTensorBridge]:
    with SharedMemoryTensorBridge(source_worker="rollout") as bridge:
        yield bridge


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((4,), float(version))}


def executor_on(bridge: Any) -> RolloutExecutor:
    return RolloutExecutor(
        weight_bridge=bridge, weight_install_adapter=ModuleInstallAdapter(weights(0))
    )


def told(trainer: SharedMemoryTensorBridge, manifest: WeightUpdateManifest) -> ConsumerReport:
    (report,) = trainer.holders(manifest)
    return report


# ---- bytes that go bad behind an import ----------------------------------------------------------


@pytest.mark.parametrize("by_executor", [False, True])
def test_an_imported_update_whose_bytes_go_bad_is_rejected_when_it_is_looked_at_again(
    by_executor: bool, rollout: SharedMemoryTensorBridge
) -> None:
    damaged = FaultInjecting(SharedMemory())
    with BridgeOver(damaged) as publisher:
        manifest = publisher.publish(weights(1), weight_version=1)
        mapping = rollout.import_update(manifest)
        damaged.corrupt(manifest, 0)
        again = executor_on(rollout).update_weights if by_executor else rollout.import_update
        with pytest.raises(ChecksumMismatch) as caught:
            again(manifest)
        assert rollout.update_state(manifest) is State.REJECTED
        (report,) = publisher.holders(manifest)
        assert (report.state, report.tensors_held) == ("rejected", False)
        assert "checksum mismatch" in str(report.reason)
        with pytest.raises(WeightUpdateRejectedError):
            mapping["weight"]
        del caught  # up to here it held the frames of the import, and nothing of the update


def test_what_is_acknowledged_stays_so_although_its_bytes_go_bad(
    rollout: SharedMemoryTensorBridge,
) -> None:
    damaged = FaultInjecting(SharedMemory())
    with BridgeOver(damaged) as publisher:
        manifest = publisher.publish(weights(1), weight_version=1)
        mapping = rollout.import_update(manifest)
        rollout.acknowledge(manifest)
        damaged.corrupt(manifest, 0)
        with pytest.raises(ChecksumMismatch):
            rollout.import_update(manifest)
        assert rollout.active_weight_version == 1
        assert mapping["weight"].shape == (4,)


# ---- who shares the bridge -----------------------------------------------------------------------


def test_an_update_acknowledged_by_hand_is_refused_by_an_executor_and_keeps_its_tensors(
    trainer: SharedMemoryTensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    manifest = trainer.publish(weights(1), weight_version=1)
    mapping = rollout.import_update(manifest)
    rollout.acknowledge(manifest)
    executor = executor_on(rollout)
    with pytest.raises(StaleUpdate, match=r"acknowledged .*release_imported"):
        executor.update_weights(manifest)
    assert rollout.update_state(manifest) is State.ACKNOWLEDGED
    assert mapping["weight"].tolist() == [1.0] * 4
    rollout.release_imported(manifest)  # as the message says
    executor.update_weights(manifest)
    assert executor.active_weight_version == 1


def test_an_update_that_somebody_acknowledges_meanwhile_keeps_its_tensors(
    trainer: SharedMemoryTensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    class Acknowledging(ModuleInstallAdapter):
        def prepare(self, manifest: Any, tensors: Any) -> None:
            super().prepare(manifest, tensors)
            rollout.acknowledge(manifest)

    manifest = trainer.publish(weights(1), weight_version=1)
    mapping = rollout.import_update(manifest)
    executor = RolloutExecutor(
        weight_bridge=rollout, weight_install_adapter=Acknowledging(weights(0))
    )
    with pytest.raises(WeightUpdateRejectedError):
        executor.update_weights(manifest)
    assert rollout.update_state(manifest) is State.ACKNOWLEDGED
    assert mapping["weight"].tolist() == [1.0] * 4


def test_an_update_that_a_bridge_of_ones_own_imports_as_an_empty_mapping_is_rejected_too() -> None:
    class Elsewhere:
        """Puts the weights where its engine finds them, and hands none out."""

        def __init__(self) -> None:
            self.said: list[str] = []

        def import_update(self, manifest: WeightUpdateManifest) -> dict[str, torch.Tensor]:
            return {}

        def acknowledge(self, update_id: str) -> None:
            self.said.append("acknowledged")

        def reject(self, update_id: str, reason: str) -> None:
            self.said.append("rejected")

        def release(self, update_id: str) -> None:
            self.said.append("released")

    own = Elsewhere()
    with make_weight_bridge("local-clone") as publisher:
        manifest = publisher.publish(weights(1), weight_version=1)
        with pytest.raises(IncompatibleUpdate):
            executor_on(own).update_weights(manifest)
    assert own.said == ["rejected"]


# ---- who holds what ------------------------------------------------------------------------------


def releasing_at(target: State) -> SharedMemoryTensorBridge:
    """A bridge whose observer releases an update in the middle of its step to `target`."""

    def release(step: Transition) -> None:
        if step.role is Role.CONSUMER and step.target is target:
            bridge.release(step.update_id)

    bridge = SharedMemoryTensorBridge(source_worker="rollout", observer=release)
    return bridge


@pytest.mark.parametrize("by_observer", [False, True])
def test_a_rejected_update_that_is_released_is_held_until_its_last_tensor_dies(
    by_observer: bool, trainer: SharedMemoryTensorBridge
) -> None:
    with releasing_at(State.REJECTED if by_observer else State.TORN) as bridge:
        manifest = trainer.publish(weights(1), weight_version=1)
        tensor = bridge.import_update(manifest)["weight"]
        bridge.reject(manifest, "not this one")
        bridge.release(manifest)
        report = told(trainer, manifest)
        assert (report.state, report.tensors_held) == ("released", True)
        assert tensor.tolist() == [1.0] * 4
        del tensor
        report = told(trainer, manifest)
        assert (report.state, report.tensors_held) == ("released", False)


def test_tensors_of_an_earlier_import_of_an_update_count_until_the_last_one_dies(
    trainer: SharedMemoryTensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    manifest = trainer.publish(weights(1), weight_version=1)
    earlier = rollout.import_update(manifest)["weight"]
    rollout.release(manifest)
    rollout.import_update(manifest)
    rollout.release(manifest)
    assert told(trainer, manifest).tensors_held
    assert earlier.tolist() == [1.0] * 4
    del earlier
    assert not told(trainer, manifest).tensors_held


def test_bytes_that_differ_are_given_back_also_where_an_observer_releases_what_was_rejected() -> (
    None
):
    damaged = FaultInjecting(SharedMemory())
    with BridgeOver(damaged) as publisher, releasing_at(State.REJECTED) as bridge:
        manifest = publisher.publish(weights(1), weight_version=1)
        damaged.corrupt(manifest, 0)
        with pytest.raises(ChecksumMismatch) as caught:
            bridge.import_update(manifest)
        (report,) = publisher.holders(manifest)
        assert (report.state, report.tensors_held) == ("released", False)
        del caught


def test_an_acknowledgement_is_told_with_its_proof_although_an_observer_releases_at_once(
    trainer: SharedMemoryTensorBridge,
) -> None:
    with releasing_at(State.ACKNOWLEDGED) as bridge:
        manifest = trainer.publish(weights(1), weight_version=1)
        bridge.import_update(manifest)
        bridge.acknowledge(manifest, proof={"method": "mine"}, timings_ms={"install": 2.0})
        report = told(trainer, manifest)
        assert (report.state, report.proof) == ("released", {"method": "mine"})
        assert report.timings_ms["install"] == bridge.timings(manifest)["install"] == 2.0
        assert bridge.active_weight_version == 1


# ---- bridges that cannot be opened ---------------------------------------------------------------


def closed_bridge() -> dict[str, Any]:
    bridge = SharedMemoryTensorBridge(source_worker="rollout")
    bridge.close()
    return {"weight_bridge": bridge}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (closed_bridge, BridgeClosed),
        (lambda: {"weight_transport": "cuda-vmm"}, TransportUnavailable),
    ],
    ids=["closed", "blocked"],
)
def test_an_executor_whose_bridge_cannot_be_opened_says_so_once_and_can_be_closed(
    options: Callable[[], dict[str, Any]],
    error: type[Exception],
    trainer: SharedMemoryTensorBridge,
) -> None:
    manifest = trainer.publish(weights(1), weight_version=1)
    adapter = ModuleInstallAdapter(weights(0))
    with RolloutExecutor(weight_install_adapter=adapter, **options()) as executor:
        for _ in range(2):
            with pytest.raises(error):
                executor.update_weights(manifest)
        executor.recover()
        executor.release_weights()
    executor.close()


# ---- publications that do not come about ---------------------------------------------------------


def test_a_filter_of_the_log_that_raises_leaves_the_number_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(_: logging.LogRecord) -> bool:
        raise LookupError

    logger = logging.getLogger("rl_bridge.bridge.publisher")
    with (
        caplog.at_level(logging.INFO, logger.name),
        SharedMemoryTensorBridge(suspicious="off", max_slots=1) as trainer,
    ):
        logger.addFilter(failing)
        try:
            with pytest.raises(LookupError):
                trainer.publish(weights(1), weight_version=1)
        finally:
            logger.removeFilter(failing)
        assert trainer.publish(weights(1), weight_version=1).weight_version == 1
    assert "publishing version 1" in caplog.text


def test_an_observer_may_publish_from_inside_a_publication() -> None:
    """What ends a publication that was cut off leaves one that runs alone."""

    def publish_another(step: Transition) -> None:
        if step.event is Event.PUBLISH and step.weight_version == 1:
            inner.append(trainer.publish(weights(2), weight_version=2))

    inner: list[WeightUpdateManifest] = []
    with SharedMemoryTensorBridge(observer=publish_another, suspicious="off") as trainer:
        outer = trainer.publish(weights(1), weight_version=1)
        for manifest, value in ((outer, 1.0), (inner[0], 2.0)):
            assert trainer.import_update(manifest)["weight"].tolist() == [value] * 4
