"""An engine for tests of what stands before a real one: its ranks are threads of this process.

Its weights are a number. It serves requests wherever it may: after each call of a driver, unless it
is paused, all ranks must hold one version, what is cached must be that version's, and so must the
label.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Barrier
from typing import Any, TypeVar

import pytest
import torch

from rl_bridge import RolloutExecutor, TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.engines.driver import EngineDriver
from rl_bridge.engines.rank import EngineRank, RankHost, RankInstaller, answer
from rl_bridge.engines.rpc import EngineClient, RankGroup, Replies, Reply
from rl_bridge.engines.serving import ServingOptions
from rl_bridge.installers.base import InstallProof

__all__ = [
    "WAIT_S",
    "Client",
    "Engine",
    "Model",
    "broken",
    "driven",
    "driver",
    "publish",
    "update",
]

WAIT_S = 20
FREEZE = ServingOptions(pause="keep", cache="recompute")

T = TypeVar("T")


def broken(*_args: Any, **_options: Any) -> None:
    raise RuntimeError("planted")


def publish(trainer: TensorBridge, version: int) -> WeightUpdateManifest:
    return trainer.publish({"w": torch.full((4,), float(version))}, weight_version=version)


class Model(RankInstaller):
    """A rank's model, which holds a version's number; and its installer."""

    def __init__(self) -> None:
        self.version = 0
        self.before: int | None = None
        self.manifest: WeightUpdateManifest | None = None

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self.manifest = manifest

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self.before, self.version = self.version, manifest.weight_version

    def prove(self) -> InstallProof:
        assert self.manifest is not None
        return InstallProof(method="digest", root=self.manifest.root)

    def undo(self) -> None:
        if self.before is not None:
            self.version, self.before = self.before, None

    def commit(self) -> None:
        self.before = None

    def abandon(self) -> None:
        """Nothing was staged."""

    def release(self, update_id: str) -> None:
        """Nothing is kept."""


class Group(RankGroup):
    """Ranks that are threads: all hear what all say."""

    def __init__(self, rank: int, size: int, shared: "Shared") -> None:
        super().__init__(rank, size)
        self._shared = shared

    def hear(self, text: str) -> list[str]:
        return self._shared.hear(self.rank, text)


class Shared:
    def __init__(self, size: int) -> None:
        self._barrier = Barrier(size)
        self._said = [""] * size

    def hear(self, rank: int, text: str) -> list[str]:
        self._said[rank] = text
        self._barrier.wait(WAIT_S)
        heard = list(self._said)
        self._barrier.wait(WAIT_S)
        return heard


class Host(RankHost):
    """What a rank is here."""

    name = "engine"

    def __init__(self, group: RankGroup) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.group = group
        self.installer = Model()

    def make_installer(self, options: Mapping[str, Any]) -> RankInstaller:
        return self.installer


class Engine:
    """All ranks, with the one scheduler that they have."""

    def __init__(self, ranks: int = 1) -> None:
        self.stopped = False
        self.modes: list[str | None] = []  # of pauses; None: it went on
        self.shown = "0@"
        self.cached: set[int] = set()
        self.keeps = ""  # why caches cannot be dropped
        self.serves = True
        self.start(ranks)

    def start(self, ranks: int) -> None:
        """Start it, or start it anew."""
        shared = Shared(ranks)
        self.hosts = [Host(Group(rank, ranks, shared)) for rank in range(ranks)]
        self.ranks = [EngineRank(host) for host in self.hosts]
        self.stopped, self.shown, self.cached = False, "0@", set()

    @property
    def models(self) -> list[Model]:
        return [host.installer for host in self.hosts]

    @property
    def versions(self) -> list[int]:
        return [model.version for model in self.models]

    @property
    def version(self) -> int:
        (version,) = set(self.versions)
        return version

    def ask(self, verb: str, payload: object) -> Replies:
        """One call on all ranks, at once."""

        def asked(rank: EngineRank) -> Reply:
            reply: Reply = json.loads(json.dumps(answer(rank, verb, payload)))
            return reply

        with ThreadPoolExecutor(len(self.ranks)) as threads:
            return list(threads.map(asked, self.ranks, timeout=WAIT_S))

    def told(self) -> Reply:
        """What its first rank says of itself."""
        return self.ask("describe", {})[0]

    def is_idle(self) -> bool:
        """Nothing of any update is left, and requests go on."""
        said = [(r["pending"], r["paused"], r["stage"]) for r in self.ask("describe", {})]
        return not self.stopped and set(said) == {(None, False, "idle")}

    def step(self) -> None:
        """A step of the model, unless it is paused; it caches what it makes."""
        if self.stopped or not self.serves:
            return
        self.cached.add(self.version)
        assert self.cached == {self.version}
        assert self.shown.startswith(f"{self.version}@"), (self.shown, self.version)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class Client(EngineClient):
    """One driver's."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(WAIT_S)
        self.engine = engine

    def _do(self, action: Callable[[], T]) -> T:
        self.engine.step()
        done = action()
        self.engine.step()
        return done

    def call(self, verb: str, payload: Reply, timeout_s: float) -> Replies:
        return self._do(lambda: self.engine.ask(verb, json.loads(json.dumps(payload))))

    def pause(self, mode: str | None, *, undoes: bool = False) -> None:
        self._do(partial(self._stop, "keep" if mode is None or undoes else mode))

    def _stop(self, mode: str) -> None:
        self.engine.stopped = True
        self.engine.modes.append(mode)

    def resume(self) -> None:
        self._do(self._go_on)

    def _go_on(self) -> None:
        self.engine.stopped = False
        self.engine.modes.append(None)

    def is_paused(self) -> bool | None:
        return self._do(lambda: self.engine.stopped)

    def drop_caches(self, policy: str | None) -> str:
        def drop() -> str:
            if not self.engine.keeps:
                self.engine.cached.clear()
            return self.engine.keeps

        return self._do(drop)

    def label(self) -> str | None:
        return self._do(lambda: self.engine.shown)

    def set_label(self, label: str) -> None:
        self._do(partial(setattr, self.engine, "shown", label))


def driver(engine: Engine, *, take_over: bool = False) -> EngineDriver:
    return EngineDriver(Client(engine), serving=FREEZE, options={}, take_over=take_over)


def update(adapter: EngineDriver, manifest: WeightUpdateManifest) -> None:
    """One update, step by step, as an executor takes it."""
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    adapter.prove()
    adapter.resume()
    adapter.commit()


@contextmanager
def driven(
    engine: Engine, adapter: EngineDriver | None = None
) -> Iterator[tuple[RolloutExecutor, TensorBridge]]:
    """An executor with a driver of its own."""
    adapter = driver(engine) if adapter is None else adapter
    with (
        make_weight_bridge("shared-memory", source_worker="driver") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        yield executor, bridge


# ---- fixtures -----------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2], ids=["one_rank", "two_ranks"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(request.param)
    yield engine
    engine.close()


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", source_worker="trainer", max_slots=8) as bridge:
        yield bridge
