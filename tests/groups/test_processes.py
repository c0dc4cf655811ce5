"""Groups of real processes: trainers to engines, and ranks that die in the middle of it."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.groups.bridge import GroupBridge
from rl_bridge.groups.exchange import GroupExchange, ProcessGroupExchange, StoreExchange
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.groups.wanted import TensorParallel, parallel
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.testing.faults import die
from rl_bridge.testing.processes import Child, ChildDied, ChildError
from tests.groups.meshes import cut, model, same, share

TCPStore = torch._C._distributed_c10d.TCPStore
SHAPES = {"embed": (8, 6), "layer.w": (12, 8), "norm": (5,), "scale": ()}
DIMS = {"embed": 0, "layer.w": 1}
CUTS: dict[str, int | None] = {**DIMS, "norm": None, "scale": None}


class TrainerRank:
    """One rank of a trainer; dies at a step of its choice."""

    def __init__(
        self, rank: int, world_size: int, port: int, timeout_s: float = 60.0, way: str = "store"
    ) -> None:
        self.bridge = make_weight_bridge(
            "shared-memory", source_worker="trainer", source_rank=rank, suspicious="off"
        )
        self.rank, self.world_size = rank, world_size
        exchange = self._exchange(port, way)
        self.publisher = GroupPublisher(self.bridge, exchange, timeout_s=timeout_s)

    def _exchange(self, port: int, way: str) -> GroupExchange:
        limit = timedelta(seconds=60)
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        if way == "store":
            return StoreExchange(store, rank=self.rank, world_size=self.world_size)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=limit
        )
        return ProcessGroupExchange(store=store if way == "gloo, store" else None)

    def publish(self, version: int, dies_at: str | None = None) -> str:
        if dies_at is not None:
            setattr(self.publisher, dies_at, lambda *_: die())
        shards = cut(model(SHAPES, version), self.world_size, CUTS)[self.rank]
        return self.publisher.publish(*shards, weight_version=version).to_json()

    def publish_and_stop(self, version: int) -> None:
        vote = self.publisher._vote

        def stopped(*arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            return vote(*arguments)

        self.publisher._vote = stopped  # type: ignore[assignment,method-assign]
        self.publish(version)

    def release(self, manifest: str) -> None:
        self.publisher.release(GroupManifest.from_json(manifest))

    def latest_status(self) -> str:
        latest = self.bridge.latest_manifest
        assert latest is not None
        return self.bridge.update_status(latest)

    def states(self, manifest: str) -> list[str]:
        return [one.state for one in self.publisher.consumers(GroupManifest.from_json(manifest))]


class EngineRank:
    """One rank of an engine that cuts tensors in its own way."""

    def __init__(self, rank: int, degree: int) -> None:
        self.rank, self.degree = rank, degree
        wanted = parallel(tensor=TensorParallel(degree, rank, DIMS))
        self.engine = {name: torch.zeros_like(one) for name, one in self.expected(0).items()}
        self.executor = RolloutExecutor(
            weight_bridge=GroupBridge(wanted, source_rank=rank),
            weight_install_adapter=ModuleInstallAdapter(self.engine, mode="flip"),
        )

    def expected(self, version: int) -> dict[str, torch.Tensor]:
        return share(model(SHAPES, version), self.degree, self.rank, CUTS)

    def update(self, manifest: str) -> bool:
        self.executor.update_weights(manifest)
        version = self.executor.active_weight_version
        assert version is not None
        return self.holds(version)

    def holds(self, version: int) -> bool:
        is_active = self.executor.active_weight_version == version
        return is_active and same(self.engine, self.expected(version))


@contextmanager
def ranks_of(num: int, **options: Any) -> Iterator[tuple[list[Child], int]]:
    """The ranks of a trainer, and the port of the store that they meet at."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                Child(TrainerRank, rank=rank, world_size=num, port=store.port, **options)
            )
            for rank in range(num)
        ]
        yield [child.ready() for child in children], store.port


def publish(children: Sequence[Child], version: int) -> str:
    for child in children:
        child.tell("publish", version=version)
    texts = {child.answer() for child in children}
    assert len(texts) == 1
    return str(texts.pop())


def test_three_trainers_feed_two_engines() -> None:
    degree = 2
    with ranks_of(3) as (trainers, _), ExitStack() as stack:
        engines = [
            stack.enter_context(Child(EngineRank, rank=rank, degree=degree))
            for rank in range(degree)
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
        Child(EngineRank, rank=0, degree=1) as engine,
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
        ranks_of(2, timeout_s=2.0) as (ranks, port),
        Child(EngineRank, rank=0, degree=1) as engine,
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
            fresh = Child(TrainerRank, rank=1, world_size=2, port=port)
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
