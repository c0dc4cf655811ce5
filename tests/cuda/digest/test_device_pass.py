"""What a pass on a device refuses, waits for and says; on CPU memory, which needs no GPU."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rl_bridge.cuda import digest as choice
from rl_bridge.cuda import streams
from rl_bridge.cuda.digest import DevicePass, choose_engine, full_device, kernel_cause
from rl_bridge.cuda.digest_engines import bytes_at
from rl_bridge.errors import DeadlineExceeded, SegmentError, WeightBridgeUnavailableError
from rl_bridge.manifest.digest import digest_bytes
from tests.cuda.digest.rig import Laid

CPU = torch.device("cpu")


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


# ---- refusals -----------------------------------------------------------------------------------


def test_within_a_capture_nothing_is_planned_copied_or_digested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = torch.ones(900, dtype=torch.uint8), torch.zeros(900, dtype=torch.uint8)
    src, dst = numbers(source.data_ptr()), numbers(target.data_ptr() + 1)
    made = DevicePass(numbers(800), CPU)
    monkeypatch.setattr(streams, "_is_capturing", lambda _: True)
    acts: list[Callable[[], object]] = [
        lambda: made.copy(src, dst),
        lambda: made.copy_digest(src, dst),
        lambda: DevicePass(numbers(800), CPU),
    ]
    for act in acts:
        with pytest.raises(WeightBridgeUnavailableError, match="outside of the capture"):
            act()
    assert not target.any()


CALLS: dict[str, Callable[[DevicePass, Laid], object]] = {
    "at address 0": lambda plan, laid: plan.digest(laid.sources * numbers(0, 1, 1)),
    "a tensor at address 0": lambda plan, laid: plan.copy_digest(
        laid.sources * numbers(1, 1, 0), laid.targets
    ),
    "for a plan of 3 tensors": lambda plan, laid: plan.digest(laid.sources[:1]),
}


@pytest.mark.parametrize("said", CALLS)
def test_addresses_that_a_plan_was_not_made_for_are_refused(said: str) -> None:
    laid = Laid([4, 0, 300])
    with pytest.raises(ValueError, match=said):
        CALLS[said](laid.plan("torch"), laid)


def test_tensors_without_bytes_need_no_address() -> None:
    nowhere = numbers(0, 0)
    assert DevicePass(nowhere, CPU).copy_digest(nowhere, nowhere) == 2 * digest_bytes(b"")


def test_memory_that_torch_takes_for_another_devices_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, current = torch.device("cuda", 1), []

    class Current:
        def __init__(self, device: torch.device) -> None:
            current.append(device)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "device", Current)
    # As it does where it copies: it says nothing.
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(SegmentError, match=r"is not on cuda:1: torch took it for cpu"):
        bytes_at(1 << 20, 5, gpu)
    assert current == [gpu]


# ---- which engine -------------------------------------------------------------------------------


def test_without_a_gpu_torch_is_taken_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_CAUSES", {})
    with caplog.at_level(logging.INFO, logger=choice.__name__):
        engines = [Laid([5]).plan().engine for _ in range(2)]
    assert engines == ["torch", "torch"]
    assert len(caplog.records) == 1
    assert "digests on cpu run in torch: Triton" in caplog.text
    assert str(kernel_cause("cpu")) in caplog.text


def test_a_kernel_that_does_not_work_here_is_refused_with_the_cause() -> None:
    with pytest.raises(WeightBridgeUnavailableError, match=r"on cpu: Triton .* engine='torch'"):
        Laid([5]).plan("triton")


def test_an_engine_that_is_none_is_refused() -> None:
    unknown: Any = "cuda"
    with pytest.raises(ValueError, match="expected 'triton', 'torch' or None"):
        choose_engine(unknown, CPU)


def test_a_gpu_is_loud_about_running_in_torch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_CAUSES", {})
    monkeypatch.setattr(choice, "_try_kernel", lambda device: f"no wings on {device}")
    gpu = torch.device("cuda", 3)
    assert choose_engine(None, gpu) == "torch"
    assert choose_engine("torch", gpu) == "torch"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "digests on cuda:3 run in torch: no wings on cuda:3" in caplog.text
    with pytest.raises(WeightBridgeUnavailableError, match="no wings on cuda:3"):
        choose_engine("triton", gpu)
    monkeypatch.setattr(choice, "_CAUSES", {gpu: None})
    assert (choose_engine(None, gpu), choose_engine("triton", gpu)) == ("triton", "triton")


def test_a_device_is_known_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert full_device("cuda") == torch.device("cuda", 2)
    assert full_device("cuda:1") == torch.device("cuda", 1)
    assert full_device("cpu") == CPU


# ---- waiting ------------------------------------------------------------------------------------


class Late:
    """An event that comes true when it was asked often enough, or never."""

    def __init__(self, asked: float) -> None:
        self.left = asked
        self.recorded = 0

    def record(self) -> None:
        self.recorded += 1

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def waiting(laid: Laid, event: Late) -> DevicePass:
    plan: Any = laid.plan("torch")
    plan._event = event
    return plan  # type: ignore[no-any-return]


def test_digests_are_read_when_the_event_says_so() -> None:
    laid, event = Laid([5000]), Late(3)
    assert waiting(laid, event).digest(laid.sources) == laid.digests()
    assert (event.left, event.recorded) == (-1, 1)


def test_a_device_that_does_not_get_there_is_given_up_and_waited_for_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "_TIMEOUT_S", 0.01)
    laid, event = Laid([5000]), Late(float("inf"))
    plan = waiting(laid, event)
    with pytest.raises(DeadlineExceeded, match=r"cpu was not through .* within 0.01 s"):
        plan.digest(laid.sources)
    # Nothing new is begun while the device may still write where it would.
    with pytest.raises(DeadlineExceeded):
        plan.digest(laid.sources)
    assert event.recorded == 1
    event.left = 0
    assert plan.digest(laid.sources) == laid.digests()
    assert event.recorded == 2


def test_calls_take_turns_and_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_TIMEOUT_S", 0.01)
    laid = Laid([5])
    plan = laid.plan("torch")
    with plan._lock, pytest.raises(DeadlineExceeded):
        plan.digest(laid.sources)
    assert plan.digest(laid.sources) == laid.digests()


def test_threads_that_share_a_plan_each_get_their_own_digests() -> None:
    laid = Laid([3000, 70_000])
    other = Laid([3000, 70_000])
    other.fill(shift=3, seed=9)
    plan = laid.plan("torch")
    wrong: list[int] = []

    def ask(mine: Laid) -> None:
        expected = mine.digests()
        wrong.extend(turn for turn in range(30) if plan.digest(mine.sources) != expected)

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in (laid, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
