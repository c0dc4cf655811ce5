"""A device that does not come to rest in time costs an update, but no engine and no lease."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.cuda.host import HostDriver, HostIPCDriver
from rl_bridge.cuda.ipc import Opening
from rl_bridge.cuda.owners import settle_late
from rl_bridge.errors import DeadlineExceeded
from rl_bridge.memory import segment as leases
from rl_bridge.memory.segment import SegmentRef
from rl_bridge.testing.host_devices import HostVMM
from rl_bridge.testing.processes import Child
from rl_bridge.transports import registry
from tests.cuda.test_ipc import HostExporter


@pytest.fixture
def bridges(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TensorBridge, TensorBridge]]:
    monkeypatch.setitem(registry._KINDS, HostVMM.name, HostVMM)
    with make_weight_bridge(HostVMM.name) as trainer, make_weight_bridge(HostVMM.name) as rollout:
        yield trainer, rollout


@contextmanager
def restless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device with a kernel that never ends."""

    def late(_: HostDriver) -> None:
        raise DeadlineExceeded("the device did not end in time, as planned. See what runs there.")

    with monkeypatch.context() as patch:
        patch.setattr(HostDriver, "fence", late)
        yield


def test_a_flip_is_given_up_and_the_engine_stays_as_it_was(
    bridges: tuple[TensorBridge, TensorBridge], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rollout = bridges
    engine = torch.nn.Linear(30, 20, bias=False)
    executor = RolloutExecutor(
        weight_bridge=rollout, weight_install_adapter=ModuleInstallAdapter(engine, mode="flip")
    )

    def update(version: int) -> None:
        weights = {"weight": torch.full((20, 30), float(version))}
        manifest = trainer.publish(weights, weight_version=version)
        try:
            executor.update_weights(manifest.to_json())
        finally:
            trainer.release(manifest.update_id)

    for version in (1, 2, 3):
        update(version)
    place = engine.weight.data_ptr()
    with restless(monkeypatch), pytest.raises(DeadlineExceeded, match="as planned"):
        update(4)
    assert torch.equal(engine.weight, torch.full((20, 30), 3.0))
    assert (executor.active_weight_version, executor.is_torn) == (3, False)
    update(5)
    assert torch.equal(engine.weight, torch.full((20, 30), 5.0))
    assert engine.weight.data_ptr() == place


def test_a_lease_goes_on_until_the_device_rests(
    bridges: tuple[TensorBridge, TensorBridge], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rollout = bridges
    manifest = trainer.publish({"w": torch.ones(5)}, weight_version=1)
    held = rollout.import_update(manifest)["w"]
    end: Any = trainer.publisher
    fd = end.end._ring._slots[0].segment.fd
    rollout.acknowledge(manifest.update_id)
    rollout.release(manifest.update_id)
    with restless(monkeypatch):
        del held
        trainer.release(manifest.update_id)
        assert leases.is_held(fd)
        # The publisher takes another slot meanwhile, and waits for nobody.
        other = trainer.publish({"w": torch.zeros(5)}, weight_version=2)
    rollout.import_update(other)  # whatever comes next asks again
    rollout.reject(other, "enough")
    assert not leases.is_held(fd)


def test_a_handle_stays_open_until_the_device_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HostIPCDriver()
    with Child(HostExporter) as owner:
        where = owner.call("where")
        segment = SegmentRef.model_validate(where["segment"])
        opening = Opening(driver, bytes.fromhex(where["handle"]), segment)
        with restless(monkeypatch):
            opening.close()
            assert driver.num_plain() == (0, 1)
        settle_late()
        assert driver.num_plain() == (0, 0)
