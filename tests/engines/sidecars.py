"""Engines for side-cars of these tests: `rl-bridge sidecar tests.engines.sidecars:NAME`.

The server's URL is in a file of the side-car's working directory.
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import torch

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.remote import TwoPhaseExecutor

__all__ = ["DEATH", "URL", "dying"]

DEATH = Path("die-here")
"""Where it names a step, that step is the side-car's last."""
URL = Path("engine-url")


class Dying(VLLMEngineAdapter):
    """Is killed right behind the step that the file names."""

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        super().prepare(manifest, tensors)
        die("prepare")

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        super().install(manifest, tensors)
        die("install")

    def resume(self) -> None:
        super().resume()
        die("resume")

    def commit(self) -> None:
        super().commit()
        die("commit")


def die(step: str) -> None:
    if DEATH.exists() and DEATH.read_text() == step:
        DEATH.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def dying() -> TwoPhaseExecutor:
    """A vLLM server's."""
    return TwoPhaseExecutor(
        weight_bridge=make_weight_bridge("shared-memory", source_worker="sidecar"),
        weight_install_adapter=Dying(URL.read_text(), take_over=True),
        suspicious="off",
    )
