"""What this side lacks for a moment never costs an update."""

import errno
import pkgutil
from pathlib import Path

import pytest
import torch

from rl_bridge import (
    TensorBridge,
    make_weight_bridge,
)
from rl_bridge.cuda.driver import driver_error
from rl_bridge.errors import (
    DeadlineExceeded,
    WeightBridgeUnavailableError,
)
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.places import CPUPlace
from tests.bridge.engines import content, failing_at_first, publish
from tests.helpers import weights

# ---- this side is short of something -------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no"),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, "no"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
        DeadlineExceeded("the device did not get there"),
        driver_error("cuMemMap", "CUDA_ERROR_OUT_OF_MEMORY", "no"),
    ],
    ids=["memory", "thread", "kernel", "gpu", "torch", "deadline", "driver"],
)
def test_a_shortage_while_the_bytes_are_read_does_not_cost_the_update(
    error: Exception,
    publisher: TensorBridge,
    consumer: TensorBridge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = publish(publisher, 1)
    monkeypatch.setattr(BytePlan, "digest", failing_at_first(error, BytePlan.digest))
    with pytest.raises(type(error)) as caught:
        consumer.import_update(manifest)
    assert caught.value is error
    assert content(consumer.import_update(manifest)) == content(weights(1))


def test_a_shortage_while_an_update_is_attached_leaves_its_slot_free_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        make_weight_bridge("shared-memory", max_slots=1) as publisher,
        make_weight_bridge("shared-memory") as consumer,
    ):
        manifest = publish(publisher, 1)
        monkeypatch.setattr(CPUPlace, "plan", failing_at_first(MemoryError("no"), CPUPlace.plan))
        with pytest.raises(MemoryError) as caught:
            consumer.import_update(manifest)
        publisher.release(manifest.update_id)
        publish(publisher, 2)
        assert caught.value.__traceback__ is not None  # its frames are still there


# What the kernel has no room for: the call that fails once, its error number, and what is raised.
KERNEL: dict[str, tuple[str, int, type[Exception]]] = {
    "lease": ("rl_bridge.memory.segment.try_shared", errno.ENOLCK, OSError),
    "record": (
        "rl_bridge.memory.segment.try_exclusive",
        errno.ENOLCK,
        WeightBridgeUnavailableError,
    ),
    "named segment": ("rl_bridge.memory.vm.os.preadv", errno.ENOMEM, WeightBridgeUnavailableError),
}


@pytest.mark.parametrize("short_of", KERNEL)
def test_a_kernel_without_room_does_not_cost_the_update(
    short_of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, number, raised = KERNEL[short_of]
    directory = tmp_path if short_of == "named segment" else None
    with make_weight_bridge("shared-memory", directory=directory) as publisher:
        manifest = publish(publisher, 1)
        with make_weight_bridge("shared-memory", directory=directory) as consumer:
            plain = pkgutil.resolve_name(name)
            monkeypatch.setattr(name, failing_at_first(OSError(number, "nothing left"), plain))
            with pytest.raises(raised, match="nothing left"):
                consumer.import_update(manifest)
            assert content(consumer.import_update(manifest)) == content(weights(1))


def test_a_shortage_here_leaves_a_released_update_as_it_was(
    publisher: TensorBridge, consumer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(_: object) -> None:
        raise WeightBridgeUnavailableError("no memory. Free some.")

    manifest = publish(publisher, 1)
    consumer.import_update(manifest)
    consumer.acknowledge(manifest.update_id)
    consumer.release(manifest.update_id)
    with monkeypatch.context() as patch:
        patch.setattr(consumer.consumer.end, "attach", no_memory)
        with pytest.raises(WeightBridgeUnavailableError, match="Free some"):
            consumer.import_update(manifest)
    assert consumer.update_status(manifest.update_id) == "released"
    assert content(consumer.import_update(manifest)) == content(weights(1))
