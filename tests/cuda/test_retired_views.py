"""A view of a slot in device memory that is over is unmapped once, whoever asks again meanwhile.

The driver gives a freed range out again: what was unmapped a second time would be another's.
"""

import threading

import pytest
import torch

from rl_bridge.bridge.consumer import Consumer
from rl_bridge.bridge.publisher import Publisher
from rl_bridge.cuda.host import HostDriver
from rl_bridge.testing.host_devices import HostVMM

LONG_S = 30.0


def test_a_view_that_is_being_unmapped_is_not_unmapped_a_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
