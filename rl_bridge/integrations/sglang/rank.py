"""The engine's part in an update: it imports, verifies, installs, proves and undoes.

It lives in the scheduler's process, at the model, and is asked over `rl_bridge.integrations.sglang
.plugin` by the executor's adapter: JSON in, JSON out. SGLang asks it between two steps, and all
ranks of a tensor-parallel engine the same; they answer together.
"""

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rl_bridge.bridge.acknowledgement import describe
from rl_bridge.bridge.bridges import TensorBridge, make_weight_bridge
from rl_bridge.bridge.records import is_shortage
from rl_bridge.bridge.steps import FineSteps
from rl_bridge.errors import (
    TornEngine,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.installers.base import InstallProof
from rl_bridge.installers.sglang.model_installer import SGLangModelInstaller
from rl_bridge.installers.sglang.parts import require, version
from rl_bridge.integrations.sglang import votes
from rl_bridge.integrations.vllm.frames import clear_frames, told
from rl_bridge.lifecycle.table import State
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.imported import ImportedTensors

__all__ = ["SGLangRank", "answer", "known_rank"]

_LOG = logging.getLogger(__name__)

Payload = Mapping[str, Any]
Reply = dict[str, Any]

_ATTRIBUTE = "_rl_bridge_rank"
_TIMEOUT_S = 600.0


class SGLangRank:
    """One rank's model with what is under way in it. Not thread-safe: SGLang asks in turn."""

    def __init__(self, model: torch.nn.Module, flush: Callable[[], bool | None]) -> None:
        """Look at the model; nothing is opened before the first update.

        Args:
            model: the rank's.
            flush: drops cached prefixes; whether it did, or None where that is not all there is.

        """
        self._model = model
        self._flush = flush
        self._engine = uuid.uuid4().hex
        self._options: Reply = {}
        self._installer = SGLangModelInstaller(model, num_ranks=votes.world_size())
        self._bridges: dict[str, TensorBridge] = {}
        self._active: WeightUpdateManifest | None = None
        self._pending: WeightUpdateManifest | None = None
        self._driver: str | None = None  # whose that is: two may have the same update
        self._is_imported = False
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._proof: InstallProof | None = None
        self._timings_ms: dict[str, float] = {}
        self._torn = ""
        self.is_open = False
        """Whether its model may be a mixture: between the begin of an install and its end."""

    def describe(self) -> Reply:
        """What it holds."""
        active, pending = self._active, self._pending
        return {
            "sglang": version(),
            "engine": self._engine,
            "device": self._device(),
            "update_id": None if active is None else active.update_id,
            "weight_version": None if active is None else active.weight_version,
            "root": None if active is None else active.root,
            "pending": None if pending is None else pending.update_id,
            "begun": self.is_open,
            "by_sglang": self.is_open and not self._is_imported,
            "torn": self._torn,
            "model": type(self._model).__name__,
        }

    def prepare(self, given: Payload) -> Reply:
        """Import and verify, if this is where the update is imported; make the second copy.

        Raises:
            WeightBridgeError: refused; nothing of the model was written.

        """
        _require_supported(self._device())
        self._require_closed()
        self._end(None)  # the driver that staged it may have died, and begin anew
        manifest = WeightUpdateManifest.from_json(str(given.get("manifest", "")))
        self._configure(dict(given.get("options") or {}))
        start, told = time.perf_counter(), {}
        self._driver, self._is_imported = given.get("driver"), bool(given.get("import"))
        self._pending = manifest
        try:
            if self._is_imported:
                bridge = self._bridge(manifest)
                self._tensors = bridge.import_update(manifest)
                told = bridge.timings(manifest.update_id)
            imported = time.perf_counter()
            self._installer.prepare(manifest, self._tensors)
        except BaseException as error:
            self._end(None if is_shortage(error) else describe(error))
            raise
        self._timings_ms = {
            "import": (imported - start) * 1e3,
            "stage": (time.perf_counter() - imported) * 1e3,
        }
        reply: Reply = {
            "timings_ms": {**told, **self._timings_ms},
            "verified": manifest.root if self._is_imported else "",
        }
        if given.get("cuts"):
            reply["cuts"] = [[cut.to_json() for cut in self._installer.cuts(manifest)]]
        return reply

    def install(self, given: Payload) -> Reply:
        """Install what was imported; or note that SGLang's own load comes next.

        Raises:
            Exception: the loader's. The executor asks for the undo.

        """
        manifest = self._meant(given)
        start = time.perf_counter()
        self.is_open = True
        if self._is_imported:
            self._installer.install(manifest, self._tensors)
        else:
            self._installer.begin()
        self._timings_ms["install"] = (time.perf_counter() - start) * 1e3
        return {"timings_ms": self._timings_ms}

    def prove(self, given: Payload) -> Reply:
        """Read what the model holds.

        Raises:
            ProofFailed: not this update.

        """
        manifest = self._meant(given)
        start = time.perf_counter()
        if not self._is_imported:
            parts = list(given.get("parts") or [[]] * votes.world_size())[votes.this_rank()]
            self._installer.expect([bytes.fromhex(part) for part in parts])
        proof = self._installer.prove()
        if proof.root != manifest.root:
            msg = (
                f"the engine holds root {proof.root}, expected {manifest.root}. Install the update "
                "again."
            )
            raise WeightUpdateRejectedError(msg)
        self._proof = proof
        self._timings_ms["prove"] = (time.perf_counter() - start) * 1e3
        return {"proof": proof.to_dict(), "timings_ms": self._timings_ms}

    def is_refused(self) -> None:
        """Another rank has no proof: this one's is worth nothing."""
        self._proof = None

    def flush(self) -> Reply:
        """Drop cached prefixes; the memory that they are in stays SGLang's."""
        return {"flushed": self._flush()}

    def undo(self, given: Payload) -> Reply:
        """Put back what is not committed; without any, nothing happens.

        With ``"reason": null`` the update was not refused, and may come again.

        Raises:
            TornEngine: it could not be put back.
            WeightUpdateRejectedError: that update is committed.

        """
        update_id = given.get("update_id")
        if self._pending is None or (update_id is not None and not self._is_pending(given)):
            if update_id is not None and self._active is not None:
                _refuse_committed(str(update_id), self._active)
            return {}
        try:
            self._installer.undo()
        except Exception as error:
            self._torn = describe(error)
            shown = self._pending.weight_version
            msg = f"version {shown}: the undo failed: {self._torn}. Call recover()."
            raise TornEngine(msg) from error
        self._torn = ""
        self.is_open = False
        reason = given.get("reason", "undone by the executor")
        self._end(None if reason is None else str(reason))
        return {}

    def commit(self, given: Payload) -> Reply:
        """Acknowledge the proven update; it is what an undo goes back to from now on.

        Raises:
            WeightUpdateRejectedError: there is none, or another one, or it is not proven.

        """
        update_id = given.get("update_id")
        active = None if self._active is None else self._active.update_id
        if update_id is not None and update_id == active and not self._is_pending(given):
            return {}  # asked again, because the answer was lost
        manifest = self._meant(given)
        proof = self._proof
        if proof is None:
            msg = f"update {manifest.update_id} is not proven. Call prove first."
            raise WeightUpdateRejectedError(msg)
        self._installer.commit()  # where it fails it may be asked for again: it is proven still
        self._proof = None
        self._active, self._pending, self.is_open = manifest, None, False
        self._let_go()
        if not self._is_imported:
            return {}
        bridge = self._bridge(manifest)
        try:
            bridge.acknowledge(
                manifest.update_id, proof=proof.to_dict(), timings_ms=dict(self._timings_ms)
            )
        except WeightBridgeError as error:
            # There is no way back, and none is needed: the engine has it.
            _LOG.exception("version %d: its trainer is not told", manifest.weight_version)
            return {"not_told": describe(error)}
        finally:
            # The model has memory of its own: the trainer's slot is free for the next version.
            bridge.release_imported(manifest.update_id)
        return {}

    # ---- inside ---------------------------------------------------------------------------------

    def _device(self) -> str:
        return next(self._model.parameters()).device.type

    def _configure(self, options: Reply) -> None:
        if options != self._options:
            ranks = votes.world_size()
            self._installer = SGLangModelInstaller(self._model, num_ranks=ranks, **options)
            self._options = options

    def _require_closed(self) -> None:
        if self.is_open:
            assert self._pending is not None
            msg = (
                f"update {self._pending.update_id} is installed and not committed. Let its driver "
                "end it, or undo it, before the next one."
            )
            raise WeightUpdateRejectedError(msg)

    def _is_pending(self, given: Payload) -> bool:
        asked = given.get("update_id"), given.get("driver")
        return self._pending is not None and asked == (self._pending.update_id, self._driver)

    def _meant(self, given: Payload) -> WeightUpdateManifest:
        if self._pending is None or not self._is_pending(given):
            held = "none" if self._pending is None else self._pending.update_id
            msg = (
                f"update {given.get('update_id')} is not prepared here by this driver: {held} is "
                "prepared. Let one driver at a time update an engine, and publish a later version."
            )
            raise WeightUpdateRejectedError(msg)
        return self._pending

    def _bridge(self, manifest: WeightUpdateManifest) -> TensorBridge:
        bridge = self._bridges.get(manifest.transport)
        if bridge is None:
            bridge = make_weight_bridge(
                manifest.transport, source_worker="sglang", source_rank=votes.this_rank()
            )
            self._bridges[manifest.transport] = bridge
        return bridge

    def _end(self, reason: str | None) -> None:
        """The pending update is refused or undone, or given up and may come again: None."""
        manifest, self._pending, self._proof = self._pending, None, None
        if manifest is None:
            return
        self._installer.abandon()
        self._let_go()
        bridge = self._bridges.get(manifest.transport)
        if bridge is None or not self._is_imported:
            return
        steps: list[Callable[[], object]] = [lambda: bridge.release_imported(manifest.update_id)]
        is_here = FineSteps(bridge).is_in(manifest, State.IMPORTED, State.VERIFIED)
        if reason is not None and is_here:
            # Else the import failed: the bridge knows whether that may be tried again.
            steps.insert(0, lambda: bridge.reject(manifest.update_id, reason))
        for step in steps:
            try:
                step()
            except WeightBridgeError:
                # The model is as it should be; that its trainer is not told must not change this.
                _LOG.exception("version %d could not be rejected", manifest.weight_version)

    def _let_go(self) -> None:
        tensors, self._tensors = self._tensors, {}
        if isinstance(tensors, ImportedTensors):
            tensors.forget()  # a kept exception's frames must not keep the trainer's slot


def _refuse_committed(update_id: str, active: WeightUpdateManifest) -> None:
    if active.update_id == update_id:
        msg = f"update {update_id} is committed: it cannot be undone. Publish a later version."
        raise WeightUpdateRejectedError(msg)


def _require_supported(device: str) -> None:
    """Refuse engines of which some processes would not be asked, or hold what is not proven."""
    context = require("sglang.srt.runtime_context")
    parallel, speculative = context.get_parallel(), context.get_spec()
    for name in ("pp_size", "dp_size", "ep_size"):
        degree = int(getattr(parallel, name, None) or 1)
        if degree != 1:
            msg = (
                f"the engine has {name}={degree}, expected 1: only the ranks of tensor "
                "parallelism decide together here. Use one engine and one executor for each "
                "replica, and tp_size to spread a model."
            )
            raise WeightBridgeUnavailableError(msg)
    if speculative.speculative_algorithm:
        msg = (
            f"the engine speculates by {speculative.speculative_algorithm}, expected none: the "
            "draft model's weights are not proven. Start it without a draft model."
        )
        raise WeightBridgeUnavailableError(msg)
    if device == "cpu" and context.get_flags().capture.enable_torch_compile:
        msg = (
            "the engine was started with enable_torch_compile, expected without: on the CPU SGLang "
            "compiles a model's weights into its code as constants, and no update reaches them. "
            "Start it without."
        )
        raise WeightBridgeUnavailableError(msg)


def known_rank(model: torch.nn.Module) -> SGLangRank | None:
    """The rank whose model this is, if anybody asked for it before."""
    rank: SGLangRank | None = vars(model).get(_ATTRIBUTE)
    return rank


_VERBS: Mapping[str, Callable[[SGLangRank, Payload], Reply]] = {
    "describe": lambda rank, _: rank.describe(),
    "prepare": SGLangRank.prepare,
    "install": SGLangRank.install,
    "prove": SGLangRank.prove,
    "flush": lambda rank, _: rank.flush(),
    "undo": SGLangRank.undo,
    "commit": SGLangRank.commit,
}


def answer(model: torch.nn.Module, flush: Callable[[], bool | None], text: str) -> str:
    """Do what is asked, on all ranks. Never raises: a failure is an answer, too.

    SGLang would end for one, and ranks that did not vote would be waited for by the others.

    Args:
        model: this rank's.
        flush: see `SGLangRank`.
        text: the call.

    """
    reply: Reply = {}
    given: Payload = {}
    rank = known_rank(model)
    try:
        given = _given(text)
        reply["call"] = given.get("call")
        if rank is None:
            rank = vars(model)[_ATTRIBUTE] = SGLangRank(model, flush)
        reply = {**reply, "ok": True, **_VERBS[given["verb"]](rank, given)}
    except Exception as error:  # noqa: BLE001 - it is the answer
        _LOG.warning("a call of rl_bridge failed", exc_info=True)
        reply = {**reply, "ok": False, **told(error)}
        clear_frames(error)
    one = votes.merged(votes.all_reply(reply, float(given.get("timeout_s", _TIMEOUT_S))))
    if rank is not None and given.get("verb") == "prove" and not one["ok"]:
        rank.is_refused()
    return json.dumps(one)


def _given(text: str) -> Payload:
    given = json.loads(text)
    if not isinstance(given, dict) or given.get("verb") not in _VERBS:
        msg = f"{text[:80]!r} is no call. Pass an object with a verb of {sorted(_VERBS)}."
        raise WeightUpdateRejectedError(msg)
    return given
