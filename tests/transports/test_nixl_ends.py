"""A reader of nixl whose publisher hangs: it ends what it began, and does not wait again and again.

The library itself is not needed here: a read that never ends stands in for its own.
"""

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from rl_bridge.errors import TransferTimeout
from rl_bridge.transports.nixl import library
from rl_bridge.transports.nixl.agent import Agent, Made
from rl_bridge.transports.nixl.consumer import NIXLConsumer, _Resources
from rl_bridge.transports.nixl.reading import Reading


class Read:
    """A read of the library's that is under way for ever."""

    handle = 1

    def release(self) -> None:
        raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")


class Library:
    """The library's own agent."""

    def check_xfer_state(self, read: Read) -> str:
        assert read.handle
        return "PROC"


class Job:
    """One part of an import, of three reads."""

    shared = None

    def __init__(self, agent: Agent) -> None:
        reads = [Made(Read()) for _ in range(3)]
        agent._made.update(dict.fromkeys(reads))
        self.reading = Reading.__new__(Reading)
        self.reading._agent, self.reading._stamping = agent, None
        self.reading._window = deque((one, 0) for one in reads)
        self.is_given_back = False

    def release(self) -> None:
        self.is_given_back = True


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> _Resources:
    """Three agents that are kept for their reads: one more than are."""
    monkeypatch.setattr(library, "find", lambda: (None, ""))
    monkeypatch.setattr(library, "failures", lambda _: (RuntimeError,))
    monkeypatch.setattr(library, "new_agent", lambda *_: Library())
    made: Any = _Resources()
    for _ in range(3):
        agent = Agent("test", backend="UCX", params={})
        made.parked.append((agent, [Job(agent)]))
    found: _Resources = made
    return found


def test_an_interrupt_in_the_forced_end_of_an_agent_is_made_up_for(
    held: _Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    (oldest, jobs), *others = list(held.parked)
    release = oldest.release

    def cut_off(*made: Made) -> None:
        release(*made[:1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(oldest, "release", cut_off)
        with pytest.raises(KeyboardInterrupt):
            held.sweep()
    was_closed = oldest.is_closed
    held.sweep()
    assert (was_closed, oldest.is_closed) == (False, True)
    assert [one for one, _ in held.parked] == [one for one, _ in others]
    assert vars(jobs[0])["is_given_back"]


@pytest.mark.parametrize("timeout_s", [0.5, 1.0, 5.0])
def test_a_publisher_that_hangs_is_waited_for_once_in_a_while(
    timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Any = None
    end = NIXLConsumer(
        "rollout",
        0,
        make_agent=nothing,
        make_arenas=nothing,
        backend="UCX",
        token=None,
        num_threads=1,
        timeout_s=timeout_s,
    )
    asked: list[float] = []

    def hangs(*_: object, is_observer: bool, within_s: float) -> None:
        assert not is_observer
        asked.append(within_s)
        raise TransferTimeout("it does not answer")

    monkeypatch.setattr(end, "_source", hangs)
    endpoint: Any = SimpleNamespace(publisher_id="trainer")
    for _ in range(3):  # updates
        end._reach(endpoint, time.monotonic() + min(2.0, timeout_s), is_observer=False)
    assert len(asked) == 1
