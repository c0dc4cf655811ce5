"""One pass over many tensors: equal to the reference, on any number of threads, compiled or not."""

import copy
import importlib.util
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.manifest.digest import LEAF_NBYTES, PAD_NBYTES, digest_bytes
from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.memory import passes
from rl_bridge.memory.passes import BytePlan, default_threads, native_cause
from tests.helpers import forked, forking

BORDERS = [
    size + delta
    for size in (PAD_NBYTES, LEAF_NBYTES, 2 * LEAF_NBYTES, 17 * LEAF_NBYTES)
    for delta in (-1, 0, 1)
]
SIZES = st.lists(
    st.sampled_from([0, 1, *BORDERS]) | st.integers(0, 3 * LEAF_NBYTES), min_size=1, max_size=6
)
compiled = pytest.mark.skipif(native_cause() is not None, reason=str(native_cause()))


class Buffers:
    """Tensors of some sizes, each at its own (possibly odd) address, with guard bytes around."""

    def __init__(self, sizes: Sequence[int], *, shift: int = 0, fill: bool = True) -> None:
        self.sizes = np.array(sizes, np.uint64)
        self._memory = [np.full(size + shift + 64, 0xA5, np.uint8) for size in sizes]
        self.views = [
            memory[shift : shift + size] for memory, size in zip(self._memory, sizes, strict=True)
        ]
        if fill:
            for index, view in enumerate(self.views):
                view[:] = (np.arange(len(view), dtype=np.uint64) * 2654435761 >> 9) + index & 255
        starts = [memory.ctypes.data + shift for memory in self._memory]
        self.addresses = np.array(starts, np.uint64)
        self._shift = shift

    def digests(self) -> bytes:
        return b"".join(digest_bytes(view.tobytes()) for view in self.views)

    def holds(self, other: "Buffers") -> bool:
        same = all(
            np.array_equal(mine, theirs)
            for mine, theirs in zip(self.views, other.views, strict=True)
        )
        guards = all(
            (memory[: self._shift] == 0xA5).all()
            and (memory[self._shift + len(view) :] == 0xA5).all()
            for memory, view in zip(self._memory, self.views, strict=True)
        )
        return same and guards


@settings(deadline=None, max_examples=60)
@given(SIZES, st.integers(1, 4), st.integers(0, 17), st.integers(0, 17), st.booleans())
def test_every_pass_equals_the_reference(
    sizes: list[int], threads: int, source_shift: int, target_shift: int, native: bool
) -> None:
    source = Buffers(sizes, shift=source_shift)
    expected = source.digests()
    plan = BytePlan(source.sizes, native=native)
    assert len(plan) == len(sizes)
    assert plan.total_nbytes == sum(sizes)
    assert plan.digest(source.addresses, num_threads=threads) == expected
    for is_digested in (False, True):
        target = Buffers(sizes, shift=target_shift, fill=False)
        if is_digested:
            found = plan.copy_digest(source.addresses, target.addresses, num_threads=threads)
            assert found == expected
        else:
            plan.copy(source.addresses, target.addresses, num_threads=threads)
        assert target.holds(source)


@compiled
@pytest.mark.parametrize("threads", [1, 3, 9, None])
@pytest.mark.parametrize("target_shift", [0, 16, 1])
def test_large_passes_stream_on_threads_and_equal_the_reference(
    threads: int | None, target_shift: int
) -> None:
    # Above both limits: from 4 MiB helpers join, from 8 MiB stores bypass the cache.
    sizes = [5 << 20, 0, 3 * LEAF_NBYTES + 1, 4097, 4 << 20, 70]
    source = Buffers(sizes, shift=3)
    target = Buffers(sizes, shift=target_shift, fill=False)
    found = BytePlan(source.sizes).copy_digest(
        source.addresses, target.addresses, num_threads=threads
    )
    assert found == source.digests()
    assert target.holds(source)


@compiled
@pytest.mark.parametrize("shift", [0, 16, 48])
def test_a_streamed_copy_has_every_byte_whatever_is_left_at_its_end(shift: int) -> None:
    ends = (4096, LEAF_NBYTES - 64, LEAF_NBYTES + 4096, 3 * LEAF_NBYTES - 64)
    tails = (0, 1, 15, 16, 17, 31, 33, 48, 63)
    sizes = [8 << 20, *(end + tail for end in ends for tail in tails)]
    source = Buffers(sizes)
    target = Buffers(sizes, shift=shift, fill=False)
    for mine, theirs in zip(target.views, source.views, strict=True):
        mine[:] = ~theirs  # no byte is right before it is copied
    BytePlan(source.sizes).copy(source.addresses, target.addresses, num_threads=2)
    assert target.holds(source)


@pytest.mark.parametrize("native", [True, False])
def test_a_tensor_whose_addresses_are_equal_is_digested_only(native: bool) -> None:
    source, other = Buffers([3000, 5000]), Buffers([3000, 5000], fill=False)
    targets = np.array([source.addresses[0], other.addresses[1]], np.uint64)
    plan = BytePlan(source.sizes, native=native)
    assert plan.copy_digest(source.addresses, targets) == source.digests()
    assert (other.views[0] == 0xA5).all()
    assert np.array_equal(other.views[1], source.views[1])


