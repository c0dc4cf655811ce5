"""Ray Direct Transport under our name, in an actor that runs several methods at a time."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("ray", reason="Ray is not installed: make test-machines")

from rl_bridge.ray.direct import DirectTransport

NUM = 48


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads that take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_tensors_that_are_returned_at_the_same_time_all_arrive() -> None:
    manager = DirectTransport()

    def give(number: int) -> list[torch.Tensor]:
        given = [torch.full((8,), float(number))]
        metadata = manager.extract_tensor_transport_metadata(f"object-{number}", given)
        return manager.recv_multiple_tensors(f"object-{number}", metadata, None)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(give, range(NUM)))
    assert [int(one[0][0]) for one in found] == list(range(NUM))
    for number in range(NUM):
        manager.garbage_collect(f"object-{number}", None, None)
