"""``broadcast``: a transfer that broke off holds up nobody, and its memory is not used too soon."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.bridge import BroadcastTensorBridge
from rl_bridge.errors import DeadlineExceeded, SegmentError
from rl_bridge.testing.peer import hashes
from rl_bridge.testing.processes import Child, until
from rl_bridge.testing.strategies import contents_of
from rl_bridge.transports.broadcast import receiver
from rl_bridge.transports.broadcast.group import BrokenGroups, _made_in_thread
from rl_bridge.transports.wire.arenas import Arrivals, CPUArenas
from tests.transports.broadcast_rig import BreakingPeer, at_transfer, big_weights

TIMEOUT_S = 60.0
SLICE_DEADLINE_S = TIMEOUT_S / 3


@pytest.fixture
def trainer() -> Iterator[BroadcastTensorBridge]:
    bridge = make_weight_bridge(
        "broadcast", source_worker="trainer", timeout_s=TIMEOUT_S, suspicious="off"
    )
    assert isinstance(bridge, BroadcastTensorBridge)
    with bridge:
        yield bridge


@pytest.fixture
def receive(trainer: BroadcastTensorBridge) -> Iterator[Callable[..., Child]]:
    started: list[Child] = []

    def start(place: int, **options: Any) -> Child:
        info = trainer.init_info(rank_offset=place).to_json()
        child = Child(
            BreakingPeer,
            worker=f"engine-{place}",
            transport_kwargs={"init_info": info, "timeout_s": TIMEOUT_S},
            **options,
        )
        started.append(child)
        child.ready().call("join")
        return child

    yield start
    for child in started:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGCONT)
        with child:
            pass  # leaving the context kills


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_nobody_waits_for_the_deadline_of_a_slice_behind_an_engine_that_died(
    trainer: BroadcastTensorBridge, receive: Callable[..., Child], victim: int
) -> None:
    """Among three, Gloo passes slices on by way of each other: it does not notice in time."""
    engines = {
        place: receive(place, breaks="die" if place == victim else "") for place in (1, 2, 3)
    }
    dead = engines.pop(victim)
    began = time.monotonic()
    text = trainer.publish(big_weights(1), weight_version=1).to_json()
    for engine in engines.values():
        engine.tell("import_update", manifest=text)
    for engine in engines.values():
        assert engine.answer() == hashes(big_weights(1))
    assert time.monotonic() - began < SLICE_DEADLINE_S
    assert dead.exitcode() == -signal.SIGKILL
    assert {report.presence for report in trainer.consumers()} == {"alive"}


def test_a_version_is_not_written_over_while_a_transfer_that_broke_off_reads_it(
    trainer: BroadcastTensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    end: Any = trainer.publisher.end
    left: list[Callable[[], object]] = []
    monkeypatch.setattr(end._sender._broken_groups, "end", lambda _group, then: left.append(then))

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("the engine's own failure")

    engine = make_weight_bridge("broadcast", source_worker="engine", timeout_s=TIMEOUT_S)
    with engine, at_transfer(receiver, 1, fail):
        manifest = trainer.publish(big_weights(1), weight_version=1)
        slot = end.snapshot(manifest.update_id)
        assert contents_of(engine.import_update(manifest)) == contents_of(big_weights(1))
        until(lambda: end._sender._sending is None, what="the second transfer has ended")
        trainer.release(manifest.update_id)
        assert slot.update_id == manifest.update_id
        (then,) = left
        then()
        assert slot.update_id is None


def test_a_group_that_does_not_come_about_is_given_up_when_it_is_in_vain() -> None:
    """Gloo's own wait for members to connect cannot be ended, so it is left to itself."""
    may_end = threading.Event()
    reasons = iter([None, "a member is gone"])
    try:
        with pytest.raises(SegmentError, match="did not come about: a member is gone"):
            _made_in_thread(lambda: may_end.wait(60), lambda: next(reasons), timeout_s=TIMEOUT_S)
        with pytest.raises(DeadlineExceeded, match=r"no group within 0\.01 s"):
            _made_in_thread(lambda: may_end.wait(60), lambda: None, timeout_s=0.01)
    finally:
        may_end.set()


def test_a_slot_that_a_broken_transfer_may_write_to_is_not_reserved_again() -> None:
    arrivals = Arrivals(CPUArenas(), "test")
    first = arrivals.reserve(1000)
    second = arrivals.reserve(1000)
    assert second is not first
    arrivals.abandon(first)
    assert arrivals.reserve(1000) is first
    arrivals.close()


class Stuck:
    """A group whose slices go on behind the end of their transfer."""

    def __init__(self, *, ends: bool) -> None:
        self.is_idle = False
        self.may_end = threading.Event()
        self._ends = ends

    def drain(self) -> bool:
        assert self.may_end.wait(20)
        return self._ends


@pytest.mark.parametrize("ends", [True, False])
def test_memory_is_given_back_when_its_slices_have_ended_and_never_before(*, ends: bool) -> None:
    broken, given_back = BrokenGroups(), threading.Event()
    group: Any = Stuck(ends=ends)
    broken.end(group, given_back.set)
    assert not broken.join(0.01)
    assert not given_back.is_set()
    group.may_end.set()
    assert broken.join(20)
    assert given_back.is_set() == ends
