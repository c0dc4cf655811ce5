"""`RolloutExecutor`: one weight update as a transaction; `TwoPhaseExecutor`: the same in steps.

import -> verify -> prepare -> install -> prove -> acknowledge -> release the old one. If any of it
fails, the previous version stays active: what was installed is undone, and the update is rejected
with the reason, unless this machine was only short of something. The steps of one update are in
`rl_bridge.bridge.transaction`, what the engine holds in `rl_bridge.bridge.engine_state`.

Ctrl-C waits for the end of a call (`rl_bridge.interrupts`).
"""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, cast

import torch

from rl_bridge.bridge.arguments import (
    UpdateRef,
    WeightConsumer,
    in_a_child,
    update_id_of,
)
from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.consumer import PlainConsumer
from rl_bridge.bridge.engine_state import Acknowledgement, EngineState, InstalledUpdate
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.bridge.transaction import Step, Transaction
from rl_bridge.errors import (
    BridgeClosed,
    EngineLost,
    IllegalTransition,
    IncompatibleUpdate,
    StaleUpdate,
    TornEngine,
    UnknownUpdate,
    WeightUpdateRejectedError,
    describe,
)
from rl_bridge.installers.base import (
    InstallProof,
    TransactionalAdapter,
    WeightInstallAdapter,
    kind_of,
    require_plain,
)
from rl_bridge.installers.wrapped import Version, as_transactional
from rl_bridge.interrupts import deferred_interrupts
from rl_bridge.lifecycle import State
from rl_bridge.manifest.compare import Policy, checked_policy
from rl_bridge.manifest.model import WeightUpdateManifest


