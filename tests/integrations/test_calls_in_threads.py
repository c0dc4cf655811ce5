"""A call to an engine is known from before it begins, wherever an interrupt comes in."""

import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from rl_bridge.engines.vllm.client import LLMHandle, Replies
from tests.helpers import tracing
from tests.interrupts import InterruptBefore


class Workers:
    """Two, of an engine in this process. They answer in one queue: one call at a time."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.inside: list[str] = []
        self.beside: list[list[str]] = []
        self.handle = LLMHandle(
            SimpleNamespace(
                llm_engine=SimpleNamespace(
                    engine_core=SimpleNamespace(engine_core=SimpleNamespace(model_executor=None)),
                    vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=2)),
                ),
                collective_rpc=self._asked,
            ),
            20,
        )

    def _asked(self, _method: str, args: tuple[str, Any]) -> Replies:
        self.inside.append(args[0])
        if len(self.inside) > 1:
            self.beside.append([*self.inside])
        assert args[0] != "install" or self.may_end.wait(20)
        self.inside.remove(args[0])
        return [{"to": args[0]}]


def interrupt_as_it_begins() -> Callable[[FrameType, str, Any], Any]:
    """Where Python does: a thread's start waits for it to run."""
    is_done: list[bool] = []

    def wait(frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "call" and not is_done and frame.f_code.co_name == "wait":
            is_done.append(True)
            raise KeyboardInterrupt
        return None

    def start(frame: FrameType, _event: str, _arg: Any) -> Any:
        is_start = frame.f_code.co_name == "start" and "threading" in frame.f_code.co_filename
        is_wait = frame.f_back is not None and frame.f_back.f_code.co_name == "start"
        return wait(frame, "call", None) if is_wait else (start if is_start else None)

    return start


def test_a_call_that_was_interrupted_as_it_began_is_known() -> None:
    workers = Workers()
    with pytest.raises(KeyboardInterrupt), tracing(interrupt_as_it_begins()):
        workers.handle.call("install")
    assert len(workers.handle._last) == 1
    workers.may_end.set()
    assert workers.handle.call("undo") == [{"to": "undo"}]
    assert workers.beside == []


@pytest.mark.parametrize("number", range(60))
def test_an_interrupt_at_any_line_of_a_call_costs_no_later_one(number: int) -> None:
    workers = Workers()
    workers.may_end.set()
    with suppress(KeyboardInterrupt), tracing(InterruptBefore(number)):
        workers.handle.call("install")
    assert workers.handle.call("undo") == [{"to": "undo"}]
    assert all(one.done() for one in workers.handle._last)
