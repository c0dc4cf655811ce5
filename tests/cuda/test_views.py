"""Views of device memory: private copies are freed in time, a retired view is unmapped once."""

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_bridge.bridge.consumer import Consumer
from rl_bridge.bridge.publisher import Publisher
from rl_bridge.cuda.driver import CAPTURING, driver_error
from rl_bridge.cuda.host import FREED, HostDriver, HostIPCDriver
from rl_bridge.cuda.ipc import IPC_UNIT
from rl_bridge.cuda.owners import settle_late
from rl_bridge.cuda.views import private_pin
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.memory.places import CPUPlace
from rl_bridge.testing.faults import HostVMM
from tests.helpers import forked, forking


class OnAGPU(CPUPlace):
    """Host memory that is called a GPU's."""

    device = torch.device("cuda", 5)


class Noting(HostIPCDriver):
    """Notes what is waited for and freed; is told to refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.refuses: dict[str, str] = {}

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if code := self.refuses.get(name):
            raise driver_error(name, code, "refused, as planned")

    def alloc(self, nbytes: int) -> int:
        self._note("alloc")
        return super().alloc(nbytes)

    def fence(self) -> None:
        self._note("fence")

    def dealloc(self, address: int) -> None:
        self._note("dealloc")
        super().dealloc(address)


@pytest.fixture
def driver() -> Iterator[Noting]:
    made = Noting()
    yield made
    made.refuses.clear()
    gc.collect()
    settle_late()
    assert made.num_plain() == (0, 0)


def view_on(driver: Noting) -> Any:
    return SimpleNamespace(place=OnAGPU(), driver=driver)


def test_private_memory_has_whole_units_and_ends_with_its_last_tensor(driver: Noting) -> None:
    pin = private_pin(view_on(driver), 1000)
    assert (pin.nbytes, pin.view) == (IPC_UNIT, None)
    tensor = OnAGPU().tensor(pin.buffer, 0, 1000, torch.uint8)
    del pin
    assert driver.calls == ["alloc"]
    tensor.fill_(7)
    part = tensor[3:5]
    del tensor
    assert part.tolist() == [7, 7] != [FREED] * 2
    del part
    gc.collect()
    # A tensor may be dead while kernels that read it still run.
    assert driver.calls == ["alloc", "fence", "dealloc"]


def test_a_shortage_is_this_sides_and_leaves_nothing(driver: Noting) -> None:
    driver.refuses["alloc"] = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(WeightBridgeUnavailableError, match=r"OUT_OF_MEMORY.*import it again"):
        private_pin(view_on(driver), 1000)


def test_memory_that_dies_while_a_graph_is_captured_is_freed_later(driver: Noting) -> None:
    pin = private_pin(view_on(driver), 1000)
    driver.refuses["fence"] = CAPTURING
    del pin
    gc.collect()
    assert driver.num_plain() == (1, 0)
    driver.refuses.clear()
    settle_late()
    assert driver.num_plain() == (0, 0)


@forking
def test_a_forked_child_frees_nothing(driver: Noting) -> None:
    pins = [private_pin(view_on(driver), 1000)]
    driver.calls.clear()

    def in_child() -> bool:
        pins.clear()
        gc.collect()
        return driver.calls == []

    assert forked(in_child)


# ---- views of slots -----------------------------------------------------------------------------

LONG_S = 30.0


def test_a_view_that_is_being_unmapped_is_not_unmapped_a_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The driver gives a freed range out again: a second unmapping would hit another's memory.
    publisher = Publisher(HostVMM(), source_worker="trainer", source_rank=0)
    consumer = Consumer(HostVMM(), source_worker="rollout", source_rank=0)
    manifest = publisher.publish({"weight": torch.arange(8.0)}, weight_version=1)
    tensor = consumer.import_update(manifest)["weight"]
    (view,) = consumer.end._views._views.values()  # type: ignore[attr-defined]
    consumer.release(manifest.update_id)
    consumer.close()  # the view ends with its tensor

    unmap, calls = HostDriver.unmap, []
    inside, go_on = threading.Event(), threading.Event()

    def slow(self: HostDriver, address: int, nbytes: int) -> None:
        calls.append(address)
        inside.set()
        if len(calls) == 1:
            assert go_on.wait(LONG_S)
        unmap(self, address, nbytes)

    monkeypatch.setattr(HostDriver, "unmap", slow)
    held = [tensor]
    del tensor
    thread = threading.Thread(target=held.clear)
    thread.start()
    try:
        assert inside.wait(LONG_S)
        view.settle()
        assert len(calls) == 1
    finally:
        go_on.set()
        thread.join(LONG_S)
    view.settle()
    assert len(calls) == 1
    monkeypatch.undo()
    publisher.close()
