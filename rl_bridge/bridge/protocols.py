"""What workers need of a bridge: structural types, no import or subclassing required."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.trainers.state_dict import Source


@runtime_checkable
class WeightPublisher(Protocol):
    """What a training worker needs of a bridge."""

    def publish(
        self,
        source: Source,
        *,
        weight_version: int,
        metadata: Mapping[str, JSONValue] | None = None,
    ) -> WeightUpdateManifest:
        """Publish one complete version."""

    def release(self, update_id: str) -> None:
        """Release an update."""


@runtime_checkable
class WeightConsumer(Protocol):
    """What a rollout worker needs of a bridge."""

    def import_update(self, manifest: WeightUpdateManifest) -> Mapping[str, torch.Tensor]:
        """Import and verify one complete version."""

    def acknowledge(self, update_id: str) -> None:
        """Say that it is installed."""

    def reject(self, update_id: str, reason: str) -> None:
        """Say that it is not, and why."""

    def release(self, update_id: str) -> None:
        """Release an update."""


@runtime_checkable
class WeightBridge(WeightPublisher, WeightConsumer, Protocol):
    """Both."""
