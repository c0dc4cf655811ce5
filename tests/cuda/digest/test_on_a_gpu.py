"""Digest and pack in a GPU's memory: `make test-gpu`. `benchmarks/gpu_digest.py` has the rates."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rl_bridge.cuda.devices import cuda_cause
from rl_bridge.cuda.digest import DevicePass, EngineName, kernel_cause
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.manifest.digest import LEAF_NBYTES, digest_bytes
from rl_bridge.memory.passes import BytePlan
from tests.cuda.digest import rig

_CAUSE = cuda_cause()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_CAUSE is not None, reason=f"no CUDA here: {_CAUSE}"),
]

BORDERS = [*rig.SMALL, LEAF_NBYTES - 1, LEAF_NBYTES, LEAF_NBYTES + 1, 3 * LEAF_NBYTES + 1025]


@pytest.fixture(params=["triton", "torch"])
def engine(request: pytest.FixtureRequest) -> EngineName:
    if request.param == "triton" and (cause := kernel_cause("cuda")):
        pytest.skip(cause)
    name: EngineName = request.param
    return name


@pytest.fixture
def large() -> Iterator[torch.Tensor]:
    """Random bytes of more than 4 GiB, 256-byte aligned as torch's allocator gives them."""
    nbytes = (4 << 30) + (512 << 20)
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * nbytes:
        pytest.skip(f"{free >> 20} MiB of GPU memory are free, {3 * nbytes >> 20} needed")
    words = torch.empty(nbytes // 8, dtype=torch.int64, device="cuda")
    words.random_()
    yield words.view(torch.uint8)
    torch.cuda.empty_cache()


def test_the_kernel_works_if_triton_is_installed() -> None:
    if rig.NO_TRITON:
        pytest.skip(rig.NO_TRITON)
    assert kernel_cause("cuda") is None


def test_the_digests_of_the_normative_page_come_out_of_one_call(engine: EngineName) -> None:
    assert rig.of_the_page(engine, 1 << 30, device="cuda") == []


def test_tensors_of_each_size_and_alignment_are_digested_and_packed(engine: EngineName) -> None:
    assert rig.of_sizes(engine, BORDERS, [0, 0, 16, 8, 4, 2, 1, 3], device="cuda") == []


def test_many_tensors_are_digested_in_one_call(engine: EngineName) -> None:
    assert rig.of_sizes(engine, [n * 97 % 5000 for n in range(2000)], [2], device="cuda") == []


def test_more_than_4_gib_have_the_digests_that_the_cpu_gives(
    engine: EngineName, large: torch.Tensor
) -> None:
    # One tensor that crosses 4 GiB, and one that lies behind them.
    first = len(large) - (64 << 20)
    offsets, sizes = np.array([0, first], np.uint64), np.array([first, (64 << 20) - 3], np.uint64)
    host, arena = large.cpu(), torch.empty_like(large)
    expected = BytePlan(sizes).digest(offsets + np.uint64(host.data_ptr()))
    plan = DevicePass(sizes, "cuda", engine=engine)
    sources, targets = (offsets + np.uint64(one.data_ptr()) for one in (large, arena))
    assert plan.digest(sources) == expected
    assert plan.copy_digest(sources, targets) == expected
    assert torch.equal(arena[: first + (64 << 20) - 3], large[: first + (64 << 20) - 3])
    assert not arena[first + (64 << 20) - 3 :].any()


# ---- streams ------------------------------------------------------------------------------------


cuda: Any = torch.cuda  # of which torch annotates half


def slow(stream: Any) -> Any:
    """Keep a stream busy for about a second; the event is true when it has ended."""
    with cuda.stream(stream):
        cuda._sleep(2_000_000_000)
        ended = cuda.Event()
        ended.record()
    return ended


def test_earlier_work_on_the_stream_is_digested(engine: EngineName) -> None:
    memory = torch.zeros(300_000, dtype=torch.uint8, device="cuda")
    plan = DevicePass(np.array([300_000], np.uint64), "cuda", engine=engine)
    places = np.array([memory.data_ptr()], np.uint64)
    cuda.synchronize()
    for stream in (None, cuda.Stream()):
        memory.zero_()
        cuda.synchronize()
        used = stream or cuda.current_stream()
        slow(used)
        with cuda.stream(used):
            memory.fill_(7)
            assert plan.digest(places) == digest_bytes(bytes([7]) * 300_000)


def test_other_streams_are_not_waited_for(engine: EngineName) -> None:
    laid = rig.Laid([5000, 300_000], device="cuda")
    plan = laid.plan(engine)
    plan.copy_digest(laid.sources, laid.targets)
    mine = cuda.Stream()
    with cuda.stream(mine):
        # What is compiled, loaded and allocated the first time may wait for the whole device.
        plan.digest(laid.targets)
    cuda.synchronize()
    ended = slow(cuda.Stream())
    with cuda.stream(mine):
        assert plan.digest(laid.targets) == laid.digests()
    assert not ended.query()
    cuda.synchronize()


def test_an_update_allocates_nothing() -> None:
    if cause := kernel_cause("cuda"):
        pytest.skip(cause)
    laid = rig.Laid([5000, 300_000], device="cuda")
    plan = laid.plan("triton")
    plan.copy_digest(laid.sources, laid.targets)
    before = cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        plan.copy_digest(laid.sources, laid.targets)
        plan.digest(laid.targets)
    assert cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_capture_is_left_alone() -> None:
    laid = rig.Laid([5000], device="cuda")
    plan = laid.plan()
    counted = torch.zeros(1, device="cuda")
    graph = cuda.CUDAGraph()
    cuda.synchronize()
    with cuda.graph(graph):
        counted += 1
        with pytest.raises(WeightBridgeUnavailableError, match="captured"):
            plan.digest(laid.targets)
    graph.replay()
    cuda.synchronize()
    assert counted.item() == 1
