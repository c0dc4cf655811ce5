"""Actors of this process, and a clock that waiting moves: what a fleet calls, without Ray."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_bridge import ModuleInstallAdapter
from rl_bridge.ray import (
    EndpointOptions,
    FleetUpdate,
    PublisherEndpoint,
    RolloutEndpoint,
    RolloutFleet,
    WeightPublisherActor,
    calls,
    trainers,
)
from rl_bridge.ray.pairing import EndpointFacts
from rl_bridge.ray.publisher_endpoint import MakeChannel
from rl_bridge.trainers.state_dict import Source

__all__ = ["NEVER_S", "TIMEOUT_S", "Actor", "Cluster", "Elsewhere", "Rollout", "Run", "Trainer"]

NEVER_S = 1e9
TIMEOUT_S = 60.0


class GetTimeoutError(Exception):
    """No answer in time."""


class RayError(Exception):
    """An actor is lost."""


class RayTaskError(RayError):
    """An actor's method raised."""


class Call:
    """One call of an actor: made in its turn, answered some time after it was asked for."""

    def __init__(self, run: Callable[[], Any], ready_at: float) -> None:
        self.ready_at = ready_at
        self._error: Exception | None = None
        try:
            self._answer = run()
        except Exception as error:  # noqa: BLE001 - raised where it is asked for
            self._error = error

    def answer(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer


class Cluster:
    """What the fleet knows as Ray."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        for module in (calls, trainers):
            monkeypatch.setattr(module, "require", self.require)

    def require(self, module: str = "ray") -> Any:
        if module == "ray.exceptions":
            return SimpleNamespace(
                GetTimeoutError=GetTimeoutError, RayError=RayError, RayTaskError=RayTaskError
            )
        return SimpleNamespace(get=self.get, wait=self.wait)

    def get(self, call: Call, *, timeout: float) -> Any:
        if not self.wait([call], timeout=timeout)[0]:
            raise GetTimeoutError
        return call.answer()

    def wait(self, waiting: Sequence[Call], *, timeout: float) -> tuple[list[Call], list[Call]]:
        first = min(waiting, key=lambda call: call.ready_at)
        if first.ready_at > self.now_s + timeout:
            self.now_s += timeout
            return [], list(waiting)
        self.now_s = max(self.now_s, first.ready_at)
        return [first], [call for call in waiting if call is not first]


class Actor:
    """Its methods are those of an endpoint, by the names that actors have for them.

    Attributes:
        takes_s: method -> how long its answer takes; one that never answers does nothing either.
        is_lost: whether it is dead, and every call fails.

    """

    def __init__(self, cluster: Cluster, names: dict[str, str] | None = None) -> None:
        self.takes_s: dict[str, float] = {}
        self.is_lost = False
        self._cluster = cluster
        self._names = names

    @property
    def target(self) -> Any:
        """Whose methods are called."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or (self._names is not None and name not in self._names):
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *given: self._call(name, given))

    def _call(self, name: str, given: tuple[Any, ...]) -> Call:
        asked = given[1] if name == "for_weight_fleet" else name
        takes_s = self.takes_s.get(asked, 0.0)
        if takes_s >= NEVER_S:
            return Call(lambda: None, NEVER_S)
        method = name if self._names is None else self._names[name]
        called = _die if self.is_lost else getattr(self.target, method)
        return Call(lambda: called(*given), self._cluster.now_s + takes_s)


def _die(*_given: object) -> None:
    raise RayError


class Learner(WeightPublisherActor):
    """A trainer of one dict of weights."""

    def __init__(self, trainer: "Trainer", kind: type[PublisherEndpoint]) -> None:
        self._trainer, self._kind = trainer, kind

    def weights_to_publish(self) -> Source:
        return self._trainer.weights

    def _make_endpoint(self, rank: int, make_channel: MakeChannel | None) -> PublisherEndpoint:
        options = EndpointOptions(rank=rank, address=self._trainer.address)
        return self._kind(self.weights_to_publish, options, make_channel=make_channel)


class Trainer(Actor):
    """A trainer's actor, over one dict of weights.

    Attributes:
        weights: the dict.
        address: where it listens, from its next start on.
        target: the actor's own object.

    """

    target: Any = None

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.weights = {"a": torch.arange(6.0)}
        self.address = "127.0.0.1"
        self.target = Learner(self, PublisherEndpoint)

    @property
    def endpoint(self) -> PublisherEndpoint:
        endpoint: PublisherEndpoint = self.target._publisher_endpoint()
        return endpoint

    def start_anew(self, kind: type[PublisherEndpoint] = PublisherEndpoint) -> None:
        """As Ray does: nothing is left of what it published and opened."""
        self.target.close_weights()
        self.target = Learner(self, kind)

    def move(self) -> None:
        """As Ray does where a machine is lost: started anew on another one."""
        self.start_anew(_FarTrainer)


class Rollout(Actor):
    """A rollout's actor, of this machine.

    Attributes:
        engine: what it holds.

    """

    def __init__(self, cluster: Cluster) -> None:
        self.engine = {"a": torch.zeros(6)}
        names = {
            "find_weights": "facts",
            "join_weights": "join",
            "update_weights": "update",
            "weight_status": "status",
        }
        super().__init__(cluster, names)
        self.endpoint = self._new_endpoint()

    @property
    def target(self) -> Any:
        return self.endpoint

    def start_anew(self) -> None:
        """As Ray does: it has not joined."""
        self.endpoint.close()
        self.endpoint = self._new_endpoint()

    def _new_endpoint(self) -> RolloutEndpoint:
        return RolloutEndpoint(lambda: ModuleInstallAdapter(self.engine))


class Elsewhere(Rollout):
    """One of another machine, which has broadcast and nothing else."""

    def _new_endpoint(self) -> RolloutEndpoint:
        return _Far(lambda: ModuleInstallAdapter(self.engine))


class _Far(RolloutEndpoint):
    def facts(self, publisher: bytes) -> bytes:
        return _elsewhere(super().facts(publisher), opened=None)


class _FarTrainer(PublisherEndpoint):
    def facts(self) -> bytes:
        return _elsewhere(super().facts(), probe=None)


def _elsewhere(facts: bytes, **changes: None) -> bytes:
    found = EndpointFacts.from_json(facts)
    transports = {**found.transports, "nixl": "a test"}
    changed = {"boot_id": "another", "transports": transports, **changes}
    return found.model_copy(update=changed).to_json()


class Run:
    """A fleet, and what it is made of."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.trainer = Trainer(cluster)
        self.fleet = RolloutFleet(self.trainer, timeout_s=TIMEOUT_S)
        self.rollouts: dict[str, Rollout] = {}
        self.version = 0

    def join(self, *names: str, kind: type[Rollout] = Rollout) -> None:
        for name in names:
            self.rollouts[name] = kind(self.cluster)
            self.fleet.join(name, self.rollouts[name])

    def update(self) -> FleetUpdate:
        self.version += 1
        self.trainer.weights["a"].add_(1)
        return self.fleet.update(self.version)

    @property
    def channels(self) -> list[str]:
        """What the trainer publishes on."""
        return sorted(self.trainer.endpoint._channels)

    def close(self) -> None:
        for one in (*self.rollouts.values(), self.trainer):
            one.endpoint.close()