def test_a_copy_of_a_plan_does_without_the_first_one() -> None:
    data = np.arange(3 * LEAF_NBYTES, dtype=np.uint8)
    first = BytePlan(np.array([LEAF_NBYTES + 1, 7], np.uint64))
    addresses = np.full(2, data.ctypes.data, np.uint64)
    expected = first.digest(addresses)
    second = copy.deepcopy(first)
    first._nbytes[:] = first._start[:] = 0  # as whoever gets that memory next may write there
    assert second.digest(addresses) == expected


def test_a_wrong_number_of_addresses_is_refused_before_memory_is_touched() -> None:
    plan = BytePlan(np.array([10, 10], np.uint64))
    with pytest.raises(ValueError, match="1 addresses for a plan of 2 tensors"):
        plan.digest(np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match="3 addresses"):
        plan.copy(np.zeros(2, np.uint64), np.zeros(3, np.uint64))


def test_the_number_of_threads_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 2), (64, 8)):
        monkeypatch.setattr(
            "rl_bridge.memory.passes.os.sched_getaffinity", lambda _, n=cores: set(range(n))
        )
        assert default_threads() == expected


def test_many_threads_may_run_passes_at_once() -> None:
    source = Buffers([5 << 20, 1 << 20])
    expected = source.digests()
    plan = BytePlan(source.sizes)
    wrong: list[bytes] = []

    def work() -> None:
        found = [plan.digest(source.addresses, num_threads=3) for _ in range(5)]
        wrong.extend(digest for digest in found if digest != expected)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


@forking
def test_a_forked_child_makes_helper_threads_of_its_own() -> None:
    source = Buffers([5 << 20, 1 << 20])
    expected = source.digests()
    plan = BytePlan(source.sizes)
    assert plan.digest(source.addresses, num_threads=2) == expected
    assert forked(lambda: plan.digest(source.addresses, num_threads=2) == expected)
    assert plan.digest(source.addresses, num_threads=2) == expected


# ---- NaN and Inf ---------------------------------------------------------------------------------


def patterns(name: str) -> torch.Tensor:
    """Every bit pattern of a dtype's first two bytes, and a number that is just finite or not."""
    dtype: torch.dtype = getattr(torch, name)
    nbytes = DTYPE_NBYTES[name] // (2 if dtype.is_complex else 1)
    if nbytes == 1:
        return torch.arange(256, dtype=torch.int64).to(torch.uint8).view(dtype)
    raw = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int64)
    words = torch.cat([raw << (8 * nbytes - 16), (raw << (8 * nbytes - 16)) + 1])
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[nbytes]
    return words.to(kind).view(dtype.to_real() if dtype.is_complex else dtype)


def is_finite(numbers: torch.Tensor) -> torch.Tensor:
    wide = numbers if numbers.element_size() == 8 else numbers.to(torch.float32)
    return wide.isfinite()


