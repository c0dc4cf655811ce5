"""Ranks of a trainer that publish as a group, and rollouts that take their share, without Ray."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rl_bridge import ModuleInstallAdapter
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.groups.exchange import StoreExchange
from rl_bridge.groups.wanted import TensorParallel, parallel
from rl_bridge.manifest.parallel import Placement
from rl_bridge.ray import EndpointOptions, PublisherEndpoint, RolloutEndpoint
from rl_bridge.ray.calls import Announcement, RolloutAnswer
from rl_bridge.ray.pairing import PairChoice
from rl_bridge.ray.publisher_endpoint import GroupChannel
from tests.groups.meshes import cut, model, same, share

__all__ = ["BROADCAST", "MEMORY", "NIXL", "TIMEOUT_S", "HashStore", "Rank", "Rollout", "Run"]

HashStore = torch._C._distributed_c10d.HashStore
SHAPES = {"embed": (8, 6), "layer.w": (12, 8), "norm": (5,)}
DIMS = {"embed": 0, "layer.w": 1}
RANKS = 2
TIMEOUT_S = 30.0
NIXL = PairChoice(transport="nixl", reason="a test", group="nixl").to_json()
MEMORY = PairChoice(transport="shared-memory", reason="a test", group="shared-memory").to_json()
BROADCAST = PairChoice(
    transport="broadcast",
    reason="a test",
    publisher_options={"address": "127.0.0.1"},
    group="broadcast",
).to_json()


class Rank:
    """One rank's endpoint, and what it holds."""

    def __init__(self, rank: int, store: Any) -> None:
        self.rank = rank
        self.placed: Mapping[str, Placement] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.train(0)
        self.endpoint = PublisherEndpoint(
            lambda: self.tensors, EndpointOptions(rank=rank), make_channel=self.made_on(store)
        )

    def made_on(self, store: Any) -> Callable[[str, TensorBridge], GroupChannel]:
        def make_channel(name: str, bridge: TensorBridge) -> GroupChannel:
            exchange = StoreExchange(store, rank=self.rank, world_size=RANKS, name=name)
            return GroupChannel(bridge, exchange, lambda: self.placed, timeout_s=TIMEOUT_S)

        return make_channel

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

    def close(self) -> None:
        for rank in self.ranks:
            rank.endpoint.close()
        self.pool.shutdown()

    def publish(self, version: int) -> tuple[Announcement, dict[str, bytes]]:
        for rank in self.ranks:
            rank.train(version)
        told, manifests = self.all(lambda rank: rank.endpoint.publish(version))
        return Announcement.from_json(told), manifests


class Rollout:
    """A share of every tensor, as one of two tensor-parallel ranks of an engine."""

    def __init__(self, rank: int, choice: bytes) -> None:
        self.rank = rank
        self.engine = {name: torch.zeros_like(one) for name, one in self.share(0).items()}
        wanted = parallel(tensor=TensorParallel(2, rank, DIMS))
        self.endpoint = RolloutEndpoint(
            lambda: ModuleInstallAdapter(self.engine), wanted=lambda: wanted
        )
        assert RolloutAnswer.from_json(self.endpoint.join(choice)).error == ""

    def share(self, version: int) -> dict[str, torch.Tensor]:
        return share(model(SHAPES, version), 2, self.rank, dict(DIMS))

    def update(self, manifest: bytes) -> RolloutAnswer:
        return RolloutAnswer.from_json(self.endpoint.update(manifest))

    def holds(self, version: int) -> bool:
        return same(self.engine, self.share(version))

    def close(self) -> None:
        self.endpoint.close()
