"""Engines for side-cars of tests: `rl-bridge sidecar tests.remote.engines:NAME`."""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from rl_bridge import ModuleInstallAdapter, WeightUpdateManifest, make_weight_bridge
from rl_bridge.remote import TwoPhaseExecutor
from tests.helpers import weights

__all__ = ["DEATH", "Watched", "dying", "executor_of", "failing", "hanging", "plain", "writing"]

DEATH = Path("die-here")
"""In the side-car's working directory: where it names a step, that step is its last."""

_HANG_S = 30.0


class Watched(ModuleInstallAdapter):
    """An engine of weights like the trainer's, which does something in one step."""

    def __init__(self, engine: dict[str, torch.Tensor], do: Callable[[str], None]) -> None:
        super().__init__(engine)
        self.held, self.do = engine, do

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        super().prepare(manifest, tensors)
        self.do("prepare")

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        super().install(manifest, tensors)
        self.do("install")

    def resume(self) -> None:
        super().resume()
        self.do("resume")

    def commit(self) -> None:
        super().commit()
        self.do("commit")


def executor_of(do: Callable[[str], None], *, num: int | None = None) -> TwoPhaseExecutor:
    """An executor of a fresh engine."""
    engine = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    if num is not None:
        engine = {"other.weight": torch.zeros(num)}
    return TwoPhaseExecutor(
        weight_bridge=make_weight_bridge("shared-memory", source_worker="rollout"),
        weight_install_adapter=Watched(engine, do),
    )


def plain() -> TwoPhaseExecutor:
    """One to which nothing happens."""
    return executor_of(lambda step: None)


def other_model() -> TwoPhaseExecutor:
    """One with other tensors."""
    return executor_of(lambda step: None, num=3)


def dying() -> TwoPhaseExecutor:
    """One that is killed in the step that the file names."""

    def die(step: str) -> None:
        if DEATH.exists() and DEATH.read_text() == step:
            DEATH.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    return executor_of(die)


def failing() -> TwoPhaseExecutor:
    """One whose install fails where the file says so."""

    def fail(step: str) -> None:
        if DEATH.exists() and DEATH.read_text() == step:
            DEATH.unlink()
            msg = f"no more memory in {step}"
            raise OSError(msg)

    return executor_of(fail)


def hanging() -> TwoPhaseExecutor:
    """One that hangs in install."""
    never = threading.Event()

    def hang(step: str) -> None:
        if step == "install":
            never.wait(_HANG_S)

    return executor_of(hang)


def writing() -> TwoPhaseExecutor:
    """One that writes into a file what it holds, after each install."""
    made: list[TwoPhaseExecutor] = []

    def write(step: str) -> None:
        adapter = made[0].weight_install_adapter
        if step == "commit" and isinstance(adapter, Watched):
            torch.save(adapter.held, "held.new")
            Path("held.new").replace("held.pt")

    made.append(executor_of(write))
    return made[0]
