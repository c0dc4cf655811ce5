"""What goes wrong while versions are exchanged in device memory, on host memory here."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.cuda.devices import driver_at
from rl_bridge.cuda.driver import CAPTURING, driver_error
from rl_bridge.cuda.host import HostDriver, HostIPCDriver
from rl_bridge.cuda.ipc import Opening
from rl_bridge.cuda.owners import AddressRange, settle_late
from rl_bridge.errors import (
    DeadlineExceeded,
    IncompatibleUpdate,
    ProofFailed,
    SegmentError,
    TornEngine,
)
from rl_bridge.installers.base import InstallProof
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.memory.places import CPUPlace
from rl_bridge.memory.segment import SegmentRef
from rl_bridge.testing.faults import HostVMM
from rl_bridge.testing.processes import Child
from rl_bridge.transports import registry
from tests.cuda.test_ipc import HostExporter
from tests.helpers import open_fds


@pytest.fixture(autouse=True)
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the transport known by its name, for as long as a test runs."""
    monkeypatch.setitem(registry._KINDS, HostVMM.name, HostVMM)


class Rig:
    """A trainer and an engine that is flipped."""

    def __init__(self) -> None:
        self.trainer: TensorBridge = make_weight_bridge(HostVMM.name, suspicious="off")
        self.rollout: TensorBridge = make_weight_bridge(HostVMM.name)
        self.engine = torch.nn.Linear(300, 200)
        self.executor = RolloutExecutor(
            weight_bridge=self.rollout,
            weight_install_adapter=ModuleInstallAdapter(self.engine, mode="flip"),
        )

    def update(self, version: int) -> None:
        weights = {
            name: torch.full_like(t, version) for name, t in self.engine.state_dict().items()
        }
        manifest = self.trainer.publish(weights, weight_version=version)
        try:
            self.executor.update_weights(manifest.to_json())
        finally:
            self.trainer.release(manifest.update_id)

    def holds(self) -> set[float]:
        return {v for t in self.engine.state_dict().values() for v in t.unique().tolist()}

    def slot_fd(self) -> int:
        end: Any = self.trainer.publisher
        return int(end.end._ring._slots[0].segment.fd)

    def addresses(self) -> list[int]:
        return [t.data_ptr() for t in self.engine.state_dict().values()]


@pytest.fixture
def rig(by_name: None) -> Iterator[Rig]:
    del by_name
    rig = Rig()
    yield rig
    rig.rollout.close()
    rig.trainer.close()


