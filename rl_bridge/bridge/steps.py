"""The fine steps of a consumer's life cycle, where its bridge keeps them.

A consumer of the user's own needs only the four verbs of `WeightConsumer`: there, these do nothing.
"""

from collections.abc import Mapping

import torch

from rl_bridge.bridge.bridges import TensorBridge
from rl_bridge.bridge.protocols import WeightConsumer
from rl_bridge.lifecycle.table import Event, State
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["FineSteps"]


class FineSteps:
    """Verify, stage, install, tear and undo, and the question where an update stands."""

    def __init__(self, bridge: WeightConsumer) -> None:
        """Look at an executor's bridge; nothing of it is opened."""
        self._consumer = bridge
        self._bridge = bridge if isinstance(bridge, TensorBridge) else None

    def bring(self, manifest: WeightUpdateManifest, *, reads: bool) -> Mapping[str, torch.Tensor]:
        """Import an update.

        Args:
            manifest: the update.
            reads: False leaves verifying to the engine's own processes, if nothing speaks against
                it; the update is then `State.IMPORTED`, until who asked takes `Event.VERIFY`.

        """
        bridge = self._bridge
        # (What a user's subclass does when it imports, or a group's, is not left out.)
        if reads or bridge is None or type(bridge).import_update is not TensorBridge.import_update:
            return self._consumer.import_update(manifest)
        return bridge._consumer_end().import_update(manifest, reads=False)  # noqa: SLF001 - the bridge's other half

    def advance(
        self, manifest: WeightUpdateManifest, event: Event, *, reason: str | None = None
    ) -> None:
        """Take a step.

        Raises:
            IllegalTransition: the update's state does not allow it.

        """
        if self._bridge is not None:
            self._bridge._consumer_end().advance(manifest.update_id, event, reason=reason)  # noqa: SLF001 - the bridge's other half

    def is_in(self, manifest: WeightUpdateManifest, *states: State) -> bool:
        """Whether an update is known to be in one of `states`."""
        # Not opened for the question: where it cannot be, as on a closed bridge, nothing is known.
        consumer = None if self._bridge is None else self._bridge._consumer  # noqa: SLF001 - the bridge's other half
        return (
            consumer is not None
            and consumer.knows(manifest.update_id)
            and consumer.state(manifest.update_id) in states
        )

    def holds(self, update_id: str) -> bool:
        """Whether an update that was acknowledged is still to be released."""
        consumer = None if self._bridge is None else self._bridge._consumer  # noqa: SLF001 - the bridge's other half
        return (
            consumer is not None
            and consumer.knows(update_id)
            and consumer.state(update_id) is State.ACKNOWLEDGED
        )

    def has_acknowledged(self, manifest: WeightUpdateManifest) -> bool:
        """Whether an update was acknowledged; an observer may have released it at once."""
        consumer = None if self._bridge is None else self._bridge._consumer  # noqa: SLF001 - the bridge's other half
        return consumer is not None and consumer.has_acknowledged(manifest.update_id)
