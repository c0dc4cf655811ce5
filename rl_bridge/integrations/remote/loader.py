"""`RemoteWeightLoader`: loads requests of a transfer strategy into an engine behind a side-car."""

import asyncio

from rl_bridge.bridge.transfer.loader import WeightLoader
from rl_bridge.bridge.transfer.pending import PendingUpdate
from rl_bridge.bridge.transfer.receiver import WeightTransferReceiver
from rl_bridge.bridge.transfer.requests import AbandonedWeightUpdateRequest, WeightUpdateRequest
from rl_bridge.errors import UnknownUpdate, WeightBridgeError
from rl_bridge.integrations.remote.client import RemoteEngine
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["RemoteWeightLoader"]


class RemoteWeightLoader(WeightLoader):
    """Loads into a `RemoteEngine`: an update is one transaction, however many batches it has.

    Batches are checked as they come, and nothing is sent; the last one sends the manifest, and the
    side-car reads the bytes itself. Nothing is pulled from a receiver on this side.

    Attributes:
        engine: as given.

    """

    def __init__(self, engine: RemoteEngine) -> None:
        """Load into `engine`."""
        self.engine = engine
        self._pending: PendingUpdate | None = None

    def check_servable(self) -> None:
        """Tell whether the engine may answer requests.

        Raises:
            WeightBridgeError: it may not, or does not answer.

        """
        self.engine.check_servable()

    async def load_weights(
        self, receiver: WeightTransferReceiver | None, request: WeightUpdateRequest
    ) -> None:
        """Take one batch; with the last one, install the update.

        Args:
            receiver: not used: None will do.
            request: the next batch.

        Raises:
            UnknownUpdate: its first batch never came, or the update ended.
            WeightBridgeError: refused or undone; the engine is at its previous version.

        """
        del receiver  # the bytes do not come by this process
        if isinstance(request, AbandonedWeightUpdateRequest):
            if self._pending is not None and self._pending.update_id == request.update_id:
                self._pending = None
            return
        pending = self._accepted(request)
        if pending.is_complete:
            self._pending = None
            await asyncio.to_thread(self.engine.update_weights, pending.manifest)

    def _accepted(self, request: WeightUpdateRequest) -> PendingUpdate:
        pending = self._pending
        if request.batch == 0 and request.manifest is not None:
            manifest = WeightUpdateManifest.from_json(request.manifest)
            pending = self._pending = PendingUpdate(manifest)
        elif pending is None or pending.update_id != request.update_id:
            msg = (
                f"batch {request.batch} of version {request.weight_version} (update "
                f"{request.update_id}) came without its first batch, or the update ended. Send it "
                "again from its first batch."
            )
            raise UnknownUpdate(msg)
        try:
            pending.add(request)
        except WeightBridgeError:
            self._pending = None
            raise
        return pending
