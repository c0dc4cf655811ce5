"""``cuda-vmm`` keeps every promise of a transport, on host memory; and what only it can refuse."""

import gc
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

from rl_bridge.cuda import streams
from rl_bridge.cuda.broker import Broker
from rl_bridge.cuda.devices import driver_at
from rl_bridge.cuda.driver import INVALID_VALUE
from rl_bridge.cuda.host import HostDriver, Live
from rl_bridge.errors import (
    DeadlineExceeded,
    DriverError,
    MalformedManifest,
    RangeBeyondSegment,
    SegmentError,
    TransportUnavailable,
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


def test_memory_of_another_kind_is_refused_and_may_come_again(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    manifest = publish(trainer)
    with pytest.raises(TransportUnavailable, match="memory of 'cuda' and this side of 'host'"):
        rollout.import_update(changed(manifest, "arena", driver="cuda"))
    assert shown(rollout, manifest) == {1.0}


def test_a_side_that_was_given_a_device_takes_no_update_of_another(trainer: BridgeOver) -> None:
    manifest = publish(trainer)
    with BridgeOver(HostVMM(device=0)) as rollout:
        with pytest.raises(TransportUnavailable, match=r"lies on GPU elsewhere .* device=0"):
            rollout.import_update(changed(manifest, "arena", device="elsewhere"))
        assert shown(rollout, manifest) == {1.0}


def test_an_arena_that_is_too_small_for_its_tensors_is_refused_unseen(
    trainer: BridgeOver, rollout: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publish(trainer)
    monkeypatch.setattr("rl_bridge.cuda.views.fetch_fd", pytest.fail)
    with pytest.raises(RangeBeyondSegment, match="does not fit its allocation of 1024"):
        rollout.import_update(changed(manifest, "arena", nbytes=1024))
    assert rollout.update_status(manifest.update_id) == "rejected"


def test_a_size_that_is_not_the_memorys_is_refused_by_the_driver(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    manifest, before = publish(trainer), held()
    nbytes = 2 * manifest.handle["arena"]["nbytes"]
    with pytest.raises(DriverError, match=f"expected {nbytes}") as caught:
        rollout.import_update(changed(manifest, "arena", nbytes=nbytes))
    assert caught.value.code == INVALID_VALUE
    assert rollout.update_status(manifest.update_id) == "rejected"
    assert held() == before


def test_a_token_that_is_not_the_brokers_opens_nothing(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    manifest, before = publish(trainer), held()
    broker = manifest.handle["arena"]["broker"] | {"token": "0" * 32}
    with pytest.raises(SegmentError, match="the token is not its own"):
        rollout.import_update(changed(manifest, "arena", broker=broker))
    assert held() == before


@pytest.mark.parametrize(
    "fields", [{"driver": "rocm"}, {"device": "x" * 65}, {"nbytes": 0}, {"key": -1}, {"fd": 3}]
)
def test_a_reference_that_is_none_is_refused(
    trainer: BridgeOver, rollout: BridgeOver, fields: dict[str, Any]
) -> None:
    manifest = publish(trainer)
    with pytest.raises(MalformedManifest, match=f"handle field arena.{next(iter(fields))}"):
        rollout.import_update(changed(manifest, "arena", **fields))


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


def test_a_slot_that_an_interrupt_loses_is_not_offered_for_good(
    trainer: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(trainer)
    end: Any = trainer.publisher
    offers = end.end._broker._server.offers
    before = (held(), set(open_fds()), set(offers))
    cuts: list[Callable[..., Any]] = [Broker.offer, end.end._make_slot]

    def and_cut(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> object:
            function(*args)
            raise KeyboardInterrupt

        return call

    for owner, name, function in (
        (Broker, "offer", cuts[0]),
        (end.end._ring, "_make_slot", cuts[1]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, and_cut(function))
            with pytest.raises(KeyboardInterrupt):
                publish(trainer, 2)
        gc.collect()
        assert (held(), set(open_fds()), set(offers)) == before
    publish(trainer, 3)