class RolloutExecutor:
    """Keeps one engine at exactly one version. Thread-safe: updates are taken in turn.

    Attributes:
        bridge: the consumer's bridge, as given or made.
        weight_install_adapter: as given.

    """

    def __init__(
        self,
        weight_bridge: WeightConsumer | None = None,
        weight_install_adapter: WeightInstallAdapter | TransactionalAdapter | None = None,
        *,
        weight_transport: str = "shared-memory",
        initial_weights: Mapping[str, torch.Tensor] | torch.nn.Module | None = None,
        suspicious: Policy | str = Policy.OFF,
        num_threads: int | None = None,
    ) -> None:
        """Configure; the engine is not touched before the first update.

        Args:
            weight_bridge: the consumer's bridge; None makes one for `weight_transport`, which
                `close` closes.
            weight_install_adapter: how tensors get into the engine. None: the imported mapping
                itself is what the rollout uses.
            weight_transport: only read without a `weight_bridge`.
            initial_weights: the engine's weights before the first update, for adapters without
                ``undo`` whose engine cannot be seen: the undo of the first update installs them.
                A copy is kept until that update is acknowledged.
            suspicious: what to do about updates that cannot be what was meant, as for a bridge
                (`TensorBridge`). Off: the publisher looks for them, and says it once.
            num_threads: threads that copy and digest where an adapter without ``undo`` or ``prove``
                leaves that to the executor; None takes the usable cores, at most 8.

        Raises:
            TypeError: an adapter without ``install`` or ``release``.
            ValueError: initial weights for an adapter that never uses them, no such policy, or
                less than one thread.
            WeightBridgeUnavailableError: no transport of that name, or a bridge that serves
                another executor already.

        """
        self._own_bridge: TensorBridge | None = None
        if weight_bridge is None:
            self._own_bridge = make_weight_bridge(weight_transport, source_worker="rollout")
            weight_bridge = self._own_bridge
        self.bridge: WeightConsumer = _checked_bridge(weight_bridge)
        self._suspicious = checked_policy("suspicious", suspicious)
        self.weight_install_adapter = weight_install_adapter
        initial = _sealed_initial(weight_install_adapter, initial_weights)
        adapter: TransactionalAdapter = _NoEngine()
        if weight_install_adapter is not None:
            adapter = as_transactional(
                weight_install_adapter, initial=initial, num_threads=num_threads
            )
        bridge = (
            self.bridge if isinstance(self.bridge, TensorBridge) else PlainConsumer(self.bridge)
        )
        self._engine = EngineState(bridge, adapter, self._suspicious)
        # The same engine as far as one LoRA adapter goes, by the adapter's name.
        self._lora: dict[str, EngineState] = {}
        self._acknowledged = self._engine  # which of them was updated last
        self._pending: Transaction | None = None  # neither over nor given up
        self._lock = threading.RLock()  # reentrant: hooks of the adapter may ask for a release
        self._pid = os.getpid()
        self._is_closing = self._is_closed = False
        bridge.claim(self)

    # ---- updates --------------------------------------------------------------------------------

    @deferred_interrupts()
    def update_weights(self, manifest: WeightUpdateManifest | str) -> InstalledUpdate:
        """Install one complete version, or leave everything as it was.

        Args:
            manifest: the publisher's manifest, or its JSON text.

        A version of a LoRA adapter that the engine holds, and that a `drop_adapter` which did not
        end took from requests, is offered to them again.

        Returns:
            The acknowledgement (proof, timings, memory), and the imported mapping, name -> tensor.
            If the engine's own processes verified the bytes, they are read and verified here when
            the first tensor is asked for; over a transport that copies they are fetched then,
            unless the version was released meanwhile.

        Raises:
            WeightBridgeError: refused or undone; the subclass and the text say why. The previous
                version is active.
            TornEngine: install and undo both failed; the engine must not serve. See `recover`.
            Exception: the adapter's own, unchanged, after the undo; a note tells what was done.

        """
        with self._exclusively("update_weights", manifest):
            manifest = WeightUpdateManifest.of(manifest, caller="update_weights")
            if (engine := self._offered_again(manifest)) is not None:
                assert engine.last_ack is not None  # what it holds was acknowledged
                return InstalledUpdate.of(engine.last_ack, engine.weights)
            update = self._begin(manifest)
            update.run(update.bring, update.stage, update.install, update.activate)
            self._acknowledged = update.engine
            self._pending = None
            assert update.result is not None  # it came through
            return update.result

    @contextmanager
    def _exclusively(self, caller: str, given: object) -> Iterator[None]:
        """Change the engine; nothing else does meanwhile."""
        if os.getpid() != self._pid:
            raise in_a_child("executor")
        with self._lock:
            if self._engine.busy.locked():
                raise WeightUpdateRejectedError(
                    f"{_name(given)}: {caller} was called from inside an update (an observer, a "
                    "hook of the adapter). Call it when that one is over."
                )
            with self._engine.busy:
                self._check_open()
                yield

    def _begin(self, manifest: WeightUpdateManifest) -> Transaction:
        """A new update, after whatever came before it has ended."""
        self._give_up_pending()
        spec = manifest.adapter
        engine = self._engine if spec is None else self._lora_state(spec.name)
        name = f"version {manifest.weight_version} (update {manifest.update_id})"
        if manifest.update_id == engine.update_id:
            msg = f"{name} is active already. Publish a later version."
            if not engine.adapter.is_offered:
                msg = (
                    f"{name} is what was installed last, and requests cannot ask for it: it was "
                    "dropped from the engine, or is about to be. Call recover(), which offers it "
                    "again where the engine holds it still; or publish a later version."
                )
            if engine.is_torn:
                msg = (
                    f"{name} is what the torn engine goes back to: call recover(), or install a "
                    "later version in full."
                )
            raise StaleUpdate(msg)
        known_as = engine.consumer.state(manifest.update_id)
        if known_as is State.ACKNOWLEDGED:
            # Another user of this bridge says that another engine has it: that stands.
            raise StaleUpdate(
                f"{name} is acknowledged on this bridge already, and not what this executor's "
                "engine holds. Publish a later version, or call the bridge's release_imported() "
                "with it and try again."
            )
        self._pending = Transaction(manifest, engine, known_as)
        return self._pending

    def _give_up_pending(self) -> None:
        """End an update that stopped half-way: by an interrupt, or between two steps.

        Raises:
            TornEngine: it could not be undone.

        """
        pending, self._pending = self._pending, None
        if pending is not None:
            msg = (
                f"{pending.name} was not committed before something else was asked for. Publish a "
                "later version."
            )
            pending.end(WeightUpdateRejectedError(msg))
        for engine in self._engines():
            if engine.changing is not None:
                engine.note_torn(engine.changing, "an interrupt stopped its install")

    def _offered_again(self, manifest: WeightUpdateManifest) -> EngineState | None:
        """The engine of a version that it holds and did not offer, and offers now; None if not."""
        engine = None if manifest.adapter is None else self._lora.get(manifest.adapter.name)
        if engine is None or engine.update_id != manifest.update_id or _is_offered(engine):
            return None
        self._give_up_pending()
        _recover(engine, is_inside=False)
        return engine if engine.update_id == manifest.update_id and _is_offered(engine) else None

    def _engines(self) -> list[EngineState]:
        return [self._engine, *self._lora.values()]

    def _lora_state(self, name: str) -> EngineState:
        """What the engine holds of a LoRA adapter.

        Raises:
            IncompatibleUpdate: it takes a model's weights only.

        """
        if name not in self._lora:
            adapter = self._engine.adapter.for_adapter(name)
            engine = self._engine
            made = EngineState(engine.bridge, adapter, self._suspicious, engine.losses)
            made.busy = self._engine.busy  # there is one engine
            self._lora[name] = made
        return self._lora[name]

    # ---- the engine -----------------------------------------------------------------------------

    @property
    def active_weight_version(self) -> int | None:
        """The version that the engine holds; None before the first, while it is torn, or gone."""
        return self._engine.version

    @property
    def active_weight_update_id(self) -> str | None:
        """The active update; None before the first and after a release."""
        return self._engine.update_id

    @property
    def shared_weights(self) -> Mapping[str, torch.Tensor]:
        """The imported mapping of the active update; empty before the first, after a release."""
        return self._engine.weights

    @property
    def last_ack(self) -> Acknowledgement | None:
        """What the last acknowledged update left behind: proof, timings, memory."""
        return self._acknowledged.last_ack

    @property
    def is_torn(self) -> bool:
        """Whether the engine is neither at its version nor at another: it must not serve."""
        return any(engine.is_torn for engine in self._engines())

    def adapter_version(self, adapter: str) -> int | None:
        """The version of a LoRA adapter that new requests ask for.

        None before the first, and while none can: after a `drop_adapter` that did not end, and
        where the engine is gone.
        """
        engine = self._lora.get(adapter)
        return None if engine is None or not engine.adapter.is_offered else engine.version

    def lora_request(self, adapter: str, version: int | None = None) -> Any:
        """What a request names a LoRA adapter by, as the engine's own ``generate`` takes it.

        Args:
            adapter: its name.
            version: one that is still resident; None is the active one.

        Raises:
            UnknownUpdate: the engine does not hold it.
            EngineLost: the engine was gone when it was asked last.

        """
        # Without the lock, which an update has as long as it lasts: it may wait for calls on the
        # event loop in which this is asked.
        engine = self._installed_lora(adapter)
        engine.check_there()
        return engine.adapter.lora_request(version)

    @deferred_interrupts()
    def drop_adapter(self, adapter: str, *, timeout_s: float | None = None) -> None:
        """Take a LoRA adapter out of the engine, with all of its versions; others stay.

        No request can ask for it from now on, and those that have it are waited for (vLLM does
        that itself where it got the adapter by files). A later version of that name begins anew.

        An executor that has the engine drops an adapter which another driver brought, too: one
        that died leaves its adapters there.

        Args:
            adapter: its name.
            timeout_s: seconds that these requests are waited for; None for the engine's timeout.

        Raises:
            UnknownUpdate: this executor has installed no adapter of that name, and the engine
                holds none.
            SessionRefused: another driver brought it, and this executor does not have the engine.
            WeightUpdateRejectedError: an update is under way in this thread.
            DeadlineExceeded: requests have it still, after that time; nothing was dropped, no new
                request gets it, and the next call begins where this one ended.

        """
        with self._between_updates() as is_inside:
            self._check_open()
            if is_inside:
                raise WeightUpdateRejectedError(
                    f"adapter {adapter!r} is not dropped within an update. Call it afterwards."
                )
            engine = self._lora.get(adapter) or self._lora_of_others(adapter)
            with _losses_noted(engine):
                engine.adapter.drop_versions(timeout_s)
            if engine.update_id is not None:
                engine.release(engine.update_id)
            engine.release_superseded()
            engine.adapter.leave()
            del self._lora[adapter]

    def _lora_of_others(self, adapter: str) -> EngineState:
        """What the engine holds of a LoRA adapter that this executor did not install.

        Raises:
            UnknownUpdate: it holds none of that name.
            SessionRefused: another driver has it.

        """
        try:
            engine = self._lora_state(adapter)
        except IncompatibleUpdate:  # it holds none of any name
            return self._installed_lora(adapter)
        is_there = False
        try:
            # Whoever has the engine's weights may end what stands in the way of their update.
            take_over = self._engine.adapter.has_engine()
            is_there = engine.adapter.finds_versions(take_over=take_over)
        finally:
            if not is_there:
                del self._lora[adapter]
                engine.adapter.leave()
        return engine if is_there else self._installed_lora(adapter)

    def _installed_lora(self, adapter: str) -> EngineState:
        engine = self._lora.get(adapter)
        if engine is None:
            raise UnknownUpdate(
                f"this executor has installed no LoRA adapter {adapter!r}, expected one of "
                f"{sorted(self._lora)}. Install a version of it with update_weights first."
            )
        return engine

    def check_servable(self) -> None:
        """Tell whether the engine may answer requests. One that can sleep is asked.

        Raises:
            TornEngine: it may not.
            EngineLost: it was gone when it was asked last.
            EngineAsleep: its weights sleep.
            WeightBridgeUnavailableError: it never got a verified version, or it threw that away in
                a sleep of its own: install one again, the same or a later one.

        """
        if self._engine.adapter.may_sleep and self._lock.acquire(blocking=False):
            try:
                if not self._engine.busy.locked():
                    self._ask_sleeper()
            finally:
                self._lock.release()
        self._engine.check_servable()

    def _ask_sleeper(self) -> None:
        """What an engine threw away in a sleep of its own is active no longer."""
        for engine in self._engines():
            with _losses_noted(engine):
                if engine.active is not None and not engine.adapter.has_engine():
                    engine.note_taken()

    @deferred_interrupts()
    def recover(self) -> None:
        """Undo what tore the engine, or take it over from another driver and end what that left.

        Raises:
            TornEngine: the undo failed again.

        """
        with self._between_updates() as is_inside:
            for engine in self._engines():
                _recover(engine, is_inside=is_inside)

    @deferred_interrupts()
    def release_weights(self) -> None:
        """Release the active update; the engine goes on with the bytes that it has."""
        with self._between_updates():
            if self._engine.update_id is not None:
                self._engine.release(self._engine.update_id)

    @deferred_interrupts()
    def release_weight_update(self, update_id: UpdateRef) -> None:
        """Release one update, active or superseded, named by its id or its manifest.

        Raises:
            MalformedManifest: what is given names no update.
            Exception: the adapter's own; the bridge has released the update all the same.

        """
        update_id = update_id_of(update_id, caller="release_weight_update")
        with self._between_updates():
            owners = [engine for engine in self._lora.values() if engine.update_id == update_id]
            (owners or [self._engine])[0].release(update_id)

    @contextmanager
    def _between_updates(self) -> Iterator[bool]:
        """Wait until no update is under way; yields whether one is all the same.

        That is so where a hook of the adapter calls: its update is under way in this very thread.
        """
        if os.getpid() != self._pid:
            raise in_a_child("executor")
        with self._lock:
            is_inside = self._engine.busy.locked()
            if not is_inside:
                self._give_up_pending()
            yield is_inside

    @deferred_interrupts()
    def close(self) -> None:
        """Release the active update, and close the bridge if the executor made it. Idempotent.

        The engine goes on with the bytes that it has. A bridge that was given stays its giver's.
        """
        if os.getpid() != self._pid:
            return  # before the lock: at the fork, another thread may have held it
        with self._lock:
            if self._is_closed:
                return
            self._is_closing = True
            try:
                self.release_weights()
                for engine in self._engines():
                    if engine.update_id is not None:
                        engine.release(engine.update_id)
                    engine.release_superseded()
                    engine.adapter.leave()
            finally:
                self._engine.bridge.give_up(self)
                if self._own_bridge is not None:
                    self._own_bridge.close()
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closing:
            raise BridgeClosed("this executor is closed. Make a new one.")


