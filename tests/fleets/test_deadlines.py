"""How long a fleet waits, and what it knows behind an answer that came too late."""

from collections.abc import Iterator

import pytest

from rl_bridge import DeadlineExceeded
from rl_bridge.ray import FleetUpdate, RolloutFleet
from tests.fleets.actors import NEVER_S, Cluster, Rollout, Trainer

TIMEOUT_S = 60.0


class Run:
    """A fleet of rollouts of one machine."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.trainer = Trainer(cluster)
        self.fleet = RolloutFleet(self.trainer, timeout_s=TIMEOUT_S)
        self.rollouts: dict[str, Rollout] = {}
        self.version = 0

    def join(self, *names: str) -> None:
        for name in names:
            self.rollouts[name] = Rollout(self.cluster)
            self.fleet.join(name, self.rollouts[name])

    def update(self) -> FleetUpdate:
        self.version += 1
        self.trainer.weights["a"].add_(1)
        return self.fleet.update(self.version)

    def close(self) -> None:
        for one in (*self.rollouts.values(), self.trainer):
            one.side.close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    made = Run(Cluster(monkeypatch))
    yield made
    made.close()


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
