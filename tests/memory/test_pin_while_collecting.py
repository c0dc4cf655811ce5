"""A lease holds although older tensors of the same version are collected while it is taken."""

import gc
from typing import Any

import pytest
import torch

from rl_bridge import SharedMemoryTensorBridge
from rl_bridge.memory import slots
from rl_bridge.memory import views as leased


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, held: torch.Tensor) -> None:
        self.me = self
        self.held = held


def test_a_collection_inside_a_second_import_does_not_take_its_lease_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = slots.read_stamp

    def collecting(*arguments: Any) -> Any:
        gc.collect()
        return read(*arguments)

    with (
        SharedMemoryTensorBridge(suspicious="off", max_slots=2) as trainer,
        SharedMemoryTensorBridge(source_worker="rollout") as rollout,
    ):
        first = trainer.publish({"weight": torch.full((4096,), 1.0)}, weight_version=1)
        gc.disable()
        try:
            Cycle(rollout.import_update(first)["weight"])
            rollout.release(first.update_id)
            monkeypatch.setattr(leased, "read_stamp", collecting)
            held = rollout.import_update(first)["weight"]
            monkeypatch.undo()
        finally:
            gc.enable()
        trainer.release(first.update_id)
        for version in (2, 3, 4):
            manifest = trainer.publish(
                {"weight": torch.full((4096,), float(version))}, weight_version=version
            )
            trainer.release(manifest.update_id)
        assert set(held.tolist()) == {1.0}
