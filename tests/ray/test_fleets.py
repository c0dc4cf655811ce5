"""A fleet: one at a time has a trainer, channels go with their rollouts, no wait is endless."""

import logging
import re

import pytest

from rl_bridge import EngineLost, RolloutExecutor
from rl_bridge.errors import (
    DeadlineExceeded,
    GroupAborted,
    SegmentError,
    SessionRefused,
    VersionNotMonotonic,
)
from rl_bridge.processes import process_name
from rl_bridge.ray import RolloutEndpoint, RolloutFleet
from tests.ray.rig import NEVER_S, TIMEOUT_S, Actor, Elsewhere, Engine, FarLearner, Run


def next_fleet(run: Run, *, take_over: bool = True) -> RolloutFleet:
    return RolloutFleet(run.trainer, timeout_s=TIMEOUT_S, take_over=take_over)


def test_a_second_fleet_is_refused_by_the_name_of_the_driver_that_has_the_trainer(
    run: Run,
) -> None:
    run.join("near")
    run.update().require_all()
    with pytest.raises(SessionRefused, match="has this trainer, and one fleet at a time") as caught:
        next_fleet(run, take_over=False)
    assert process_name() in str(caught.value)
    run.update().require_all()


def test_a_fleet_whose_trainer_was_taken_over_publishes_nothing_more(run: Run) -> None:
    run.join("near")
    run.update().require_all()
    other = next_fleet(run)
    other.join("near", run.rollouts["near"])
    for call in (run.update, lambda: run.fleet.join("late", Actor(run.cluster, Engine))):
        with pytest.raises(SessionRefused, match="has this trainer"):
            call()
    assert (other.weight_version, other.routable) == (1, ("near",))
    other.update(7).require_all()


def test_a_fleet_that_is_told_no_version_says_which_one_it_published(run: Run) -> None:
    run.join("near")
    run.update().require_all()
    run.trainer.made.step()
    update = run.fleet.update()
    update.require_all()
    assert (update.weight_version, run.fleet.weight_version) == (2, 2)


def test_a_fleet_that_is_closed_leaves_the_trainer_and_its_version_to_the_next_one(
    run: Run,
) -> None:
    run.join("near")
    run.update().require_all()
    run.fleet.close()
    with next_fleet(run, take_over=False) as fleet:
        fleet.join("near", run.rollouts["near"])
        assert (fleet.weight_version, fleet.routable) == (1, ("near",))


def test_a_fleet_that_could_not_be_made_does_not_keep_the_trainer(run: Run) -> None:
    run.fleet.close()
    run.trainer.takes_s["join_weight_fleet"] = TIMEOUT_S + 1
    with pytest.raises(DeadlineExceeded):
        next_fleet(run, take_over=False)
    run.trainer.takes_s.clear()
    run.fleet = next_fleet(run, take_over=False)
    run.join("near")
    run.update().require_all()


def test_channels_of_a_driver_that_is_gone_go_with_the_first_update_of_the_next_one(
    run: Run,
) -> None:
    run.join("near")
    run.join("far", kind=Elsewhere)
    run.update().require_all()
    run.fleet = next_fleet(run)
    run.fleet.join("near", run.rollouts["near"])
    run.update().require_all()
    assert list(run.bridges) == ["shared-memory"]


def test_rollouts_of_a_driver_that_was_started_anew_find_their_channels(run: Run) -> None:
    run.join("near")
    run.join("far", kind=Elsewhere)
    run.update().require_all()
    bridge = run.bridges["broadcast"]
    run.fleet = next_fleet(run)
    for name, rollout in run.rollouts.items():
        run.fleet.join(name, rollout)
    run.update().require_all()
    assert run.bridges["broadcast"] is bridge


def test_a_trainer_whose_own_gathering_is_aborted_keeps_its_channels(run: Run) -> None:
    """It publishes alone, of ranks that it knows and that the fleet does not."""
    run.join("near")
    run.update().require_all()
    bridge = run.bridges["shared-memory"]
    with pytest.MonkeyPatch.context() as patch:

        def aborted(*_given: object) -> None:
            raise GroupAborted("rank 3 of its own did not answer. Publish again.")

        patch.setattr(run.trainer.made, "publish_weights", aborted)
        with pytest.raises(GroupAborted):
            run.update()
    run.update().require_all()
    assert run.bridges["shared-memory"] is bridge


