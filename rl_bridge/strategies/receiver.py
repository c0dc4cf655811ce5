"""The engine's half of a transfer: a receiver imports an update, a loader installs it.

`PendingUpdates` checks that the batches of an update come in order, each once, as its manifest
says; it holds no bytes. `BridgeTransferReceiver` imports the update over a bridge when the first
tensors are asked for.

`ExecutorWeightLoader` is the loader behind `VLLMWeightLoader`, `SGLangWeightLoader` and the user's
own engines with an install adapter. It pulls and checks batches as they come, without touching the
engine; the last one makes its executor install, prove and acknowledge the update.
"""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import (
    EngineLost,
    MalformedManifest,
    StaleUpdate,
    UnknownUpdate,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
    describe,
    is_shortage,
)
from rl_bridge.installers.base import Engine
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.strategies.requests import (
    AbandonedWeightUpdateRequest,
    GPUHandle,
    WeightUpdateRequest,
    columns_of,
)

_LOG = logging.getLogger(__name__)
_SHOWN = 5


@dataclass(slots=True)
class PendingUpdate:
    """One update from its first request to its last."""

    manifest: WeightUpdateManifest  # as this engine imports it
    update_id: str  # the one in its requests; if each GPU has a copy, that of the first copy
    num_batches: int
    batches: list[tuple[str, ...]] = field(default_factory=list)  # names of each that came
    seen: set[str] = field(default_factory=set)
    last: WeightUpdateRequest | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the last batch came."""
        return self.last is not None and self.last.is_last

    def add(self, request: WeightUpdateRequest) -> None:
        """Add the next batch.

        Raises:
            WeightUpdateRejectedError: another batch is due.
            MalformedManifest: the batch is not of this update, or not as its manifest says.

        """
        name, version = _name(request), self.manifest.weight_version
        as_made = "Send requests as the sender made them."
        if (request.update_id, request.weight_version) != (self.update_id, version):
            raise MalformedManifest(
                f"{name} came with the manifest of version {version} (update {self.update_id}). "
                f"{as_made}"
            )
        due = (len(self.batches), self.num_batches)
        if (request.batch, request.num_batches) != due:
            raise WeightUpdateRejectedError(
                f"{name} came as batch {request.batch} of {request.num_batches}, expected batch "
                f"{due[0]} of {due[1]}. Send the requests of an update in order, each once."
            )
        rows = self.manifest.table.rows
        strange = [one for one in request.names if one not in rows or one in self.seen]
        if strange:
            raise MalformedManifest(
                f"{name} names {strange[:_SHOWN]}, which the manifest does not have or an earlier "
                f"batch had. {as_made}"
            )
        expected = columns_of(self.manifest, request.names)
        if any(getattr(request, column) != value for column, value in expected.items()):
            raise MalformedManifest(
                f"{name}: its dtypes or shapes are not those of the manifest. {as_made}"
            )
        missing = rows.keys() - self.seen - set(request.names) if request.is_last else ()
        if missing:
            raise MalformedManifest(
                f"{name} is the last one, and {len(missing)} tensors came in none, such as "
                f"{sorted(missing)[:_SHOWN]}. Send all requests of an update."
            )
        self.batches.append(request.names)
        self.seen.update(request.names)
        self.last = request


def _name(request: WeightUpdateRequest) -> str:
    return f"batch {request.batch} of version {request.weight_version} (update {request.update_id})"


class PendingUpdates:
    """Takes the requests of one update at a time: a newer update ends the one before."""

    def __init__(self, *, gpu: str | None = None) -> None:
        """Wait for the first request."""
        self._gpu = gpu
        self._pending: PendingUpdate | None = None
        self._ended: tuple[str, str] = ("", "")

    def accept(self, request: WeightUpdateRequest) -> PendingUpdate:
        """Record the next batch, without its bytes.

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
            if pending is not None and pending.update_id == first.update_id:
                self.finish("it began again")  # its sender did not hear of its first batch
            elif pending is not None:
                _require_newer(manifest, pending.manifest)
                self.reject(f"version {manifest.weight_version} began before it was complete")
            pending = PendingUpdate(manifest, first.update_id, request.num_batches)
            self._pending = pending
        elif pending is None or pending.update_id != request.update_id:
            ended, reason = self._ended
            why = f"it ended: {reason}" if ended == request.update_id else "no batch of it came"
            raise UnknownUpdate(
                f"{_name(request)}: {why}. Send the update again from its first batch."
            )
        try:
            pending.add(request)
        except WeightBridgeError as error:
            self.reject(describe(error))
            raise
        return pending

    def reject(self, reason: str) -> None:
        """End the update under way, if there is one: its later batches are refused."""
        self.finish(reason)

    def finish(self, reason: str = "it was loaded") -> PendingUpdate | None:
        """Forget the update under way, and return it."""
        pending = self._pending
        if pending is not None:
            self.end(pending, reason)
        return pending

    def end(self, pending: PendingUpdate, reason: str) -> None:
        """Note why no more requests of an update are taken."""
        if self._pending is pending:
            self._pending = None
        self._ended = (pending.update_id, reason)

    def abandon(self, request: AbandonedWeightUpdateRequest) -> None:
        """End an update that its trainer abandoned; one whose install began goes on, or stays."""
        pending = self._pending
        if pending is not None and pending.update_id == request.update_id:
            self.reject(f"its trainer gave it up: {request.reason}")

    def _manifests(
        self, request: WeightUpdateRequest
    ) -> tuple[WeightUpdateManifest, WeightUpdateManifest]:
        """The manifest that the requests name, and that of this engine's copy of the update."""
        assert request.manifest is not None
        first = WeightUpdateManifest.from_json(request.manifest)
        handles: tuple[GPUHandle, ...] = getattr(request, "handles", ())
        if not handles:
            return first, first
        mine = next((one.manifest for one in handles if one.gpu == self._gpu), None)
        if mine is None:
            raise MalformedManifest(
                f"version {request.weight_version} lies on the GPUs "
                f"{[one.gpu for one in handles]}, this engine is on {self._gpu}. Place trainer and "
                "engine on the same GPUs, or send by broadcast."
            )
        manifest = WeightUpdateManifest.from_json(mine)
        if (manifest.root, manifest.weight_version) != (first.root, first.weight_version):
            raise MalformedManifest(
                f"the copy of version {request.weight_version} on GPU {self._gpu} has root "
                f"{manifest.root}, expected {first.root}. Send requests as the sender made them."
            )
        return first, manifest


