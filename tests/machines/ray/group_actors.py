"""Ranks of a trainer and of engines that cut the same model, as actors of Ray."""

import os
import signal
from collections.abc import Mapping
from typing import Any

import ray
import torch

from rl_bridge import ModuleInstallAdapter
from rl_bridge.groups.wanted import TensorParallel, Wanted, parallel
from rl_bridge.manifest.parallel import Placement
from rl_bridge.ray import RolloutActor, WeightPublisherActor
from rl_bridge.trainers.state_dict import Source
from tests.groups.meshes import cut, model, same
from tests.groups.meshes import share as share_of

__all__ = ["Owner", "Share", "owners", "share"]

SHAPES = {"embed": (8, 6), "layer.w": (12, 8), "norm": (5,)}
DIMS = {"embed": 0, "layer.w": 1}


class Owner(WeightPublisherActor):
    """One rank of a trainer, with its own part of every tensor."""

    def __init__(self, rank: int, world_size: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.world_size = rank, world_size
        self.train(0)

    def train(self, version: int) -> None:
        dims: dict[str, int | None] = {**dict.fromkeys(SHAPES), **DIMS}
        self.held, self.placed = cut(model(SHAPES, version), self.world_size, dims)[self.rank]

    def weights_to_publish(self) -> Source:
        return self.held

    def weight_placements(self) -> Mapping[str, Placement]:
        return self.placed

    def pid(self) -> int:
        return os.getpid()


class Share(RolloutActor):
    """One rank of an engine that is cut in two."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.engine = {name: torch.zeros_like(one) for name, one in self.expected(0).items()}

    def weight_adapter(self) -> ModuleInstallAdapter:
        return ModuleInstallAdapter(self.engine)

    def weight_layout(self) -> Wanted:
        return parallel(tensor=TensorParallel(2, self.rank, DIMS))

    def expected(self, version: int) -> dict[str, torch.Tensor]:
        return share_of(model(SHAPES, version), 2, self.rank, dict(DIMS))

    def holds(self, version: int) -> bool:
        return self.check_weights() == version and same(self.engine, self.expected(version))

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def owners(num: int) -> list[Any]:
    """The ranks of a trainer."""
    kind = ray.remote(num_cpus=0.1)(Owner)
    return [kind.remote(rank, num) for rank in range(num)]


def share(rank: int) -> Any:
    """One rank of an engine."""
    return ray.remote(num_cpus=0.1)(Share).remote(rank)
