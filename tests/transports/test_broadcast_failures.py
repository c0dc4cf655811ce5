"""``broadcast`` when processes die or stand still in a transfer, and that transfer's memory."""

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
from rl_bridge.testing.peer import hashes, id_of
from rl_bridge.testing.processes import Child, ChildDied, ChildError, until
from rl_bridge.testing.tensors import contents_of
from rl_bridge.transports.broadcast import receiver as receiving
from rl_bridge.transports.broadcast.group import BrokenGroups, _made_in_thread
from rl_bridge.transports.wire.arenas import Arrivals, CPUArenas
from tests.helpers import stop
from tests.transports.broadcast_rig import BreakingPeer, at_transfer, big_weights

TIMEOUT_S = 3.0
# What the deadlines add up to, and the delays of a machine with other things to do: what has no
# deadline takes longer than that.
SLACK_S = 4 * TIMEOUT_S + 40.0

Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Child] = []

    def make(**options: Any) -> Child:
        child = Child(BreakingPeer, **options)
        started.append(child)
        return child.ready()

    yield make
    for child in started:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGCONT)
        with child:
            pass  # leaving the context kills


@pytest.fixture
def trainer() -> Iterator[BroadcastTensorBridge]:
    bridge = make_weight_bridge(
        "broadcast", source_worker="trainer", timeout_s=TIMEOUT_S, suspicious="off"
    )
    assert isinstance(bridge, BroadcastTensorBridge)
    with bridge:
        yield bridge


def receiver(
    start: Start, trainer: BroadcastTensorBridge, worker: str, place: int = 1, **options: Any
) -> Child:
    """A process that follows from now on."""
    info = trainer.init_info(rank_offset=place).to_json()
    timeout_s = trainer.publisher.end._options.timeout_s  # type: ignore[attr-defined]
    child = start(
        worker=worker, transport_kwargs={"init_info": info, "timeout_s": timeout_s}, **options
    )
    child.call("join")
    return child


def presence_of(trainer: BroadcastTensorBridge, worker: str) -> set[str]:
    return {report.presence for report in trainer.consumers() if report.worker == worker}


def publish(trainer: BroadcastTensorBridge, version: int) -> str:
    return trainer.publish(big_weights(version), weight_version=version).to_json()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(1, id="first transfer", marks=pytest.mark.full),
        pytest.param(2, id="steady state"),
    ],
)
def test_survivors_get_the_update_that_a_receiver_died_in(
    start: Start, trainer: BroadcastTensorBridge, number: int
) -> None:
    one = receiver(start, trainer, "one")
    two = receiver(start, trainer, "two")
    victim = receiver(start, trainer, "victim", breaks="die", number=number)
    for version in range(1, number):
        text = publish(trainer, version)
        for child in (one, two, victim):
            assert child.call("import_update", manifest=text) == hashes(big_weights(version))
    held = [child.pid for child in (one, two)]
    began = time.monotonic()
    text = publish(trainer, number)
    for child in (one, two):
        assert child.call("import_update", manifest=text) == hashes(big_weights(number))
    assert time.monotonic() - began < SLACK_S
    assert victim.exitcode() == -signal.SIGKILL
    assert [child.pid for child in (one, two)] == held
    text = publish(trainer, number + 1)
    for child in (one, two):
        assert child.call("import_update", manifest=text) == hashes(big_weights(number + 1))


def test_a_receiver_that_stands_still_in_a_transfer_is_left_out_within_the_deadline(
    start: Start, trainer: BroadcastTensorBridge
) -> None:
    one = receiver(start, trainer, "one")
    victim = receiver(start, trainer, "victim", breaks="stop")
    began = time.monotonic()
    text = publish(trainer, 1)
    assert one.call("import_update", manifest=text) == hashes(big_weights(1))
    assert time.monotonic() - began < SLACK_S
    os.kill(victim.pid, signal.SIGCONT)
    assert victim.call("import_update", manifest=text) == hashes(big_weights(1))


def test_a_receiver_that_was_stopped_costs_one_deadline_and_comes_back(
    start: Start, trainer: BroadcastTensorBridge
) -> None:
    one = receiver(start, trainer, "one")
    two = receiver(start, trainer, "two")
    first = publish(trainer, 1)
    for child in (one, two):
        assert child.call("import_update", manifest=first) == hashes(big_weights(1))
    stop(two.pid)
    began = time.monotonic()
    second = publish(trainer, 2)
    assert one.call("import_update", manifest=second) == hashes(big_weights(2))
    assert time.monotonic() - began < SLACK_S
    until(lambda: presence_of(trainer, "two") == {"gone"}, what="the publisher gave it up")
    third = publish(trainer, 3)
    began = time.monotonic()
    assert one.call("import_update", manifest=third) == hashes(big_weights(3))
    assert time.monotonic() - began < SLACK_S
    os.kill(two.pid, signal.SIGCONT)
    assert two.call("import_update", manifest=third) == hashes(big_weights(3))
    assert "alive" in presence_of(trainer, "two")


