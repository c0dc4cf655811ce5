"""One worker's part in an update: it imports, stages, installs, proves and undoes.

All ranks of an engine do each step together. Nothing is exchanged before every rank has staged the
whole update; a rank that fails while it exchanges makes all others exchange back before any of them
runs a step of the model: they vote, within one call.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from rl_bridge.bridge.consumer import is_shortage
from rl_bridge.engines.rank_bridges import EngineBridges, acknowledge, let_go
from rl_bridge.engines.vllm.host import make_installer, manifest_of, require_supported, tried
from rl_bridge.engines.vllm.pauses import PauseNote
from rl_bridge.engines.vllm.votes import all_agree, first_said, group, require_one
from rl_bridge.errors import TornEngine, WeightUpdateRejectedError, describe
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.views import ImportedTensors

__all__ = [
    "VLLMRank",
    "rank_of",
]

_LOG = logging.getLogger(__name__)

Payload = dict[str, Any]

_OTHER = ("WeightUpdateRejectedError: another rank", "TornEngine: another rank")
_ATTRIBUTE = "_rl_bridge_rank"
_TAKEN_OVER = 16


class VLLMRank:
    """One worker of a vLLM engine. Not thread-safe: vLLM calls a worker from one thread."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        """Look at a worker's model; nothing is opened before the first update."""
        self._model = model
        self._config = vllm_config
        self._options: Payload = {}
        self._installer: TransactionalAdapter | None = None
        self._bridges = EngineBridges("vllm")
        self._active: WeightUpdateManifest | None = None
        self._pending: WeightUpdateManifest | None = None
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._driver: str | None = None  # had it prepared; None: none that says who it is
        self._proof: InstallProof | None = None
        self._timings_ms: dict[str, float] = {}
        self._torn = ""
        self._is_installed = self._is_committing = False
        self.pause_note = PauseNote()
        # Committed by who did not name it: the driver that installed it may not know.
        self._taken_over: deque[str] = deque(maxlen=_TAKEN_OVER)

    @property
    def rank(self) -> int:
        """Rank among the workers of this engine."""
        return int(group().rank_in_group)

    @property
    def is_last(self) -> bool:
        """Whether it is the last of the workers."""
        return self.rank == int(group().world_size) - 1

    # ---- what it holds --------------------------------------------------------------------------

    def describe(self) -> Payload:
        """What this rank holds."""
        active = self._active
        return {
            "world_size": int(group().world_size),
            "update_id": None if active is None else active.update_id,
            "weight_version": None if active is None else active.weight_version,
            "root": None if active is None else active.root,
            "pending": None if self._pending is None else self._pending.update_id,
            "installed": self._pending.to_json() if self._pending and self._holds_it() else None,
            "exchanged": self._is_installed and self._pending is not None,
            "pausing": self.pause_note.driver,
            "torn": self._torn,
            "model": type(self._model).__name__,
        }

    def _holds_it(self) -> bool:
        """Whether the model holds the pending update, proven and not committed."""
        return self._is_installed and not self._torn and self._proof is not None

    def configure(self, options: Payload) -> None:
        """Options of `make_installer`, which raises for them; ``transports`` of `EngineBridges`."""
        if options == self._options or self._is_installed:
            return
        self.undo(None)  # what is staged by the options before
        wanted = dict(options)
        transports = wanted.pop("transports", {})
        installer = make_installer(self._model, self._config, **wanted)
        self._bridges.configure(transports)
        self._options, self._installer = dict(options), installer

    def has(self, update_id: str, driver: str | None) -> bool:
        """Whether it has that driver's update still: staged, or what the model holds."""
        pending = None if self._pending is None else (self._pending.update_id, self._driver)
        is_active = self._active is not None and self._active.update_id == update_id
        return (is_active and not self._is_installed) or (update_id, driver) == pending

    # ---- the steps ------------------------------------------------------------------------------

    def prepare(self, manifest: WeightUpdateManifest, driver: str | None = None) -> Payload:
        """Import, verify and stage; the model goes on serving what it has.

        Args:
            manifest: the update.
            driver: who alone may install it; None: whoever names the update.

        Raises:
            WeightBridgeError: refused; nothing of the model was written.

        """
        require_supported(self._config)
        if self._is_committing:
            self._finish_commit()
        if self._torn:
            msg = f"the engine is torn: {self._torn}. Call recover(), or start a fresh engine."
            raise TornEngine(msg)
        if self._is_installed and self._pending is not None:
            # Requests may have been served by it: that is not this call's to take back.
            msg = (
                f"version {self._pending.weight_version} (update {self._pending.update_id}) is "
                "installed on this rank, and neither committed nor undone. Call recover()."
            )
            raise WeightUpdateRejectedError(msg)
        self.undo(None)  # what is staged: its driver may have died, and begin anew
        bridge = self._bridges.of(manifest, self.rank)
        start = time.perf_counter()
        self._is_own(manifest.update_id)
        self._driver, self._pending = driver, manifest
        try:
            self._tensors = bridge.import_update(manifest)
            imported = time.perf_counter()
            self._engine().prepare(manifest, self._tensors)
        except BaseException as error:
            self._end(None if is_shortage(error) else describe(error))
            raise
        self._timings_ms = {
            "import": (imported - start) * 1e3,
            "stage": (time.perf_counter() - imported) * 1e3,
        }
        told = {**bridge.timings(manifest.update_id), **self._timings_ms}
        return {"timings_ms": told, "verified": manifest.root}

    def receive(self, given: Any) -> str:
        """Prepare and install, on all ranks or on none: for callers with one call for both.

        Args:
            given: a manifest's JSON text, or that text parsed.

        Returns:
            Why no rank has it now, the same text on all ranks; empty if all have.

        """
        manifest: list[WeightUpdateManifest] = []
        problem, _ = tried(lambda: manifest.append(self._read(given)))
        # A vote of its own: nobody takes anything back for what another rank cannot read.
        if not all_agree(ok=not problem):
            return first_said(problem or f"{_OTHER[0]} refused it", echo=_OTHER)
        problem, is_refused = tried(lambda: self._take(manifest[0]))
        if not all_agree(ok=not problem):
            # What no rank refused, and one only was short of something for, may come again.
            reason = None if all_agree(ok=not is_refused) else "another rank refused it"
            undone = self._undo_quietly(reason)
            return first_said(problem or undone, echo=_OTHER)
        problem, _ = tried(self.install)
        if problem:
            self.forget_staged(None)  # each rank was given another one: nothing is wrong with any
        return first_said(problem, echo=_OTHER) if problem else ""  # (all failed, or none)

    def _read(self, given: object) -> WeightUpdateManifest:
        if self._options.get("reload"):
            msg = "the executor updates this engine by reloads. Use the executor, which pauses it."
            raise WeightUpdateRejectedError(msg)
        return manifest_of(given)

    def _take(self, manifest: WeightUpdateManifest) -> None:
        self._make_way(manifest)
        self.prepare(manifest)

    def _make_way(self, manifest: WeightUpdateManifest) -> None:
        """Take an unfinished update back, and say so: requests may have been served by it."""
        earlier, reason = self._pending, None
        if earlier is not None and self._is_installed and not self._is_committing:
            reason = (
                f"it was installed, and taken back: version {manifest.weight_version} came before "
                "finish_weight_update. Requests may have been served by it."
            )
            _LOG.warning("version %d: %s", earlier.weight_version, reason)
            if earlier.update_id == manifest.update_id:
                reason = None  # it comes again
        self.undo(reason)

    def install(self, update_id: str | None = None, driver: str | None = None) -> Payload:
        """Exchange and prove, on all ranks or on none.

        Args:
            update_id: what must be prepared; None takes what is.
            driver: who must have had it prepared.

        Raises:
            WeightBridgeError: this rank failed, or another one did; all are at the old version.

        """
        manifest, error = self._pending, None
        held = "" if manifest is None else manifest.update_id
        if held and update_id is not None and driver != self._driver:
            held += ", of another driver,"
        require_one(held, update_id)
        try:
            if manifest is None:
                msg = "no update is prepared on this rank. Call prepare first."
                raise WeightUpdateRejectedError(msg)  # noqa: TRY301 - it has a vote, too
            start = time.perf_counter()
            self._is_installed = True
            self._engine().install(manifest, self._tensors)
            installed = time.perf_counter()
            self._proof = self._engine().prove()
            if self._proof.method != "unproven" and self._proof.root != manifest.root:
                msg = (
                    f"the engine holds root {self._proof.root}, expected {manifest.root}. "
                    "Install the update again."
                )
                raise WeightUpdateRejectedError(msg)  # noqa: TRY301 - as above
            self._timings_ms["install"] = (installed - start) * 1e3
            self._timings_ms["prove"] = (time.perf_counter() - installed) * 1e3
        except Exception as caught:  # noqa: BLE001 - raised below, after the vote
            error = caught
        if not all_agree(ok=error is None):
            try:
                self.undo("a rank failed to install it" if error is None else describe(error))
            finally:
                # Nobody runs a step before all are back.
                all_back = all_agree(ok=not self._torn)
            if error is not None:
                try:
                    raise error
                finally:
                    error = None  # else it and this frame hold each other, and the update's memory
            msg = "another rank failed to install it; this one is back. See that rank's error."
            if not all_back:
                msg = "another rank failed to install it and is torn. Start a fresh engine."
                raise TornEngine(msg)
            raise WeightUpdateRejectedError(msg)
        assert self._proof is not None
        return {"proof": self._proof.to_dict(), "timings_ms": self._timings_ms}

    def undo(
        self, reason: str | None, update_id: str | None = None, driver: str | None = None
    ) -> Payload:
        """Exchange back what is not committed; without any, nothing happens.

        Args:
            reason: for its trainer. None: it was not refused, and may come again.
            update_id: of the update that is meant: another one stays. None means any.
            driver: who had it prepared: that of another driver stays.

        Raises:
            TornEngine: it could not be exchanged back.
            WeightUpdateRejectedError: another driver has committed it: there is no way back.

        """
        if self._is_committing:
            self._finish_commit()  # it was proven on all ranks: forward is the only way
        meant = None if self._pending is None else (self._pending.update_id, self._driver)
        if self._pending is not None and (update_id is None or (update_id, driver) == meant):
            try:
                self._engine().undo()
            except Exception as error:
                self._torn = describe(error)
                version = self._pending.weight_version
                msg = f"version {version}: the undo failed: {self._torn}. Call recover()."
                raise TornEngine(msg) from error
            self._torn = ""
            self._end(reason)
        elif update_id in self._taken_over:
            msg = (
                f"update {update_id} cannot be undone: another driver has committed it. Let one "
                "driver at a time update an engine, and publish a later version."
            )
            raise WeightUpdateRejectedError(msg)
        return {}

    def forget_staged(self, reason: str | None) -> None:
        """Let go of what was staged and not begun to be installed; `reason` as for `undo`."""
        if self._pending is not None and not self._is_installed:
            self._undo_quietly(reason)

    def _undo_quietly(self, reason: str | None) -> str:
        try:
            self.undo(reason)
        except TornEngine as error:
            return describe(error)
        return f"{_OTHER[0]} refused it"

    def commit(self, update_id: str | None = None, *, if_installed: bool = False) -> Payload:
        """Acknowledge the proven update; it is what an undo goes back to from now on.

        Args:
            update_id: of the update that is meant; None means any.
            if_installed: without one that is proven, nothing happens.

        Raises:
            WeightUpdateRejectedError: there is none, or another one.

        """
        manifest, proof = self._pending, self._proof
        if if_installed and not self._holds_it() and not self._is_committing:
            return {}
        if update_id is not None and (manifest is None or manifest.update_id != update_id):
            if self._active is not None and self._active.update_id == update_id:
                self._is_own(update_id)
                return {}  # the next driver did it
            held = "none" if manifest is None else f"update {manifest.update_id}"
            msg = f"update {update_id} is not pending here, {held} is. Publish a later version."
            raise WeightUpdateRejectedError(msg)
        if manifest is None or proof is None:
            msg = "no update is installed and proven on this rank. Call install first."
            raise WeightUpdateRejectedError(msg)
        self._is_committing = True
        if update_id is None:
            self._taken_over.append(manifest.update_id)
        return self._finish_commit()

    def _is_own(self, update_id: str) -> None:
        """The driver of an update knows from now on what became of it."""
        with suppress(ValueError):
            self._taken_over.remove(update_id)

    def _finish_commit(self) -> Payload:
        """What an interrupt cut off is ended here: of a commit there is no undo."""
        self._engine().commit()
        manifest, proof = self._pending, self._proof
        answer: Payload = {}
        if manifest is not None and proof is not None:
            self._active = manifest
            bridge = self._bridges.of(manifest, self.rank)
            answer = acknowledge(bridge, manifest, proof, self._timings_ms)
        self._pending, self._proof, self._tensors = None, None, {}
        self._is_committing = self._is_installed = False  # last: until here it is done again
        return answer

    def close(self) -> None:
        """Undo what is not committed, and let go of the bridges."""
        try:
            self.undo("the engine shut down")
        finally:
            self._bridges.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _engine(self) -> TransactionalAdapter:
        if self._installer is None:
            self._installer = make_installer(self._model, self._config)
        return self._installer

    def _end(self, reason: str | None) -> None:
        """The pending update is refused, undone or given up: tell its publisher."""
        manifest, self._pending, self._proof = self._pending, None, None
        tensors, self._tensors = self._tensors, {}
        self._is_installed = False
        assert manifest is not None
        if isinstance(tensors, ImportedTensors):
            tensors.forget()  # a kept exception's frames must not keep the trainer's slot
        let_go(self._bridges.of(manifest, self.rank), manifest, reason, self._installer)


def rank_of(model: torch.nn.Module, vllm_config: Any) -> VLLMRank:
    """The rank whose model this is; vLLM's backend and the executor's calls share one.

    The model keeps it, so that both go together.
    """
    state = vars(model)
    if _ATTRIBUTE not in state:
        state[_ATTRIBUTE] = VLLMRank(model, vllm_config)
    rank: VLLMRank = state[_ATTRIBUTE]
    return rank