def _require_newer(manifest: WeightUpdateManifest, under_way: WeightUpdateManifest) -> None:
    """Refuse a late first batch: it must not end the newer update."""
    if manifest.publisher_id != under_way.publisher_id:
        return
    if manifest.weight_version < under_way.weight_version:
        raise StaleUpdate(
            f"version {manifest.weight_version} (update {manifest.update_id}) is stale: version "
            f"{under_way.weight_version} is being received already. Publish a later version."
        )


class WeightTransferReceiver(ABC):
    """Gives the tensors of a request to a loader."""

    @abstractmethod
    def receive_weights(
        self, request: WeightUpdateRequest
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the batch's tensors, by name."""


class BridgeTransferReceiver(PendingUpdates, WeightTransferReceiver):
    """Receives over a bridge.

    When the first tensors are asked for, the whole update is imported and every byte of it is
    verified, so that a damaged one is refused before an engine gets anything of it. The tensors are
    the update's own memory, without a copy if the transport needs none.

    Attributes:
        bridge: the consumer's; `close` closes it.

    """

    def __init__(self, bridge: TensorBridge, *, gpu: str | None = None) -> None:
        """Receive through `bridge`."""
        super().__init__(gpu=gpu)
        self.bridge = bridge

    async def receive_weights(
        self, request: WeightUpdateRequest
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the batch's tensors, by name.

        Raises:
            UnknownUpdate: its first batch never came, or the update ended.
            WeightBridgeError: what `accept` or the import raises; the update is rejected, unless
                this machine was only short of something: then it may come again.

        """
        pending = self._pending
        if pending is None or pending.last is not request:
            pending = self.accept(request)
        # In a thread: it may wait for bytes that are on the wire.
        tensors = await asyncio.to_thread(self.imported, pending)
        for name in request.names:
            yield name, tensors[name]

    def imported(self, pending: PendingUpdate) -> Mapping[str, torch.Tensor]:
        """Import the update; see `receive_weights`."""
        try:
            return self.bridge.import_update(pending.manifest)
        except Exception as error:
            if self._pending is pending:  # else it ended meanwhile, and another one may have begun
                self.fail(pending, error)
            raise

    def reject(self, reason: str) -> None:
        """End the update under way, if there is one: its later batches are refused."""
        pending = self.finish(reason)
        if pending is not None:
            self._reject(pending, reason)

    def fail(self, pending: PendingUpdate, error: BaseException) -> None:
        """End an update that failed: it is rejected, unless nothing is wrong with it.

        After a shortage of this machine, or when the engine is gone, the same update may come again
        from its first batch.
        """
        self.end(pending, describe(error))
        if not (isinstance(error, EngineLost) or is_shortage(error)):
            self._reject(pending, describe(error))
        elif self.bridge.active_update_id != pending.manifest.update_id:
            # An earlier batch may have imported it: it would keep its publisher's slot.
            self.bridge.release_imported(pending.manifest)

    def _reject(self, pending: PendingUpdate, reason: str) -> None:
        if self.bridge.active_update_id == pending.manifest.update_id:
            return
        try:
            self.bridge.reject(pending.manifest, reason)
        except WeightBridgeError:
            # The bridge ended it already.
            _LOG.debug("update %s was over", pending.manifest.update_id, exc_info=True)

    def close(self) -> None:
        """Release the update under way, and close the bridge. Idempotent."""
        self.reject("the receiver closed")
        self.bridge.close()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()


# ---- loaders -------------------------------------------------------------------------------------


class WeightLoader(ABC):
    """Loads an engine's weights; one call for each request."""

    @abstractmethod
    async def load_weights(
        self, receiver: WeightTransferReceiver, request: WeightUpdateRequest
    ) -> None:
        """Pull the request's tensors from the receiver and load them."""


class ExecutorWeightLoader(WeightLoader):
    """Loads through a `RolloutExecutor`: an update is one transaction, however many batches it has.

    If a batch fails, the update is rejected, and the engine keeps what it held. After a shortage of
    this machine the same update may come again. Batches that come during an install wait for its
    end; a word of the trainer that it gives up does not, and ends no install.

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
        self._turn = threading.Lock()

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
        if self._in_thread or not request.is_last:
            # One that is cancelled goes on to its end, or was not begun and may come again.
            await asyncio.to_thread(self._take, receiver, request)
        else:
            self._take(receiver, request)

    def _take(self, receiver: BridgeTransferReceiver, request: WeightUpdateRequest) -> None:
        with self._turn:
            pending = receiver.accept(request)
            if not pending.is_complete:
                receiver.imported(pending)  # the engine gets all batches or none
                return
            receiver.end(pending, "all its batches came, and its install began")
            try:
                adapter = self.executor.weight_install_adapter
                if isinstance(adapter, BatchedLoadAdapter):
                    adapter.batches = tuple(pending.batches)
                self.executor.update_weights(pending.manifest)
            except BaseException as error:
                receiver.fail(pending, error)
                raise
            receiver.end(pending, "it was loaded")

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
        raise WeightBridgeUnavailableError(
            f"the receiver, a {type(receiver).__name__}, does not share the executor's bridge. "
            "Make the executor with weight_bridge=receiver.bridge."
        )


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
