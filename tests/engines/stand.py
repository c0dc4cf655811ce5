"""A running engine, a trainer, two sets of weights, and what fresh engines answer with each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rl_bridge import EngineLost, WeightUpdateManifest
from tests.engines.sidecars import DEATH
from tests.engines.trainer import Trainer
from tests.remote.process import SidecarProcess

WAIT_S = 120


def label_of(manifest: WeightUpdateManifest) -> str:
    """As an engine is labelled that has it."""
    return f"{manifest.weight_version}@{manifest.root}"


@dataclass
class Stand:
    """The two sets are numbered 0 and 1.

    Attributes:
        engine: has ``answers()``, or a subclass knows how it is asked; perhaps ``label()``.
        holds: which set the engine has.

    """

    engine: Any
    trainer: Trainer
    weights: Sequence[dict[str, torch.Tensor]]
    fresh: Sequence[object]
    holds: int = 0

    def answers(self) -> object:
        """Ask the engine."""
        return self.engine.answers()

    def next(self, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
        """The set that the engine does not have."""
        return {**self.weights[1 - self.holds], **changed}

    def publish(self, number: int | None = None) -> WeightUpdateManifest:
        """The next version; of the set that the engine does not have, if none is named."""
        return self.trainer.publish(self.next() if number is None else self.weights[number])

    def update(self, executor: Any, number: int | None = None) -> WeightUpdateManifest:
        """Publish and install a version; `executor` may be the client of a side-car."""
        number = 1 - self.holds if number is None else number
        manifest = self.publish(number)
        executor.update_weights(manifest)
        self.holds = number
        return manifest

    def check(self, what: object = "") -> None:
        """The engine answers as a fresh one that has the same."""
        assert self.answers() == self.fresh[self.holds], what

    def side_car_dies(
        self, sidecar: SidecarProcess, engine: str, steps: Mapping[str, bool]
    ) -> None:
        """Kill a side-car behind each step, and start it again; the engine lives.

        Args:
            sidecar: one that is not started.
            engine: of the side-car; dies where `DEATH` says.
            steps: step -> whether the update goes forward that ended with it.

        """
        sidecar.start(engine)
        with sidecar.client(timeout_s=WAIT_S) as client:
            held = self.update(client)
            for step, is_kept in steps.items():
                following = self.publish()
                (sidecar.directory / DEATH).write_text(step)
                with pytest.raises(EngineLost):
                    client.update_weights(following)
                sidecar.died()
                status = sidecar.start(engine)
                if is_kept:
                    held, self.holds = following, 1 - self.holds
                assert (status.state, status.active_root) == ("serving", held.root), (step, status)
                assert status.recovery.outcome == "reinstalled"
                self.check(step)
                assert self.engine.label() == label_of(held)
                if not is_kept:  # nothing was wrong with it: the same one may come again
                    assert client.update_weights(following).root == following.root
                    held, self.holds = following, 1 - self.holds
            self.update(client)
            self.check()
