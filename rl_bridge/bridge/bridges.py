"""The bridges that users make: a publisher and a consumer over one transport, behind one object."""

import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import torch

from rl_bridge.bridge.consumer import Consumer
from rl_bridge.bridge.guards import require_own_process
from rl_bridge.bridge.publisher import ConsumerReport, Publisher
from rl_bridge.errors import BridgeClosed, UnknownUpdate
from rl_bridge.extractors.state_dict import Source
from rl_bridge.lifecycle.machine import Observer
from rl_bridge.lifecycle.table import STATUS, State
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.compare import Policy
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.transports.base import Transport
from rl_bridge.transports.registry import canonical_name, transport_class

__all__ = [
    "CUDAIPCTensorBridge",
    "CUDAVMMTensorBridge",
    "LocalTensorCopyBridge",
    "SharedMemoryTensorBridge",
    "TensorBridge",
    "make_weight_bridge",
]


class TensorBridge:
    """A publisher and a consumer over one transport; each opens when it is first used.

    Usually the trainer's object only publishes and the rollout worker's only imports. Every method
    may be called from any thread, none waits for another process.
    """

    transport: ClassVar[str]

    def __init__(
        self,
        *,
        source_worker: str = "local-training",
        source_rank: int = 0,
        state_dir: str | os.PathLike[str] | None = None,
        suspicious: Policy | str = Policy.WARN,
        observer: Observer | None = None,
        **options: object,
    ) -> None:
        """Configure; nothing is opened yet.

        Args:
            source_worker: this worker's name, for manifests and reports.
            source_rank: its rank.
            state_dir: directory in which the publisher keeps its last version across restarts.
            suspicious: what `publish` does about a no-op or narrowed update: off, warn or reject.
            observer: called with every lifecycle transition.
            options: the transport's own, such as ``directory``, ``max_slots``, ``num_threads``.

        Raises:
            TypeError: an option that the transport does not have.
            ValueError: an option out of its range; the text names what is expected.

        """
        self.source_worker = source_worker
        self.source_rank = source_rank
        self._state_dir = state_dir
        self._suspicious = Policy(suspicious)
        self._observer = observer
        self._transport = self._make_transport(options)
        self._lock = threading.RLock()
        self._pid: int | None = None
        self._publisher: Publisher | None = None
        self._consumer: Consumer | None = None
        self._is_closed = False

    def _make_transport(self, options: Mapping[str, object]) -> Transport:
        return transport_class(self.transport).create(**options)

    # ---- publishing -----------------------------------------------------------------------------

    def publish(
        self,
        source: Source,
        *,
        weight_version: int,
        metadata: Mapping[str, JSONValue] | None = None,
        trainable: Iterable[str] | None = None,
    ) -> WeightUpdateManifest:
        """Publish one complete version: a sealed snapshot that no later training step changes.

        Args:
            source: an ``nn.Module``, a state dict, or an iterable of ``(name, tensor)`` pairs or
                chunks. CPU tensors of any shape and strides; views travel with their own bytes
                only, tied tensors once.
            weight_version: 0 or more, above every version that this publisher used before.
            metadata: JSON values of your own; ``metadata["layout"]`` is checked and filled.
            trainable: names that a training step changes, for the no-op detector; by default a
                module's parameters that require gradients.

        Returns:
            The manifest: send its `to_json` to the rollout side.

        Raises:
            VersionNotMonotonic: the version is not above the last one.
            WeightBridgeUnavailableError: this transport cannot serve these tensors here.
            SlotsExhausted: consumers or unreleased updates hold every slot.
            SuspiciousUpdate: only with ``suspicious="reject"``.

        """
        return self._publisher_end().publish(
            source, weight_version=weight_version, metadata=metadata, trainable=trainable
        )

    def consumers(self) -> list[ConsumerReport]:
        """One report per consumer and update, of the last few updates of each (publisher's side).

        Consumers that are gone stay, with ``presence="gone"``, until their place is needed. Empty
        before the first publication.

        Raises:
            BridgeClosed: this bridge published and is closed.

        """
        return [] if self._publisher is None else self._publisher.reports()

    def holders(self, update_id: str) -> list[ConsumerReport]:
        """The reports of `consumers` about one update: everybody who told of it.

        Who rejected or released it, and who is gone, is listed too, with that ``state`` and
        ``presence``; ``tensors_held`` tells who still keeps tensors of it.

        Raises:
            BridgeClosed: this bridge published and is closed.

        """
        return [] if self._publisher is None else self._publisher.reports(update_id)

    @property
    def published_nbytes(self) -> int:
        """Bytes of memory that published updates take on this side; 0 after `close`."""
        return 0 if self._publisher is None else self._publisher.nbytes

    @property
    def publisher_id(self) -> str:
        """Names this bridge's stream of versions; opens the publisher if it was not used yet."""
        return self._publisher_end().publisher_id

    @property
    def latest_manifest(self) -> WeightUpdateManifest | None:
        """The manifest published last here, for a late joiner; it is told also after `close`."""
        return None if self._publisher is None else self._publisher.latest

    def get_manifest(self, update_id: str) -> WeightUpdateManifest:
        """The manifest of an update that was published here.

        Raises:
            UnknownUpdate: it was not.

        """
        return self._publisher_end().manifest(update_id)

    # ---- consuming ------------------------------------------------------------------------------

    def import_update(self, manifest: WeightUpdateManifest | str) -> Mapping[str, torch.Tensor]:
        """Make an update's tensors readable here and verify every byte against the manifest.

        Args:
            manifest: the manifest, or its JSON text.

        Returns:
            Name -> tensor. With shared-memory they alias the published pages without a copy;
            writing to one changes this process's own copy only. They stay valid for as long as
            you hold them, also after `release`.

        Raises:
            ChecksumMismatch: bytes differ from the manifest; the update is rejected.
            StaleUpdate: older than what was acknowledged, or overwritten meanwhile.
            SegmentError: the memory is gone or not what the manifest says.
            WeightManifestValidationError: its other subclasses, one per reason.

        """
        return self._consumer_end().import_update(manifest)

    def acknowledge(
        self,
        update_id: str,
        *,
        proof: Mapping[str, JSONValue] | None = None,
        timings_ms: Mapping[str, float] | None = None,
    ) -> None:
        """Say that the full update is installed; it becomes the active version.

        Args:
            update_id: the update.
            proof: what was checked in the engine; the publisher gets to see it.
            timings_ms: phase -> milliseconds, joined to what import measured.

        Raises:
            UnknownUpdate: it was not imported here.
            IllegalTransition: its state does not allow it.

        """
        self._consumer_end().acknowledge(update_id, proof=proof, timings_ms=timings_ms)

    def reject(self, update_id: str | WeightUpdateManifest, reason: str) -> None:
        """Refuse an update, imported or not, and let go of it.

        Raises:
            IllegalTransition: it was acknowledged already.

        """
        self._consumer_end().reject(update_id, reason)

    @property
    def active_weight_version(self) -> int | None:
        """The version acknowledged last on this side."""
        return None if self._consumer is None else self._consumer.active_weight_version

    @property
    def active_update_id(self) -> str | None:
        """The update acknowledged last on this side, unless it was released."""
        return None if self._consumer is None else self._consumer.active_update_id

    # ---- both -----------------------------------------------------------------------------------

    def release(self, update_id: str) -> None:
        """Let go of an update on whichever side knows it. Idempotent; unknown ids are ignored."""
        if self._consumer is not None:
            self._consumer.release(update_id)
        if self._publisher is not None:
            self._publisher.release(update_id)

    def update_status(self, update_id: str) -> str:
        """One of the words: published, imported, acknowledged, rejected, released.

        Raises:
            UnknownUpdate: nothing is known of the update here.

        """
        return STATUS[self.update_state(update_id)]

    def update_state(self, update_id: str) -> State:
        """Fine state, such as ``verified`` or ``torn``; the consumer's where both sides know it.

        Raises:
            UnknownUpdate: nothing is known of the update here.

        """
        if self._consumer is not None and self._consumer.knows(update_id):
            return self._consumer.state(update_id)
        if self._publisher is not None and self._publisher.knows(update_id):
            return self._publisher.state(update_id)
        msg = (
            f"unknown weight update {update_id}: neither published nor imported here, or forgotten "
            "since. Ask with the update_id of a manifest that passed through this bridge."
        )
        raise UnknownUpdate(msg)

    def rejection_reason(self, update_id: str) -> str | None:
        """Why an update was rejected or torn here; None if it was not, or is unknown."""
        if self._consumer is not None and self._consumer.knows(update_id):
            return self._consumer.reason(update_id)
        return None

    def timings(self, update_id: str) -> dict[str, float]:
        """Phase -> milliseconds, of publishing and of importing; empty if unknown here."""
        found: dict[str, float] = {}
        if self._publisher is not None and self._publisher.knows(update_id):
            found |= self._publisher.timings_ms(update_id)
        if self._consumer is not None and self._consumer.knows(update_id):
            found |= self._consumer.timings_ms(update_id)
        return found

    def close(self) -> None:
        """Give everything back; tensors that are still referenced stay valid. Idempotent."""
        if self._pid not in {None, os.getpid()}:
            return
        with self._lock:
            self._is_closed = True
            if self._consumer is not None:
                self._consumer.close()
            if self._publisher is not None:
                self._publisher.close()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()

    def _publisher_end(self) -> Publisher:
        self._check_process()
        with self._lock:
            if self._publisher is None:
                self._check_open()
                self._publisher = Publisher(
                    self._transport,
                    source_worker=self.source_worker,
                    source_rank=self.source_rank,
                    state_dir=self._state_dir,
                    suspicious=self._suspicious,
                    observer=self._observer,
                )
            return self._publisher

    def _consumer_end(self) -> Consumer:
        """The consuming half, with the fine steps that an executor takes."""
        self._check_process()
        with self._lock:
            if self._consumer is None:
                self._check_open()
                self._consumer = Consumer(
                    self._transport,
                    source_worker=self.source_worker,
                    source_rank=self.source_rank,
                    observer=self._observer,
                )
            return self._consumer

    def _check_process(self) -> None:
        # Before the lock is taken: at the fork, another thread of the parent may have held it. A
        # bridge that was not used yet belongs to whoever uses it first.
        if self._pid is None:
            self._pid = os.getpid()
        require_own_process(self._pid, type(self).__name__)

    def _check_open(self) -> None:
        if self._is_closed:
            msg = f"this {type(self).__name__} is closed. Make a new one."
            raise BridgeClosed(msg)