def _is_offered(engine: EngineState) -> bool:
    return engine.adapter.is_offered


@contextmanager
def _losses_noted(engine: EngineState) -> Iterator[None]:
    """Let all streams of an engine know if it is lost in here."""
    try:
        yield
    except EngineLost as error:
        engine.note_lost(error)
        raise


def _recover(engine: EngineState, *, is_inside: bool) -> None:
    """Undo what tore an engine, or take it over. See `RolloutExecutor.recover`."""
    with _losses_noted(engine):
        if not is_inside and engine.adapter.take_over():
            engine.note_healed()
            engine.note_taken()
        elif not is_inside:
            engine.note_answer(is_same=True)
    if not engine.is_torn:
        engine.check_owner()
        return
    manifest, _ = engine.last_torn
    try:
        engine.undo()
    except Exception as error:
        raise TornEngine(
            f"recover: the undo of version {manifest.weight_version} failed again: "
            f"{describe(error)}. The engine must not serve: mend the cause and call "
            "recover() once more, or install a later version in full."
        ) from error
    engine.note_healed()


# ---- in steps ------------------------------------------------------------------------------------


class TwoPhaseExecutor(RolloutExecutor):
    """A `RolloutExecutor` whose updates may also be taken step by step.

    `import_weights` -> `prepare_weights` -> `commit_weights`, or `abort_weights` before the last.
    Until the commit the engine serves on, untouched. One update at a time is on its way: the next
    one gives it up, and so does whatever else is asked of the executor.
    """

    @property
    def pending_weight_update_id(self) -> str | None:
        """The update that is imported or prepared, and neither committed nor given up."""
        pending = self._pending
        is_over = pending is None or pending.step is Step.OVER
        return None if pending is None or is_over else pending.manifest.update_id

    @deferred_interrupts()
    def import_weights(
        self, manifest: WeightUpdateManifest | str | bytes, *, reads: bool = True
    ) -> Mapping[str, torch.Tensor]:
        """Import an update and verify every byte; the engine is not asked.

        Args:
            manifest: the update's manifest, or its text.
            reads: False leaves the bytes to `prepare_weights` where the engine's own processes
                read and verify them.

        Returns:
            The imported mapping, name -> tensor.

        Raises:
            WeightBridgeError: refused; the subclass and the text say why.

        """
        with self._exclusively("import_weights", manifest):
            update = self._begin(WeightUpdateManifest.of(manifest, caller="import_weights"))
            update.run(partial(update.bring, reads=reads))
            return update.tensors

    @deferred_interrupts()
    def prepare_weights(self, update: UpdateRef) -> None:
        """Find every reason to refuse the imported update before a byte of the engine changes.

        Raises:
            UnknownUpdate: it is not the one that was imported, or it is given up.
            IllegalTransition: it is prepared already.
            WeightBridgeError: refused, and given up.
            Exception: the adapter's own, unchanged.

        """
        with self._on("prepare_weights", update) as pending:
            if pending.step is Step.PREPARED:
                raise IllegalTransition(
                    f"{pending.name} is prepared already. Call commit_weights or abort_weights."
                )
            pending.run(pending.stage)

    @deferred_interrupts()
    def commit_weights(self, update: UpdateRef) -> InstalledUpdate:
        """Install, prove and acknowledge the prepared update, or leave everything as it was.

        Returns:
            The acknowledgement, and the imported mapping, name -> tensor.

        Raises:
            UnknownUpdate: it is not the one that was imported, or it is given up.
            IllegalTransition: it is not prepared.
            WeightBridgeError: undone; the previous version is active.
            TornEngine: install and undo both failed; the engine must not serve.
            Exception: the adapter's own, unchanged, after the undo.

        """
        with self._on("commit_weights", update) as pending:
            if pending.step is not Step.PREPARED:
                raise IllegalTransition(
                    f"{pending.name} is imported and not prepared. Call prepare_weights first."
                )
            pending.run(pending.install, pending.activate)
            self._acknowledged = pending.engine
            assert pending.result is not None  # it came through
            return pending.result

    @deferred_interrupts()
    def abort_weights(self, update: UpdateRef, reason: str) -> None:
        """Give up the imported or prepared update; the engine is what it was.

        Raises:
            UnknownUpdate: it is not the one that was imported, or it is given up already.

        """
        with self._on("abort_weights", update) as pending:
            pending.end(WeightUpdateRejectedError(f"{pending.name} was given up: {reason}"))

    @contextmanager
    def _on(self, caller: str, update: UpdateRef) -> Iterator[Transaction]:
        """Take a step with the update that waits for one."""
        update_id = update_id_of(update, caller=caller)
        with self._exclusively(caller, update):
            pending = self._pending
            if pending is None or self.pending_weight_update_id != update_id:
                raise UnknownUpdate(
                    f"{caller}: update {update_id} is not on its way here, expected "
                    f"{self.pending_weight_update_id}. Import its manifest first."
                )
            yield pending


