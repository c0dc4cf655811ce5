"""Engines for side-cars of tests: `rl-bridge sidecar tests.remote.engines:NAME`."""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from rl_bridge import ModuleInstallAdapter, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import EngineLost
from rl_bridge.remote import TwoPhaseExecutor
from rl_bridge.testing.processes import until
from tests.helpers import weights

__all__ = [
    "BEGUN",
    "DEATH",
    "Watched",
    "dying",
    "elsewhere",
    "executor_of",
    "failing",
    "hanging",
    "over_broadcast",
    "plain",
    "waiting",
    "writing",
]

DEATH = Path("die-here")
"""In the side-car's working directory: where it names a step, that step is its last."""

BEGUN = Path("install-has-begun")
"""In the same directory, of an engine that waits."""

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


def executor_of(
    do: Callable[[str], None], *, num: int | None = None, transport: str = "shared-memory"
) -> TwoPhaseExecutor:
    """An executor of a fresh engine."""
    engine = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    if num is not None:
        engine = {"other.weight": torch.zeros(num)}
    return TwoPhaseExecutor(
        weight_bridge=make_weight_bridge(transport, source_worker="rollout"),
        weight_install_adapter=Watched(engine, do),
    )


def plain() -> TwoPhaseExecutor:
    """One to which nothing happens."""
    return executor_of(lambda step: None)


def over_broadcast() -> TwoPhaseExecutor:
    """One whose bytes come by broadcast."""
    return executor_of(lambda step: None, transport="broadcast")


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
            raise OSError(f"no more memory in {step}")

    return executor_of(fail)


def hanging() -> TwoPhaseExecutor:
    """One that hangs in install."""
    never = threading.Event()

    def hang(step: str) -> None:
        if step == "install":
            never.wait(_HANG_S)

    return executor_of(hang)


def waiting() -> TwoPhaseExecutor:
    """One whose install says that it has begun, and waits for the file to end."""

    def wait(step: str) -> None:
        if step == "install":
            BEGUN.touch()
            until(DEATH.exists, what="install may end")

    return executor_of(wait)


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


class Elsewhere(Watched):
    """An engine in a process of its own, as far as its adapter can tell.

    Where the file says ``gone`` it is; where it says ``fresh``, another one was started.
    """

    def __init__(self, engine: dict[str, torch.Tensor]) -> None:
        super().__init__(engine, lambda step: None)
        self.held_id: str | None = None
        self.pending_id: str | None = None

    def look(self) -> None:
        """Notice what the file says."""
        said = DEATH.read_text() if DEATH.exists() else ""
        if said == "gone":
            raise EngineLost("the engine is gone. Start a fresh one.")
        if said == "fresh":
            DEATH.unlink()
            self.held_id = None

    def describe(self) -> dict[str, str | None]:
        self.look()
        return {"update_id": self.held_id}

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self.look()
        super().prepare(manifest, tensors)
        self.pending_id = manifest.update_id

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        super().install(manifest, tensors)
        if DEATH.exists() and DEATH.read_text() == "install":
            DEATH.unlink()
            raise OSError("no more memory")

    def commit(self) -> None:
        super().commit()
        self.held_id = self.pending_id


def elsewhere() -> TwoPhaseExecutor:
    """One that may be started anew behind the side-car's back."""
    engine = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    return TwoPhaseExecutor(
        weight_bridge=make_weight_bridge("shared-memory", source_worker="rollout"),
        weight_install_adapter=Elsewhere(engine),
    )
