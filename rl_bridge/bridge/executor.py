"""`RolloutExecutor`: one weight update as a transaction.

import -> verify -> prepare -> install -> prove -> acknowledge -> release the old one; on any
failure undo, reject with the reason, and the previous version is active and byte-identical.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Self, TypeVar

import torch

from rl_bridge.bridge.arguments import (
    UpdateRef,
    as_manifest,
    look_for_suspicion,
    require_own_process,
    update_id_of,
)
from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.engine_state import Acknowledgement, FineSteps, Standing
from rl_bridge.bridge.protocols import WeightConsumer
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.bridge.transaction import Transaction, commit, let_go, look_whose, undo
from rl_bridge.errors import (
    BridgeClosed,
    StaleUpdate,
    TornEngine,
    WeightUpdateRejectedError,
    describe,
)
from rl_bridge.installers.base import InstallProof, TransactionalAdapter, WeightInstallAdapter
from rl_bridge.installers.wrapped import Version, as_transactional
from rl_bridge.lifecycle import State
from rl_bridge.manifest.compare import Policy
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "NoEngine",
    "RolloutExecutor",
    "checked_bridge",
    "sealed_initial",
]

# ---- What an executor is given, looked at when it is made.

_VERBS = ("import_update", "acknowledge", "reject", "release")


def checked_bridge(given: object) -> WeightConsumer:
    """The consumer's bridge as it was given.

    Raises:
        TypeError: it is none: the name of a transport, a class, an object that cannot import.

    """
    if isinstance(given, type):
        what, remedy = f"the class {given.__name__}", "Make an object of it"
    elif isinstance(given, str):
        what = f"the str {given!r}"
        remedy = f"Pass make_weight_bridge({given!r}), or weight_transport={given!r} instead"
    elif isinstance(given, WeightConsumer) and all(callable(getattr(given, v)) for v in _VERBS):
        return given
    else:
        lacking = [verb for verb in _VERBS if not callable(getattr(given, verb, None))]
        what = f"a {type(given).__name__}, which has no {' and no '.join(lacking)}"
        remedy = "Pass what make_weight_bridge returned"
    msg = f"weight_bridge: got {what}, expected a consumer's bridge. {remedy}."
    raise TypeError(msg)


# ---- The engine's weights before its first update, kept for the undo of that one.


def sealed_initial(
    adapter: WeightInstallAdapter | TransactionalAdapter | None,
    weights: Mapping[str, torch.Tensor] | torch.nn.Module | None,
) -> Version | None:
    """Copy the initial weights into a version of their own, which lives until the first commit.

    Raises:
        ValueError: this adapter would never use them.
        WeightBridgeError: tensors that cannot be copied.

    """
    if weights is None:
        return None
    if adapter is None or callable(getattr(adapter, "undo", None)):
        who = "there is no adapter" if adapter is None else f"{type(adapter).__name__} has an undo"
        msg = (
            f"initial_weights= would never be used: {who}. They are for adapters without undo(), "
            "whose first update is undone by installing them. Leave them out."
        )
        raise ValueError(msg)
    with make_weight_bridge("local-clone", source_worker="initial") as bridge:
        manifest = bridge.publish(weights, weight_version=0)
        # They outlive the bridge, and are the only copy then.
        return manifest, bridge.import_update(manifest)


# ---- The adapter of an executor that was given none: the imported mapping is what serves.


class NoEngine(TransactionalAdapter):
    """Installs nowhere; what import verified is the proof."""

    def __init__(self) -> None:
        """Begin without an update."""
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


# ---- the rest builds on the parts above

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


class RolloutExecutor:
    """Keeps one engine at exactly one version. Thread-safe: updates are taken in turn.

    Attributes:
        bridge: the consumer's bridge, as given or made.
        weight_install_adapter: as given.

    """

    def __init__(
        self,
        *,
        weight_bridge: WeightConsumer | None = None,
        weight_transport: str = "shared-memory",
        weight_install_adapter: WeightInstallAdapter | TransactionalAdapter | None = None,
        initial_weights: Mapping[str, torch.Tensor] | torch.nn.Module | None = None,
        suspicious: Policy | str = Policy.WARN,
        num_threads: int | None = None,
    ) -> None:
        """Configure; the engine is not touched before the first update.

        Args:
            weight_bridge: the consumer's bridge; None makes one for `weight_transport`, which
                `close` closes.
            weight_transport: only read without a `weight_bridge`.
            weight_install_adapter: how tensors get into the engine. None: the imported mapping
                itself is what the rollout uses.
            initial_weights: the engine's weights before the first update, for adapters without
                ``undo`` whose engine cannot be seen: the undo of the first update installs them.
                A copy is kept until that update is acknowledged.
            suspicious: what to do about a no-op or narrowed update: off, warn or reject.
            num_threads: threads that copy and digest where an adapter without ``undo`` or ``prove``
                leaves that to the executor; None takes the usable cores.

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
        self.bridge: WeightConsumer = checked_bridge(weight_bridge)
        self._steps = FineSteps(self.bridge)
        self._standing = Standing(self.bridge, self._steps)
        self._suspicious = Policy(suspicious)
        self.weight_install_adapter = weight_install_adapter
        initial = sealed_initial(weight_install_adapter, initial_weights)
        self._adapter: TransactionalAdapter = NoEngine()
        if weight_install_adapter is not None:
            self._adapter = as_transactional(
                weight_install_adapter, initial=initial, num_threads=num_threads
            )
        self._lock = threading.RLock()
        # Held, under the other one, for as long as an update runs: tells a running update from one
        # that an interrupt left behind. (Locks are let go where no interrupt can come in between.)
        self._busy = threading.Lock()
        self._under_way: Transaction | None = None
        self._pid = os.getpid()
        self._is_closed = self._is_given_back = False
        if isinstance(self.bridge, TensorBridge):
            self.bridge.claim(self)  # last: an executor that could not be made claims nothing

    # ---- the transaction ------------------------------------------------------------------------

    def update_weights(self, manifest: WeightUpdateManifest | str) -> Mapping[str, torch.Tensor]:
        """Install one complete version, or leave everything as it was.

        Args:
            manifest: the publisher's manifest, or its JSON text.

        Returns:
            The imported mapping, name -> tensor. Where the engine's own processes verified it, its
            bytes are read and verified here when the first tensor is asked for.

        Raises:
            WeightBridgeError: refused or undone; the subclass and the text say why. The previous
                version is active.
            TornEngine: install and undo both failed; the engine must not serve. See `recover`.
            Exception: the adapter's own, unchanged, after the undo; a note tells what was done.

        """
        return self._exclusively("update_weights", self._update, manifest)

    def _exclusively(
        self, caller: str, step: Callable[[WeightUpdateManifest], T], given: object
    ) -> T:
        """Take a step with the manifest that is given; no other one runs meanwhile."""
        # A bridge may know manifests of its own, such as a group's, and make an update of them.
        resolve = getattr(self.bridge, "resolve_update", None)
        manifest = as_manifest(given, caller=caller) if resolve is None else given
        self._check_process()
        with self._lock:
            if self._busy.locked():
                version = getattr(manifest, "weight_version", "of a group")
                msg = (
                    f"version {version}: {caller} was called from inside an update (an "
                    "observer, a hook of the adapter). Call it when that one is over."
                )
                raise WeightUpdateRejectedError(msg)
            with self._busy:
                if resolve is not None:
                    manifest = resolve(manifest)
                return step(as_manifest(manifest, caller=caller))

    def _update(self, manifest: WeightUpdateManifest) -> Mapping[str, torch.Tensor]:
        update = self._begin(manifest)
        self._take(update, partial(update.run, self._look_for_suspicion))
        update.activate()
        self._under_way = None
        return update.tensors

    def _begin(self, manifest: WeightUpdateManifest) -> Transaction:
        """A new update, behind whatever came before it."""
        self._check_open()
        self._settle()
        self._make_up()
        self._refuse_active(manifest)
        self._refuse_acknowledged(manifest)
        return Transaction(
            manifest, bridge=self.bridge, standing=self._standing, adapter=self._adapter
        )

    def _take(self, update: Transaction, step: Callable[[], None]) -> None:
        """Take one step of an update, or end it."""
        try:
            self._under_way = update
            step()
        except BaseException as error:
            update.end(error)
            self._under_way = None
            raise

    @property
    def active_weight_version(self) -> int | None:
        """The version that the engine holds; None before the first and while it is torn."""
        left = self._not_activated()
        if left is not None:
            return left.manifest.weight_version
        return None if self.is_torn else self._standing.version

    @property
    def active_weight_update_id(self) -> str | None:
        """The active update; None before the first and after a release."""
        left = self._not_activated()
        return self._standing.update_id if left is None else left.manifest.update_id

    @property
    def shared_weights(self) -> Mapping[str, torch.Tensor]:
        """The imported mapping of the active update; empty before the first, after a release."""
        left = self._not_activated()
        return self._standing.weights if left is None else left.tensors

    @property
    def last_ack(self) -> Acknowledgement | None:
        """What the last acknowledged update left behind: proof, timings, memory."""
        left = self._not_activated()
        return self._standing.last_ack if left is None else left.acknowledgement()

    @property
    def is_torn(self) -> bool:
        """Whether the engine is neither at its version nor at another: it must not serve."""
        left = self._left_over()
        if left is not None and left.is_acknowledged:
            return False
        return self._standing.is_torn or (left is not None and left.leaves_a_mixture)

    def check_servable(self) -> None:
        """Tell whether the engine may answer requests.

        Raises:
            TornEngine: it may not.
            WeightBridgeUnavailableError: it never got a verified version.

        """
        if self._not_activated() is not None:
            return
        left = self._left_over()
        if left is not None and left.leaves_a_mixture:
            raise TornEngine(_cut_off(left))
        self._standing.check_servable()

    def recover(self) -> None:
        """Try the undo of a torn engine once more, or end what an earlier executor left half-way.

        Raises:
            TornEngine: it failed again.

        """
        self._check_process()
        with self._lock:
            self._settle_if_idle()
            if not self._standing.is_torn:
                self._adapter.take_over()
                look_whose(self._adapter, self._standing, self.bridge)
                return
            manifest, _ = self._standing.last_torn
            try:
                undo(self._adapter, self._standing, self.bridge)
            except Exception as error:
                msg = (
                    f"recover: the undo of version {manifest.weight_version} failed again: "
                    f"{describe(error)}. The engine must not serve: mend the cause and call "
                    "recover() once more, or install a later version in full."
                )
                raise TornEngine(msg) from error
            self._standing.healed()

    def release_weights(self) -> None:
        """Release the active update; the engine goes on with the bytes that it has."""
        self._check_process()
        with self._lock:
            self._settle_if_idle()
            if self.active_weight_update_id is not None:
                self.release_weight_update(self.active_weight_update_id)

    def release_weight_update(self, update_id: UpdateRef) -> None:
        """Release one update, active or superseded, named by its id or its manifest.

        Raises:
            MalformedManifest: what is given names no update.
            Exception: the adapter's own; the bridge has let go of the update all the same.

        """
        update_id = update_id_of(update_id, caller="release_weight_update")
        self._check_process()
        with self._lock:
            self._settle_if_idle()
            self._let_go(update_id)

    def _let_go(self, update_id: str) -> None:
        self._standing.released(update_id)
        try:
            let_go(update_id, adapter=self._adapter, bridge=self.bridge)
        except Exception:
            self._standing.superseded.pop(update_id, None)
            raise
        self._standing.superseded.pop(update_id, None)

    def close(self) -> None:
        """Release the active update, and close the bridge if the executor made it. Idempotent.

        The engine goes on with the bytes that it has. A bridge that was given stays its giver's.
        """
        if os.getpid() != self._pid:
            return  # before the lock: at the fork, another thread may have held it
        with self._lock:
            if self._is_given_back:
                return
            self._is_closed = True
            try:
                self.release_weights()
                for update_id in list(self._standing.superseded):
                    self._let_go(update_id)
            finally:
                if isinstance(self.bridge, TensorBridge):
                    self.bridge.give_up(self)
                if self._own_bridge is not None:
                    self._own_bridge.close()
            self._is_given_back = True  # last: what an interrupt cut off, the next call ends

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()

    # ---- its steps ------------------------------------------------------------------------------

    def _refuse_active(self, manifest: WeightUpdateManifest) -> None:
        if manifest.update_id != self.active_weight_update_id:
            return
        name = f"version {manifest.weight_version} (update {manifest.update_id})"
        if not self.is_torn:
            msg = f"{name} is active already. Publish a later version."
        else:
            msg = (
                f"{name} is what the torn engine goes back to: call recover(), or install a later "
                "version in full."
            )
        raise StaleUpdate(msg)

    def _refuse_acknowledged(self, manifest: WeightUpdateManifest) -> None:
        """It says that another engine has it, by whoever shares the bridge: that must stand."""
        if self._steps.is_in(manifest, State.ACKNOWLEDGED):
            msg = (
                f"version {manifest.weight_version} (update {manifest.update_id}) is acknowledged "
                "on this bridge already, and not what this executor's engine holds. Publish a "
                "later version, or call the bridge's release_imported() with it and try again."
            )
            raise StaleUpdate(msg)

    def _look_for_suspicion(self, manifest: WeightUpdateManifest) -> None:
        previous = self._standing.active
        if previous is None or previous.publisher_id != manifest.publisher_id:
            return  # another stream begins anew: with the same weights, or with another wire dtype
        if previous.update_id != manifest.update_id:
            look_for_suspicion(self._suspicious, previous, manifest)
        # Else it is not a new update that changes nothing, but this one again, after its release.

    def _left_over(self) -> Transaction | None:
        """An update that an interrupt left behind; None while one is in full swing."""
        # In this order: an update that begins in between is seen to run.
        left = self._under_way
        return None if left is None or self._busy.locked() or left.is_over else left

    def _not_activated(self) -> Transaction | None:
        """An update that an interrupt left behind its acknowledgement: the engine has it."""
        left = self._left_over()
        return left if left is not None and left.is_acknowledged else None

    def _settle(self) -> None:
        """End what an interrupt left behind, before anything else is done to the engine.

        Raises:
            TornEngine: its undo fails.

        """
        update = self._under_way
        if update is not None:
            update.end(WeightUpdateRejectedError(_cut_off(update)), was_cut_off=True)
            self._under_way = None

    def _make_up(self) -> None:
        """Commit the active version, where that failed: the next undo must lead back to it."""
        if self._standing.uncommitted is not None and not self._standing.is_torn:
            try:
                commit(self._adapter, self._standing)
            except Exception:  # noqa: BLE001 - logged in full
                _LOG.exception(
                    "the adapter's commit failed once more: an install that fails now cannot be "
                    "undone"
                )

    def _settle_if_idle(self) -> None:
        # Asked from inside an update, by a hook of the adapter, there is nothing left behind.
        if not self._busy.locked():
            self._settle()

    def _check_open(self) -> None:
        if self._is_closed:
            msg = "this executor is closed. Make a new one."
            raise BridgeClosed(msg)

    def _check_process(self) -> None:
        require_own_process(self._pid, "executor")


def _cut_off(update: Transaction) -> str:
    return (
        f"an interrupt cut version {update.manifest.weight_version} off before its undo was "
        "complete. Call recover(), or install a later version in full."
    )
