"""One trainer, several rollouts, each an actor in a process of its own; one dies and comes back."""

import multiprocessing
import os
import signal
import tempfile
from contextlib import ExitStack
from multiprocessing.managers import BaseManager
from typing import Any

import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    TensorBridge,
    WeightUpdateManifest,
    make_weight_bridge,
)


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


class RolloutActor:
    """Bridge, engine and executor are made where they are used; only text goes in and out."""

    def __init__(self, rank: int) -> None:
        self._engine = make_model()
        self._bridge = make_weight_bridge(
            "shared-memory", source_worker="rollout", source_rank=rank
        )
        self._executor = RolloutExecutor(
            weight_bridge=self._bridge,
            weight_install_adapter=ModuleInstallAdapter(self._engine, mode="copy"),
        )

    def update(self, manifest: str) -> int | None:
        self._executor.update_weights(manifest)
        return self._executor.active_weight_version

    def answer(self) -> list[float]:
        self._executor.check_servable()  # raises before the first version
        with torch.no_grad():
            return list(self._engine(torch.ones(8)).tolist())

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self._executor.close()
        self._bridge.close()


class Actors(BaseManager):
    """Makes actors of the standard library; `RolloutActor` itself knows nothing of it."""


Actors.register("RolloutActor", RolloutActor)


def start(stack: ExitStack, rank: int) -> Any:
    manager = Actors(ctx=multiprocessing.get_context("spawn"))
    stack.enter_context(manager)
    return manager.RolloutActor(rank)  # type: ignore[attr-defined]


def train(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)


def join(trainer: TensorBridge, actor: Any) -> None:
    """Bring a late joiner to the version that was published last."""
    latest = trainer.latest_manifest
    # It names a released version too, whose memory may hold another one by now.
    if latest is not None and trainer.update_status(latest.update_id) == "published":
        actor.update(latest.to_json())


def main() -> None:
    model = make_model()
    with ExitStack() as stack:
        state_dir = stack.enter_context(tempfile.TemporaryDirectory())
        actors = [start(stack, rank) for rank in range(2)]
        trainer = stack.enter_context(
            make_weight_bridge("shared-memory", source_worker="trainer", state_dir=state_dir)
        )

        # Every rollout gets the same text. The version before goes when all have the new one.
        previous: WeightUpdateManifest | None = None
        for version in range(1, 7):
            train(model)
            manifest = trainer.publish(model, weight_version=version)
            for actor in actors:
                assert actor.update(manifest.to_json()) == version
            if previous is not None:
                trainer.release(previous.update_id)
            previous = manifest

        # A rollout dies. Its share of the memory is free at once, and the others go on.
        os.kill(actors[1].pid(), signal.SIGKILL)
        actors[1] = start(stack, 1)
        join(trainer, actors[1])
        with torch.no_grad():
            expected = model(torch.ones(8)).tolist()
        assert [actor.answer() for actor in actors] == [expected] * 2
        for report in trainer.holders(manifest.update_id):
            print(f"rollout {report.rank}: {report.state}, {report.presence}")

        # The trainer starts anew. With the same state_dir it is the same stream: versions go on.
        trainer.close()
        trainer = stack.enter_context(
            make_weight_bridge("shared-memory", source_worker="trainer", state_dir=state_dir)
        )
        train(model)
        manifest = trainer.publish(model, weight_version=7)
        assert [actor.update(manifest.to_json()) for actor in actors] == [7, 7]
        for actor in actors:
            actor.close()


if __name__ == "__main__":
    main()
