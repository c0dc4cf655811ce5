"""Channels of a trainer: open for as long as a rollout of the fleet uses them."""

import logging
import re

import pytest

from rl_bridge import RolloutExecutor
from rl_bridge.errors import DeadlineExceeded, SegmentError
from rl_bridge.ray import RolloutEndpoint
from tests.ray.actors import NEVER_S, TIMEOUT_S, Elsewhere, Rollout, Run


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Rollout, "shared-memory: one machine, and the publisher's memory is reachable"),
        (Elsewhere, "broadcast: .*; not shared-memory: they run on different machines"),
    ],
    ids=["near", "far"],
)
def test_the_transport_and_its_reason_are_logged(
    run: Run, caplog: pytest.LogCaptureFixture, kind: type[Rollout], said: str
) -> None:
    with caplog.at_level(logging.INFO, "rl_bridge"):
        run.join("one", kind=kind)
    told = [record.getMessage() for record in caplog.records]
    for what in ("rollout one gets weights by", "rollout rollout joins by"):
        assert any(re.match(f"{what} {said}", text) for text in told), told


def test_a_channel_goes_with_its_last_rollout(run: Run) -> None:
    run.join("near")
    run.join("far", "farther", kind=Elsewhere)
    run.update().require_all()
    assert run.channels == ["broadcast", "shared-memory"]
    run.fleet.leave("far")
    run.update().require_all()
    assert run.channels == ["broadcast", "shared-memory"]
    run.fleet.leave("farther")
    run.update().require_all()
    assert run.channels == ["shared-memory"]


def test_a_rollout_that_comes_back_finds_its_channel_again(run: Run) -> None:
    run.join("far", kind=Elsewhere)
    run.update().require_all()
    run.fleet.leave("far")
    run.join("another", kind=Elsewhere)
    run.fleet.join("far", run.rollouts["far"])
    assert run.fleet.routable == ("another", "far")
    run.update().require_all()


def test_a_join_that_fails_leaves_no_channel_behind(run: Run) -> None:
    run.join("near")
    far = Elsewhere(run.cluster)
    far.takes_s["join_weights"] = NEVER_S
    with pytest.raises(DeadlineExceeded):
        run.fleet.join("far", far)
    run.update().require_all()
    assert run.channels == ["shared-memory"]


def test_a_join_that_is_late_comes_again_on_the_channel_that_it_has(run: Run) -> None:
    """What is copied for it anew each time is never there in time."""
    run.join("near")
    run.update().require_all()
    far = run.rollouts["far"] = Elsewhere(run.cluster)
    far.takes_s["update_weights"] = TIMEOUT_S + 1
    with pytest.raises(DeadlineExceeded):
        run.fleet.join("far", far)
    channel = run.trainer.endpoint._channels["broadcast"]
    far.takes_s.clear()
    run.fleet.join("far", far)
    assert run.trainer.endpoint._channels["broadcast"] is channel
    assert set(run.fleet.routable) == {"far", "near"}


def test_a_rollout_whose_first_install_on_another_channel_is_late_gets_the_next_one_there(
    run: Run,
) -> None:
    run.join("near", "moved")
    run.update().require_all()
    moved = run.rollouts["moved"]
    moved.endpoint.close()
    moved.endpoint = Elsewhere(run.cluster).endpoint  # Ray started it anew, on another machine
    joins = moved.endpoint.join

    def late(choice: bytes) -> bytes:
        moved.takes_s["update_weights"] = TIMEOUT_S + 1
        answer: bytes = joins(choice)
        return answer

    moved.endpoint.join = late  # type: ignore[method-assign]
    assert list(run.update().lost) == ["moved"]
    moved.takes_s.clear()
    run.update().require_all()
    assert set(run.fleet.routable) == {"moved", "near"}


def test_rollouts_of_a_trainer_that_moved_join_again_by_themselves(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.join("near")
    run.update().require_all()
    run.trainer.move()
    real = RolloutEndpoint._install

    def install(endpoint: RolloutEndpoint, executor: RolloutExecutor, text: str) -> None:
        if '"shared-memory"' in text:
            raise SegmentError("it is another machine's memory")
        real(endpoint, executor, text)

    monkeypatch.setattr(RolloutEndpoint, "_install", install)
    run.update().require_all()
    assert run.fleet.routable == ("near",)
    assert run.fleet.choices["near"].transport == "broadcast"


def test_a_channel_that_cannot_be_dropped_holds_no_version_up(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.join("near")
    run.join("far", kind=Elsewhere)

    def drop(channel: str) -> None:
        raise OSError(channel)

    run.trainer.endpoint.drop = drop  # type: ignore[method-assign]
    run.fleet.leave("far")
    run.update().require_all()
    assert "was not dropped: broadcast" in caplog.text


def test_a_trainer_that_moved_while_nobody_was_there_is_found(run: Run) -> None:
    run.trainer.address = "192.0.2.1"  # of no machine
    run.trainer.start_anew()
    run.join("near")
    run.trainer.address = "127.0.0.1"
    run.trainer.start_anew()
    run.join("far", kind=Elsewhere)
    run.update().require_all()
