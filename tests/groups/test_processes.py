"""Groups of real processes: trainers to engines, and ranks that die in the middle of it."""

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch.distributed as dist

from rl_bridge.groups.exchange import ProcessGroupExchange
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.testing.faults import die
from rl_bridge.testing.processes import Child, ChildDied, ChildError
from tests.machines.roles import Engine, Owner, owners_of, publish


class TrainerRank(Owner):
    """One rank of a trainer; dies at a step of its choice."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: tuple[str, int],
        *,
        timeout_s: float = 60.0,
        way: str = "store",
    ) -> None:
        super().__init__(rank, world_size, store, transport="shared-memory", timeout_s=timeout_s)
        if way == "store":
            return
        dist.init_process_group("gloo", store=self.store, rank=rank, world_size=world_size)
        exchange = ProcessGroupExchange(store=self.store if way == "gloo, store" else None)
        self.publisher = GroupPublisher(self.bridge, exchange, timeout_s=timeout_s)

    def publish(self, version: int, dies_at: str | None = None) -> str:
        if dies_at is not None:
            setattr(self.publisher, dies_at, lambda *_: die())
        return super().publish(version)

    def publish_and_stop(self, version: int) -> None:
        vote = self.publisher._vote

        def stopped(*arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            return vote(*arguments)

        self.publisher._vote = stopped  # type: ignore[assignment,method-assign]
        self.publish(version)

    def latest_status(self) -> str:
        latest = self.bridge.latest_manifest
        assert latest is not None
        return self.bridge.update_status(latest)


def ranks_of(num: int, **options: Any) -> Any:
    """The ranks of a trainer, and where their store is."""
    return owners_of(num, TrainerRank, **options)


def test_three_trainers_feed_two_engines() -> None:
    degree = 2
    with ranks_of(3) as (trainers, _), ExitStack() as stack:
        engines = [
            stack.enter_context(Child(Engine, rank=rank, degree=degree)) for rank in range(degree)
        ]
        for version in (1, 2, 3):
            manifest = publish(trainers, version)
            assert all(engine.ready().call("update", manifest=manifest) for engine in engines)
            for trainer in trainers:
                assert trainer.call("states", manifest=manifest) == ["acknowledged"] * degree
                trainer.call("release", manifest=manifest)


def test_a_process_group_carries_it_too_until_a_rank_does_not_come() -> None:
    """What comes late would be taken for an answer to what is asked then."""
    with (
        ranks_of(2, way="gloo", timeout_s=2.0) as (trainers, _),
        Child(Engine, rank=0, degree=1) as engine,
    ):
        for version in (1, 2):
            assert engine.ready().call("update", manifest=publish(trainers, version))
        with pytest.raises(ChildError, match="The process group is lost") as caught:
            trainers[0].call("publish", version=3)
        assert caught.value.kind == "GroupAborted"
        with pytest.raises(ChildError, match="Make a new process group"):
            trainers[0].call("publish", version=4)


def dies(trainers: Sequence[Child], rank: int, version: int, step: str) -> None:
    """Have a rank die at a step; the others' publication fails."""
    for at, trainer in enumerate(trainers):
        trainer.tell("publish", version=version, dies_at=step if at == rank else None)
    for at, trainer in enumerate(trainers):
        with pytest.raises(ChildDied if at == rank else ChildError) as caught:
            trainer.answer()
        if at != rank:
            assert getattr(caught.value, "kind", "") == "GroupAborted"


def test_a_death_over_a_process_group_with_a_store_aborts_all_survivors() -> None:
    with ranks_of(3, way="gloo, store", timeout_s=5.0) as (trainers, _):
        publish(trainers, 1)
        dies(trainers, 1, 2, "_part_message")
        for rank in (0, 2):
            assert trainers[rank].call("latest_status") == "released"


def test_a_rank_that_dies_leaves_the_version_before_untouched() -> None:
    """`_part_message` is behind the publication and before the exchange."""
    with (
        ranks_of(2, timeout_s=2.0) as (ranks, store),
        Child(Engine, rank=0, degree=1) as engine,
        ExitStack() as stack,
    ):
        trainers = ranks
        for version, step in ((1, "_hello"), (3, "_part_message")):
            assert engine.ready().call("update", manifest=publish(trainers, version))
            dies(trainers, 1, version + 1, step)
            # Where no byte had moved yet, the latest is still the version before.
            expected = "published" if step == "_hello" else "released"
            assert trainers[0].call("latest_status") == expected
            assert engine.call("holds", version=version)
            fresh = Child(TrainerRank, rank=1, world_size=2, store=store)
            trainers = [trainers[0], stack.enter_context(fresh).ready()]
        assert engine.call("update", manifest=publish(trainers, 5))


def test_a_rank_that_hangs_is_left_behind_by_the_deadline_and_learns_of_it() -> None:
    with ranks_of(2, timeout_s=2.0) as (trainers, _):
        publish(trainers, 1)
        trainers[1].tell("publish_and_stop", version=2)
        with pytest.raises(ChildError, match=r"ranks \(1,\)"):
            trainers[0].call("publish", version=2)
        assert trainers[0].call("latest_status") == "released"
        os.kill(trainers[1].pid, signal.SIGCONT)
        with pytest.raises(ChildError, match="GroupAborted"):
            trainers[1].answer()
        assert trainers[1].call("latest_status") == "released"