def require_two_phase(executor: object) -> None:
    """Refuse an executor that cannot stop between its steps."""
    if not isinstance(executor, TwoPhaseExecutor):
        raise TypeError(
            f"executor is a {type(executor).__name__}, expected a TwoPhaseExecutor. Make one with "
            "rl_bridge.remote.TwoPhaseExecutor, which takes the same arguments."
        )


# ---- what an executor is given -------------------------------------------------------------------

_VERBS = ("import_update", "acknowledge", "reject", "release")


def _checked_bridge(given: object) -> WeightConsumer:
    """The consumer's bridge as it was given."""
    lacking = [verb for verb in _VERBS if not callable(getattr(given, verb, None))]
    if lacking or isinstance(given, type):
        raise TypeError(
            f"weight_bridge: got {kind_of(given)}, expected a consumer's bridge, which can "
            f"{', '.join(lacking or _VERBS)}. Pass what make_weight_bridge returned."
        )
    for verb in _VERBS:
        require_plain(getattr(given, verb), f"weight_bridge: {type(given).__name__}.{verb}")
    return cast("WeightConsumer", given)


def _sealed_initial(
    adapter: WeightInstallAdapter | TransactionalAdapter | None,
    weights: Mapping[str, torch.Tensor] | torch.nn.Module | None,
) -> Version | None:
    """Copy the initial weights into a version of their own, for the undo of the first update."""
    if weights is None:
        return None
    if adapter is None or callable(getattr(adapter, "undo", None)):
        who = "there is no adapter" if adapter is None else f"{type(adapter).__name__} has an undo"
        raise ValueError(
            f"initial_weights= would never be used: {who}. They are for adapters without undo(), "
            "whose first update is undone by installing them. Leave them out."
        )
    with make_weight_bridge("local-clone", source_worker="initial") as bridge:
        manifest = bridge.publish(weights, weight_version=0)
        # They outlive the bridge, and are the only copy then.
        return manifest, bridge.import_update(manifest)


class _NoEngine(TransactionalAdapter):
    """The adapter of an executor that was given none: the imported mapping is what serves."""

    def __init__(self) -> None:
        self._proof = InstallProof(method="unproven")

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing can be refused."""

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Remember what was imported."""
        del tensors
        self._proof = InstallProof(
            method="import",
            root=manifest.root,
            digested_nbytes=manifest.total_nbytes,
            tensors=manifest.tensor_count,
        )

    def prove(self) -> InstallProof:
        """Tell that import read every byte."""
        return self._proof

    def undo(self) -> None:
        """Nothing was changed."""

    def release(self, update_id: str) -> None:
        """Nothing is kept."""

    def for_adapter(self, name: str) -> TransactionalAdapter:  # noqa: ARG002 - of any name
        """The imported mapping is what serves, of a LoRA adapter too."""
        return _NoEngine()


def _name(given: object) -> str:
    version = getattr(given, "weight_version", None)
    return "this update" if version is None else f"version {version}"
