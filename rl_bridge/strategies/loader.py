"""Loaders: they pull an update's batches from a receiver, and install it when it is complete.

`ExecutorWeightLoader` is the one behind `VLLMWeightLoader`, `SGLangWeightLoader` and the user's own
engines with an install adapter. It pulls and checks batches as they come, without touching the
engine; the last one makes its executor install, prove and acknowledge the update.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.errors import WeightBridgeUnavailableError, describe
from rl_bridge.installers.arguments import Engine
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.strategies.receiver import BridgeTransferReceiver, WeightTransferReceiver
from rl_bridge.strategies.requests import AbandonedWeightUpdateRequest, WeightUpdateRequest

__all__ = [
    "BatchedLoadAdapter",
    "ExecutorWeightLoader",
    "WeightLoader",
]


class WeightLoader(ABC):
    """Loads an engine's weights; one call for each request."""

    @abstractmethod
    async def load_weights(
        self, receiver: WeightTransferReceiver, request: WeightUpdateRequest
    ) -> None:
        """Pull the request's tensors from the receiver and load them."""


class ExecutorWeightLoader(WeightLoader):
    """Loads through a `RolloutExecutor`: an update is one transaction, however many batches it has.

    If a batch fails, the update is rejected, and the engine keeps what it held.

    Attributes:
        executor: as given.

    """

    def __init__(self, executor: RolloutExecutor, *, in_thread: bool = True) -> None:
        """Load with `executor`, whose bridge must be the receiver's.

        Args:
            executor: with the adapter of the engine.
            in_thread: install in another thread, so that the event loop goes on; False for engines
                that must be called from the thread that they generate in.

        """
        self.executor = executor
        self._in_thread = in_thread

    def check_servable(self) -> None:
        """Check that the engine may answer requests: not before its first verified version.

        Raises:
            TornEngine: it may not.
            WeightBridgeUnavailableError: it never got a verified version.

        """
        self.executor.check_servable()

    async def load_weights(
        self, receiver: WeightTransferReceiver, request: WeightUpdateRequest
    ) -> None:
        """Take one batch; with the last one, install the update.

        Raises:
            WeightBridgeError: refused or undone; the engine is at its previous version.
            TornEngine: install and undo both failed; the engine must not serve.
            Exception: the adapter's own, unchanged, after the undo.

        """
        receiver = self._checked(receiver)
        if isinstance(request, AbandonedWeightUpdateRequest):
            receiver.abandon(request)
            return
        pending = receiver.accept(request)
        if not pending.is_complete:
            async for _ in receiver.receive_weights(request):
                pass  # every byte is verified; the engine gets all batches or none
            return
        try:
            adapter = self.executor.weight_install_adapter
            if isinstance(adapter, BatchedLoadAdapter):
                adapter.batches = tuple(pending.batches)
            if self._in_thread:
                await asyncio.to_thread(self.executor.update_weights, pending.manifest)
            else:
                self.executor.update_weights(pending.manifest)
        except Exception as error:
            receiver.reject(describe(error))
            raise
        receiver.finish()

    def close(self) -> None:
        """End the executor, and release what its adapter holds of the engine, which goes on.

        The receiver stays open. Idempotent.
        """
        adapter = self.executor.weight_install_adapter
        self.executor.close()
        close = getattr(adapter, "close", None)
        if callable(close):
            close()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()

    def _checked(self, receiver: WeightTransferReceiver) -> BridgeTransferReceiver:
        if isinstance(receiver, BridgeTransferReceiver) and receiver.bridge is self.executor.bridge:
            return receiver
        msg = (
            f"the receiver, a {type(receiver).__name__}, does not share the executor's bridge. "
            "Make the executor with weight_bridge=receiver.bridge."
        )
        raise WeightBridgeUnavailableError(msg)


class BatchedLoadAdapter:
    """An install adapter for engines that load names and tensors: one call for each batch.

    Before an install the engine's tensors are copied aside; on failure they are put back. Tensors
    that the engine holds under the update's names are read for the proof.

    Attributes:
        engine: what is loaded into.
        batches: names of each batch of the next update; empty: one batch with all of them.

    """

    def __init__(
        self, engine: Engine, load: Callable[[list[tuple[str, torch.Tensor]]], object]
    ) -> None:
        """Load into `engine` with `load`, such as ``model.load_weights``."""
        self.engine = engine
        self.batches: Sequence[tuple[str, ...]] = ()
        self._load = load

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Call the engine's loader for each batch."""
        # An undo installs another version, and an update may come without requests: no batches.
        names = {name for batch in self.batches for name in batch}
        fits = names == set(manifest.table.rows)
        for batch in self.batches if fits else [tuple(tensors)]:
            self._load([(name, tensors[name]) for name in batch])

    def release(self, update_id: str) -> None:
        """Nothing is kept of an update."""