# ---- channels ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Engine, "shared-memory: one machine, and the publisher's memory is reachable"),
        (Elsewhere, "broadcast: .*; not shared-memory: they run on different machines"),
    ],
    ids=["near", "far"],
)
def test_the_transport_and_its_reason_are_logged(
    run: Run, caplog: pytest.LogCaptureFixture, kind: type[Engine], said: str
) -> None:
    with caplog.at_level(logging.INFO, "rl_bridge"):
        run.join("one", kind=kind)
    told = [record.getMessage() for record in caplog.records]
    for what in ("rollout one gets weights by", f"rollout {kind.__name__} joins by"):
        assert any(re.match(f"{what} {said}", text) for text in told), told


def test_a_channel_goes_with_its_last_rollout(run: Run) -> None:
    run.join("near")
    run.join("far", "farther", kind=Elsewhere)
    run.update().require_all()
    assert list(run.bridges) == ["broadcast", "shared-memory"]
    run.fleet.leave("far")
    run.update().require_all()
    assert list(run.bridges) == ["broadcast", "shared-memory"]
    run.fleet.leave("farther")
    run.update().require_all()
    assert list(run.bridges) == ["shared-memory"]


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
    far = Actor(run.cluster, Elsewhere)
    far.takes_s["join_weights"] = NEVER_S
    with pytest.raises(DeadlineExceeded):
        run.fleet.join("far", far)
    run.update().require_all()
    assert list(run.bridges) == ["shared-memory"]


def test_a_join_that_is_late_comes_again_on_the_channel_that_it_has(run: Run) -> None:
    """What is copied for it anew each time is never there in time."""
    run.join("near")
    run.update().require_all()
    far = run.rollouts["far"] = Actor(run.cluster, Elsewhere)
    far.takes_s["update_weights"] = TIMEOUT_S + 1
    with pytest.raises(DeadlineExceeded):
        run.fleet.join("far", far)
    bridge = run.bridges["broadcast"]
    far.takes_s.clear()
    run.fleet.join("far", far)
    assert run.bridges["broadcast"] is bridge
    assert set(run.fleet.routable) == {"far", "near"}


def test_a_rollout_whose_first_install_on_another_channel_is_late_gets_the_next_one_there(
    run: Run,
) -> None:
    run.join("near", "moved")
    run.update().require_all()
    moved = run.rollouts["moved"]
    moved.start_anew(Elsewhere)
    joins = moved.made.join_weights

    def late(choice: bytes) -> bytes:
        moved.takes_s["update_weights"] = TIMEOUT_S + 1
        answer: bytes = joins(choice)
        return answer

    moved.made.join_weights = late
    assert list(run.update().lost) == ["moved"]
    moved.takes_s.clear()
    run.update().require_all()
    assert set(run.fleet.routable) == {"moved", "near"}


