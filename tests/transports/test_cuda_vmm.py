"""``cuda-vmm`` keeps every promise of a transport, on host memory; and what only it can refuse."""

import gc
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

from rl_bridge.cuda import streams
from rl_bridge.cuda.devices import driver_at
from rl_bridge.cuda.host import HostDriver, Live
from rl_bridge.errors import (
    DeadlineExceeded,
    DriverError,
    MalformedManifest,
    RangeBeyondSegment,
    SegmentError,
    TransportUnavailable,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.memory.passes import BytePlan
from rl_bridge.testing import TransportSuite
from rl_bridge.testing.faults import HostVMM, Locate, published_address
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.transports.cuda import CUDAVMM
from tests.helpers import open_fds
from tests.transports.cuda_rig import changed, publish, refuse_once, shown


class TestOnHostMemory(TransportSuite):
    transport_class = HostVMM
    locate: ClassVar[Locate] = staticmethod(published_address)


@pytest.fixture
def trainer() -> Iterator[BridgeOver]:
    with BridgeOver(HostVMM()) as made:
        yield made


@pytest.fixture
def rollout() -> Iterator[BridgeOver]:
    with BridgeOver(HostVMM()) as made:
        yield made


def settled() -> Live:
    """What the process holds, whatever tests before left to be collected."""
    gc.collect()
    return held()


def held() -> Live:
    driver = driver_at("host", None)
    assert isinstance(driver, HostDriver)
    return driver.live()


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [-1, True, 0.0, "0"])
def test_a_device_that_is_no_number_of_one_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="expected the number of a GPU, or None"):
        CUDAVMM(device=device)


# ---- what a publish leaves on the device --------------------------------------------------------


