"""A store that dies or hangs ends publications in time, with the error that a rank expects."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from rl_bridge import make_weight_bridge
from rl_bridge.errors import DeadlineExceeded, GroupAborted
from rl_bridge.groups.exchange import BoundedCaller, StoreExchange
from rl_bridge.groups.publish import GroupPublisher
from tests.groups.meshes import cut, model
from tests.groups.rig import HashStore
from tests.helpers import stop

SHARDS = cut(model({"w": (4, 2)}), 1, {})
HOST = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def host() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that keeps a store, and its port."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOST], text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def rank_at(port: int) -> Iterator[GroupPublisher]:
    """The one rank of a group that meets at a port."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    exchange = StoreExchange(store, rank=0, world_size=1, timeout_s=1.0)
    with make_weight_bridge("shared-memory", suspicious="off") as bridge:
        yield GroupPublisher(bridge, exchange, timeout_s=1.0)


def test_a_store_that_is_gone_aborts_a_publication() -> None:
    with host() as (process, port), rank_at(port) as publisher:
        publisher.publish(*SHARDS[0], weight_version=1)
        process.kill()
        process.wait(timeout=10)
        with pytest.raises(GroupAborted, match="the store"):
            publisher.publish(*SHARDS[0], weight_version=2)


@pytest.mark.parametrize("step", ["begin", "gather", "decide"])
def test_a_store_that_hangs_aborts_a_publication_in_time(step: str) -> None:
    with host() as (process, port), rank_at(port) as publisher:
        publisher.publish(*SHARDS[0], weight_version=1)
        exchange = publisher._exchange
        usual = getattr(exchange, step)

        def hangs(*given: object, **named: object) -> object:
            stop(process.pid)
            return usual(*given, **named)

        setattr(exchange, step, hangs)
        start = time.monotonic()
        with pytest.raises(GroupAborted, match="did not answer"):
            publisher.publish(*SHARDS[0], weight_version=2)
        assert time.monotonic() - start < 10
        latest = publisher.bridge.latest_manifest
        assert latest is not None
        is_first = latest.weight_version == 1
        assert publisher.bridge.update_status(latest) == ("published" if is_first else "released")
        setattr(exchange, step, usual)
        os.kill(process.pid, signal.SIGCONT)
        _answers(exchange)
        assert publisher.publish(*SHARDS[0], weight_version=3).weight_version == 3


def _answers(exchange: object) -> None:
    """Wait until the last question has its answer."""
    last = exchange.rounds.caller._last  # type: ignore[attr-defined]
    last.exception(timeout=10)


def test_a_rank_that_missed_several_rounds_does_not_decide_for_itself() -> None:
    store = HashStore()
    late, other = (StoreExchange(store, rank=rank, world_size=2) for rank in range(2))
    late.begin()
    for _ in range(4):
        other.begin()
        other.decide("withdrawn")
    with pytest.raises(GroupAborted, match="forgot the end"):
        late.decide("commit")


def test_a_limit_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        StoreExchange(HashStore(), rank=0, world_size=1, timeout_s=0)


def test_a_bounded_call_returns_or_raises() -> None:
    caller = BoundedCaller("an oracle")
    assert caller.call(lambda: 7, 5.0) == 7
    with pytest.raises(ZeroDivisionError):
        caller.call(lambda: 1 // 0, 5.0)


def test_a_call_after_an_unanswered_one_is_refused_at_once() -> None:
    caller, gate = BoundedCaller("an oracle"), threading.Event()
    with pytest.raises(DeadlineExceeded, match="an oracle did not answer"):
        caller.call(lambda: gate.wait(20), 0.01)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        caller.call(lambda: 7, 20.0)
    assert time.monotonic() - start < 5
    gate.set()
    assert caller._last is not None
    caller._last.exception(timeout=10)
    assert caller.call(lambda: 7, 5.0) == 7


def test_the_thread_of_a_bounded_caller_ends_with_it() -> None:
    caller = BoundedCaller("an oracle")
    caller.call(lambda: 7, 5.0)
    thread = caller._thread
    assert thread is not None
    del caller
    thread.join(timeout=10)
    assert not thread.is_alive()
