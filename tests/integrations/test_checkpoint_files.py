"""The files of an engine that is updated by reloads: none outlives its use."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_bridge import TensorBridge, TornEngine
from tests.integrations.test_checkpoint_reload import (
    LLM,
    broken,
    checkpoint,
    executor_of,
)
from tests.integrations.test_engine_adapter import trainer
from tests.integrations.test_rank import publish

__all__ = ["checkpoint", "trainer"]  # fixtures, for this file, too


def versions(checkpoint: Path) -> list[str]:
    return sorted(p.name.partition("-")[0] for p in (checkpoint.parent / "versions").iterdir())
