"""Ranks of a trainer that publish as a group, as actors of Ray do it, tried without Ray."""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import GroupAborted, IncompleteCoverage, ModuleInstallAdapter
from rl_bridge.bridge.group_exchange import StoreExchange
from rl_bridge.bridge.pairing import PairChoice
from rl_bridge.bridge.resharding import TensorParallel, parallel
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.integrations.ray.answers import Announcement, RolloutAnswer
from rl_bridge.integrations.ray.lanes import GroupLane
from rl_bridge.manifest.placement import Placement
from rl_bridge.ray import PublisherSide, RolloutSide
from tests.groups.meshes import cut, model

HashStore = torch._C._distributed_c10d.HashStore
SHAPES = {"embed": (8, 6), "layer.w": (12, 8), "norm": (5,)}
DIMS = {"embed": 0, "layer.w": 1}
RANKS = 2
TIMEOUT_S = 30.0
MEMORY = PairChoice(transport="shared-memory", reason="a test", group="shared-memory").to_json()
BROADCAST = PairChoice(
    transport="broadcast",
    reason="a test",
    publisher_options={"address": "127.0.0.1"},
    group="broadcast",
).to_json()


class Rank:
    """One rank's side, and what it holds."""

    def __init__(self, rank: int, store: Any) -> None:
        self.rank = rank
        self.placed: Mapping[str, Placement] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.train(0)
        self.side = PublisherSide(lambda: self.tensors, rank=rank, make_lane=self.laned(store))

    def laned(self, store: Any) -> Callable[[str, TensorBridge], GroupLane]:
        def make_lane(name: str, bridge: TensorBridge) -> GroupLane:
            exchange = StoreExchange(store, rank=self.rank, world_size=RANKS, name=name)
            return GroupLane(bridge, exchange, lambda: self.placed, timeout_s=TIMEOUT_S)

        return make_lane

    def train(self, version: int) -> None:
        dims: dict[str, int | None] = {**dict.fromkeys(SHAPES), **DIMS}
        self.tensors, self.placed = cut(model(SHAPES, version), RANKS, dims)[self.rank]


class Run:
    """All ranks, called at once."""

    def __init__(self) -> None:
        store = HashStore()
        self.ranks = [Rank(rank, store) for rank in range(RANKS)]
        self.pool = ThreadPoolExecutor(RANKS)

    def all(self, call: Callable[[Rank], Any]) -> Any:
        """What all of them answer, which is the same."""
        answers = [one.result(TIMEOUT_S) for one in [self.pool.submit(call, r) for r in self.ranks]]
        assert all(one == answers[0] for one in answers)
        return answers[0]

    def publish(self, version: int) -> tuple[Announcement, dict[str, bytes]]:
        for rank in self.ranks:
            rank.train(version)
        told, manifests = self.all(lambda rank: rank.side.publish(version))
        return Announcement.from_json(told), manifests


class Rollout:
    """A share of every tensor, as one of two tensor-parallel ranks of an engine."""

    def __init__(self, rank: int, choice: bytes) -> None:
        self.rank = rank
        self.engine = {name: torch.zeros_like(one) for name, one in self.share(0).items()}
        wanted = parallel(tensor=TensorParallel(2, rank, DIMS))
        self.side = RolloutSide(lambda: ModuleInstallAdapter(self.engine), wanted=lambda: wanted)
        assert RolloutAnswer.from_json(self.side.join(choice)).error == ""

    def share(self, version: int) -> dict[str, torch.Tensor]:
        return {
            name: one.chunk(2, DIMS[name])[self.rank].contiguous() if name in DIMS else one
            for name, one in model(SHAPES, version).items()
        }

    def update(self, manifest: bytes) -> RolloutAnswer:
        return RolloutAnswer.from_json(self.side.update(manifest))

    def holds(self, version: int) -> bool:
        return all(torch.equal(self.engine[name], one) for name, one in self.share(version).items())


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    for rank in made.ranks:
        rank.side.close()
    made.pool.shutdown()


@pytest.fixture
def rollouts(run: Run) -> Iterator[list[Rollout]]:
    run.all(lambda rank: rank.side.serve(MEMORY))
    made = [Rollout(rank, MEMORY) for rank in range(2)]
    yield made
    for one in made:
        one.side.close()


