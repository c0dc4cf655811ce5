"""The processes that tests talk to: an answer belongs to its call, however late it comes."""

import multiprocessing
import os
import threading

import pytest

from rl_bridge.errors import DeadlineExceeded
from rl_bridge.testing.processes import Child, ChildDied, ChildError, Line


class Clerk:
    """Answers what it is asked; may be kept busy until it is let go on."""

    def __init__(self, *, is_broken: bool = False) -> None:
        if is_broken:
            raise ValueError("there is no clerk")
        self._go_on = threading.Event()

    def slow(self) -> str:
        self._go_on.wait(1.0)  # nobody sets it: only the caller's deadline is shorter
        return "slow"

    def quick(self, number: int) -> int:
        return number

    def say(self, variable: str) -> None:
        os.write(2, os.environ[variable].encode())


def test_a_late_answer_is_not_taken_for_that_to_the_next_call() -> None:
    with Child(Clerk) as child:
        child.tell("slow")
        with pytest.raises(DeadlineExceeded):
            child.answer(deadline_s=0.0)
        assert child.call("quick", number=2) == 2


def test_a_child_has_the_environment_and_the_output_of_the_test_that_starts_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for word in ("first", "second"):
        monkeypatch.setenv("RL_BRIDGE_WORD", word)
        with Child(Clerk) as child:
            child.call("say", variable="RL_BRIDGE_WORD")
        assert capfd.readouterr().err == word


def test_a_call_in_between_takes_nobodys_answer() -> None:
    with Child(Clerk) as child:
        child.tell("quick", number=1)
        child.tell("quick", number=2)
        assert child.call("quick", number=3) == 3
        assert [child.answer(), child.answer()] == [1, 2]


def test_a_child_that_cannot_be_built_says_why() -> None:
    with Child(Clerk, is_broken=True) as child, pytest.raises(ChildError, match="no clerk"):
        child.ready()


def test_a_killed_child_is_told_apart() -> None:
    with Child(Clerk) as child:
        child.ready().kill()
        with pytest.raises(ChildDied) as caught:
            child.call("quick", number=1)
    assert caught.value.exitcode == -9


def test_a_line_that_nobody_reads_is_given_up() -> None:
    here, there = multiprocessing.Pipe()
    with here, there, pytest.raises(DeadlineExceeded, match=r"took no message within 0.05 s"):
        Line(here, send_timeout_s=0.05).send("x" * (4 << 20))  # more than it buffers