@pytest.mark.parametrize("breaks", ["die", "stop"])
def test_receivers_of_a_publisher_that_is_lost_in_a_transfer_get_an_error_within_the_deadline(
    start: Start, breaks: str
) -> None:
    victim = start(
        worker="trainer",
        breaks=breaks,
        side="sender",
        number=3,
        transport_kwargs={"timeout_s": TIMEOUT_S},
    )
    receivers = [
        start(worker=name, transport_kwargs={"timeout_s": TIMEOUT_S}) for name in ("one", "two")
    ]
    first = victim.call("publish", seed=1, weight_version=1)
    for child in receivers:
        child.call("import_update", manifest=first)
    began = time.monotonic()
    second = victim.call("publish_big", seed=2, weight_version=2)
    for child in receivers:
        child.tell("import_update", manifest=second)
    for child in receivers:
        with pytest.raises(ChildError) as caught:
            child.answer()
        expected = "SegmentError" if breaks == "die" else "DeadlineExceeded"
        assert expected in caught.value.lineage
    assert time.monotonic() - began < SLACK_S
    assert receivers[0].call("held", update_id=id_of(first))
    if breaks == "die":
        assert victim.exitcode() == -signal.SIGKILL
    else:
        os.kill(victim.pid, signal.SIGCONT)
        for child in receivers:
            assert child.call("import_update", manifest=second) == hashes(big_weights(2))


def test_a_default_group_of_the_receivers_own_is_left_alone(
    start: Start, trainer: BroadcastTensorBridge
) -> None:
    child = receiver(start, trainer, "rollout")
    assert child.call("own_world") == 1
    for version in (1, 2):
        text = publish(trainer, version)
        assert child.call("import_update", manifest=text) == hashes(big_weights(version))
        assert child.call("world_size") == 1
    child.call("close")
    assert child.call("world_size") == 1
    assert child.stop() == 0


def test_a_killed_idle_receiver_is_not_waited_for(
    start: Start, trainer: BroadcastTensorBridge
) -> None:
    one = receiver(start, trainer, "one")
    victim = receiver(start, trainer, "victim")
    first = publish(trainer, 1)
    for child in (one, victim):
        child.call("import_update", manifest=first)
    victim.kill()
    with pytest.raises((ChildDied, OSError, EOFError)):
        victim.call("held", update_id="none")
    began = time.monotonic()
    second = publish(trainer, 2)
    assert one.call("import_update", manifest=second) == hashes(big_weights(2))
    assert time.monotonic() - began < TIMEOUT_S + 10


# ---- memory of transfers that broke off ---------------------------------------------------------

LONG_S = 60.0


@pytest.fixture
def patient() -> Iterator[BroadcastTensorBridge]:
    bridge = make_weight_bridge("broadcast", timeout_s=LONG_S, suspicious="off")
    assert isinstance(bridge, BroadcastTensorBridge)
    with bridge:
        yield bridge


@pytest.mark.parametrize("victim", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 3))])
def test_an_engine_that_died_costs_the_others_less_than_a_slices_deadline(
    patient: BroadcastTensorBridge, start: Start, victim: int
) -> None:
    """Among three, Gloo passes slices on by way of each other: it does not notice in time."""
    engines = {
        place: receiver(
            start, patient, f"engine-{place}", place=place, breaks="die" if place == victim else ""
        )
        for place in (1, 2, 3)
    }
    dead = engines.pop(victim)
    began = time.monotonic()
    text = patient.publish(big_weights(1), weight_version=1).to_json()
    for engine in engines.values():
        engine.tell("import_update", manifest=text)
    for engine in engines.values():
        assert engine.answer() == hashes(big_weights(1))
    assert time.monotonic() - began < LONG_S / 3
    assert dead.exitcode() == -signal.SIGKILL
    assert {report.presence for report in patient.consumers()} == {"alive"}


def test_a_version_is_not_written_over_while_a_transfer_that_broke_off_reads_it(
    patient: BroadcastTensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    end: Any = patient.publisher.end
    left: list[Callable[[], object]] = []
    monkeypatch.setattr(end._sender._broken_groups, "end", lambda _group, then: left.append(then))

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("the engine's own failure")

    engine = make_weight_bridge("broadcast", source_worker="engine", timeout_s=LONG_S)
    with engine, at_transfer(receiving, 1, fail):
        manifest = patient.publish(big_weights(1), weight_version=1)
        slot = end.snapshot(manifest.update_id)
        assert contents_of(engine.import_update(manifest)) == contents_of(big_weights(1))
        until(lambda: end._sender._sending is None, what="the second transfer has ended")
        patient.release(manifest.update_id)
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
            _made_in_thread(lambda: may_end.wait(60), lambda: next(reasons), timeout_s=LONG_S)
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
