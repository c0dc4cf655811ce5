"""How long a fleet waits, and what it knows behind an answer that came too late."""

import pytest

from rl_bridge import EngineLost
from rl_bridge.errors import DeadlineExceeded, VersionNotMonotonic
from tests.ray.actors import NEVER_S, TIMEOUT_S, Run


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
    run.update().require_all()


def test_a_rollout_that_hangs_has_one_manifest_to_take_and_then_the_last_one(run: Run) -> None:
    run.join("hangs")
    run.update().require_all()
    rollout, given = run.rollouts["hangs"], []
    installs = rollout.endpoint.update

    def install(manifest: bytes) -> bytes:
        given.append(manifest)
        answer: bytes = installs(manifest)
        return answer

    rollout.endpoint.update = install  # type: ignore[method-assign]
    rollout.takes_s["update_weights"] = 2.5 * TIMEOUT_S
    for _ in range(2):
        assert {type(error) for error in run.update().lost.values()} == {DeadlineExceeded}
    assert len(given) == 1
    rollout.takes_s.clear()
    run.update().require_all()
    assert len(given) == 2


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
