"""One worker's part in an update: it imports, stages, installs, proves and undoes.

All ranks of an engine do each step together. Nothing is exchanged before every rank has staged the
whole update; a rank that fails while it exchanges makes all others exchange back before any of them
runs a step of the model: they vote, within one call.
"""

import logging
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rl_bridge.bridge.acknowledgement import describe
from rl_bridge.bridge.bridges import TensorBridge, make_weight_bridge
from rl_bridge.errors import (
    StaleUpdate,
    TornEngine,
    WeightBridgeError,
    WeightUpdateRejectedError,
)
from rl_bridge.installers.base import InstallProof
from rl_bridge.installers.vllm.model_installer import VLLMModelInstaller
from rl_bridge.installers.vllm.parts import require
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.imported import ImportedTensors

__all__ = ["VLLMRank", "rank_of"]

_LOG = logging.getLogger(__name__)

Payload = dict[str, Any]

_TEXT_NBYTES = 1024
_OTHER = "WeightUpdateRejectedError: another rank"


class VLLMRank:
    """One worker of a vLLM engine. Not thread-safe: vLLM calls a worker from one thread."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        """Look at a worker's model; nothing is opened before the first update."""
        self._model = model
        self._config = vllm_config
        self._options: Payload = {}
        self._installer: VLLMModelInstaller | None = None
        self._bridges: dict[str, TensorBridge] = {}
        self._active: WeightUpdateManifest | None = None
        self._pending: WeightUpdateManifest | None = None
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._proof: InstallProof | None = None
        self._timings_ms: dict[str, float] = {}
        self._torn = ""

    @property
    def rank(self) -> int:
        """Rank among the workers of this engine."""
        return int(_group().rank_in_group)

    @property
    def is_last(self) -> bool:
        """Whether it is the last of the workers."""
        group = _group()
        return bool(group.rank_in_group == group.world_size - 1)

    # ---- by remote call -------------------------------------------------------------------------

    def call(self, verb: str, payload: Payload) -> Payload:
        """Do what the executor's adapter asks for; JSON in, JSON out, no exception."""
        verbs: dict[str, Callable[[Payload], Payload]] = {
            "describe": lambda _: self.describe(),
            "prepare": self._prepare,
            "install": lambda _: self.install(),
            "undo": lambda _: self.undo("undone by the executor"),
            "abandon": lambda _: self.undo("another rank refused it"),
            "commit": lambda _: self.commit(),
        }
        try:
            if verb not in verbs:
                msg = f"{verb!r} is no verb of a rank, expected one of {sorted(verbs)}."
                raise WeightUpdateRejectedError(msg)  # noqa: TRY301 - answered like all others
            return {"ok": True, "rank": self.rank, **verbs[verb](payload)}
        except Exception as error:  # noqa: BLE001 - it is the answer
            _LOG.warning("%s failed", verb, exc_info=True)
            _clear_frames(error)
            return {
                "ok": False,
                "rank": self.rank,
                "type": type(error).__name__,
                "message": str(error),
            }

    def describe(self) -> Payload:
        """What this rank holds."""
        active = self._active
        return {
            "world_size": int(_group().world_size),
            "update_id": None if active is None else active.update_id,
            "weight_version": None if active is None else active.weight_version,
            "root": None if active is None else active.root,
            "pending": None if self._pending is None else self._pending.update_id,
            "torn": self._torn,
            "model": type(self._model).__name__,
        }

    def configure(self, options: Payload) -> None:
        """Options of the installer: ``cast``, ``memory_budget_nbytes``, ``num_threads``."""
        if options != self._options and self._pending is None:
            self._options, self._installer = dict(options), None

    def _prepare(self, payload: Payload) -> Payload:
        self.configure(payload.get("options") or {})
        return self.prepare(WeightUpdateManifest.from_json(payload["manifest"]))

    # ---- the steps ------------------------------------------------------------------------------

    def prepare(self, manifest: WeightUpdateManifest) -> Payload:
        """Import, verify and stage; the model goes on serving what it has.

        Raises:
            WeightBridgeError: refused; nothing of the model was written.

        """
        if self._pending is not None:
            if not self._torn:
                self.undo("a later update came before it was finished")
            else:
                msg = f"the engine is torn: {self._torn}. Undo it again before the next update."
                raise TornEngine(msg)
        if self._active is not None and manifest.update_id == self._active.update_id:
            msg = (
                f"version {manifest.weight_version} (update {manifest.update_id}) is active on "
                "this rank already. Publish a later version."
            )
            raise StaleUpdate(msg)
        bridge = self._bridge(manifest)
        start = time.perf_counter()
        self._tensors = bridge.import_update(manifest)
        imported = time.perf_counter()
        self._pending = manifest
        try:
            self._engine().prepare(manifest, self._tensors)
        except BaseException as error:
            self._end(describe(error))
            raise
        self._timings_ms = {
            "import": (imported - start) * 1e3,
            "stage": (time.perf_counter() - imported) * 1e3,
        }
        return {"timings_ms": self._timings_ms}

    def receive(self, manifest: WeightUpdateManifest) -> str:
        """Prepare and install, on all ranks or on none: for callers with one call for both.

        Returns:
            Why no rank has it now, the same text on all ranks; empty if all have.

        """
        problem = ""
        try:
            self.prepare(manifest)
        except Exception as error:  # noqa: BLE001 - told below, after the vote
            _LOG.warning("version %d is refused", manifest.weight_version, exc_info=True)
            problem = describe(error)
            _clear_frames(error)
        if _all_agree(ok=not problem):
            try:
                self.install()
            except Exception as error:  # noqa: BLE001 - as above
                problem = describe(error)
                _clear_frames(error)
        else:
            self.undo("another rank refused it")
        # (All of them failed, or none: they voted.)
        return _first_said(problem) if problem or self._pending is None else ""

    def install(self) -> Payload:
        """Exchange and prove, on all ranks or on none.

        Raises:
            WeightBridgeError: this rank failed, or another one did; all are at the old version.

        """
        manifest, error = self._pending, None
        try:
            if manifest is None:
                msg = "no update is prepared on this rank. Call prepare first."
                raise WeightUpdateRejectedError(msg)  # noqa: TRY301 - it has a vote, too
            start = time.perf_counter()
            self._engine().install(manifest, {})
            installed = time.perf_counter()
            self._proof = self._engine().prove()
            if self._proof.root != manifest.root:
                msg = f"the engine holds root {self._proof.root}, expected {manifest.root}."
                raise WeightUpdateRejectedError(msg)  # noqa: TRY301 - as above
            self._timings_ms["install"] = (installed - start) * 1e3
            self._timings_ms["prove"] = (time.perf_counter() - installed) * 1e3
        except Exception as caught:  # noqa: BLE001 - raised below, after the vote
            error = caught
        if not _all_agree(ok=error is None):
            try:
                self.undo("a rank failed to install it" if error is None else describe(error))
            finally:
                # Nobody runs a step before all are back.
                all_back = _all_agree(ok=not self._torn)
            if error is not None:
                try:
                    raise error
                finally:
                    error = None  # else it and this frame hold each other, and the update's memory
            msg = "another rank failed to install it; this one is back at its version."
            if not all_back:
                msg = "another rank failed to install it and could not be undone."
                raise TornEngine(msg)
            raise WeightUpdateRejectedError(msg)
        assert self._proof is not None
        return {"proof": self._proof.to_dict(), "timings_ms": self._timings_ms}

    def undo(self, reason: str) -> Payload:
        """Exchange back what is not committed; without any, nothing happens.

        Raises:
            TornEngine: it could not be exchanged back.

        """
        if self._pending is not None:
            try:
                self._engine().undo()
            except Exception as error:
                self._torn = describe(error)
                msg = f"version {self._pending.weight_version}: the undo failed: {self._torn}."
                raise TornEngine(msg) from error
            self._torn = ""
            self._end(reason)
        return {}

    def commit(self) -> Payload:
        """Acknowledge the proven update; it is what an undo goes back to from now on."""
        manifest, proof = self._pending, self._proof
        if manifest is None or proof is None:
            msg = "no update is installed and proven on this rank. Call install first."
            raise WeightUpdateRejectedError(msg)
        self._engine().commit()
        self._active, self._pending, self._proof, self._tensors = manifest, None, None, {}
        try:
            bridge = self._bridge(manifest)
            bridge.acknowledge(
                manifest.update_id, proof=proof.to_dict(), timings_ms=dict(self._timings_ms)
            )
            # The model has memory of its own: the trainer's slot is free for the next version.
            bridge.release_imported(manifest.update_id)
        except WeightBridgeError as error:
            # Other ranks have committed: there is no way back, and none is needed.
            _LOG.exception(
                "version %d is active, but its trainer is not told", manifest.weight_version
            )
            return {"not_told": describe(error)}
        return {}

    def close(self) -> None:
        """Undo what is not committed, and let go of the bridges."""
        try:
            self.undo("the engine shut down")
        finally:
            bridges, self._bridges = self._bridges, {}
            for bridge in bridges.values():
                bridge.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _engine(self) -> VLLMModelInstaller:
        if self._installer is None:
            self._installer = VLLMModelInstaller(self._model, self._config, **self._options)
        return self._installer

    def _bridge(self, manifest: WeightUpdateManifest) -> TensorBridge:
        bridge = self._bridges.get(manifest.transport)
        if bridge is None:
            bridge = make_weight_bridge(
                manifest.transport, source_worker="vllm", source_rank=self.rank
            )
            self._bridges[manifest.transport] = bridge
        return bridge

    def _end(self, reason: str) -> None:
        """The pending update is refused or undone: tell its publisher."""
        manifest, self._pending, self._proof = self._pending, None, None
        tensors, self._tensors = self._tensors, {}
        assert manifest is not None
        if isinstance(tensors, ImportedTensors):
            tensors.forget()  # a kept exception's frames must not keep the trainer's slot
        try:
            self._engine().abandon()
            bridge = self._bridge(manifest)
            bridge.reject(manifest.update_id, reason)
            bridge.release_imported(manifest.update_id)
        except WeightBridgeError:
            # The model is as it should be; that its trainer is not told must not change this.
            _LOG.exception("version %d could not be rejected", manifest.weight_version)


