"""Asking something that may never answer: in a thread of its own, so that no deadline is missed."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from rl_bridge.errors import DeadlineExceeded

__all__ = ["Asking"]

T = TypeVar("T")
_Question = tuple["Future[object]", Callable[[], object]]


class Asking:
    """One question at a time, to whatever blocks without a limit of its own.

    A question that got no answer in time stays on its way: until it has one, the next ones are
    refused at once.
    """

    def __init__(self, what: str) -> None:
        """Ask `what`, which messages name. The thread begins with the first question."""
        self._what = what
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._last: Future[object] | None = None
        self._is_late = False
        self._thread: threading.Thread | None = None

    def ask(self, question: Callable[[], T], timeout_s: float) -> T:
        """The answer, or what asking for it raises.

        Raises:
            DeadlineExceeded: there is none within `timeout_s`, or not yet one to the last question.

        """
        before, future = self._last, Future[object]()
        if before is not None and not before.done():
            # (An interrupt leaves a question that is about to be answered.)
            self._wait(before, 0.0 if self._is_late else timeout_s)
        if self._thread is None:
            self._begin()
        self._last = future
        self._questions.put((future, question))
        self._wait(future, timeout_s)
        return future.result()  # type: ignore[return-value]  # what the question gave

    def _wait(self, future: "Future[object]", timeout_s: float) -> None:
        answered = threading.Event()
        future.add_done_callback(lambda _: answered.set())
        self._is_late = not answered.wait(max(0.0, timeout_s))
        if self._is_late:
            msg = (
                f"{self._what} did not answer within {timeout_s:.1f} s. See whether its process "
                "runs, then try again."
            )
            raise DeadlineExceeded(msg)

    def _begin(self) -> None:
        self._thread = threading.Thread(
            target=_answer, args=(self._questions,), name="rl_bridge asking", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._questions.put, None).atexit = False


def _answer(questions: "SimpleQueue[_Question | None]") -> None:
    while (one := questions.get()) is not None:
        future, question = one
        try:
            future.set_result(question())
        except BaseException as error:  # noqa: BLE001 - raised where it was asked
            future.set_exception(error)
        del one, future, question  # else they would live until the next one comes
