"""Two fleets of one trainer, side by side or one behind the other."""

import pytest

from rl_bridge.errors import GroupAborted
from rl_bridge.ray import RolloutFleet
from tests.ray.actors import TIMEOUT_S, Elsewhere, Rollout, Run


def test_who_joins_gets_the_version_that_another_fleet_had_published(run: Run) -> None:
    other = RolloutFleet(run.trainer, timeout_s=TIMEOUT_S)
    run.join("here")
    run.update().require_all()
    run.rollouts["there"] = Rollout(run.cluster)
    other.join("there", run.rollouts["there"])
    assert (other.weight_version, other.routable) == (1, ("there",))
    run.update().require_all()
    run.rollouts["late"] = Rollout(run.cluster)
    other.join("late", run.rollouts["late"])
    assert (other.weight_version, other.routable) == (2, ("late",))
    other.update(3).require_all()


def test_channels_of_a_driver_that_is_gone_go_with_the_first_update_of_the_next_one(
    run: Run,
) -> None:
    run.join("near")
    run.join("far", kind=Elsewhere)
    run.update().require_all()
    run.fleet = RolloutFleet(run.trainer, timeout_s=TIMEOUT_S)
    run.fleet.join("near", run.rollouts["near"])
    run.update().require_all()
    assert run.channels == ["shared-memory"]


def test_rollouts_of_a_driver_that_was_started_anew_find_their_channels(run: Run) -> None:
    run.join("near")
    run.join("far", kind=Elsewhere)
    run.update().require_all()
    channel = run.trainer.side._channels["broadcast"]
    run.fleet = RolloutFleet(run.trainer, timeout_s=TIMEOUT_S)
    for name, rollout in run.rollouts.items():
        run.fleet.join(name, rollout)
    run.update().require_all()
    assert run.trainer.side._channels["broadcast"] is channel


def test_rollouts_of_another_fleet_that_lives_join_again(run: Run) -> None:
    run.join("far", kind=Elsewhere)
    run.update().require_all()
    other = RolloutFleet(run.trainer, timeout_s=TIMEOUT_S)
    run.rollouts["near"] = Rollout(run.cluster)
    other.join("near", run.rollouts["near"])
    other.update(2).require_all()
    run.version = 2
    for _ in range(2):
        run.update().require_all()
    assert run.fleet.routable == ("far",)
    assert run.channels == ["broadcast", "shared-memory"]
    other.update(5).require_all()
    assert run.channels == ["broadcast", "shared-memory"]


def test_a_trainer_whose_own_gathering_is_aborted_keeps_its_channels(run: Run) -> None:
    """It publishes alone, of ranks that it knows and that the fleet does not."""
    run.join("near")
    run.update().require_all()
    channel = run.trainer.side._channels["shared-memory"]
    with pytest.MonkeyPatch.context() as patch:

        def aborted(*_given: object) -> None:
            raise GroupAborted("rank 3 of its own did not answer. Publish again.")

        patch.setattr(run.trainer.side, "publish", aborted)
        with pytest.raises(GroupAborted):
            run.update()
    run.update().require_all()
    assert run.trainer.side._channels["shared-memory"] is channel
