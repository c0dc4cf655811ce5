"""`RolloutExecutor`: one weight update as a transaction.

import -> verify -> prepare -> install -> prove -> acknowledge -> release the old one; on any
failure undo, reject with the reason, and the previous version is active and byte-identical.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Self

import torch

from rl_bridge.bridge.acknowledgement import (
    Acknowledgement,
    PhaseClock,
    describe,
    peak_rss_nbytes,
)
from rl_bridge.bridge.bridges import TensorBridge, make_weight_bridge
from rl_bridge.bridge.guards import as_manifest, look_for_suspicion, require_own_process
from rl_bridge.bridge.initial import sealed_initial
from rl_bridge.bridge.no_engine import NoEngine
from rl_bridge.bridge.protocols import WeightConsumer
from rl_bridge.bridge.settling import settle
from rl_bridge.bridge.standing import Standing
from rl_bridge.bridge.steps import FineSteps
from rl_bridge.errors import BridgeClosed, ProofFailed, StaleUpdate, TornEngine
from rl_bridge.installers.base import InstallProof, TransactionalAdapter, WeightInstallAdapter
from rl_bridge.installers.wrapped import as_transactional
from rl_bridge.lifecycle.table import Event, State
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.compare import Policy
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.imported import ImportedTensors

__all__ = ["RolloutExecutor"]

_LOG = logging.getLogger(__name__)


class RolloutExecutor:
    """Keeps one engine at exactly one version. Thread-safe: updates are taken in turn.

    Attributes:
        bridge: the consumer's bridge, as given or made.
        weight_install_adapter: as given.
        shared_weights: the imported mapping of the active update; empty before the first and after
            a release.
        active_weight_update_id: the active update; None before the first and after a release.
        last_ack: what the last acknowledged update left behind: proof, timings, memory.

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
            WeightBridgeUnavailableError: no transport of that name.

        """
        self._own_bridge: TensorBridge | None = None
        if weight_bridge is None:
            self._own_bridge = make_weight_bridge(weight_transport, source_worker="rollout")
            weight_bridge = self._own_bridge
        self.bridge: WeightConsumer = weight_bridge
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
        self._pid = os.getpid()
        self._is_closed = False
        self.shared_weights: Mapping[str, torch.Tensor] = {}
        self.active_weight_update_id: str | None = None
        self.last_ack: Acknowledgement | None = None

    # ---- the transaction ------------------------------------------------------------------------

    def update_weights(self, manifest: WeightUpdateManifest | str) -> Mapping[str, torch.Tensor]:
        """Install one complete version, or leave everything as it was.

        Args:
            manifest: the publisher's manifest, or its JSON text.

        Returns:
            The imported mapping, name -> tensor.

        Raises:
            WeightBridgeError: refused or undone; the subclass and the text say why. The previous
                version is active.
            TornEngine: install and undo both failed; the engine must not serve. See `recover`.
            Exception: the adapter's own, unchanged, after the undo; a note tells what was done.

        """
        manifest = as_manifest(manifest, caller="update_weights")
        self._check_process()
        with self._lock:
            self._check_open()
            self._refuse_active(manifest)
            start = time.perf_counter()
            clock = PhaseClock()
            tensors: Mapping[str, torch.Tensor] = {}
            try:
                tensors = self.bridge.import_update(manifest)
                self._look_for_suspicion(manifest)
                clock.run("prepare", lambda: self._adapter.prepare(manifest, tensors))
                if not self._standing.is_torn_by(manifest):
                    self._steps.advance(manifest, Event.STAGE)
            except BaseException as error:
                if tensors or self._steps.is_in(manifest, State.IMPORTED, State.VERIFIED):
                    self._standing.refused(manifest, error)
                    self._forget(manifest, tensors)
                raise
            try:
                clock.run("install", lambda: self._adapter.install(manifest, tensors))
                self._steps.advance(manifest, Event.INSTALL)
                proof = clock.run("prove", lambda: self._prove(manifest))
                clock.timings_ms["total"] = (time.perf_counter() - start) * 1e3
                self._acknowledge(manifest, proof, clock.timings_ms)
            except BaseException as error:
                if self._steps.is_in(manifest, State.ACKNOWLEDGED):
                    # An interrupt right behind the point of no return: the update stands.
                    self._activate(manifest, tensors, proof, clock.timings_ms)
                else:
                    self._undo(manifest, error)
                    self._forget(manifest, tensors)
                raise
            self._activate(manifest, tensors, proof, clock.timings_ms)
            return tensors

    @property
    def active_weight_version(self) -> int | None:
        """The version that the engine holds; None before the first and while it is torn."""
        return self._standing.version

    @property
    def is_torn(self) -> bool:
        """Whether the engine is neither at its version nor at another: it must not serve."""
        return self._standing.is_torn

    def check_servable(self) -> None:
        """Tell whether the engine may answer requests.

        Raises:
            TornEngine: it may not.
            WeightBridgeUnavailableError: it never got a verified version.

        """
        self._standing.check_servable()

    def recover(self) -> None:
        """Try the undo of a torn engine once more.

        Raises:
            TornEngine: it failed again.

        """
        self._check_process()
        with self._lock:
            if not self.is_torn:
                return
            manifest, _ = self._standing.last_torn
            try:
                self._adapter.undo()
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
            if self.active_weight_update_id is not None:
                self.release_weight_update(self.active_weight_update_id)

    def release_weight_update(self, update_id: str) -> None:
        """Release one update, active or superseded.

        Raises:
            Exception: the adapter's own; the bridge has let go of the update all the same.

        """
        self._check_process()
        with self._lock:
            if self.active_weight_update_id == update_id:
                self.shared_weights = {}
                self.active_weight_update_id = None
            try:
                self._adapter.release(update_id)
            finally:
                self.bridge.release(update_id)

    def close(self) -> None:
        """Release the active update, and close the bridge if the executor made it. Idempotent.

        The engine goes on with the bytes that it has. A bridge that was given stays its giver's.
        """
        if os.getpid() != self._pid:
            return  # before the lock: at the fork, another thread may have held it
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                self.release_weights()
            finally:
                if self._own_bridge is not None:
                    self._own_bridge.close()

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

    def _look_for_suspicion(self, manifest: WeightUpdateManifest) -> None:
        previous = self._standing.active
        if previous is None or previous.update_id != manifest.update_id:
            look_for_suspicion(self._suspicious, previous, manifest)
        # Else it is not a new update that changes nothing, but this one again, after its release.

    def _prove(self, manifest: WeightUpdateManifest) -> InstallProof:
        proof = self._adapter.prove()
        if proof.method != "unproven" and proof.root != manifest.root:
            msg = (
                f"version {manifest.weight_version}: the proof is for root {proof.root}, expected "
                f"{manifest.root}. Let the adapter's prove() read what the engine holds."
            )
            raise ProofFailed(msg)
        return proof

    def _acknowledge(
        self, manifest: WeightUpdateManifest, proof: InstallProof, timings_ms: dict[str, float]
    ) -> None:
        if not isinstance(self.bridge, TensorBridge):
            self.bridge.acknowledge(manifest.update_id)
            return
        evidence: dict[str, JSONValue] = {
            **proof.to_dict(),
            "total_nbytes": manifest.total_nbytes,
            "peak_rss_nbytes": peak_rss_nbytes(),
        }
        self.bridge.acknowledge(manifest.update_id, proof=evidence, timings_ms=timings_ms)

    def _activate(
        self,
        manifest: WeightUpdateManifest,
        tensors: Mapping[str, torch.Tensor],
        proof: InstallProof,
        timings_ms: dict[str, float],
    ) -> None:
        previous = self.active_weight_update_id
        torn = self._standing.activated(manifest)
        self.shared_weights = tensors
        self.active_weight_update_id = manifest.update_id
        if isinstance(self.bridge, TensorBridge):
            timings_ms = {**self.bridge.timings(manifest.update_id), **timings_ms}
        self.last_ack = Acknowledgement(
            update_id=manifest.update_id,
            weight_version=manifest.weight_version,
            root=manifest.root,
            proof=proof,
            timings_ms=timings_ms,
            total_nbytes=manifest.total_nbytes,
            peak_rss_nbytes=peak_rss_nbytes(),
        )
        _LOG.info(
            "version %d is active: %s, %.1f ms",
            manifest.weight_version,
            proof.method,
            timings_ms.get("total", 0.0),
        )
        steps: dict[str, Callable[[], object]] = {"commit": self._adapter.commit}
        for other in torn:
            steps[f"undo of update {other.update_id}"] = partial(
                self._steps.advance, other, Event.UNDO
            )
        if previous is not None and previous != manifest.update_id:
            steps[f"release of update {previous}"] = partial(self.release_weight_update, previous)
        settle(manifest.weight_version, steps)

    # ---- failures -------------------------------------------------------------------------------

    def _undo(self, manifest: WeightUpdateManifest, error: BaseException) -> None:
        """Failed while or after the engine changed: bring it back, or declare it torn."""
        try:
            self._adapter.undo()
        except BaseException as second:
            self._standing.torn(manifest, error, second)
            if not isinstance(second, Exception):
                second.add_note(
                    f"rl_bridge: this interrupted the undo of version {manifest.weight_version}; "
                    "the engine is torn: call recover()."
                )
                raise
            if isinstance(error, Exception):
                msg = (
                    f"version {manifest.weight_version} failed to install ({describe(error)}) and "
                    f"its undo failed too ({describe(second)}). The engine must not serve: call "
                    "recover(), or install a later version in full."
                )
                raise TornEngine(msg) from error
            return
        self._standing.undone(manifest, error)

    def _forget(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give a refused update's memory back, although the frames of its exception hold it."""
        if not isinstance(self.bridge, TensorBridge) or self._standing.is_torn_by(manifest):
            return
        if isinstance(tensors, ImportedTensors):
            tensors.forget()

    def _check_open(self) -> None:
        if self._is_closed:
            msg = "this executor is closed. Make a new one."
            raise BridgeClosed(msg)

    def _check_process(self) -> None:
        require_own_process(self._pid, "executor")
