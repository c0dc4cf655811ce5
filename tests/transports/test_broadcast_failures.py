"""``broadcast`` when processes die or stand still in the middle of a transfer."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from rl_bridge import make_weight_bridge
from rl_bridge.bridge.bridges import BroadcastTensorBridge
from rl_bridge.testing.peer import hashes
from rl_bridge.testing.processes import Child, ChildDied, ChildError, until
from tests.helpers import stop
from tests.transports.broadcast_rig import BreakingPeer, big_weights

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


def receiver(start: Start, trainer: BroadcastTensorBridge, worker: str, **options: Any) -> Child:
    """A process that follows from now on."""
    info = trainer.init_info().to_json()
    child = start(
        worker=worker, transport_kwargs={"init_info": info, "timeout_s": TIMEOUT_S}, **options
    )
    child.call("join")
    return child


def presence_of(trainer: BroadcastTensorBridge, worker: str) -> set[str]:
    return {report.presence for report in trainer.consumers() if report.worker == worker}


def publish(trainer: BroadcastTensorBridge, version: int) -> str:
    return trainer.publish(big_weights(version), weight_version=version).to_json()


@pytest.mark.parametrize("number", [1, 2], ids=["first transfer", "steady state"])
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
def test_receivers_of_a_publisher_that_is_lost_in_a_transfer_are_told_within_the_deadline(
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
    assert receivers[0].call("held", update_id=BreakingPeer._update_id(first))
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
