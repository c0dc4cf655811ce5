"""One fleet at a time has a trainer: the second one is refused, or takes it over."""

import pytest

from rl_bridge.errors import DeadlineExceeded, GroupAborted, SessionRefused
from rl_bridge.processes import process_name
from rl_bridge.ray import RolloutFleet
from tests.ray.actors import TIMEOUT_S, Elsewhere, Rollout, Run


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
    for call in (run.update, lambda: run.fleet.join("late", Rollout(run.cluster))):
        with pytest.raises(SessionRefused, match="has this trainer"):
            call()
    assert (other.weight_version, other.routable) == (1, ("near",))
    other.update(7).require_all()


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
    assert run.channels == ["shared-memory"]


def test_rollouts_of_a_driver_that_was_started_anew_find_their_channels(run: Run) -> None:
    run.join("near")
    run.join("far", kind=Elsewhere)
    run.update().require_all()
    bridge = run.trainer.endpoint._channels["broadcast"].bridge
    run.fleet = next_fleet(run)
    for name, rollout in run.rollouts.items():
        run.fleet.join(name, rollout)
    run.update().require_all()
    assert run.trainer.endpoint._channels["broadcast"].bridge is bridge


def test_a_trainer_whose_own_gathering_is_aborted_keeps_its_channels(run: Run) -> None:
    """It publishes alone, of ranks that it knows and that the fleet does not."""
    run.join("near")
    run.update().require_all()
    bridge = run.trainer.endpoint._channels["shared-memory"].bridge
    with pytest.MonkeyPatch.context() as patch:

        def aborted(*_given: object) -> None:
            raise GroupAborted("rank 3 of its own did not answer. Publish again.")

        patch.setattr(run.trainer.endpoint, "publish", aborted)
        with pytest.raises(GroupAborted):
            run.update()
    run.update().require_all()
    assert run.trainer.endpoint._channels["shared-memory"].bridge is bridge
