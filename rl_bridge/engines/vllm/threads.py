"""Calls to an engine that may never return, each in a thread that nobody has to wait for."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

from rl_bridge.errors import WeightBridgeUnavailableError

__all__ = [
    "in_thread",
]


def in_thread(
    action: Callable[[], Any],
    note: Callable[["concurrent.futures.Future[Any]"], object] = lambda _: None,
) -> "concurrent.futures.Future[Any]":
    """Do something that may never end, in a thread that nobody has to wait for.

    Args:
        action: what is done.
        note: is given the call before it begins: an interrupt may come as it does.

    Raises:
        WeightBridgeUnavailableError: this process can start no thread; nothing was done.

    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    thread = threading.Thread(
        target=_answer, args=(future, action), name="rl_bridge-vllm-call", daemon=True
    )
    try:
        note(future)
        thread.start()
    except BaseException as error:
        future.cancel()  # unless it runs by now
        if not isinstance(error, RuntimeError):
            raise
        msg = (
            f"this process can start no thread to call the engine from ({error}). Nothing was "
            "asked of it: end other threads, or raise the limit, and try again."
        )
        raise WeightBridgeUnavailableError(msg) from error
    return future


def _answer(future: "concurrent.futures.Future[Any]", action: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as error:  # noqa: BLE001 - raised where the future is read
        future.set_exception(error)
