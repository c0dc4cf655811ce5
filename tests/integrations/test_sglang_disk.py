"""SGLang's route by disk: which folders are there, whatever the engine names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_bridge import TensorBridge
from rl_bridge.engines.sglang import plugin
from rl_bridge.engines.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.engines.sglang.loaders import DiskRoute
from tests.installers.test_model_installer import equal, held, loaded, version
from tests.integrations.sglang_engine import Client, Engine, engine

__all__ = ["engine"]  # a fixture, for this file, too

safetensors = pytest.importorskip("safetensors.torch")


class DiskClient(Client):
    """Of an engine that names the folder that it took last, as SGLang does."""

    def _asked(self, route: str, body: dict[str, Any]) -> tuple[bool, Any]:
        if route != "update_weights_from_disk":
            return super()._asked(route, body)
        done: tuple[bool, Any] = plugin._guarded(load_folder, self._engine, body["model_path"])
        self._engine.named = body["model_path"]
        return done

    def model_path(self) -> str:
        return self._engine.named


def load_folder(engine: Engine, path: str) -> tuple[bool, str]:
    engine.model.load_weights(safetensors.load_file(f"{path}/model.safetensors").items())
    return True, ""


@pytest.fixture
def home(engine: Engine, tmp_path: Path) -> Path:
    first = tmp_path / "first"
    first.mkdir()
    (first / "config.json").write_text("{}")
    engine.model_config = SimpleNamespace(model_path=str(first))
    engine.named = str(first)
    return tmp_path / "versions"


def driver(engine: Engine, home: Path) -> SGLangInstallAdapter:
    return SGLangInstallAdapter(DiskClient(engine), route=DiskRoute(home))


def install(adapter: SGLangInstallAdapter, trainer: TensorBridge, number: int) -> None:
    manifest = trainer.publish(version(number), weight_version=number)
    adapter.prepare(manifest, version(number))
    adapter.install(manifest, version(number))


def test_a_folder_that_the_engine_names_is_there_and_others_go_with_the_next_commit(
    engine: Engine, trainer: TensorBridge, home: Path
) -> None:
    adapter = driver(engine, home)
    for number in (1, 2):
        install(adapter, trainer, number)
        adapter.resume()
        adapter.commit()
        assert [str(path) for path in home.iterdir()] == [engine.named]
    install(adapter, trainer, 3)
    adapter.undo()
    assert equal(held(engine.model), loaded(2))
    assert (Path(engine.named) / "config.json").exists(), "the next driver begins with it"
    install(adapter, trainer, 4)
    adapter.resume()
    adapter.commit()
    assert [str(path) for path in home.iterdir()] == [engine.named]
    assert equal(held(engine.model), loaded(4))