class OnTheStream:
    """Stands for a stream whose work takes as long as a test wants, and notes what is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.is_over = False
        self.is_captured = False
        fence, unmap, copy = HostDriver.fence, HostDriver.unmap, BytePlan.copy_digest

        def note(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any, **kwargs: Any) -> Any:
                self.asked.append(name)
                return call(*args, **kwargs)

            return noted

        for target, name, call in (
            (HostDriver, "fence", note("drain", fence)),
            (HostDriver, "unmap", note("unmap", unmap)),
            (BytePlan, "copy_digest", note("write", copy)),
            (streams, "_mark", note("mark", lambda _: self)),
            (streams, "_go_behind", note("behind", lambda _, mark: mark)),
            (streams, "_is_capturing", lambda _: self.is_captured),
        ):
            monkeypatch.setattr(target, name, call)

    def query(self) -> bool:
        return self.is_over


def give_up(monkeypatch: pytest.MonkeyPatch, trainer: BridgeOver) -> None:
    """A publish that the device does not end in time."""

    def late(*_: Any, **__: Any) -> bytes:
        raise DeadlineExceeded("late, as planned")

    with monkeypatch.context() as patch:
        patch.setattr(BytePlan, "copy_digest", late)
        with pytest.raises(DeadlineExceeded, match="as planned"):
            publish(trainer)


def test_a_publish_never_waits_for_the_whole_device(
    trainer: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not even where its layout needs another slot, and the old one is given back.
    before = settled()
    stream = OnTheStream(monkeypatch)
    for version, size in enumerate((300, 300, 4 << 20, 300), 1):
        manifest = trainer.publish({"w": torch.zeros(size)}, weight_version=version)
        trainer.release(manifest.update_id)
    assert stream.asked.count("unmap") >= 2
    assert "drain" not in stream.asked
    trainer.close()
    assert "drain" not in stream.asked
    assert held() == before


def test_a_publish_goes_behind_what_a_failed_one_left_to_be_written(
    trainer: BridgeOver, rollout: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On another stream it could be overwritten by that, after it was sealed.
    stream = OnTheStream(monkeypatch)
    give_up(monkeypatch, trainer)
    assert stream.asked == ["mark"]
    assert shown(rollout, publish(trainer, 2)) == {2.0}
    assert stream.asked[:3] == ["mark", "behind", "write"]
    stream.asked.clear()
    publish(trainer, 3)
    assert "behind" not in stream.asked


@pytest.mark.parametrize("is_over", [False, True])
def test_a_slot_is_unmapped_once_nothing_writes_to_it(
    trainer: BridgeOver, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    stream = OnTheStream(monkeypatch)
    give_up(monkeypatch, trainer)
    stream.asked.clear()
    stream.is_over = is_over
    trainer.close()
    assert stream.asked == (["unmap"] if is_over else ["drain", "unmap"])


def test_a_device_that_is_lost_stops_no_bridge_from_closing(
    trainer: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = settled()
    stream = OnTheStream(monkeypatch)
    give_up(monkeypatch, trainer)

    def lost() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(stream, "query", lost)
    trainer.close()
    assert stream.asked[-1] == "unmap"
    assert held() == before


def test_a_publish_within_a_capture_is_refused_before_anything_is_put_on_the_stream(
    trainer: BridgeOver, rollout: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is captured is done again at each replay: to whatever the slot holds by then.
    stream = OnTheStream(monkeypatch)
    weights = {"w": torch.ones(20, 30).t()}  # strided: gathered by torch, before the pass begins
    first = trainer.publish(weights, weight_version=1)
    stream.asked.clear()
    stream.is_captured = True
    with pytest.raises(WeightBridgeUnavailableError, match="outside of the capture"):
        trainer.publish({"w": torch.zeros(20, 30).t()}, weight_version=2)
    assert stream.asked == []
    stream.is_captured = False
    assert shown(rollout, trainer.publish(weights, weight_version=2)) == {1.0}
    assert trainer.update_status(first.update_id) == "published"


# ---- manifests that cannot be right here --------------------------------------------------------


TOKEN = {"token": "0" * 32}


@pytest.mark.parametrize(
    ("fields", "error", "told"),
    [
        ({"driver": "cuda"}, TransportUnavailable, "memory of 'cuda' and this side of 'host'"),
        ({"nbytes": 1024}, RangeBeyondSegment, "does not fit its allocation of 1024"),
        ({"nbytes": 4 << 20}, DriverError, f"has {2 << 20} bytes, expected {4 << 20}"),
        ({"broker": TOKEN}, SegmentError, "the token is not its own"),
        ({"driver": "rocm"}, MalformedManifest, "handle field arena.driver"),
        ({"device": "x" * 65}, MalformedManifest, "handle field arena.device"),
        ({"nbytes": 0}, MalformedManifest, "handle field arena.nbytes"),
        ({"key": -1}, MalformedManifest, "handle field arena.key"),
        ({"fd": 3}, MalformedManifest, "handle field arena.fd"),
    ],
    ids=str,
)
def test_an_arena_that_cannot_be_right_is_refused_and_holds_nothing(
    trainer: BridgeOver,
    rollout: BridgeOver,
    fields: dict[str, Any],
    error: type[WeightBridgeError],
    told: str,
) -> None:
    manifest, before = publish(trainer), held()
    if broker := fields.get("broker"):
        fields = {"broker": manifest.handle["arena"]["broker"] | broker}
    with pytest.raises(error, match=told):
        rollout.import_update(changed(manifest, "arena", **fields))
    assert held() == before
    if error is TransportUnavailable:  # it may come again
        assert shown(rollout, manifest) == {1.0}


def test_a_side_that_was_given_a_device_takes_no_update_of_another(trainer: BridgeOver) -> None:
    manifest = publish(trainer)
    with BridgeOver(HostVMM(device=0)) as rollout:
        with pytest.raises(TransportUnavailable, match=r"lies on GPU elsewhere .* device=0"):
            rollout.import_update(changed(manifest, "arena", device="elsewhere"))
        assert shown(rollout, manifest) == {1.0}


# ---- shortages: the update is as good as before -------------------------------------------------


@pytest.mark.parametrize("name", ["import_fd", "reserve", "map", "set_access"])
def test_a_driver_that_is_short_of_something_does_not_cost_the_update(
    trainer: BridgeOver, rollout: BridgeOver, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    manifest, before = publish(trainer), held()
    refuse_once(monkeypatch, HostDriver, name, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(WeightBridgeUnavailableError, match="import it again") as kept:
        rollout.import_update(manifest)
    # Whoever keeps the exception keeps its frames, and must not keep memory with them.
    assert isinstance(kept.value.__cause__, DriverError)
    assert held() == before
    assert shown(rollout, manifest) == {1.0}


def test_a_broker_that_is_late_does_not_cost_the_update(
    trainer: BridgeOver, rollout: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object, **__: object) -> object:
        raise DeadlineExceeded("the broker did not answer. Wait for it.")

    manifest = publish(trainer)
    with monkeypatch.context() as patch:
        patch.setattr("rl_bridge.cuda.views.fetch_fd", late)
        with pytest.raises(WeightBridgeUnavailableError, match=r"import it again.*did not answer"):
            rollout.import_update(manifest)
    assert shown(rollout, manifest) == {1.0}


# ---- a publisher that is refused, or interrupted ------------------------------------------------


@pytest.mark.parametrize("name", ["create", "reserve", "map", "set_access", "export_fd"])
def test_a_slot_that_the_driver_refuses_leaves_nothing(
    trainer: BridgeOver, rollout: BridgeOver, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    publish(trainer)  # what is made once is there
    before = (held(), set(open_fds()))
    refuse_once(monkeypatch, HostDriver, name, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError, match="refused, as planned"):
        publish(trainer, 2)
    assert (held(), set(open_fds())) == before
    assert shown(rollout, publish(trainer, 3)) == {3.0}
