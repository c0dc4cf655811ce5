"""`RolloutExecutor`: one weight update as a transaction.

import -> verify -> prepare -> install -> prove -> acknowledge -> release the old one; on any
failure undo, reject with the reason, and the previous version is active and byte-identical.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping

import torch

from rl_bridge.bridge.acknowledgement import (
    Acknowledgement,
    PhaseClock,
    describe,
    peak_rss_nbytes,
)
from rl_bridge.bridge.bridges import TensorBridge, make_weight_bridge
from rl_bridge.bridge.protocols import WeightConsumer
from rl_bridge.bridge.steps import FineSteps
from rl_bridge.errors import (
    BridgeClosed,
    ProofFailed,
    StaleUpdate,
    SuspiciousUpdate,
    TornEngine,
    WeightBridgeUnavailableError,
)
from rl_bridge.installers.base import InstallProof, TransactionalAdapter, WeightInstallAdapter
from rl_bridge.installers.wrapped import Version, as_transactional
from rl_bridge.lifecycle.table import Event, State
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.compare import Policy, compare
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.imported import ImportedTensors

__all__ = ["RolloutExecutor"]

_LOG = logging.getLogger(__name__)


class RolloutExecutor:
    """Keeps one engine at exactly one version. Thread-safe: updates are taken in turn."""

    def __init__(
        self,
        *,
        weight_bridge: WeightConsumer | None = None,
        weight_transport: str = "shared-memory",
        weight_install_adapter: WeightInstallAdapter | TransactionalAdapter | None = None,
        initial_weights: Mapping[str, torch.Tensor] | torch.nn.Module | None = None,
        suspicious: Policy | str = Policy.WARN,
    ) -> None:
        """Configure; the engine is not touched before the first update.

        Args:
            weight_bridge: the consumer's bridge; None makes one for `weight_transport`.
            weight_transport: only read without a `weight_bridge`.
            weight_install_adapter: how tensors get into the engine. None: the imported mapping
                itself is what the rollout uses.
            initial_weights: the engine's weights before the first update, for adapters whose
                engine cannot be seen: the undo of the first update installs them.
            suspicious: what to do about a no-op or narrowed update: off, warn or reject.

        """
        self.bridge: WeightConsumer = weight_bridge or make_weight_bridge(
            weight_transport, source_worker="rollout"
        )
        self._steps = FineSteps(self.bridge)
        self._suspicious = Policy(suspicious)
        self._initial_bridge: TensorBridge | None = None
        self.weight_install_adapter = weight_install_adapter
        self._adapter: TransactionalAdapter | None = None
        if weight_install_adapter is not None:
            initial = None if initial_weights is None else self._seal_initial(initial_weights)
            self._adapter = as_transactional(weight_install_adapter, initial=initial)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        # The updates that tore the engine, each with its reason, the last one last.
        self._torn: dict[str, tuple[WeightUpdateManifest, str]] = {}
        self._active: WeightUpdateManifest | None = None
        self.shared_weights: Mapping[str, torch.Tensor] = {}
        self.active_weight_version: int | None = None
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
        if isinstance(manifest, str | bytes):
            manifest = WeightUpdateManifest.from_json(manifest)
        self._check_process()
        with self._lock:
            self._refuse_active(manifest)
            start = time.perf_counter()
            clock = PhaseClock()
            tensors: Mapping[str, torch.Tensor] = {}
            try:
                tensors = self.bridge.import_update(manifest)
                self._look_for_suspicion(manifest)
                if self._adapter is not None:
                    clock.run("prepare", lambda: self._prepare(manifest, tensors))
                if manifest.update_id not in self._torn:
                    self._steps.advance(manifest, Event.STAGE)
            except BaseException as error:
                if tensors or self._steps.is_in(manifest, State.IMPORTED, State.VERIFIED):
                    self._reject(manifest, error)
                    self._forget(manifest, tensors)
                raise
            try:
                if self._adapter is not None:
                    adapter = self._adapter
                    clock.run("install", lambda: adapter.install(manifest, tensors))
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
    def is_torn(self) -> bool:
        """Whether the engine is neither at its version nor at another: it must not serve."""
        return bool(self._torn)

    def check_servable(self) -> None:
        """Tell whether the engine may answer requests.

        Raises:
            TornEngine: it may not.
            WeightBridgeUnavailableError: it never got a verified version.

        """
        if self._torn:
            manifest, reason = self._last_torn()
            msg = (
                f"the engine is torn by version {manifest.weight_version}: {reason}. "
                "Call recover(), or install a later version in full."
            )
            raise TornEngine(msg)
        if self._active is None:
            msg = "the engine has no verified version yet. Install one with update_weights first."
            raise WeightBridgeUnavailableError(msg)

    def recover(self) -> None:
        """Try the undo of a torn engine once more.

        Raises:
            TornEngine: it failed again.

        """
        self._check_process()
        with self._lock:
            if not self._torn or self._adapter is None:
                return
            manifest, _ = self._last_torn()
            try:
                self._adapter.undo()
            except Exception as error:
                msg = (
                    f"recover: the undo of version {manifest.weight_version} failed again: {error}"
                )
                raise TornEngine(msg) from error
            self._heal()

    def release_weights(self) -> None:
        """Release the active update; the engine goes on with the bytes that it has."""
        self._check_process()
        with self._lock:
            if self.active_weight_update_id is not None:
                self.release_weight_update(self.active_weight_update_id)

    def release_weight_update(self, update_id: str) -> None:
        """Release one update, active or superseded."""
        self._check_process()
        with self._lock:
            if self._adapter is not None:
                self._adapter.release(update_id)
            if self.active_weight_update_id == update_id:
                self.shared_weights = {}
                self.active_weight_update_id = None
            self.bridge.release(update_id)

    # ---- its steps ------------------------------------------------------------------------------

    def _refuse_active(self, manifest: WeightUpdateManifest) -> None:
        if manifest.update_id != self.active_weight_update_id:
            return
        name = f"version {manifest.weight_version} (update {manifest.update_id})"
        if not self._torn:
            msg = f"{name} is active already."
        else:
            msg = (
                f"{name} is what the torn engine goes back to: call recover(), or install a later "
                "version in full."
            )
        raise StaleUpdate(msg)

    def _look_for_suspicion(self, manifest: WeightUpdateManifest) -> None:
        if self._suspicious is Policy.OFF:
            return
        previous = self._active
        if previous is not None and previous.update_id == manifest.update_id:
            return  # not a new update that changes nothing: this one once more, after its release
        findings = compare(previous, manifest)
        for finding in findings:
            _LOG.warning("suspicious update: %s", finding.message)
        if findings and self._suspicious is Policy.REJECT:
            raise SuspiciousUpdate("; ".join(finding.message for finding in findings))

    def _prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._adapter is not None:
            self._adapter.prepare(manifest, tensors)

    def _prove(self, manifest: WeightUpdateManifest) -> InstallProof:
        if self._adapter is None:
            return InstallProof(
                method="import",
                root=manifest.root,
                digested_nbytes=manifest.total_nbytes,
                tensors=manifest.tensor_count,
            )
        proof = self._adapter.prove()
        if proof.method != "unproven" and proof.root != manifest.root:
            msg = (
                f"version {manifest.weight_version}: the proof is for root {proof.root}, expected "
                f"{manifest.root}. The install was undone."
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
        self._active = manifest
        torn, self._torn = self._torn, {}
        self.shared_weights = tensors
        self.active_weight_version = manifest.weight_version
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
        try:
            if self._adapter is not None:
                self._adapter.commit()
            for update, _ in torn.values():
                if update.update_id != manifest.update_id:
                    self._steps.advance(update, Event.UNDO)
            if previous is not None and previous != manifest.update_id:
                self.release_weight_update(previous)
        except Exception:  # noqa: BLE001 - logged in full
            # The new version is installed, proven and acknowledged: telling the caller that the
            # update failed would be wrong. What could not be let go is said in the log.
            _LOG.exception(
                "version %d is active, but the old one was not let go", manifest.weight_version
            )

    # ---- failures -------------------------------------------------------------------------------

    def _reject(self, manifest: WeightUpdateManifest, error: BaseException) -> None:
        """Refused before a byte of the engine changed."""
        if manifest.update_id not in self._torn:
            self.bridge.reject(manifest.update_id, describe(error))
        error.add_note(
            f"rl_bridge: version {manifest.weight_version} was refused before the engine was "
            f"touched; {self._standing()}"
        )

    def _undo(self, manifest: WeightUpdateManifest, error: BaseException) -> None:
        """Failed while or after the engine changed: bring it back, or declare it torn."""
        try:
            if self._adapter is not None:
                self._adapter.undo()
        except BaseException as second:  # noqa: BLE001 - told in every branch below
            self._tear(manifest, f"{describe(error)}; undo: {describe(second)}")
            error.add_note(
                f"rl_bridge: the undo failed too ({describe(second)}); the engine is torn."
            )
            if isinstance(error, Exception):
                msg = (
                    f"version {manifest.weight_version} failed to install ({describe(error)}) "
                    "and its "
                    f"undo failed too ({describe(second)}). The engine must not serve: call "
                    "recover(), "
                    "or install a later version in full."
                )
                raise TornEngine(msg) from error
            return
        was_torn = manifest.update_id in self._torn
        if not was_torn or self._steps.is_in(manifest, State.INSTALLED):
            self.bridge.reject(
                manifest.update_id, f"rollout weight install failed: {describe(error)}"
            )
        if was_torn:
            self._heal()
        error.add_note(
            f"rl_bridge: version {manifest.weight_version} was undone; {self._standing()}"
        )

    def _tear(self, manifest: WeightUpdateManifest, reason: str) -> None:
        was_torn = self._torn.pop(manifest.update_id, None) is not None
        if not was_torn or self._steps.is_in(manifest, State.INSTALLED):
            self._steps.advance(manifest, Event.TEAR, reason=reason)
        self._torn[manifest.update_id] = (manifest, reason)
        self.active_weight_version = None

    def _last_torn(self) -> tuple[WeightUpdateManifest, str]:
        return next(reversed(self._torn.values()))

    def _heal(self) -> None:
        torn, self._torn = self._torn, {}
        for manifest, _ in torn.values():
            if not self._steps.is_in(manifest, State.REJECTED):
                self._steps.advance(manifest, Event.UNDO)
        if self._active is not None:
            self.active_weight_version = self._active.weight_version

    def _standing(self) -> str:
        if self._torn:
            return "the engine is still torn."
        if self._active is None:
            return "the engine holds its initial weights, version None."
        return f"the engine holds version {self._active.weight_version}."

    def _forget(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give a refused update's memory back, although the frames of its exception hold it."""
        if not isinstance(self.bridge, TensorBridge) or manifest.update_id in self._torn:
            return
        if isinstance(tensors, ImportedTensors):
            tensors.forget()

    def _check_process(self) -> None:
        # Before the lock is taken: at the fork, another thread of the parent may have held it.
        if os.getpid() != self._pid:
            msg = "this executor belongs to the parent process. Make one after the fork."
            raise BridgeClosed(msg)

    def _seal_initial(self, weights: Mapping[str, torch.Tensor] | torch.nn.Module) -> Version:
        """Keep the initial weights as a version of their own, for the undo of the first update."""
        self._initial_bridge = make_weight_bridge("local-clone", source_worker="initial")
        manifest = self._initial_bridge.publish(weights, weight_version=0)
        return manifest, self._initial_bridge.import_update(manifest)