_RANKS: "WeakKeyDictionary[torch.nn.Module, VLLMRank]" = WeakKeyDictionary()


def rank_of(model: torch.nn.Module, vllm_config: Any) -> VLLMRank:
    """The rank whose model this is; vLLM's backend and the executor's calls share one."""
    rank = _RANKS.get(model)
    if rank is None:
        rank = _RANKS[model] = VLLMRank(model, vllm_config)
    return rank


def _clear_frames(error: BaseException) -> None:
    """Who keeps the log's records must not keep the trainer's slot, by tensors in frames."""
    chain: list[BaseException] = [error]
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        chain += [e for e in (link.__cause__, link.__context__) if e is not None and e not in chain]


def _group() -> Any:
    """The workers of this engine: its tensor and pipeline parallel ranks."""
    state = require("vllm.distributed.parallel_state")
    inner = getattr(state, "_INNER_DP_WORLD", None)
    return inner if inner is not None else state.get_world_group()


def _first_said(problem: str) -> str:
    """What the first rank with a cause of its own says; all ranks must ask."""
    group = _group()
    if group.world_size == 1:
        return problem
    said = torch.zeros(group.world_size, _TEXT_NBYTES, dtype=torch.uint8)
    own = "" if problem.startswith(_OTHER) else f"rank {group.rank_in_group}: {problem}"
    text = (own if problem else "").encode()[:_TEXT_NBYTES]
    said[group.rank_in_group, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in said]
    return next(filter(None, texts), "a rank failed")


def _all_agree(*, ok: bool) -> bool:
    """Whether all ranks say yes; each waits for all, as long as vLLM's own groups do."""
    group = _group()
    if group.world_size == 1:
        return ok
    vote = torch.tensor([int(ok)])
    torch.distributed.all_reduce(vote, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(vote.item())
