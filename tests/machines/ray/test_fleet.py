"""A fleet of rollout actors on a real Ray: who dies, hangs or refuses holds nobody else up."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_bridge import EngineLost, WeightUpdateRejectedError
from rl_bridge.errors import DeadlineExceeded, VersionNotMonotonic
from rl_bridge.ray import FleetUpdate, RolloutFleet
from rl_bridge.testing.processes import until
from tests.helpers import stop
from tests.machines.ray.cluster import elsewhere, raising, rollout, trainer

pytestmark = pytest.mark.usefixtures("one_node")

TIMEOUT_S = 90.0  # an actor imports torch first, beside others that do
SHORT_S = 2.0
# What a loaded machine may take beyond a deadline before it counts as a hang.
SLACK_S = 10.0


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=TIMEOUT_S)


def start_anew(actor: Any) -> None:
    """Have Ray start an actor anew; what it is asked from here on, the new process answers."""
    pid = get(actor.pid.remote())
    ray.kill(actor, no_restart=False)
    until(lambda: not Path(f"/proc/{pid}").exists(), what="the actor's process is gone")


@pytest.fixture(scope="module")
def learner() -> Any:
    return trainer()


class Run:
    """A fleet of one trainer that all tests share: its versions go on from test to test."""

    def __init__(self, learner: Any, spares: list[Any]) -> None:
        self.trainer, self.spares = learner, spares
        self.fleet = RolloutFleet(learner, timeout_s=TIMEOUT_S)
        self.version = self.fleet.weight_version or 0

    def step(self) -> FleetUpdate:
        get(self.trainer.step.remote())
        self.version += 1
        return self.fleet.update(self.version)

    def rollouts(self, num: int) -> list[Any]:
        """Rollouts that are alive; tests that start none are quicker."""
        self.spares += [rollout() for _ in range(num - len(self.spares))]
        return self.spares[:num]

    def all_hold(self, *actors: Any) -> bool:
        return all(get([actor.holds.remote(self.version) for actor in actors]))


@pytest.fixture(scope="module")
def spares() -> list[Any]:
    return []


@pytest.fixture
def run(learner: Any, spares: list[Any]) -> Iterator[Run]:
    made = Run(learner, spares)
    with made.fleet:
        yield made


def test_every_rollout_gets_each_version_through_shared_memory(run: Run) -> None:
    actors = dict(zip("ab", run.rollouts(2), strict=True))
    for name, actor in actors.items():
        assert run.fleet.join(name, actor).transport == "shared-memory"
    for _ in range(3):
        update = run.step()
        update.require_all()
        assert update.routable == run.fleet.routable == ("a", "b")
        assert {answer.proof["root"] for answer in update.answers.values()} == {update.root}
    assert run.all_hold(*actors.values())


def test_a_dead_rollout_is_named_and_the_others_go_on(run: Run) -> None:
    alive, doomed = run.rollouts(2)
    run.fleet.join("alive", alive)
    run.fleet.join("doomed", doomed)
    run.spares.remove(doomed)
    doomed.die.remote()
    update = run.step()
    assert update.routable == ("alive",)
    assert isinstance(update.lost["doomed"], EngineLost)
    assert "'doomed'" in str(update.lost["doomed"])
    with pytest.raises(EngineLost):
        update.require_all()
    another = run.rollouts(2)[1]
    run.fleet.join("doomed", another)
    assert list(run.fleet.routable) == ["alive", "doomed"]
    run.step().require_all()
    assert run.all_hold(alive, another)


def test_a_rollout_that_raises_is_named_and_the_others_go_on(run: Run) -> None:
    run.step()
    run.fleet.join("bad", raising())  # asked first: who comes behind it must be heard all the same
    (good,) = run.rollouts(1)
    run.fleet.join("good", good)
    update = run.step()
    assert update.routable == run.fleet.routable == ("good",)
    assert "'bad' raised instead of answering: OSError: disk quota" in str(update.lost["bad"])
    assert isinstance(update.lost["bad"].__cause__, OSError)
    assert run.all_hold(good)


def test_a_rollout_that_ray_cannot_place_is_lost(run: Run) -> None:
    nowhere = NodeAffinitySchedulingStrategy(node_id="ab" * 28, soft=False)
    with pytest.raises(EngineLost, match="'nowhere' is lost"):
        run.fleet.join("nowhere", rollout(scheduling_strategy=nowhere))


def test_a_rollout_that_hangs_is_given_up_at_the_deadline_and_may_come_back(run: Run) -> None:
    quick, slow = run.rollouts(2)
    run.fleet.join("quick", quick)
    run.fleet.join("slow", slow)
    pid = get(slow.pid.remote())
    run.fleet._timeout_s = SHORT_S
    stop(pid)
    try:
        start = time.monotonic()
        update = run.step()
        assert time.monotonic() - start < SHORT_S + SLACK_S
    finally:
        os.kill(pid, signal.SIGCONT)
    assert isinstance(update.lost["slow"], DeadlineExceeded)
    assert list(update.routable) == list(run.fleet.routable) == ["quick"]
    run.fleet._timeout_s = TIMEOUT_S
    assert run.fleet.ask("slow").active_version == run.version
    assert list(run.fleet.routable) == ["quick", "slow"]


def test_rollouts_and_trainers_that_ray_starts_anew_join_again(tmp_path: Path) -> None:
    """A rollout on another channel than the trainer's first one, and then the trainer."""
    learner, busy = trainer(max_restarts=1, max_task_retries=-1), tmp_path / "busy"
    run, far = Run(learner, []), elsewhere(busy, max_restarts=1, max_task_retries=-1)
    assert run.fleet.join("far", far).transport == "nixl"
    run.step().require_all()
    # One that comes back and cannot join at once is not forgotten.
    busy.touch()
    start_anew(far)
    update = run.step()
    assert isinstance(update.lost["far"], WeightUpdateRejectedError), update
    assert list(run.fleet.routable) == []
    busy.unlink()
    run.step().require_all()
    assert run.all_hold(far)
    # What the trainer had opened for it is gone with the trainer.
    start_anew(learner)
    run.version += 1
    run.fleet.update(run.version).require_all()
    assert get(far.holds.remote(0))


def test_a_trainer_that_refuses_says_so_by_its_own_error(run: Run) -> None:
    run.step()
    with pytest.raises(VersionNotMonotonic, match="must increase monotonically"):
        run.fleet.update(run.version)
    run.step().require_all()
