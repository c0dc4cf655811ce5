"""Ranks of a trainer and of engines that cut the same model, as actors of Ray."""

import os
import signal
from typing import Any

import ray
import torch

from tests.ray.rig import Rank, Share


class Owner(Rank):
    """One rank of a trainer, in a process of its own."""

    def __init__(self, rank: int, world_size: int) -> None:
        torch.set_num_threads(1)
        super().__init__(rank, world_size)

    def pid(self) -> int:
        return os.getpid()


class EngineShare(Share):
    """One rank of an engine that is cut in two, in a process of its own."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        super().__init__(rank)

    def has(self, version: int) -> bool:
        return self.check_weights() == version and self.holds(version)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def owners(num: int) -> list[Any]:
    """The ranks of a trainer."""
    kind = ray.remote(num_cpus=0.1)(Owner)
    return [kind.remote(rank, num) for rank in range(num)]


def share(rank: int) -> Any:
    """One rank of an engine."""
    return ray.remote(num_cpus=0.1)(EngineShare).remote(rank)
