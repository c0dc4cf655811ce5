"""The engine's half of a transfer: whoever loads an update pulls its tensors from here."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Self

import torch

from rl_bridge.bridge.acknowledgement import describe
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.bridge.transfer.pending import PendingUpdate
from rl_bridge.bridge.transfer.requests import (
    AbandonedWeightUpdateRequest,
    GPUHandle,
    WeightUpdateRequest,
)
from rl_bridge.errors import MalformedManifest, StaleUpdate, UnknownUpdate, WeightBridgeError
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["BridgeTransferReceiver", "WeightTransferReceiver"]

_LOG = logging.getLogger(__name__)


class WeightTransferReceiver(ABC):
    """Gives the tensors of a request to whoever loads them."""

    @abstractmethod
    def receive_weights(
        self, request: WeightUpdateRequest
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the batch's tensors, by name."""


class BridgeTransferReceiver(WeightTransferReceiver):
    """Receives over a bridge. One update at a time: a newer one ends the one before.

    The first batch's bytes are asked for when its tensors are; then the whole update is imported
    and every byte of it verified, so that a damaged one is refused before an engine hears of it.
    The tensors are the update's memory, without a copy where the transport needs none.

    Attributes:
        bridge: the consumer's; `close` closes it.

    """

    def __init__(self, bridge: TensorBridge, *, gpu: str | None = None) -> None:
        """Receive through `bridge`.

        Args:
            bridge: this engine's, which nobody else imports with.
            gpu: UUID of this engine's GPU, for requests that have a handle for each.

        """
        self.bridge = bridge
        self._gpu = gpu
        self._pending: PendingUpdate | None = None
        self._ended: tuple[str, str] = ("", "")

    def accept(self, request: WeightUpdateRequest) -> PendingUpdate:
        """Take note of the next batch, without its bytes.

        Returns:
            The update so far.

        Raises:
            UnknownUpdate: its first batch never came, or the update ended.
            StaleUpdate: it begins an older update than the one under way, which goes on.
            WeightBridgeError: it is not the batch that is due; the update is rejected.

        """
        pending = self._pending
        if request.batch == 0 and request.manifest is not None:
            first, manifest = self._manifests(request)
            if pending is not None:
                _require_newer(manifest, pending.manifest)
                self.reject(f"version {manifest.weight_version} began before it was complete")
            pending = self._pending = PendingUpdate(manifest, update_id=first.update_id)
        elif pending is None or pending.update_id != request.update_id:
            ended, reason = self._ended
            why = f"it ended: {reason}" if ended == request.update_id else "no batch of it came"
            msg = (
                f"batch {request.batch} of version {request.weight_version} (update "
                f"{request.update_id}): {why}. Send the update again from its first batch."
            )
            raise UnknownUpdate(msg)
        try:
            pending.add(request)
        except WeightBridgeError as error:
            self.reject(describe(error))
            raise
        return pending

    async def receive_weights(
        self, request: WeightUpdateRequest
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the batch's tensors, by name.

        Raises:
            UnknownUpdate: its first batch never came, or the update ended.
            WeightBridgeError: what `accept` or the import raises; the update is rejected.

        """
        pending = self._pending
        if pending is None or pending.last is not request:
            pending = self.accept(request)
        tensors = await self._imported(pending.manifest)
        for name in request.names:
            yield name, tensors[name]

    async def _imported(self, manifest: WeightUpdateManifest) -> Mapping[str, torch.Tensor]:
        # In a thread: it may wait for bytes that are on the wire.
        try:
            return await asyncio.to_thread(self.bridge.import_update, manifest)
        except Exception as error:
            self.reject(describe(error))
            raise

    def reject(self, reason: str) -> None:
        """End the update under way, if there is one: its later batches are refused."""
        pending = self.finish(reason)
        if pending is not None and self.bridge.active_update_id != pending.manifest.update_id:
            try:
                self.bridge.reject(pending.manifest, reason)
            except WeightBridgeError:
                # It is over already, by the bridge itself or whoever shares it.
                _LOG.debug("update %s was over", pending.manifest.update_id, exc_info=True)

    def finish(self, reason: str = "it was loaded") -> PendingUpdate | None:
        """Forget the update under way, whatever became of it; returns it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._ended = (pending.update_id, reason)
        return pending

    def abandon(self, request: AbandonedWeightUpdateRequest) -> None:
        """End an update that its trainer gave up; one that is installed stays."""
        pending = self._pending
        if pending is not None and pending.update_id == request.update_id:
            self.reject(f"its trainer gave it up: {request.reason}")

    def close(self) -> None:
        """Let go of the update under way, and close the bridge. Idempotent."""
        self.reject("the receiver closed")
        self.bridge.close()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()

    def _manifests(
        self, request: WeightUpdateRequest
    ) -> tuple[WeightUpdateManifest, WeightUpdateManifest]:
        """The manifest that the request goes by, and that of this engine's copy of the update."""
        assert request.manifest is not None
        first = WeightUpdateManifest.from_json(request.manifest)
        handles: tuple[GPUHandle, ...] = getattr(request, "handles", ())
        if not handles:
            return first, first
        mine = next((one.manifest for one in handles if one.gpu == self._gpu), None)
        if mine is None:
            msg = (
                f"version {request.weight_version} lies on the GPUs "
                f"{[one.gpu for one in handles]}, this engine is on {self._gpu}. Place trainer and "
                "engine on the same GPUs, or send by broadcast."
            )
            raise MalformedManifest(msg)
        manifest = WeightUpdateManifest.from_json(mine)
        if (manifest.root, manifest.weight_version) != (first.root, first.weight_version):
            msg = (
                f"the copy of version {request.weight_version} on GPU {self._gpu} has root "
                f"{manifest.root}, expected {first.root}. Send requests as the sender made them."
            )
            raise MalformedManifest(msg)
        return first, manifest


def _require_newer(manifest: WeightUpdateManifest, under_way: WeightUpdateManifest) -> None:
    """Refuse a late first batch: it must not end the update that came after it."""
    is_of_one_stream = manifest.publisher_id == under_way.publisher_id
    if is_of_one_stream and manifest.weight_version < under_way.weight_version:
        msg = (
            f"version {manifest.weight_version} (update {manifest.update_id}) is stale: version "
            f"{under_way.weight_version} is being received already. Publish a later version."
        )
        raise StaleUpdate(msg)
