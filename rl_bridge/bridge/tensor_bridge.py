"""`TensorBridge`: a publisher and a consumer over one transport, behind one object."""

import inspect
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import ClassVar, NoReturn, Self

import torch

from rl_bridge.assembly.wanted import Wanted, WantedLayout
from rl_bridge.bridge.arguments import (
    UpdateRef,
    as_update,
    check_options,
    checked_observer,
    checked_rank,
    checked_state_dir,
    checked_wanted,
    checked_worker,
    in_a_child,
    require_options,
    update_id_of,
)
from rl_bridge.bridge.consumer import Consumer
from rl_bridge.bridge.publisher import ConsumerReport, Publisher
from rl_bridge.errors import BridgeClosed, UnknownUpdate, WeightBridgeUnavailableError
from rl_bridge.interrupts import deferred_interrupts
from rl_bridge.lifecycle import STATUS, Observer, State
from rl_bridge.manifest.adapter import AdapterSpec
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.compare import Policy, checked_policy
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.passes import checked_count, checked_threads
from rl_bridge.trainers.state_dict import Source
from rl_bridge.transports.base import Transport
from rl_bridge.transports.registry import transport_class

_LOG = logging.getLogger(__name__)


class TensorBridge:
    """A publisher and a consumer over one transport; each opens when it is first used.

    Usually the trainer's object only publishes and the rollout worker's only imports. Every method
    may be called from any thread. Over ``shared-memory`` and ``local-clone`` none waits for another
    process, over other transports for at most their `timeout_s`. Wherever an update's id is taken,
    its manifest or the manifest's JSON text is as well.
    """

    transport: ClassVar[str]

    def __init__(
        self,
        *,
        source_worker: str = "local-training",
        source_rank: int = 0,
        state_dir: str | os.PathLike[str] | None = None,
        suspicious: Policy | str = Policy.WARN,
        nonfinite: Policy | str = Policy.WARN,
        observer: Observer | None = None,
        wanted: Wanted | WantedLayout | None = None,
        **options: object,
    ) -> None:
        """Configure; nothing is opened yet.

        Args:
            source_worker: this worker's name, for manifests and reports.
            source_rank: its rank.
            state_dir: directory in which the publisher keeps its last version across restarts.
            suspicious: what `publish` does about an update that cannot be what was meant, such as
                one that changes nothing, a stale copy, another dtype. ``"warn"``: a line in the
                log. ``"reject"``: it is refused. ``"off"``: nothing is looked for.
            nonfinite: what `publish` does about NaN and Inf in the weights, likewise: warn, reject
                or off. They are found in the pass that copies the bytes.
            observer: called with every lifecycle transition.
            wanted: what is imported of a version that several ranks published (`GroupPublisher`),
                such as ``parallel(tensor=TensorParallel(...))``. None: every tensor, whole.
            options: the transport's own, such as ``directory``, ``max_slots``, ``num_threads``; the
                last two also hold for what is assembled here of a version of several parts.

        Raises:
            TypeError: an option that the transport does not have, or of the wrong type.
            ValueError: an option out of its range; the text names what is expected.

        """
        self.source_worker = checked_worker(source_worker)
        self.source_rank = checked_rank(source_rank)
        self._state_dir = checked_state_dir(state_dir)
        self.suspicious = checked_policy("suspicious", suspicious)
        self._nonfinite = checked_policy("nonfinite", nonfinite)
        self._observer = checked_observer(observer)
        self._wanted = checked_wanted(wanted)
        self._max_slots = checked_count("max_slots", options.get("max_slots", 4))
        self._num_threads = checked_threads(options.get("num_threads"))
        self._transport = self._make_transport(options)
        self._lock = threading.RLock()
        self._pid: int | None = None
        self._publisher: Publisher | None = None
        self._consumer: Consumer | None = None
        self._owner: weakref.ref[object] | None = None  # of the consuming half
        self._is_closed = False

    # ---- the two halves -------------------------------------------------------------------------

    @property
    def publisher(self) -> Publisher:
        """The publishing half; opened when it is first asked for.

        Raises:
            BridgeClosed: this bridge is closed, or the parent process's.
            WeightBridgeError: the transport is blocked here, or the state directory is in use.

        """
        self._check_process()
        with self._lock:
            if self._publisher is None:
                self._check_open()
                self._publisher = Publisher(
                    self._transport,
                    source_worker=self.source_worker,
                    source_rank=self.source_rank,
                    state_dir=self._state_dir,
                    suspicious=self.suspicious,
                    nonfinite=self._nonfinite,
                    observer=self._observer,
                )
            return self._publisher

    @property
    def consumer(self) -> Consumer:
        """The consuming half, with the fine steps that an executor takes; opened as `publisher` is.

        Raises:
            BridgeClosed: this bridge is closed, or the parent process's.
            WeightBridgeError: the transport is blocked here.

        """
        self._check_process()
        with self._lock:
            if self._consumer is None:
                self._check_open()
                self._consumer = Consumer(
                    self._transport,
                    source_worker=self.source_worker,
                    source_rank=self.source_rank,
                    observer=self._observer,
                    wanted=self._wanted,
                    max_slots=self._max_slots,
                    num_threads=self._num_threads,
                )
            return self._consumer

    def _make_transport(self, options: Mapping[str, object]) -> Transport:
        kind = transport_class(self.transport)
        check_options(kind, options)
        require_options(kind, options)
        if "source_rank" in inspect.signature(kind).parameters:  # each rank has a place of its own
            options = {"source_rank": self.source_rank, **options}
        return kind.create(**options)

    # ---- publishing -----------------------------------------------------------------------------

    @deferred_interrupts()
    def publish(
        self,
        source: Source,
        weight_version: int | None = None,
        *,
        metadata: Mapping[str, JSONValue] | None = None,
        trainable: Iterable[str] | None = None,
        adapter: str | AdapterSpec | None = None,
        merged: bool = False,
        base_root: str = "",
        dtype: torch.dtype | None = None,
        keep: int | None = None,
    ) -> WeightUpdateManifest:
        """Publish one complete version: a sealed snapshot that no later training step changes.

        Args:
            source: an ``nn.Module``, a state dict, an extractor, or an iterable of ``(name,
                tensor)`` pairs or of `WeightChunk`, such as ``extractor.local()``. Tensors of any
                shape and strides, on the CPU or on a GPU (torch's current stream there is read);
                views travel with their own bytes only, tied tensors once.
            weight_version: 0 or more, above every version that this publisher used before. None
                takes the next one: behind the last one of this publisher, of its `state_dir` or of
                the store that it publishes to; the very first is 0.
            metadata: JSON values of your own; ``metadata["layout"]`` is checked and filled.
            trainable: names that a training step changes, for the no-op detector; by default a
                module's parameters that require gradients.
            adapter: of a peft model, publish one LoRA adapter under this name, and nothing else: it
                is peft's adapter of that name, or the only one. With tensors under the names of
                PEFT's checkpoints, an `AdapterSpec` that belongs to them.
            merged: of a peft model, publish the model's own weights with the adapters merged in;
                the training weights stay as they are. The merged ones are made in new memory.
            base_root: root of the base weights that the adapter was trained on: an engine with
                another base refuses it. Empty: that is not checked.
            dtype: to which floating-point tensors are cast on their way into the sealed memory,
                such as ``torch.bfloat16``; others travel as they are, and tied tensors stay tied.
                None casts nothing.
            keep: as soon as this version is published, older ones than the newest `keep` are
                released, each when no living consumer holds it: now, or with a later publication.
                An adapter's versions are counted apart. None: each stays until `release`.

        Returns:
            The manifest: send its `to_json` to the rollout side.

        Raises:
            IncompatibleUpdate: a source that cannot be published, a peft model of which is not said
                what is published, half of an adapter's pair.
            VersionNotMonotonic: the version is not above the last one.
            WeightBridgeUnavailableError: this transport cannot serve these tensors here.
            SlotsExhausted: consumers or unreleased updates hold every slot.
            SuspiciousUpdate: with ``suspicious="reject"`` whatever is suspicious, such as an update
                that changes nothing; with ``nonfinite="reject"`` NaN or Inf.
            TypeError, ValueError: a `dtype` that holds no floating-point numbers; `keep` below 1.

        """
        return self.publisher.publish(
            source,
            weight_version,
            metadata=metadata,
            trainable=trainable,
            adapter=adapter,
            merged=merged,
            base_root=base_root,
            dtype=dtype,
            keep=keep,
        )

    def consumers(self) -> list[ConsumerReport]:
        """One report per consumer and update, of the last few updates of each (publisher's side).

        Consumers that are gone stay, with ``presence="gone"``, until their place is needed. Empty
        before the first publication.

        Raises:
            BridgeClosed: this bridge published and is closed.

        """
        return [] if self._publisher is None else self._publisher.reports()

    def holders(self, update_id: UpdateRef) -> list[ConsumerReport]:
        """The reports of `consumers` about one update: of each consumer that met it.

        Consumers that rejected or released it, or are gone, are listed too, with that ``state`` and
        ``presence``; ``tensors_held`` is set if a consumer still keeps tensors of it.

        Raises:
            BridgeClosed: this bridge published and is closed.
            MalformedManifest: what is given names no update.

        """
        update_id = update_id_of(update_id, caller="holders")
        publisher = self._publisher
        return [] if publisher is None else publisher.reports(publisher.own_id(update_id))

    @property
    def published_nbytes(self) -> int:
        """Bytes of memory that published updates take on this side; 0 after `close`."""
        return 0 if self._publisher is None else self._publisher.end.nbytes

    @property
    def publisher_id(self) -> str:
        """Names this bridge's stream of versions; opens the publisher if it was not used yet."""
        return self.publisher.publisher_id

    @property
    def latest_manifest(self) -> WeightUpdateManifest | None:
        """The manifest published last here, for a late joiner; also after `close`."""
        return None if self._publisher is None else self._publisher.latest

    def get_manifest(self, update_id: UpdateRef) -> WeightUpdateManifest:
        """The manifest of an update that was published here.

        Raises:
            UnknownUpdate: it was not.

        """
        return self.publisher.manifest(update_id_of(update_id, caller="get_manifest"))

    # ---- consuming ------------------------------------------------------------------------------

    @deferred_interrupts()
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
        manifest = WeightUpdateManifest.of(manifest, caller="import_update")
        return self.consumer.import_update(manifest)

    @deferred_interrupts()
    def acknowledge(
        self,
        update_id: UpdateRef,
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
        update_id = update_id_of(update_id, caller="acknowledge")
        self.consumer.acknowledge(update_id, proof=proof, timings_ms=timings_ms)

    @deferred_interrupts()
    def reject(self, update_id: UpdateRef, reason: str) -> None:
        """Refuse an update, imported or not, and release it.

        Raises:
            IllegalTransition: it was acknowledged already.

        """
        self.consumer.reject(as_update(update_id, caller="reject"), reason)

    @deferred_interrupts()
    def release_imported(self, update_id: UpdateRef) -> None:
        """Release an imported update; if this bridge published it as well, it stays published.

        What an executor calls: it must not take an update from those that import it elsewhere.
        Idempotent; unknown ids are ignored.

        Raises:
            MalformedManifest: what is given names no update.

        """
        update_id = update_id_of(update_id, caller="release_imported")
        if self._consumer is not None:
            self._consumer.release(update_id)

    def claim(self, owner: object) -> None:
        """Keep the consuming half for one owner, as long as it lives or until `give_up`.

        What an executor calls, so that no second one installs through the same bridge: which of two
        engines an acknowledgement speaks of, nobody could tell.

        Raises:
            WeightBridgeUnavailableError: another owner has it.

        """
        with self._lock:
            holder = None if self._owner is None else self._owner()
            if holder is not None and holder is not owner:
                raise WeightBridgeUnavailableError(
                    f"the {type(self).__name__} of worker {self.source_worker!r} serves another "
                    f"{type(holder).__name__} already, expected at most one. Make a bridge for "
                    "each, or close() the other one first."
                )
            self._owner = weakref.ref(owner)

    def give_up(self, owner: object) -> None:
        """End the claim of `owner`; another one's stands."""
        with self._lock:
            if self._owner is not None and self._owner() is owner:
                self._owner = None

    @property
    def active_weight_version(self) -> int | None:
        """The version acknowledged last on this side."""
        return None if self._consumer is None else self._consumer.active_weight_version

    @property
    def active_update_id(self) -> str | None:
        """The update acknowledged last on this side, unless it was released."""
        return None if self._consumer is None else self._consumer.active_update_id

    # ---- both -----------------------------------------------------------------------------------

    @deferred_interrupts()
    def release(self, update_id: UpdateRef) -> None:
        """Release an update on whichever side knows it. Idempotent; an unknown id is logged.

        Raises:
            MalformedManifest: what is given names no update.

        """
        update_id = update_id_of(update_id, caller="release")
        consumer, publisher = self._consumer, self._publisher
        is_known = False
        if consumer is not None:
            is_known = consumer.state(update_id) is not None
            consumer.release(update_id)
        if publisher is not None:
            own = publisher.own_id(update_id)
            is_known = is_known or publisher.state(own) is not None
            publisher.release(own)
        if not is_known:
            _LOG.warning(
                "release: this bridge of %r knows no update %s, so it released nothing. It is "
                "another bridge's, or was released long ago.",
                self.source_worker,
                update_id,
            )

    def update_status(self, update_id: UpdateRef) -> str:
        """One of the words: published, imported, acknowledged, rejected, released.

        Raises:
            UnknownUpdate: nothing is known of the update here.

        """
        return STATUS[self.update_state(update_id)]

    def update_state(self, update_id: UpdateRef) -> State:
        """Fine state, such as ``verified`` or ``torn``; the consumer's where both sides know it.

        Raises:
            UnknownUpdate: nothing is known of the update here.

        """
        update_id = update_id_of(update_id, caller="update_state")
        for half in (self._consumer, self._publisher):
            state = None if half is None else half.state(update_id)
            if state is not None:
                return state
        raise UnknownUpdate(
            f"unknown weight update {update_id}: neither published nor imported here, or forgotten "
            "since. Ask with the update_id of a manifest that passed through this bridge."
        )

    def rejection_reason(self, update_id: UpdateRef) -> str | None:
        """Why an update was rejected or torn here; None if it was not, or is unknown."""
        update_id = update_id_of(update_id, caller="rejection_reason")
        return None if self._consumer is None else self._consumer.reason(update_id)

    def timings(self, update_id: UpdateRef) -> dict[str, float]:
        """Phase -> milliseconds, of publishing and of importing; empty if unknown here."""
        update_id = update_id_of(update_id, caller="timings")
        halves = (self._publisher, self._consumer)
        found = [{} if half is None else half.timings_ms(update_id) for half in halves]
        return {**found[0], **found[1]}

    @deferred_interrupts()
    def close(self) -> None:
        """Give everything back; tensors that are still referenced stay valid. Idempotent."""
        if self._pid not in {None, os.getpid()}:
            return
        with self._lock:
            self._is_closed = True
            try:
                if self._consumer is not None:
                    self._consumer.close()
            finally:
                if self._publisher is not None:
                    self._publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: its locks and memory belong to "
            "this process. Make one in each process, and send manifests between them (to_json)."
        )

    def _check_process(self) -> None:
        # Before the lock is taken: at the fork, another thread of the parent may have held it. A
        # bridge that was not used yet belongs to the first process that uses it.
        if self._pid is None:
            self._pid = os.getpid()
        if os.getpid() != self._pid:
            raise in_a_child(type(self).__name__)

    def _check_open(self) -> None:
        if self._is_closed:
            raise BridgeClosed(f"this {type(self).__name__} is closed. Make a new one.")
