"""An SGLang engine of one rank without SGLang, and drivers that it may have several of."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from rl_bridge import TensorBridge, WeightBridgeError, WeightUpdateManifest, make_weight_bridge
from rl_bridge.engines.sglang import calls, plugin, rank, support, votes
from rl_bridge.engines.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.engines.sglang.handles import Answer, EngineHandle
from rl_bridge.engines.sglang.plugin import PREFIX, SENDER, sender
from rl_bridge.engines.sglang.routes import Route
from tests.integrations.test_sglang_exchange import Model, version

__all__ = [
    "Engine",
    "Handle",
    "Loader",
    "LostError",
    "drivers",
    "end",
    "engine",
    "importing",
    "interrupt",
    "loading",
    "trainer",
    "update",
]


class Context:
    """What SGLang says there of how an engine was started."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {"speculative_algorithm": None, "enable_torch_compile": False}

    def _bag(self) -> SimpleNamespace:
        return SimpleNamespace(**self.told)

    get_parallel = get_serving = get_spec = get_memory = _bag

    def get_flags(self) -> SimpleNamespace:
        return SimpleNamespace(capture=self._bag())


class Engine:
    """One rank, asked as SGLang's scheduler asks it; it has what a load of SGLang's own needs."""

    model_config = SimpleNamespace(model_path="")

    def __init__(self) -> None:
        self.model = Model()
        self.context = Context()
        self.label = "user's"
        self.is_paused = False
        self.pauses: list[str | None] = []  # modes; None: it went on
        self.flushes = True
        self.refuses = ""  # a route of SGLang's own
        self.is_in_session = False
        self.named = ""  # the folder that it took last
        self.is_written_to_paused = True

    def get_model(self) -> Model:
        return self.model

    def ask(self, verb: str, **given: Any) -> dict[str, Any]:
        text = json.dumps({"verb": verb, "call": 1, **given})
        told: dict[str, Any] = json.loads(self.answer(text))
        return told

    def answer(self, text: str) -> str:
        if json.loads(text)["verb"] in {"install", "undo"}:
            self.is_written_to_paused &= self.is_paused
        return calls.answer(self.model, lambda: self.flushes, text)

    def turn_session(self, *, is_on: bool) -> tuple[bool, str]:
        if self.is_in_session == is_on:
            return False, f"a session is open: {is_on}"
        self.is_in_session = is_on
        return True, ""

    def prepare(self, manifest: Any) -> dict[str, Any]:
        return self.ask("prepare", manifest=manifest.to_json(), **{"import": True})

    def update(self, manifest: Any) -> None:
        asked = {"update_id": manifest.update_id}
        told = [self.prepare(manifest)]
        told += [self.ask(verb, **asked) for verb in ("install", "prove", "commit")]
        assert all(one["ok"] for one in told), told


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(support, "require", lambda _: engine.context)
    monkeypatch.setattr(rank, "version", lambda: "0.5.23")
    monkeypatch.setattr(votes, "world_size", lambda: 1)
    monkeypatch.setattr(votes, "this_rank", lambda: 0)
    monkeypatch.setattr(votes, "all_reply", lambda reply, _: [reply])
    return engine


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("local", source_worker="trainer") as bridge:
        yield bridge


class LostError(WeightBridgeError):
    """A call that was cut off, or an answer that did not come."""


class Handle(EngineHandle):
    """One driver's, of an engine that several have; at one of its calls something is done first."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(20)
        self._engine = engine
        self._left = 0
        self._named = ""
        self._first: Callable[[], object] = lambda: None
        self._lost: tuple[str, bool] | None = None
        self.came_in_at = ""

    def lose(self, call: str, *, is_made: bool) -> None:
        """The next call of that name is not made; or it is, and its answer is lost."""
        self._lost = call, is_made

    def interrupt(self, at: int | str, first: Callable[[], object]) -> None:
        """Before the call that is the `at`-th from now on, or the first one of that name."""
        self._left, self._named = (0, at) if isinstance(at, str) else (at, "")
        self._first = first

    def catch_up(self) -> None:
        """Do it now, if that call did not come."""
        if self._left > 0:
            self._left = 0
            self._first()

    def _made(self, name: str, call: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left == 0 or self._named == name:
            self.came_in_at, self._named = name, ""
            self._first()
        if self._lost == (name, False):
            self._lost = None
            raise LostError
        answer = call()
        if self._lost == (name, True):
            self._lost = None
            raise LostError
        return answer

    def ask(self, route: str, **body: Any) -> tuple[bool, Any]:
        is_ours = route == "get_weights_by_name"
        name = json.loads(body["name"].removeprefix(PREFIX))["verb"] if is_ours else route
        answer: tuple[bool, Any] = self._made(name, lambda: self._asked(route, body))
        return answer

    def _asked(self, route: str, body: dict[str, Any]) -> tuple[bool, Any]:
        if route == self._engine.refuses:
            return False, "planted"
        if route == "update_weight_version":
            self._engine.label = body["new_version"]
        if route in {"pause_generation", "continue_generation"}:
            self._engine.is_paused = route == "pause_generation"
            self._engine.pauses.append(body.get("mode"))
        if route in {"begin_weight_update", "end_weight_update"}:
            return self._engine.turn_session(is_on=route == "begin_weight_update")
        if route == "update_weights_from_tensor":
            done: tuple[bool, Any] = plugin._guarded(load_bucket, self._engine, body["bucket"])
            return done
        if route != "get_weights_by_name":
            return True, ""
        text = body["name"].removeprefix(PREFIX)
        return True, list(self._engine.answer(text).encode())

    def flush(self) -> Answer:
        answer: Answer = self._made("flush_cache", lambda: (True, ""))
        return answer

    def label(self) -> str:
        label: str = self._made("model_info", lambda: self._engine.label)
        return label

    def model_path(self) -> str:
        return ""


def load_bucket(engine: Engine, bucket: Any) -> tuple[bool, str]:
    engine.model.load_weights(iter(bucket["tensors"].items()))
    return True, ""


class Loader(Route):
    """Brings the bytes itself, as all routes but ``import`` do."""

    def load(self, manifest: WeightUpdateManifest, tensors: Any) -> None:
        bucket = {"tensors": tensors, SENDER: sender(self._handle.name)}
        with self._session():
            self._handle.do("update_weights_from_tensor", bucket=bucket)


def importing(engine: Engine) -> SGLangInstallAdapter:
    return SGLangInstallAdapter(Handle(engine))


def loading(engine: Engine) -> SGLangInstallAdapter:
    adapter = importing(engine)
    adapter._route = Loader(adapter._handle)
    return adapter


def drivers(engine: Engine) -> tuple[SGLangInstallAdapter, SGLangInstallAdapter]:
    return importing(engine), importing(engine)


def update(adapter: SGLangInstallAdapter, manifest: WeightUpdateManifest) -> None:
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    adapter.resume()
    adapter.commit()


def end(
    adapter: SGLangInstallAdapter, manifest: WeightUpdateManifest, *, is_installed: bool = False
) -> None:
    """Go on with an update as an executor does."""
    try:
        if not is_installed:
            adapter.install(manifest, version(manifest.weight_version))
        adapter.prove()
        adapter.resume()
        adapter.commit()
    except WeightBridgeError:
        with suppress(WeightBridgeError):
            adapter.undo()


def interrupt(adapter: SGLangInstallAdapter, at: int | str, first: Callable[[], object]) -> Handle:
    handle = adapter._handle
    assert isinstance(handle, Handle)
    handle.interrupt(at, first)
    return handle
