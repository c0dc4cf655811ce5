"""The engine's side: what a rank is, and how it is called. Runs in the ranks' processes."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from engine import Worker
from safetensors.torch import load_file

from rl_bridge.engines import (
    EngineCompat,
    ModelInstaller,
    RankGroup,
    RankHost,
    answer,
    rank_of,
)


class SmallHost(RankHost):
    """One rank of the small engine."""

    name = "small-engine"

    def __init__(self, worker: Worker) -> None:
        self.model = worker.model
        self.group = RankGroup(worker.rank, worker.size, torch.distributed.group.WORLD)

    def make_installer(self, options: Mapping[str, Any]) -> ModelInstaller:
        """What makes the next version beside the serving one. The loader is learned from."""
        return ModelInstaller(self.model, EngineCompat(), num_ranks=self.group.size, **options)


def call(worker: Worker, text: str) -> str:
    """Answer a driver. `answer` never raises, so that no rank gets out of step."""
    given = json.loads(text)
    rank = rank_of(worker.model, lambda: SmallHost(worker))
    return json.dumps(answer(rank, given["verb"], given))


def load(worker: Worker, text: str) -> str:
    """Let the engine's own loader write into the weights that serve; what went wrong, if it did."""
    given = json.loads(text)
    try:
        if not rank_of(worker.model, lambda: SmallHost(worker)).takes_load_of(given["driver"]):
            return "another driver has the engine"
        worker.model.load_weights(load_file(given["path"]).items())
    except Exception as error:  # noqa: BLE001 - it is the answer
        return f"{type(error).__name__}: {error}"
    return ""
