"""A trainer in a process of its own, for the tests of `nixl`."""

import os
from typing import cast

import torch

from rl_bridge.bridge.bridges import NIXLTensorBridge, make_weight_bridge
from rl_bridge.transports.nixl.publisher import NIXLPublisher

__all__ = ["SIZE", "Trainer", "weights"]

SIZE = 48 << 20
"""Bytes of the tensor: several steps of a read."""


def weights(version: int) -> dict[str, torch.Tensor]:
    """A state dict whose bytes follow from the version."""
    values = torch.arange(SIZE // 8, dtype=torch.int64)
    return {"w": values * (2 * version + 1)}


class Trainer:
    """Publishes over `nixl`."""

    def __init__(self, ucx: dict[str, str] | None = None, port: int = 0) -> None:
        os.environ.update(ucx or {})  # before the library is loaded
        made = make_weight_bridge("nixl", source_worker="trainer", suspicious="off", port=port)
        self.bridge = cast("NIXLTensorBridge", made)

    def publish(self, version: int) -> str:
        return self.bridge.publish(weights(version), weight_version=version).to_json()

    def release(self, update_id: str) -> None:
        self.bridge.release(update_id)

    def help(self, rounds: int) -> None:
        """Let the network move what it still has."""
        end = cast("NIXLPublisher", self.bridge._publisher_end()._end)
        for _ in range(rounds):
            end._agent.progress()

    def registered(self) -> int:
        return cast("NIXLPublisher", self.bridge._publisher_end()._end).num_registered

    def readers(self) -> list[str]:
        end = cast("NIXLPublisher", self.bridge._publisher_end()._end)
        return [name for entry in end.catalog() for name in entry.readers]