def test_each_rollout_takes_its_share_and_answers_with_the_groups_root(
    run: Run, rollouts: list[Rollout]
) -> None:
    for version in range(1, 5):
        told, manifests = run.publish(version)
        for one in rollouts:
            answer = one.update(manifests["shared-memory"])
            assert answer.outcome == "acknowledged", answer
            assert (answer.active_version, answer.active_root) == (version, told.root)
            assert one.holds(version)
    for rank in run.ranks:
        reports = json.loads(rank.side.reports())["shared-memory"]
        assert [one["state"] for one in reports].count("acknowledged") == 2


def test_a_refused_version_leaves_the_answer_at_the_one_before(
    run: Run, rollouts: list[Rollout]
) -> None:
    told, manifests = run.publish(1)
    assert rollouts[0].update(manifests["shared-memory"]).outcome == "acknowledged"
    _, manifests = run.publish(2)
    changed = manifests["shared-memory"].replace(b'"weight_version":2', b'"weight_version":3')
    answer = rollouts[0].update(changed)
    assert answer.outcome == "refused"
    assert (answer.active_version, answer.active_root) == (1, told.root)
    assert rollouts[0].holds(1)


def test_a_late_lane_gets_the_sealed_version_of_all_ranks(
    run: Run, rollouts: list[Rollout]
) -> None:
    told, manifests = run.publish(1)
    for rank in run.ranks:
        rank.train(7)  # what they hold by now is not what was published
    manifest = run.all(lambda rank: rank.side.serve(BROADCAST))
    late = Rollout(1, BROADCAST)
    answer = late.update(manifest)
    assert (answer.active_version, answer.active_root) == (1, told.root), answer
    assert late.holds(1)
    _, manifests = run.publish(2)
    for one, lane in ((late, "broadcast"), (rollouts[0], "shared-memory")):
        assert one.update(manifests[lane]).outcome == "acknowledged"
        assert one.holds(2)
    late.side.close()


def test_where_a_rank_fails_no_rank_publishes_and_the_next_version_goes_through(
    run: Run, rollouts: list[Rollout]
) -> None:
    run.publish(1)
    for rank in run.ranks:
        rank.train(2)
    run.ranks[1].tensors.pop("embed")
    run.ranks[1].placed = {n: p for n, p in run.ranks[1].placed.items() if n != "embed"}
    futures = [run.pool.submit(rank.side.publish, 2) for rank in run.ranks]
    for future in futures:
        with pytest.raises((IncompleteCoverage, GroupAborted)):
            future.result(TIMEOUT_S)
    told, manifests = run.publish(3)
    assert told.weight_version == 3
    assert rollouts[0].update(manifests["shared-memory"]).active_version == 3


def test_a_lane_that_was_dropped_is_published_on_no_more(run: Run, rollouts: list[Rollout]) -> None:
    run.all(lambda rank: rank.side.serve(BROADCAST))
    assert set(run.publish(1)[1]) == {"shared-memory", "broadcast"}
    run.all(lambda rank: rank.side.drop("broadcast"))
    run.all(lambda rank: rank.side.drop("broadcast"))
    _, manifests = run.publish(2)
    assert set(manifests) == {"shared-memory"}
    assert rollouts[0].update(manifests["shared-memory"]).active_version == 2


def test_ranks_that_talk_over_another_store_go_on_with_their_versions(
    run: Run, rollouts: list[Rollout]
) -> None:
    told, manifests = run.publish(1)
    store = HashStore()
    for rank in run.ranks:
        rank.side.reseat(rank.laned(store))
    assert Announcement.from_json(run.all(lambda rank: rank.side.announcement())) == told
    assert rollouts[0].update(manifests["shared-memory"]).active_version == 1
    _, manifests = run.publish(2)
    assert rollouts[0].update(manifests["shared-memory"]).active_version == 2
    assert rollouts[0].holds(2)


def test_ranks_that_name_one_directory_of_state_do_not_get_into_each_others_way(
    run: Run, tmp_path: Path
) -> None:
    sides = []
    for rank in run.ranks:
        lanes = rank.laned(HashStore())
        sides.append(PublisherSide(dict, rank=rank.rank, make_lane=lanes, state_dir=str(tmp_path)))
    for side in sides:
        side.close()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rank-0", "rank-1"]
