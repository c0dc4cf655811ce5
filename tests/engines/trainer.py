"""The trainer's half: publishes versions that grow, and keeps two of them."""

import itertools
from collections.abc import Mapping
from typing import Self

import torch

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.bridge import ConsumerReport

_VERSIONS = itertools.count(1)


class Trainer:
    """Publishes over shared memory. Versions grow over all trainers of a session."""

    def __init__(self) -> None:
        """Open the bridge."""
        self.bridge = make_weight_bridge("shared-memory", source_worker="trainer")
        self._held: list[WeightUpdateManifest] = []

    def publish(self, weights: Mapping[str, torch.Tensor]) -> WeightUpdateManifest:
        """Publish the next version; the one before the last is released."""
        while len(self._held) > 1:
            self.bridge.release(self._held.pop(0).update_id)
        manifest = self.bridge.publish(dict(weights), weight_version=next(_VERSIONS))
        self._held.append(manifest)
        return manifest

    def release_all(self) -> None:
        """Free all slots for whatever is published next."""
        while self._held:
            self.bridge.release(self._held.pop(0).update_id)

    def holders(self, manifest: WeightUpdateManifest) -> tuple[ConsumerReport, ...]:
        """Who has it, and what they said of it."""
        return tuple(self.bridge.holders(manifest.update_id))

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the bridge."""
        self.bridge.close()
