"""What belongs to one process says so when it is sent to another, or copied."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from rl_bridge import SharedMemoryTensorBridge
from rl_bridge.errors import DriverError, GroupAborted, TransportUnavailable


@pytest.fixture
def bridge() -> Iterator[SharedMemoryTensorBridge]:
    with SharedMemoryTensorBridge(source_worker="trainer") as made:
        yield made


def sent(item: object) -> None:
    """As to a process that is spawned, or through a queue."""
    ForkingPickler(io.BytesIO()).dump(item)


@pytest.mark.parametrize(
    "error",
    [
        TransportUnavailable("nixl", "no port is free", "Give another one."),
        DriverError("cuMemMap", "CUDA_ERROR_INVALID_VALUE", "what", "Free some."),
        GroupAborted("rank 1 died. Start it again.", (1,)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_is_sent_to_another_process_says_the_same_there(error: Exception) -> None:
    error.add_note("a note")
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))


MEANS: list[Callable[[Any], object]] = [sent, copy.deepcopy]


@pytest.mark.parametrize("means", MEANS)
def test_a_bridge_that_is_sent_or_copied_says_to_make_one_in_each_process(
    means: Callable[[Any], object], bridge: SharedMemoryTensorBridge
) -> None:
    with pytest.raises(TypeError, match=r"SharedMemoryTensorBridge cannot be .* in each process"):
        means({"bridge": bridge})


@pytest.mark.parametrize("means", MEANS)
def test_imported_tensors_that_are_sent_or_copied_say_how_to_take_their_bytes(
    means: Callable[[Any], object], bridge: SharedMemoryTensorBridge
) -> None:
    tensors = bridge.import_update(bridge.publish({"w": torch.ones(2)}, weight_version=1))
    with pytest.raises(TypeError, match=r"\{name: t\.clone\(\) for name, t in"):
        means(tensors)
    means({name: tensor.clone() for name, tensor in tensors.items()})
