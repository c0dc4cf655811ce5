"""Two fleets of one trainer, side by side or one behind the other."""

from rl_bridge.ray import RolloutFleet
from tests.fleets.actors import TIMEOUT_S, Rollout, Run


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