# (torch has no numbers of the one that is two in a byte.)
NUMBERS = sorted(DTYPE_NBYTES.keys() - {"float4_e2m1fn_x2"})


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("native", [pytest.param(True, marks=compiled), False])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_pass_finds_what_torch_says_is_not_finite(name: str, *, native: bool) -> None:
    numbers = patterns(name)
    finite = is_finite(numbers)
    for some in (numbers[finite], numbers[~finite]):
        each = torch.split(some[:: 1 + len(some) // 300], 1)
        many = [some, *each] if len(some) else []
        plan = BytePlan(
            np.array([one.nbytes for one in many], np.uint64),
            dtypes=[name] * len(many),
            native=native,
        )
        plan.digest(np.array([one.data_ptr() for one in many], np.uint64))
        assert plan.non_finite.tolist() == [not is_finite(one).all() for one in many]


@pytest.mark.parametrize(
    ("native", "threads"),
    [pytest.param(True, 1, marks=compiled), pytest.param(True, 2, marks=compiled), (False, 1)],
)
@pytest.mark.parametrize("name", ["bfloat16", "float32", "float8_e4m3fnuz"])
@pytest.mark.parametrize("at", [1, 65_535, 65_536, -1])
def test_one_number_anywhere_is_found_and_only_in_its_tensor(
    name: str, at: int, threads: int, *, native: bool
) -> None:
    # The tensors are long enough for copies past the cache, and end in the middle of a word.
    tensors = [torch.ones(4_300_001).to(getattr(torch, name)) for _ in range(2)]
    tensors[1].view(torch.uint8)[at * tensors[1].itemsize :][: tensors[1].itemsize] = (
        torch.tensor([torch.nan]).to(tensors[1].dtype).view(torch.uint8)
    )
    copies = [torch.empty_like(one) for one in tensors]
    sources, targets = (
        np.array([one.data_ptr() for one in some], np.uint64) for some in (tensors, copies)
    )
    sizes = np.array([one.nbytes for one in tensors], np.uint64)
    plan = BytePlan(sizes, dtypes=[name] * 2, native=native)
    expected = BytePlan(sizes).digest(sources)
    for run in (
        partial(plan.copy_digest, sources, targets),
        partial(plan.digest, sources),
        partial(plan.copy_digest, sources, sources),
    ):
        assert run(num_threads=threads) == expected
        assert plan.non_finite.tolist() == [False, True]
    assert all(
        torch.equal(one.view(torch.uint8), copy.view(torch.uint8))
        for one, copy in zip(tensors, copies, strict=True)
    )
    tensors[1].fill_(1)
    plan.copy_digest(sources, targets, num_threads=threads)
    assert not plan.non_finite.any()


# ---- interrupts and failures --------------------------------------------------------------------


class _FakeNative:
    """Stands in for the compiled module: helpers wait at a gate, so that the order is ours."""

    def __init__(self) -> None:
        self.caller = threading.get_ident()
        self.gate = threading.Event()
        self.waiting = threading.Event()
        self.num_begun = 0
        self.num_finished = 0
        self.fails_in: str | None = None

    def run(self, *_: int) -> None:
        if threading.get_ident() == self.caller:
            assert self.waiting.wait(30)
            if self.fails_in == "caller":
                raise MemoryError
            return
        self.num_begun += 1
        self.waiting.set()
        if self.fails_in == "helper":
            raise MemoryError
        assert self.gate.wait(30)
        self.num_finished += 1

    def combine(self, *_: int) -> None:
        """Digests are not looked at."""


def _run_with(fake: Any) -> None:
    plan = BytePlan(np.array([5 << 20], np.uint64))
    plan._native = fake
    plan.digest(np.zeros(1, np.uint64), num_threads=2)


def test_a_pass_that_is_interrupted_waits_for_its_helpers() -> None:
    # A helper that goes on after the caller has left would write into memory that was given back,
    # or into a slot that somebody else fills by now.
    fake = _FakeNative()
    finished_at_exit = []

    def interrupt() -> None:
        assert fake.waiting.wait(30)
        signal.pthread_kill(fake.caller, signal.SIGINT)
        # Whoever left the pass early is seen by the gate still being closed.
        threading.Timer(0.3, fake.gate.set).start()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            _run_with(fake)
        finished_at_exit.append(fake.num_finished)
    finally:
        fake.gate.set()
        thread.join(30)
    assert finished_at_exit == [1]


@pytest.mark.parametrize("failing", ["caller", "helper"])
def test_a_failure_ends_the_pass_behind_its_helpers(failing: str) -> None:
    fake = _FakeNative()
    fake.fails_in = failing
    timer = threading.Timer(0.2, fake.gate.set)
    timer.start()
    with pytest.raises(MemoryError):
        _run_with(fake)
    assert fake.num_finished == (failing == "caller")
    timer.join(30)


def test_a_helper_that_begins_after_the_pass_is_over_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where no thread can be started, the pool says so and keeps the work all the same; whoever
    # takes it up later would write into memory that was given back long ago.
    kept: list[Callable[[], object]] = []

    class Pool:
        def submit(self, work: Callable[..., object], *arguments: object) -> None:
            kept.append(partial(work, *arguments))
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(passes._POOL, "_executor", Pool())
    fake = _FakeNative()
    fake.waiting.set()
    _run_with(fake)
    thread = threading.Thread(target=kept[0])
    thread.start()
    thread.join(30)
    assert fake.num_begun == 0


def test_a_pass_without_any_helper_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def submit(self, *_: object) -> None:
            raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(passes._POOL, "_executor", Pool())
    source = Buffers([5 << 20, 1 << 20])
    assert BytePlan(source.sizes).digest(source.addresses, num_threads=4) == source.digests()


def test_the_compiled_pass_is_in_use_where_it_was_built() -> None:
    # A compiled pass that disagrees with the reference switches itself off: that must be seen.
    if importlib.util.find_spec("rl_bridge.memory._native") is not None:
        assert native_cause() is None


# ---- without the compiled module ----------------------------------------------------------------


@compiled
def test_a_compiled_module_of_an_earlier_build_is_told_once_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(importlib.import_module("rl_bridge.memory._native"), "looks_for")
    native, _, cause = passes._load_native()
    assert native is None
    assert "is of an earlier build" in str(cause)
    (line,) = caplog.messages
    assert "pip install -e ." in line


@compiled
def test_a_compiled_pass_that_disagrees_with_the_reference_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong:
        def run(self, *_: int) -> None:
            """Copy and digest nothing."""

        combine = run

    monkeypatch.setattr(passes, "NATIVE", Wrong())
    monkeypatch.setattr(passes, "_CAUSE", None)
    with caplog.at_level(logging.INFO):
        passes._self_test()
    assert native_cause() == "the compiled module disagrees with xxhash on this machine"
    source = Buffers([LEAF_NBYTES + 5])
    assert BytePlan(source.sizes).digest(source.addresses) == source.digests()
    assert "digests run in Python" in caplog.text
