"""Ranks of a trainer as actors with a thread each, which publish together; without Ray."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_bridge import ModuleInstallAdapter
from rl_bridge.manifest.parallel import Placement
from rl_bridge.ray import (
    FleetUpdate,
    RolloutActor,
    RolloutFleet,
    WeightPublisherActor,
    actors,
    calls,
    group_store,
    trainers,
)
from rl_bridge.trainers.state_dict import Source
from tests.groups.meshes import cut, model, same
from tests.ray.actors import GetTimeoutError, RayError, RayTaskError

__all__ = ["Actor", "Cluster", "Run"]

SHAPES = {"embed": (8, 6), "norm": (5,)}
DIMS: dict[str, int | None] = {"embed": 0, "norm": None}
TIMEOUT_S = 30.0


class Cluster:
    """What fleet and actors know as Ray."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors: list[Actor] = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        for module in (calls, trainers, group_store):
            monkeypatch.setattr(module, "require", self.require)
        monkeypatch.setattr(actors, "here", lambda: ("a node", "127.0.0.1"))

    def require(self, module: str = "ray") -> Any:
        if module == "ray.exceptions":
            return SimpleNamespace(
                GetTimeoutError=GetTimeoutError, RayError=RayError, RayTaskError=RayTaskError
            )
        return SimpleNamespace(get=self.get, wait=self.wait, remote=self.remote)

    def get(self, call: "futures.Future[Any]", *, timeout: float | None = None) -> Any:
        if not futures.wait([call], timeout).done:
            raise GetTimeoutError
        return call.result()

    def wait(self, waiting: Sequence[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        done, rest = futures.wait(waiting, timeout, return_when=futures.FIRST_COMPLETED)
        return list(done), list(rest)

    def remote(self, **_options: object) -> Callable[[type], Any]:
        return lambda kind: SimpleNamespace(remote=lambda: Actor(self, kind))

    def close(self) -> None:
        for actor in self.actors:
            actor.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Actor:
    """Runs one method at a time; those of an asynchronous one as they come."""

    def __init__(self, cluster: Cluster, make: Callable[[], Any]) -> None:
        self._cluster = cluster
        self._make = make
        self.made, self._thread = make(), futures.ThreadPoolExecutor(1)
        cluster.actors.append(self)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self._call(getattr(self.made, name), given))

    def start_anew(self) -> None:
        """As Ray does: nothing is left of what it had."""
        self.stop()
        self.made, self._thread = self._make(), futures.ThreadPoolExecutor(1)

    def stop(self) -> None:
        self._thread.shutdown()
        if hasattr(self.made, "close_weights"):
            self.made.close_weights()

    def _call(self, method: Any, given: tuple[Any, ...]) -> "futures.Future[Any]":
        if inspect.iscoroutinefunction(method):
            return asyncio.run_coroutine_threadsafe(method(*given), self._cluster.loop)
        return self._thread.submit(method, *given)


class Rank(WeightPublisherActor):
    """One rank of a trainer, with its own part of every tensor."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.train(0)

    def train(self, version: int) -> None:
        self.held, self.placed = cut(model(SHAPES, version), self.world_size, DIMS)[self.rank]

    def weights_to_publish(self) -> Source:
        return self.held

    def weight_placements(self) -> Mapping[str, Placement]:
        return self.placed


class Whole(RolloutActor):
    """An engine that holds every tensor."""

    def __init__(self) -> None:
        self.engine = {name: torch.zeros_like(one) for name, one in model(SHAPES, 0).items()}

    def weight_adapter(self) -> ModuleInstallAdapter:
        return ModuleInstallAdapter(self.engine)

    def holds(self, version: int) -> bool:
        return same(self.engine, model(SHAPES, version))


class Run:
    """Ranks, a rollout, and fleets of them."""

    def __init__(self, cluster: Cluster, num_ranks: int) -> None:
        self.ranks = [Actor(cluster, partial(Rank, rank, num_ranks)) for rank in range(num_ranks)]
        self.cluster, self.rollout = cluster, Actor(cluster, Whole)
        self.version = 0

    def fleet(self) -> RolloutFleet:
        made = RolloutFleet(self.ranks, timeout_s=TIMEOUT_S, take_over=True)
        made.join("one", self.rollout)
        return made

    def update(self, fleet: RolloutFleet) -> FleetUpdate:
        """One that comes through, to the byte."""
        self.version += 1
        for rank in self.ranks:
            rank.made.train(self.version)
        update = fleet.update(self.version)
        update.require_all()
        assert self.rollout.made.holds(self.version)
        return update

    @property
    def channels(self) -> list[list[str]]:
        """What each rank publishes on."""
        return [sorted(rank.made._publisher_endpoint()._channels) for rank in self.ranks]