class LocalTensorCopyBridge(TensorBridge):
    """``local-clone``: one process, every update copied."""

    transport: ClassVar[str] = "local-clone"


class SharedMemoryTensorBridge(TensorBridge):
    """``shared-memory``: CPU tensors between processes of one machine, no copy on import."""

    transport: ClassVar[str] = "shared-memory"


class CUDAVMMTensorBridge(TensorBridge):
    """``cuda-vmm``: blocked in this release; publishing and importing say why."""

    transport: ClassVar[str] = "cuda-vmm"


class CUDAIPCTensorBridge(TensorBridge):
    """``cuda-ipc``: blocked in this release; publishing and importing say why."""

    transport: ClassVar[str] = "cuda-ipc"


# Transports whose bridges users know by a class name. Every other one gets a class when asked for.
_NAMED: dict[str, type[TensorBridge]] = {
    kind.transport: kind
    for kind in (
        LocalTensorCopyBridge,
        SharedMemoryTensorBridge,
        CUDAVMMTensorBridge,
        CUDAIPCTensorBridge,
    )
}


def make_weight_bridge(
    transport: str = "local-clone",
    *,
    source_worker: str = "local-training",
    source_rank: int = 0,
    **options: object,
) -> TensorBridge:
    """Make the bridge of a transport.

    Args:
        transport: ``local-clone``, ``shared-memory``, ``cuda-vmm`` or ``cuda-ipc``; short forms
            ``local``, ``shm``, ``ipc``; or one that was registered with
            `rl_bridge.transports.registry.register_transport`.
        source_worker: this worker's name.
        source_rank: its rank.
        options: what `TensorBridge` and the transport take.

    Raises:
        WeightBridgeUnavailableError: no transport of that name.
        TypeError: an option that the transport does not have.
        ValueError: an option out of its range.

    """
    name = canonical_name(transport)
    kind: Any = _NAMED.get(name) or type("TensorBridge", (TensorBridge,), {"transport": name})
    made: TensorBridge = kind(source_worker=source_worker, source_rank=source_rank, **options)
    return made
