"""One way on which a trainer's actor publishes: by itself, or as a rank of a group.

Knows nothing of Ray.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

from rl_bridge.bridge.group_exchange import GroupExchange
from rl_bridge.bridge.group_publish import GroupPublisher
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.extractors.state_dict import Source
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_leaves import LEAVES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.placement import Placement

__all__ = ["GroupLane", "Lane", "Manifest", "SingleLane"]

Manifest = WeightUpdateManifest | GroupManifest


class Lane(ABC):
    """A bridge, and how versions are published through it."""

    def __init__(self, bridge: TensorBridge) -> None:
        """Publish through `bridge`, which is the lane's from here on."""
        self.bridge = bridge

    @abstractmethod
    def publish(
        self, source: Source, *, weight_version: int, metadata: Mapping[str, JSONValue] | None
    ) -> Manifest:
        """Publish a version.

        Raises:
            WeightBridgeError: it cannot be published; nothing of it is.

        """

    @abstractmethod
    def release(self, manifest: Manifest) -> None:
        """Let go of a version. Idempotent."""

    @abstractmethod
    def sealed(self, manifest: Manifest) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """What this process published with a version, out of its own sealed memory."""


class SingleLane(Lane):
    """Versions that this process publishes alone."""

    def publish(
        self, source: Source, *, weight_version: int, metadata: Mapping[str, JSONValue] | None
    ) -> Manifest:
        """Publish a version."""
        return self.bridge.publish(source, weight_version=weight_version, metadata=metadata)

    def release(self, manifest: Manifest) -> None:
        """Let go of a version."""
        self.bridge.release(manifest.update_id)

    @contextmanager
    def sealed(self, manifest: Manifest) -> Iterator[Mapping[str, torch.Tensor]]:
        """What was published, verified."""
        assert isinstance(manifest, WeightUpdateManifest)
        try:
            yield self.bridge.import_update(manifest)
        finally:
            self.bridge.release_imported(manifest.update_id)


class GroupLane(Lane):
    """Versions that this process publishes as one rank of many."""

    def __init__(
        self,
        bridge: TensorBridge,
        exchange: GroupExchange,
        placements: Callable[[], Mapping[str, Placement]],
        *,
        timeout_s: float,
    ) -> None:
        """Be a rank.

        Args:
            bridge: as for `Lane`.
            exchange: how the ranks talk.
            placements: tells where this rank's tensors lie in the whole ones.
            timeout_s: longest wait for the other ranks, in one step.

        """
        super().__init__(bridge)
        self._rank = exchange.rank
        self._placements = placements
        self._publisher = GroupPublisher(bridge, exchange, timeout_s=timeout_s)

    def publish(
        self, source: Source, *, weight_version: int, metadata: Mapping[str, JSONValue] | None
    ) -> Manifest:
        """Publish this rank's part, when all others publish theirs."""
        return self._publisher.publish(
            source, self._placements(), weight_version=weight_version, metadata=metadata
        )

    def release(self, manifest: Manifest) -> None:
        """Let go of this rank's part."""
        assert isinstance(manifest, GroupManifest)
        self._publisher.release(manifest)

    @contextmanager
    def sealed(self, manifest: Manifest) -> Iterator[Mapping[str, torch.Tensor]]:
        """This rank's part. Who publishes it again compares the roots."""
        assert isinstance(manifest, GroupManifest)
        # Not imported: with a part is sealed the header of its group, and not one of its own.
        end = self.bridge._consumer_end()._end  # noqa: SLF001 - the bridge's other half
        attachment = end.look(manifest.parts[self._rank])
        try:
            yield {name: one for name, one in attachment.tensors.items() if name != LEAVES}
        finally:
            attachment.tensors.forget()
            end.settle()
