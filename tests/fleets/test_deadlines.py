"""How long a fleet waits, and what it knows behind an answer that came too late."""

from rl_bridge import DeadlineExceeded
from tests.fleets.actors import NEVER_S, TIMEOUT_S, Run


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
    run.rollouts["hangs"].takes_s["update_weights"] = NEVER_S
    run.rollouts["again"].start_anew()
    run.rollouts["again"].takes_s["join_weights"] = 1.0
    update = run.update()
    assert update.routable == ("again",)
    assert list(update.lost) == ["hangs"]
    del run.rollouts["hangs"].takes_s["update_weights"]
    run.update().require_all()
