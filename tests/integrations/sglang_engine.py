"""An SGLang engine of one rank without SGLang, and clients that call it as SGLang is called."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rl_bridge import WeightBridgeError, WeightUpdateManifest
from rl_bridge.engines.rpc import RankGroup, Reply
from rl_bridge.engines.sglang import host, plugin
from rl_bridge.engines.sglang.client import Answer, SGLangClient
from rl_bridge.engines.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.engines.sglang.loaders import SGLangLoader
from rl_bridge.engines.sglang.plugin import PREFIX, SENDER, sender
from tests.installers.test_model_installer import Model

__all__ = ["Client", "Engine", "LostError", "engine", "importing", "loading", "update"]


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
        self.flushes: bool | None = True
        self.refuses = ""  # a route of SGLang's own
        self.is_in_session = False
        self.named = ""  # the folder that it took last

    def get_model(self) -> Model:
        return self.model

    def answer(self, text: str) -> str:
        return host.answer_text(self.model, lambda: self.flushes, text)

    def told(self) -> Reply:
        """What its rank says of itself."""
        (reply,) = json.loads(self.answer(json.dumps({"verb": "describe"})))
        return dict(reply)

    def turn_session(self, *, is_on: bool) -> tuple[bool, str]:
        if self.is_in_session == is_on:
            return False, f"a session is open: {is_on}"
        self.is_in_session = is_on
        return True, ""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(host, "require", lambda _: engine.context)
    monkeypatch.setattr(host, "version", lambda: "0.5.23")
    monkeypatch.setattr(host, "tensor_group", lambda: RankGroup(0, 1))
    return engine


class LostError(WeightBridgeError):
    """A call that was cut off, or an answer that did not come."""


class Client(SGLangClient):
    """One driver's; at one of its calls something is done first, or its answer is lost."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(20)
        self._engine = engine
        self._named = ""
        self._first: Callable[[], object] = lambda: None
        self._lost: tuple[str, bool] | None = None

    def lose(self, call: str, *, is_made: bool) -> None:
        """The next call of that name is not made; or it is, and its answer is lost."""
        self._lost = call, is_made

    def before(self, call: str, first: Callable[[], object]) -> None:
        """Do something in front of the next call of that name."""
        self._named, self._first = call, first

    def _made(self, name: str, call: Callable[[], Any]) -> Any:
        if self._named == name:
            self._named = ""
            self._first()
        if self._lost == (name, False):
            self._lost = None
            raise LostError
        answer = call()
        if self._lost == (name, True):
            self._lost = None
            raise LostError
        return answer

    def control(
        self, route: str, *, within_s: float | None = None, **body: Any
    ) -> tuple[bool, Any]:
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


class Fed(SGLangLoader):
    """Brings the bytes itself, as all routes but ``import`` do."""

    imports = False

    def load(self, manifest: WeightUpdateManifest, tensors: Any) -> None:
        bucket = {"tensors": tensors, SENDER: sender(self._client.driver)}
        with self._session():
            self._client.do("update_weights_from_tensor", bucket=bucket)


def importing(engine: Engine, **options: Any) -> SGLangInstallAdapter:
    return SGLangInstallAdapter(Client(engine), **options)


def loading(engine: Engine, **options: Any) -> SGLangInstallAdapter:
    adapter = importing(engine, **options)
    client = adapter._client
    assert isinstance(client, SGLangClient)
    adapter._loader, adapter.imports_itself = Fed(client, drops=True), False
    return adapter


def update(adapter: SGLangInstallAdapter, manifest: WeightUpdateManifest) -> None:
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    adapter.resume()
    adapter.commit()
