"""A trainer, ranks of one, and rollouts as actors of this process; what Ray does is played here.

Each actor is one of the package's own mixins. Its calls run one at a time; those of a rank run in a
thread, since ranks wait for each other. A fleet's clock moves only when the fleet waits.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_bridge import ModuleInstallAdapter
from rl_bridge.assembly.wanted import TensorParallel, Wanted, parallel
from rl_bridge.manifest.parallel import Placement
from rl_bridge.ray import (
    EndpointFacts,
    FleetUpdate,
    PairChoice,
    RolloutActor,
    RolloutAnswer,
    RolloutFleet,
    WeightPublisherActor,
    actors,
    calls,
    group_store,
    trainers,
)
from rl_bridge.trainers.state_dict import Source
from tests.groups.meshes import cut, model, same, share

NEVER_S = 1e9
TIMEOUT_S = 60.0
SHAPES = {"embed": (8, 6), "layer.w": (12, 8), "norm": (5,)}
CUTS = {"embed": 0, "layer.w": 1}


class GetTimeoutError(Exception):
    """No answer in time."""


class RayError(Exception):
    """An actor is lost."""


class RayTaskError(RayError):
    """An actor's method raised."""


class Call:
    """One call of an actor: made in its turn, answered some time after it was asked for."""

    def __init__(self, future: "Future[Any]", ready_at: float) -> None:
        self.future = future
        self.ready_at = ready_at


class Cluster:
    """What fleets and actors know as Ray."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.address = "127.0.0.1"
        self.actors: list[Actor] = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        for module in (calls, trainers, group_store):
            monkeypatch.setattr(module, "require", self.require)
        monkeypatch.setattr(actors, "here", lambda: ("a node", self.address))

    def require(self, module: str = "ray") -> Any:
        if module == "ray.exceptions":
            return SimpleNamespace(
                GetTimeoutError=GetTimeoutError, RayError=RayError, RayTaskError=RayTaskError
            )
        return SimpleNamespace(get=self.get, wait=self.wait, remote=self.remote)

    def get(self, call: Call, *, timeout: float | None = None) -> Any:
        if timeout is not None and not self.wait([call], timeout=timeout)[0]:
            raise GetTimeoutError
        return call.future.result(TIMEOUT_S)

    def wait(self, waiting: Sequence[Call], *, timeout: float) -> tuple[list[Call], list[Call]]:
        first = min(waiting, key=lambda call: call.ready_at)
        if first.ready_at > self.now_s + timeout:
            self.now_s += timeout
            return [], list(waiting)
        self.now_s = max(self.now_s, first.ready_at)
        first.future.exception(TIMEOUT_S)
        return [first], [call for call in waiting if call is not first]

    def remote(self, **_options: object) -> Callable[[type], Any]:
        return lambda kind: SimpleNamespace(remote=lambda: Actor(self, kind))

    def close(self) -> None:
        for actor in reversed(self.actors):
            actor.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Actor:
    """Runs one method at a time; those of an asynchronous one as they come.

    Attributes:
        made: the actor's own object.
        takes_s: method -> how long its answer takes; one that never answers does nothing either.
        is_lost: whether it is dead, and every call fails.

    """

    def __init__(self, cluster: Cluster, make: Callable[[], Any]) -> None:
        self.takes_s: dict[str, float] = {}
        self.is_lost = False
        self._cluster = cluster
        self._make = make
        self.made, self._thread = make(), ThreadPoolExecutor(1)
        cluster.actors.append(self)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, name))

    def start_anew(self, make: Callable[[], Any] | None = None) -> None:
        """As Ray does: nothing is left of what it had. `make`: on another machine."""
        self.stop()
        self.made, self._thread = (make or self._make)(), ThreadPoolExecutor(1)

    def stop(self) -> None:
        self._thread.shutdown()
        if hasattr(self.made, "close_weights"):
            self.made.close_weights()

    def _call(self, name: str, *given: Any) -> Call:
        asked = given[1] if name == "for_weight_fleet" else name
        takes_s, now = self.takes_s.get(asked, 0.0), self._cluster.now_s
        if takes_s >= NEVER_S:
            return Call(Future(), NEVER_S)
        method = _die if self.is_lost else getattr(self.made, name)
        if inspect.iscoroutinefunction(method):
            future = asyncio.run_coroutine_threadsafe(method(*given), self._cluster.loop)
        else:
            future = self._thread.submit(method, *given)
        if not isinstance(self.made, Rank):
            future.exception(TIMEOUT_S)
        return Call(future, now + takes_s)


def _die(*_given: object) -> None:
    raise RayError


def answer(text: bytes) -> RolloutAnswer:
    return RolloutAnswer.from_json(text)


# ---- a trainer alone -----------------------------------------------------------------------------


def weights() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0), "b": torch.ones(3, 2)}


class Learner(WeightPublisherActor):
    """A trainer of one dict of weights."""

    def __init__(self, held: dict[str, torch.Tensor] | None = None) -> None:
        self.held = weights() if held is None else held
        self.source: Callable[[], Source] = lambda: self.held

    def weights_to_publish(self) -> Source:
        return self.source()

    def step(self) -> None:
        for tensor in self.held.values():
            tensor.add_(1)


class FarLearner(Learner):
    """A trainer on another machine."""

    def weight_facts(self) -> bytes:
        return _elsewhere(super().weight_facts(), "broadcast", probe=None)


class Engine(RolloutActor):
    """A rollout of this machine, and what it holds."""

    def __init__(self) -> None:
        self.engine = self.expected(0)
        for tensor in self.engine.values():
            tensor.zero_()
        self.adapter: Callable[[], ModuleInstallAdapter | None]
        self.adapter = lambda: ModuleInstallAdapter(self.engine)

    def weight_adapter(self) -> ModuleInstallAdapter | None:
        return self.adapter()

    def expected(self, version: int) -> dict[str, torch.Tensor]:
        del version
        return weights()

    def holds(self, wanted: Mapping[str, torch.Tensor] | int) -> bool:
        return same(self.engine, self.expected(wanted) if isinstance(wanted, int) else wanted)

    def joined(self, choice: bytes) -> "Engine":
        """Itself, on a channel."""
        assert answer(self.join_weights(choice)).error == ""
        return self


class Elsewhere(Engine):
    """A rollout of another machine, which has one transport over the network."""

    reaches = "broadcast"

    def find_weights(self, publisher_facts: bytes) -> bytes:
        return _elsewhere(super().find_weights(publisher_facts), self.reaches, opened=None)


def _elsewhere(facts: bytes, reaches: str, **changes: None) -> bytes:
    found = EndpointFacts.from_json(facts)
    blocked = {name: "a test" for name in ("nixl", "broadcast") if name != reaches}
    changed = {"boot_id": "another", "transports": {**found.transports, **blocked}, **changes}
    return found.model_copy(update=changed).to_json()


class Run:
    """A fleet of one trainer, and its rollouts."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.trainer = Actor(cluster, Learner)
        self.fleet = RolloutFleet(self.trainer, timeout_s=TIMEOUT_S)
        self.rollouts: dict[str, Actor] = {}
        self.version = 0

    def join(self, *names: str, kind: type[Engine] = Engine) -> None:
        for name in names:
            self.rollouts[name] = Actor(self.cluster, kind)
            self.fleet.join(name, self.rollouts[name])

    def update(self) -> FleetUpdate:
        self.version += 1
        self.trainer.made.step()
        return self.fleet.update(self.version)

    @property
    def bridges(self) -> dict[str, Any]:
        """What the trainer publishes on."""
        channels = self.trainer.made._publisher_endpoint()._channels
        return {name: channels[name].bridge for name in sorted(channels)}