def test_rollouts_of_a_trainer_that_moved_join_again_by_themselves(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.join("near")
    run.update().require_all()
    run.trainer.start_anew(FarLearner)
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

    run.trainer.made.drop_weights = drop
    run.fleet.leave("far")
    run.update().require_all()
    assert "was not dropped: broadcast" in caplog.text


def test_a_trainer_that_moved_while_nobody_was_there_is_found(run: Run) -> None:
    run.cluster.address = "192.0.2.1"  # of no machine
    run.trainer.start_anew()
    run.join("near")
    run.cluster.address = "127.0.0.1"
    run.trainer.start_anew()
    run.join("far", kind=Elsewhere)
    run.update().require_all()


# ---- deadlines -----------------------------------------------------------------------------------


def test_rollouts_that_hang_while_they_join_again_take_one_deadline_in_all(run: Run) -> None:
    run.join("a", "b", "c", "last")
    run.update().require_all()
    for name, rollout in run.rollouts.items():
        rollout.start_anew()
        rollout.takes_s["find_weights"] = NEVER_S if name != "last" else 1.0
    start_s = run.cluster.now_s
    update = run.update()
    assert run.cluster.now_s - start_s == TIMEOUT_S
    assert update.routable == run.fleet.routable == ("last",)
    assert {type(error) for error in update.lost.values()} == {DeadlineExceeded}
    assert list(update.lost) == ["a", "b", "c"]


def test_a_rollout_that_joins_again_does_not_wait_for_one_that_hangs(run: Run) -> None:
    run.join("hangs", "again")
    run.update().require_all()
    run.rollouts["hangs"].takes_s["update_weights"] = TIMEOUT_S + 1
    run.rollouts["again"].start_anew()
    run.rollouts["again"].takes_s["join_weights"] = 1.0
    update = run.update()
    assert update.routable == ("again",)
    assert list(update.lost) == ["hangs"]
    del run.rollouts["hangs"].takes_s["update_weights"]
    run.cluster.now_s += 1.0
    run.update().require_all()


def test_a_rollout_that_hangs_has_one_manifest_to_take_and_then_the_last_one(run: Run) -> None:
    run.join("hangs")
    run.update().require_all()
    rollout, given = run.rollouts["hangs"], []
    installs = rollout.made.update_weights

    def install(manifest: bytes) -> bytes:
        given.append(manifest)
        answer: bytes = installs(manifest)
        return answer

    rollout.made.update_weights = install
    rollout.takes_s["update_weights"] = 2.5 * TIMEOUT_S
    for _ in range(2):
        assert {type(error) for error in run.update().lost.values()} == {DeadlineExceeded}
    assert len(given) == 1
    rollout.takes_s.clear()
    run.cluster.now_s += 2 * TIMEOUT_S
    run.update().require_all()
    assert len(given) == 2


def test_a_rollout_that_hangs_costs_its_deadline_once(run: Run) -> None:
    run.join("hangs", "serves")
    run.update().require_all()
    rollout, serving = run.rollouts["hangs"], run.rollouts["serves"]
    rollout.takes_s["update_weights"] = 3.5 * TIMEOUT_S
    assert list(run.update().lost) == ["hangs"]
    serving.takes_s["update_weights"] = 1.0
    for _ in range(3):
        start_s = run.cluster.now_s
        update = run.update()
        assert run.cluster.now_s - start_s == 1.0
        assert update.routable == ("serves",)
        assert "has not answered the call before" in str(update.lost["hangs"])
    # What it answers while the others are waited for is early enough.
    rollout.takes_s.clear()
    serving.takes_s["update_weights"] = 0.9 * TIMEOUT_S
    run.cluster.now_s += 2 * TIMEOUT_S
    run.update().require_all()


def publish_late(run: Run) -> None:
    """Version 2 comes through, and its answer too late."""
    run.join("near")
    run.update().require_all()
    run.trainer.takes_s["publish_weights"] = TIMEOUT_S + 1
    with pytest.raises(DeadlineExceeded):
        run.update()
    run.trainer.takes_s.clear()


def test_a_rollout_that_joins_after_a_late_publication_gets_that_version(run: Run) -> None:
    publish_late(run)
    assert run.fleet.routable == ("near",)
    run.join("late")
    assert run.fleet.weight_version == 2
    assert run.fleet.routable == ("late",)
    run.update().require_all()


def test_a_driver_that_counts_on_from_the_fleets_version_gets_past_one_that_came_late(
    run: Run,
) -> None:
    publish_late(run)
    assert run.fleet.weight_version == 1
    with pytest.raises(VersionNotMonotonic, match="2 came after 2"):
        run.fleet.update(2)
    assert run.fleet.weight_version == 2
    run.fleet.update(3).require_all()


def test_a_trainer_that_was_started_anew_takes_nothing_back_from_the_rollouts(run: Run) -> None:
    run.join("near")
    run.update().require_all()
    run.trainer.takes_s["publish_weights"] = NEVER_S
    with pytest.raises(DeadlineExceeded):
        run.update()
    run.trainer.takes_s.clear()
    run.trainer.start_anew()
    run.join("late")
    assert (run.fleet.weight_version, run.fleet.routable) == (1, ("near",))
    run.update().require_all()


def test_the_error_of_a_lost_trainer_does_not_advise_to_join_it(run: Run) -> None:
    run.trainer.takes_s["publish_weights"] = NEVER_S
    with pytest.raises(DeadlineExceeded, match=r"'trainer' did not publish .* a later version\."):
        run.update()
    run.trainer.takes_s.clear()
    run.trainer.is_lost = True
    with pytest.raises(EngineLost, match=r"'trainer' is lost .* make another fleet"):
        run.update()
