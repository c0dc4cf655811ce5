"""The engine protocol, kept by vLLM: one engine of two ranks, each in a process of its own."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from rl_bridge.engines import EngineDriver, default_label
from rl_bridge.testing import EngineSuite, EngineUnderTest
from rl_bridge.vllm import VLLMEngineAdapter, VLLMServing
from tests.engines.drive import Setting, answers, start
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References

SETTING = Setting(Kind("qwen3", tied=True), in_process=False, ranks=2)


@pytest.fixture(scope="module")
def running(checkpoints: Checkpoints, references: References) -> Iterator[EngineUnderTest]:
    second = references.of(SETTING, 1)
    with start(SETTING, checkpoints.path(SETTING.kind, 0)) as llm:
        yield EngineUnderTest(llm, (answers(llm), second))


@pytest.mark.timeout(400)  # engines start
class TestVLLM(EngineSuite):
    kills = ("install",)
    every = 4
    asks_each_call = False

    @pytest.fixture(autouse=True)
    def models(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def start(self) -> AbstractContextManager[Any]:
        return start(SETTING, self.checkpoints.path(SETTING.kind, 0))

    def make_driver(
        self, engine: Any, *, label: Any = default_label, **options: Any
    ) -> EngineDriver:
        return VLLMEngineAdapter(engine, serving=VLLMServing(label=label), **options)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        return self.checkpoints.weights(SETTING.kind, number)

    def answers(self, engine: Any) -> object:
        return answers(engine)

    def in_ranks(self, engine: Any, text: str) -> list[str]:
        said: list[str] = engine.collective_rpc("in_rank", args=(text,))
        return said
