"""The small engine keeps the protocol: `EngineSuite` says what that is."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from client import small_engine_adapter
from engine import HIDDEN, INNER, LAYERS, VOCABULARY, Engine, Worker
from safetensors.torch import save_file

from rl_bridge.engines import EngineDriver
from rl_bridge.testing import EngineSuite, EngineUnderTest, in_rank


def weights(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    shapes = {"embed": (VOCABULARY, HIDDEN), "head": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.{part}": (INNER, HIDDEN) for part in ("gate", "up")}
        shapes[f"layers.{layer}.down"] = (HIDDEN, INNER)
    return {f"{n}.weight": torch.randn(s, generator=generator) for n, s in shapes.items()}


def answers(engine: Engine) -> object:
    said = [engine.generate(prompt, tokens=2) for prompt in ([1, 2, 3], [30])]
    return [(one["tokens"], one["scores"]) for one in said]


def ask(worker: Worker, text: str) -> str:
    """Runs in each rank: see `TestSmallEngine.in_ranks`."""
    return in_rank(worker.model, text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for number in (0, 1):
        save_file(weights(number), folder / f"{number}.safetensors")
    return folder


@contextmanager
def started(folder: Path, number: int) -> Iterator[Engine]:
    engine = Engine(folder / f"{number}.safetensors")
    try:
        # Ranks import rl_bridge with the first call: a driver has less patience.
        engine.ask("test_small_engine:ask", '{"ask": "uproot"}', timeout_s=300.0)
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[EngineUnderTest]:
    """The engine that tests share, and what fresh engines of both versions answer."""
    with started(folder, 1) as second, started(folder, 0) as engine:
        yield EngineUnderTest(engine, (answers(engine), answers(second)))


class TestSmallEngine(EngineSuite):
    every = 2

    @pytest.fixture(autouse=True)
    def checkpoints(self, folder: Path) -> None:
        self.folder = folder

    def start(self) -> AbstractContextManager[Engine]:
        return started(self.folder, 0)

    def make_driver(self, engine: Engine, **options: Any) -> EngineDriver:
        return small_engine_adapter(engine, **options)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        return weights(number)

    def answers(self, engine: Engine) -> object:
        return answers(engine)

    def in_ranks(self, engine: Engine, text: str) -> list[str]:
        return engine.ask("test_small_engine:ask", text)


class TestSmallEngineByFile(TestSmallEngine):
    """Fed by its own loader. What the two have in common is tried at fewer places."""

    kills = ("install",)
    every = 6

    def make_driver(self, engine: Engine, **options: Any) -> EngineDriver:
        return small_engine_adapter(engine, file=self.folder / "update.safetensors", **options)
