"""A pass over addresses by torch's operations gives what the CPU's own pass gives."""

import numpy as np
import pytest
import torch

from rl_bridge.cuda.digest import DevicePass
from rl_bridge.memory.passes import Addresses, BytePlan

SIZES = np.array([0, 1, 255, 256, 257, 131_072, 300_001, 0, 7], np.uint64)


def laid_out(memory: torch.Tensor, gaps: int, *, first: int = 0) -> Addresses:
    """Addresses of tensors of SIZES in `memory`: multiples of `gaps`."""
    room = -(-SIZES.astype(np.int64) // gaps) * gaps
    starts = np.cumsum(room) - room + first
    base = -(-memory.data_ptr() // 256) * 256
    return (starts + base).astype(np.uint64)


def memory_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (600_000,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("gaps", "first"), [(256, 0), (256, 1), (1, 0), (512, 0)])
def test_copies_and_digests_are_those_of_the_cpus_pass(gaps: int, first: int) -> None:
    # Only the first of these is a packed arena, which is copied and digested in one go.
    source, target = memory_of(1), memory_of(2)
    src, dst = laid_out(source, 3, first=1), laid_out(target, gaps, first=first)
    ours, reference = DevicePass(SIZES, "cpu"), BytePlan(SIZES)
    assert len(ours) == len(reference)
    assert ours.total_nbytes == reference.total_nbytes
    expected = reference.digest(src)
    assert ours.digest(src) == expected
    assert reference.digest(dst) != expected
    assert ours.copy_digest(src, dst) == expected
    assert reference.digest(dst) == expected
    again = memory_of(3)
    ours.copy(dst, laid_out(again, 5))
    assert reference.digest(laid_out(again, 5)) == expected


def test_what_lies_in_its_place_already_is_digested_there() -> None:
    target = memory_of(2)
    dst = laid_out(target, 256)
    expected = BytePlan(SIZES).digest(dst)
    assert DevicePass(SIZES, "cpu").copy_digest(dst, dst) == expected


def test_bytes_between_the_tensors_stay_as_they_are() -> None:
    source, target = memory_of(1), memory_of(2)
    before = target.clone()
    src, dst = laid_out(source, 3), laid_out(target, 7)
    DevicePass(SIZES, "cpu").copy_digest(src, dst)
    written = torch.zeros(len(target), dtype=torch.bool)
    for address, nbytes in zip(dst.tolist(), SIZES.tolist(), strict=True):
        start = address - target.data_ptr()
        written[start : start + nbytes] = True
    assert torch.equal(target[~written], before[~written])
    assert not torch.equal(target[written], before[written])
