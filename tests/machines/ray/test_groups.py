"""Several trainer actors publish as one group on a real Ray; rollouts fetch what they need."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rl_bridge import EngineLost
from rl_bridge.errors import DeadlineExceeded, GroupAborted
from rl_bridge.ray import FleetUpdate, RolloutFleet
from rl_bridge.ray.calls import Deadline
from tests.helpers import stop
from tests.machines.ray.group_actors import owners, share

pytestmark = pytest.mark.usefixtures("one_node")

TIMEOUT_S = 90.0  # an actor imports torch first, beside others that do
SHORT_S = 12.0
# What a loaded machine may take beyond a deadline before it counts as a hang.
SLACK_S = 10.0
RANKS = 2


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=TIMEOUT_S)


class Run:
    """A trainer of several ranks, and an engine of two."""

    def __init__(self) -> None:
        self.owners = owners(RANKS)
        self.shares = {f"share-{rank}": share(rank) for rank in range(2)}
        self.version = 0

    def fleet(self) -> RolloutFleet:
        made = RolloutFleet(self.owners, timeout_s=TIMEOUT_S, take_over=True)
        for name, actor in self.shares.items():
            assert made.join(name, actor).transport == "shared-memory"
        return made

    def hurry(self, fleet: RolloutFleet) -> RolloutFleet:
        """Let a fleet that is up wait no longer than that."""
        fleet._timeout_s = SHORT_S
        fleet._trainers._join_all(Deadline(SHORT_S), anew=False)
        return fleet

    def train(self) -> int:
        self.version += 1
        get([owner.train.remote(self.version) for owner in self.owners])
        return self.version

    def update(self, fleet: RolloutFleet) -> FleetUpdate:
        update = fleet.update(self.train())
        update.require_all()
        assert self.all_hold(self.version)
        return update

    def all_hold(self, version: int) -> bool:
        return all(get([actor.has.remote(version) for actor in self.shares.values()]))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """One for all tests: its versions go on, and each test leaves it whole."""
    made = Run()
    yield made
    for actor in (*made.owners, *made.shares.values()):
        ray.kill(actor)


def test_each_rollout_gets_its_share_of_what_all_ranks_publish(run: Run) -> None:
    fleet = run.fleet()
    for _ in range(3):
        update = run.update(fleet)
        assert update.routable == fleet.routable == tuple(run.shares)
        assert {answer.active_root for answer in update.answers.values()} == {update.root}


def test_a_rank_that_hangs_is_named_and_the_group_goes_on_when_it_is_back(run: Run) -> None:
    fleet = run.fleet()
    run.update(fleet)
    before = run.version
    pid = get(run.owners[1].pid.remote())
    version = run.train()
    run.hurry(fleet)
    stop(pid)
    try:
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="'trainer rank 1' did not publish"):
            fleet.update(version)
        assert time.monotonic() - start < SHORT_S + SLACK_S
    finally:
        os.kill(pid, signal.SIGCONT)
    assert run.all_hold(before)
    run.update(run.fleet())


def test_a_lost_store_ends_the_version_and_the_fleet_makes_another_one(run: Run) -> None:
    fleet = run.fleet()
    run.update(fleet)
    before = run.version
    ray.kill(fleet._trainers._store)
    with pytest.raises(GroupAborted, match="store"):
        fleet.update(run.train())
    assert run.all_hold(before)
    run.update(fleet)


def test_a_rank_that_dies_ends_the_version_and_one_in_its_place_joins_the_group(run: Run) -> None:
    fleet = run.fleet()
    run.update(fleet)
    before = run.version
    version = run.train()
    run.hurry(fleet)
    ray.kill(run.owners[1])
    with pytest.raises(EngineLost, match="trainer rank 1"):
        fleet.update(version)
    assert run.all_hold(before)
    spare = owners(RANKS)
    ray.kill(spare[0])
    run.owners[1] = spare[1]
    run.update(run.fleet())
