"""A store that dies or hangs ends publications in time, with the error that a rank expects."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from rl_bridge import make_weight_bridge
from rl_bridge.errors import GroupAborted
from rl_bridge.groups.exchange import StoreExchange, StoreOptions
from rl_bridge.groups.publish import GroupPublisher
from tests.groups.meshes import cut, model
from tests.groups.rig import HashStore
from tests.helpers import stop

TIMEOUT_S = 1.0
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
    exchange = StoreExchange(StoreOptions(store, timeout_s=TIMEOUT_S), rank=0, world_size=1)
    with make_weight_bridge("shared-memory", suspicious="off") as bridge:
        yield GroupPublisher(bridge, exchange, timeout_s=TIMEOUT_S)


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
        with pytest.raises(GroupAborted, match="did not answer"):
            publisher.publish(*SHARDS[0], weight_version=2)
        latest = publisher.bridge.latest_manifest
        assert latest is not None
        is_first = latest.weight_version == 1
        assert publisher.bridge.update_status(latest) == ("published" if is_first else "released")
        setattr(exchange, step, usual)
        os.kill(process.pid, signal.SIGCONT)
        publisher._exchange.rounds._last.exception(timeout=10)  # type: ignore[union-attr]
        assert publisher.publish(*SHARDS[0], weight_version=3).weight_version == 3


def test_a_rank_that_missed_several_rounds_does_not_decide_for_itself() -> None:
    store = HashStore()
    late, other = (StoreExchange(store, rank=rank, world_size=2) for rank in range(2))
    late.begin()
    for _ in range(4):
        other.begin()
        other.decide("withdrawn")
    with pytest.raises(GroupAborted, match="forgot the end"):
        late.decide("commit")


def test_a_question_after_an_unanswered_one_is_refused_at_once() -> None:
    exchange, gate = StoreExchange(HashStore(), rank=0, world_size=1), threading.Event()
    rounds, waited = exchange.rounds, []
    with pytest.raises(GroupAborted, match="the store did not answer"):
        rounds.ask("begin", lambda: gate.wait(20), 0.01)
    with pytest.raises(GroupAborted, match=r"did not answer within 0\.0 s"):
        rounds.ask("begin", lambda: waited.append(1), 20.0)
    gate.set()
    assert rounds._last is not None
    rounds._last.exception(timeout=10)
    assert rounds.ask("begin", lambda: 7, 5.0) == 7
    assert not waited


def test_a_limit_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        StoreOptions(HashStore(), timeout_s=0)