# ---- a trainer of several ranks ------------------------------------------------------------------


class Rank(WeightPublisherActor):
    """One rank of a trainer, with its own part of every tensor."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.train(0)

    def train(self, version: int) -> None:
        dims: dict[str, int | None] = {**dict.fromkeys(SHAPES), **CUTS}
        self.held, self.placed = cut(model(SHAPES, version), self.world_size, dims)[self.rank]

    def weights_to_publish(self) -> Source:
        return self.held

    def weight_placements(self) -> Mapping[str, Placement]:
        return self.placed


class Share(Engine):
    """One of two ranks of an engine, with its share of every tensor."""

    def __init__(self, rank: int = 1) -> None:
        self.rank = rank
        super().__init__()

    def weight_layout(self) -> Wanted:
        return parallel(tensor=TensorParallel(2, self.rank, CUTS))

    def expected(self, version: int) -> dict[str, torch.Tensor]:
        return share(model(SHAPES, version), 2, self.rank, dict(CUTS))


class FarShare(Share, Elsewhere):
    """The same, of another machine."""


class GroupRun:
    """Ranks, a rollout, and fleets of them."""

    def __init__(self, cluster: Cluster, num_ranks: int = 2) -> None:
        self.ranks = [Actor(cluster, partial(Rank, rank, num_ranks)) for rank in range(num_ranks)]
        self.cluster, self.rollouts = cluster, {"one": Actor(cluster, Share)}
        self.version = 0

    def fleet(self) -> RolloutFleet:
        made = RolloutFleet(self.ranks, timeout_s=TIMEOUT_S, take_over=True)
        for name, rollout in self.rollouts.items():
            made.join(name, rollout)
        return made

    def join(self, fleet: RolloutFleet, name: str, kind: type[Engine]) -> Engine:
        self.rollouts[name] = Actor(self.cluster, kind)
        fleet.join(name, self.rollouts[name])
        made: Engine = self.rollouts[name].made
        return made

    def train(self) -> int:
        self.version += 1
        for rank in self.ranks:
            rank.made.train(self.version)
        return self.version

    def update(self, fleet: RolloutFleet) -> FleetUpdate:
        """One that comes through, to the byte."""
        update = fleet.update(self.train())
        update.require_all()
        assert all(self.rollouts[name].made.holds(self.version) for name in update.answers)
        return update

    @property
    def channels(self) -> list[list[str]]:
        """What each rank publishes on."""
        return [sorted(rank.made._publisher_endpoint()._channels) for rank in self.ranks]


def choice(transport: str, **options: Any) -> bytes:
    return PairChoice(transport=transport, reason="a test", **options).to_json()


MEMORY = choice("shared-memory")
BROADCAST = choice("broadcast", publisher_options={"address": "127.0.0.1"})