class Refusing:
    """A call of the driver that refuses, at the calls that are named, from 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, *failing: int) -> None:
        self.calls = 0
        inner: Callable[..., Any] = getattr(HostDriver, name)

        def call(driver: HostDriver, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls in failing:
                raise driver_error(name, "CUDA_ERROR_OUT_OF_MEMORY", "refused, as planned")
            return inner(driver, *args, **kwargs)

        monkeypatch.setattr(HostDriver, name, call)


def test_the_device_is_drained_before_anything_is_unmapped(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.update(1)
    rig.update(2)
    calls: list[str] = []
    for name in ("fence", "unmap", "map", "set_access"):
        inner = getattr(HostDriver, name)

        def call(
            driver: HostDriver, *args: Any, _name: str = name, _inner: Any = inner, **kwargs: Any
        ) -> Any:
            calls.append(_name + " to be written" * kwargs.get("writable", False))
            return _inner(driver, *args, **kwargs)

        monkeypatch.setattr(HostDriver, name, call)
    rig.update(3)
    flip = calls.index("unmap")
    assert calls[flip - 1 : flip + 3] == ["fence", "unmap", "map", "set_access"]


@pytest.mark.parametrize("name", ["unmap", "map", "set_access"])
def test_a_driver_that_refuses_a_flip_leaves_the_version_before(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for version in (1, 2, 3):  # both slots are mapped: what comes is the flip alone
        rig.update(version)
    with monkeypatch.context() as patch:
        refusing = Refusing(patch, name, 1)
        with pytest.raises(SegmentError, match="refused, as planned"):
            rig.update(4)
        assert refusing.calls
    assert (rig.holds(), rig.executor.active_weight_version) == ({3.0}, 3)
    rig.update(5)
    assert (rig.holds(), rig.executor.active_weight_version) == ({5.0}, 5)


def test_a_first_flip_that_is_refused_leaves_the_initial_weights(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: tensor.clone() for name, tensor in rig.engine.state_dict().items()}
    places = rig.addresses()
    # The third mapping: the publisher's own and the import's come first.
    Refusing(monkeypatch, "map", 3)
    with pytest.raises(SegmentError, match="refused, as planned"):
        rig.update(1)
    assert rig.addresses() == places
    assert all(torch.equal(t, before[name]) for name, t in rig.engine.state_dict().items())
    assert rig.executor.active_weight_version is None


def test_a_driver_that_refuses_the_way_back_too_tears_the_engine(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2, 3):
        rig.update(version)
    with monkeypatch.context() as patch:
        Refusing(patch, "map", 1, 2, 3, 4)
        with pytest.raises(TornEngine, match="refused, as planned"):
            rig.update(4)
        assert rig.executor.is_torn
    rig.update(5)
    after = (rig.holds(), rig.executor.active_weight_version, rig.executor.is_torn)
    assert after == ({5.0}, 5, False)


def test_an_exchange_that_did_not_happen_fails_the_proof(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.update(1)
    with monkeypatch.context() as patch:
        patch.setattr(AddressRange, "swap", lambda *_, **__: None)
        with pytest.raises(ProofFailed, match="does not hold version 2"):
            rig.update(2)
    assert (rig.holds(), rig.executor.active_weight_version) == ({1.0}, 1)
    rig.update(3)
    assert (rig.holds(), rig.executor.active_weight_version) == ({3.0}, 3)


@pytest.mark.parametrize("skipped", [{"unmap", "map", "set_access"}, {"map", "set_access"}])
def test_a_driver_that_says_yes_and_does_nothing_fails_the_proof(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, skipped: set[str]
) -> None:
    for version in (1, 2, 3):
        rig.update(version)
    places = rig.addresses()
    with monkeypatch.context() as patch:
        lying = set(skipped)

        def lie(name: str) -> None:
            inner = getattr(HostDriver, name)

            def call(driver: HostDriver, *args: Any, **kwargs: Any) -> Any:
                if name in lying:
                    lying.remove(name)
                    return None
                return inner(driver, *args, **kwargs)

            patch.setattr(HostDriver, name, call)

        for name in skipped:
            lie(name)
        with pytest.raises(ProofFailed, match="does not show it there"):
            rig.update(4)
    assert (rig.holds(), rig.executor.active_weight_version) == ({3.0}, 3)
    rig.update(5)
    assert (rig.holds(), rig.addresses()) == ({5.0}, places)


def test_an_engine_on_another_device_is_refused_with_both_named(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere(CPUPlace):
        device = torch.device("cuda", 5)

    # Verification runs where the memory really is; only what it is called is another device.
    monkeypatch.setattr("rl_bridge.cuda.views.place_at", lambda _: Elsewhere())
    with pytest.raises(IncompatibleUpdate, match="lies on cuda:5 and the engine on cpu"):
        rig.update(1)
    assert rig.executor.active_weight_version is None


def test_the_device_is_drained_before_a_lease_ends(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kernels may still read what a tensor showed that is gone: the slot must not be written yet.
    manifest = rig.trainer.publish({"w": torch.ones(5)}, weight_version=1)
    tensors = rig.rollout.import_update(manifest)
    held = tensors["w"]
    rig.rollout.acknowledge(manifest.update_id)
    del tensors
    rig.rollout.release(manifest.update_id)
    calls: list[str] = []
    for owner, name in ((HostDriver, "fence"), (leases, "unlock")):
        inner = getattr(owner, name)

        def call(*args: Any, _name: str = name, _inner: Any = inner, **kwargs: Any) -> Any:
            calls.append(_name)
            return _inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)
    del held
    assert calls[:2] == ["fence", "unlock"]


def test_only_the_end_of_a_lease_drains_the_device(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2):  # both slots are known, and leased by nobody
        manifest = rig.trainer.publish({"w": torch.ones(5)}, weight_version=version)
        rig.rollout.import_update(manifest)
        rig.rollout.reject(manifest, "enough")
    rig.trainer.release(manifest.update_id)
    drained: list[str] = []

    def fence(driver: HostDriver) -> None:
        drained.append(driver.name)

    monkeypatch.setattr(HostDriver, "fence", fence)
    manifest = rig.trainer.publish({"w": torch.ones(5)}, weight_version=3)
    held = rig.rollout.import_update(manifest)["w"]
    rig.rollout.acknowledge(manifest.update_id)
    rig.rollout.release(manifest.update_id)
    assert drained == []
    del held
    assert drained == ["host"]


@contextmanager
def restless(
    monkeypatch: pytest.MonkeyPatch, make_error: Callable[[], Exception]
) -> Iterator[None]:
    """A device that does not come to rest."""

    def refuse(_: HostDriver) -> None:
        raise make_error()

    with monkeypatch.context() as patch:
        patch.setattr(HostDriver, "fence", refuse)
        yield


def late() -> Exception:
    return DeadlineExceeded("the device did not end in time, as planned. See what runs there.")


def capturing() -> Exception:
    return driver_error("cuCtxSynchronize", CAPTURING, "a graph is captured")


def test_a_flip_is_given_up_where_the_device_does_not_rest(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2, 3):
        rig.update(version)
    places = rig.addresses()
    with restless(monkeypatch, late), pytest.raises(DeadlineExceeded, match="as planned"):
        rig.update(4)
    assert (rig.holds(), rig.executor.active_weight_version) == ({3.0}, 3)
    assert not rig.executor.is_torn
    rig.update(5)
    assert (rig.holds(), rig.addresses()) == ({5.0}, places)


@pytest.mark.parametrize("make_error", [late, capturing])
def test_a_lease_goes_on_until_the_device_rests(
    make_error: Callable[[], Exception], rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = rig.trainer.publish({"w": torch.ones(5)}, weight_version=1)
    held = rig.rollout.import_update(manifest)["w"]
    fd = rig.slot_fd()
    rig.rollout.acknowledge(manifest.update_id)
    rig.rollout.release(manifest.update_id)
    with restless(monkeypatch, make_error):
        del held
        rig.trainer.release(manifest.update_id)
        assert leases.is_held(fd)
        # The publisher takes another slot meanwhile, and waits for nobody.
        other = rig.trainer.publish({"w": torch.zeros(5)}, weight_version=2)
    rig.rollout.import_update(other)  # whatever comes next asks again
    rig.rollout.reject(other, "enough")
    assert not leases.is_held(fd)


def test_a_bridge_that_closes_while_a_graph_is_captured_keeps_its_lease_until_then(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = rig.trainer.publish({"w": torch.ones(5)}, weight_version=1)
    held = rig.rollout.import_update(manifest)["w"]
    rig.rollout.acknowledge(manifest.update_id)
    fd = rig.slot_fd()
    with restless(monkeypatch, capturing):
        rig.rollout.close()
        del held
        gc.collect()
        assert leases.is_held(fd)
    settle_late()
    assert not leases.is_held(fd)


def test_an_import_in_the_middle_of_a_drain_keeps_its_lease(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a signal's handler may, in the very thread that waits for the device.
    manifest = rig.trainer.publish({"w": torch.ones(5)}, weight_version=1)
    held = [rig.rollout.import_update(manifest)["w"]]
    rig.rollout.acknowledge(manifest.update_id)
    rig.rollout.release(manifest.update_id)
    fd = rig.slot_fd()
    consumer: Any = rig.rollout.consumer
    (view,) = consumer.end._views._views.values()
    again: list[object] = []
    fence = HostDriver.fence

    def interrupted(driver: HostDriver) -> None:
        if not again:
            again.append(view.pin(manifest.update_id, 1, manifest.table.arena_nbytes))
        fence(driver)

    with monkeypatch.context() as patch:
        patch.setattr(HostDriver, "fence", interrupted)
        held.clear()
    assert leases.is_held(fd)
    again.clear()
    assert not leases.is_held(fd)


def test_a_device_that_is_lost_does_not_stop_a_bridge_from_closing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = rig.trainer.publish({"w": torch.ones(5)}, weight_version=1)
    rig.rollout.import_update(manifest)
    rig.rollout.reject(manifest, "enough")
    with monkeypatch.context() as patch:
        Refusing(patch, "fence", *range(1, 100))
        rig.rollout.close()
    reports = rig.trainer.holders(manifest)
    assert [report.presence for report in reports] == ["gone"]


def test_a_reader_of_fixed_addresses_sees_the_new_version_and_after_an_undo_the_old_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a captured graph does: it knows addresses, and no tensors.
    rig.update(1)
    sizes = [t.nbytes for t in rig.engine.state_dict().values()]
    places = list(zip(rig.addresses(), sizes, strict=True))

    def replayed() -> set[float]:
        return {
            value
            for at, nbytes in places
            for value in vm.tensor_at(at, nbytes).view(torch.float32).tolist()
        }

    rig.update(2)
    assert replayed() == {2.0}
    seen = []
    prove = ModuleInstallAdapter.prove

    def unproven(adapter: ModuleInstallAdapter) -> InstallProof:
        prove(adapter)
        seen.append(replayed())
        raise ProofFailed("as planned. Try again.")

    with monkeypatch.context() as patch:
        patch.setattr(ModuleInstallAdapter, "prove", unproven)
        with pytest.raises(ProofFailed, match="as planned"):
            rig.update(3)
    assert (seen, replayed()) == ([{3.0}], {2.0})
    for version in (4, 5):
        rig.update(version)
        assert replayed() == rig.holds() == {version}
    assert rig.addresses() == [at for at, _ in places]


def test_a_hundred_flips_leave_nothing_behind(rig: Rig) -> None:
    driver = driver_at("host", None)
    assert isinstance(driver, HostDriver)
    for version in range(1, 6):
        rig.update(version)
    before, fds = driver.live(), open_fds()
    for version in range(6, 106):
        rig.update(version)
    assert driver.live() == before
    assert open_fds() == fds


def test_a_handle_stays_open_until_the_device_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HostIPCDriver()
    with Child(HostExporter) as owner:
        where = owner.call("where")
        segment = SegmentRef.model_validate(where["segment"])
        opening = Opening(driver, bytes.fromhex(where["handle"]), segment)
        with restless(monkeypatch, late):
            opening.close()
            assert driver.num_plain() == (0, 1)
        settle_late()
        assert driver.num_plain() == (0, 0)
