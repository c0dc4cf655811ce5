"""The engine protocol, kept by SGLang: one engine of two ranks, by import and by its own loader."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.engines import EngineDriver, default_label
from rl_bridge.sglang import SGLangInstallAdapter, SGLangServing
from rl_bridge.testing import EngineSuite, EngineUnderTest
from tests.engines.models import Kind
from tests.sglang.bench import Bench, Engines, answers_of

RANKS = 2
KIND = Kind("qwen2", tied=True)


@pytest.fixture(scope="module")
def pair(engines: Engines) -> Bench:
    return engines.bench(KIND, RANKS)


@pytest.fixture(scope="module")
def running(pair: Bench) -> Iterator[EngineUnderTest]:
    yield EngineUnderTest(pair.engine, (pair.fresh[0], pair.fresh[1]))
    pair.holds = pair.fresh.index(pair.answers())


@pytest.mark.timeout(600)  # two engines start, one behind the other
class TestSGLang(EngineSuite):
    route: Any = "import"
    # A killed scheduler is in `test_killed.py`: there is one engine in a process at a time.
    kills = ()
    every = 4
    asks_each_call = False

    @pytest.fixture(autouse=True)
    def engine_of_two(self, pair: Bench, tmp_path: Path) -> None:
        self.pair, self.folder = pair, tmp_path

    def make_driver(
        self, engine: Any, *, label: Any = default_label, **options: Any
    ) -> EngineDriver:
        serving = SGLangServing(label=label)
        return SGLangInstallAdapter(engine, route=self.route, serving=serving, **options)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        return self.pair.weights[number]

    def answers(self, engine: Any) -> object:
        return answers_of(engine)

    def is_paused(self, engine: Any) -> bool:
        return bool(engine.tokenizer_manager.is_pause)

    def in_ranks(self, engine: Any, text: str) -> list[str]:
        return self.pair.ask(text, self.folder)


class TestSGLangByItsOwnLoader(TestSGLang):
    route = "tensor"
    every = 8
