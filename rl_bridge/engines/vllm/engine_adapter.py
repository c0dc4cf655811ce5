"""`VLLMEngineAdapter`: a whole vLLM engine, all of its ranks, behind the executor's adapter.

    executor = RolloutExecutor(
        weight_bridge=bridge, weight_install_adapter=VLLMEngineAdapter(llm)
    )
    executor.update_weights(manifest)

All ranks stage the update before any installs it. From the pause to the resume, requests wait; in
between, no request sees a mixture, whatever fails.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rl_bridge.engines.rank_bridges import TransportOptions, checked_transports
from rl_bridge.engines.staging import checked_budget
from rl_bridge.engines.vllm.asking import (
    Ranks,
    are_half_way,
    held_by,
    joined,
    refusal_of,
    require_all,
    require_alone,
    verified,
    version_name,
)
from rl_bridge.engines.vllm.caches import CachePolicy, EngineCaches
from rl_bridge.engines.vllm.client import PauseMode, Replies
from rl_bridge.engines.vllm.labels import EngineLabel, LabelMaker, default_label
from rl_bridge.engines.vllm.pauses import EnginePause
from rl_bridge.engines.vllm.server import handle_of
from rl_bridge.errors import EngineLost, TornEngine, WeightUpdateRejectedError
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "CachePolicy",
    "VLLMEngineAdapter",
    "default_label",
]

_LOG = logging.getLogger(__name__)


class VLLMEngineAdapter(TransactionalAdapter):
    """Installs updates into a vLLM engine: an ``LLM``, an ``AsyncLLM``, or a server by its URL.

    The engine's environment needs rl_bridge, no option, and for a server
    ``VLLM_SERVER_DEV_MODE=1``. Its workers read the update themselves, so the transport must reach
    their processes.
    """

    def __init__(
        self,
        engine: Any,
        *,
        pause: PauseMode | None = "keep",
        cache: CachePolicy = "recompute",
        label: LabelMaker | None = default_label,
        cast: bool = False,
        reload: bool = False,
        memory_budget_nbytes: int | None = None,
        transports: TransportOptions | None = None,
        timeout_s: float = 600.0,
        loop: Any = None,
    ) -> None:
        """Configure; the engine is not called.

        Args:
            engine: an ``LLM``, an ``AsyncLLM``, a server's URL, or an `EngineHandle`.
            pause: what running requests do during the install. None does not pause: the install is
                atomic between two steps of the model all the same, but tokens of the steps beside
                it may carry the other label, and use keys and values of the old weights.
            cache: what becomes of cached keys and values.
            label: makes the version label that vLLM puts on outputs; None leaves it alone.
            cast: True lets an update's dtype differ from the engine's.
            reload: True lets vLLM reload the model, with a copy to go back to: for quantized models
                and others that are refused without it. What cannot be read back makes the proof
                ``unproven``. Requests wait for all of it; vLLM's loader casts.
            memory_budget_nbytes: what staging may take on each rank; None takes what there is.
            transports: name of a transport -> options of the ranks' bridges, such as
                ``{"shared-memory": {"directory": path}}``; they travel to the engine as JSON.
            timeout_s: deadline of each call to the engine.
            loop: of an ``AsyncLLM``; None takes the running one.

        Raises:
            ValueError: no such pause or cache policy; a reload without a pause, or with a cast; a
                negative budget; a text that is no URL.
            TypeError: a budget that is no int, a label that is no function, no such option of a
                transport.
            WeightBridgeUnavailableError: a URL without httpx, an ``AsyncLLM`` without a loop; no
                such transport.

        """
        if pause not in {"keep", "wait", "abort", None}:
            raise ValueError(f"pause={pause!r}: expected 'keep', 'wait', 'abort' or None.")
        if cache not in {"recompute", "reset", "keep"}:
            raise ValueError(f"cache={cache!r}: expected 'recompute', 'reset' or 'keep'.")
        if reload and (pause is None or cast):
            raise ValueError("reload=True: expected a pause, and no cast; vLLM's loader casts.")
        self._handle = handle_of(engine, timeout_s, loop)
        self._ranks = Ranks(self._handle)
        self._pause = EnginePause(self._handle, self._ranks, pause)
        self._caches = EngineCaches(self._handle, cache)
        self._label = EngineLabel(self._handle, label)
        self._options: dict[str, Any] = {"reload": True} if reload else {"cast": cast}
        self._options["memory_budget_nbytes"] = checked_budget(memory_budget_nbytes)
        if transports:
            self._options["transports"] = checked_transports(transports)
        self._phases_ms: dict[str, float] = {}
        self._verified = ""
        self._refusal: str | None = None  # a rank's; None: the update may come again
        self._manifest: WeightUpdateManifest | None = None
        self._given_up: dict[str, Any] | None = None  # of which the ranks may not have heard
        self._proofs: list[dict[str, Any]] = []
        # Each is noted before the step that it tells of: an interrupt may come behind any.
        self._is_installed = self._may_have_run = False
        self._is_left = False  # another driver's update is in the model: its pause must stay
        self._held = ""  # by the ranks, as they said last
        # What an undo leads back to: what they held before, or this driver's last where they hold
        # nothing: they were started anew, and the undo says so.
        self._base: str | None = None
        self._committed: str | None = None
        self._found: str | None = None  # what they held when they were looked at last

    @property
    def imports_itself(self) -> bool:
        """The ranks read every byte of an update, each for itself; the executor need not."""
        return True

    @property
    def verified_root(self) -> str:
        """Root of what all ranks verified when they prepared; empty if one did not."""
        return self._verified

    @property
    def phases_ms(self) -> Mapping[str, float]:
        """Phases of the update under way: pause, cache, label; the slowest rank's verify, prove."""
        return self._phases_ms

    @property
    def is_overtaken(self) -> bool:
        """Whether the ranks hold another driver's version, or none, instead of this one's."""
        return self._committed is not None and self._found != self._committed

    # ---- the steps ------------------------------------------------------------------------------

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Import, verify and stage on all ranks; the engine goes on serving what it has.

        Raises:
            IncompatibleUpdate: a rank refuses it; no rank was touched.
            EngineLost: the engine is gone.

        """
        del tensors  # the workers import it themselves
        self._phases_ms, self._verified, self._refusal = {}, "", None
        self._look_at_ranks()
        self._manifest = manifest
        payload = {"manifest": manifest.to_json(), "options": self._options}
        try:
            replies = self._all("prepare", payload)
        except Exception as error:
            self._refusal = refusal_of(error, self._held)
            raise
        if self.imports_itself:  # else the executor's own verification has that name
            slowest = max(reply["timings_ms"].get("verify", 0.0) for reply in replies)
            self._phases_ms["verify"], self._verified = slowest, verified(replies)

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Pause, then exchange and prove on all ranks or on none.

        Raises:
            WeightBridgeError: a rank failed; all are back. Call `undo`, which resumes.

        """
        del tensors
        self._manifest = manifest
        if self._pause.is_wanted:
            self._timed("pause", lambda: self._pause.begin(self._meant()))
        self._is_installed = True
        self._may_have_run |= not self._pause.is_wanted
        replies = self._all("install", {"update_id": manifest.update_id})
        self._proofs = [reply["proof"] for reply in replies]
        self._phases_ms["prove"] = max(reply["timings_ms"]["prove"] for reply in replies)

    def prove(self) -> InstallProof:
        """What all ranks found in their models when they installed.

        Raises:
            ProofFailed: they do not agree.

        """
        return joined(self._proofs)

    def resume(self) -> None:
        """Drop what the old weights cached, set the label, and let requests go on.

        Raises:
            WeightUpdateRejectedError: another driver has taken it over; or requests hold cached
                blocks that ``cache="reset"`` would leave behind.
            TypeError: the label is no text.

        """
        assert self._manifest is not None
        self._pause.require(self._meant())
        self._timed("cache", self._caches.drop_old)
        if self._label.is_wanted:
            label = self._label.of(self._manifest)
            self._timed("label", lambda: self._label.set(label))
        self._may_have_run = True
        self._pause.go_on()

    def undo(self) -> None:
        """Bring all ranks back, with caches and label, and let requests go on.

        Raises:
            TornEngine: a rank could not be brought back, or the engine is gone.

        """
        try:
            if self._is_installed:
                self._back()
            else:
                self.abandon()
        except EngineLost as error:
            raise TornEngine(str(error)) from error
        finally:
            if not (self._is_installed or self._is_left):
                self._pause.end()  # also where the pause itself failed, or was cut off

    def _back(self) -> None:
        self._pause.begin_again()
        # Caches and label first: who finds the weights back lets requests go on, and nothing else.
        # Who finds the update in the model commits it, and does both anew.
        if self._may_have_run:
            self._caches.drop_undone()
        if any(reply["mine"] for reply in self._all("describe", {})):
            self._label.take_back()
        replies = self._undone()
        if self._may_have_run:
            self._caches.drop_undone()  # where it is not paused, requests went on until here
            self._may_have_run = False
        self._require_base(replies)
        self._label.take_back()
        self._is_left = self._is_installed = False
        self._manifest = None

    def _undone(self) -> Replies:
        try:
            return self._all("undo", self._meant())
        except WeightUpdateRejectedError:
            # Another driver has committed it: from now on cache and label are that one's.
            self._label.stand()
            self._pause.end()
            raise

    def _require_base(self, replies: Replies) -> None:
        """Refuse to take another driver's version for the one that this driver went back to."""
        held = self._found = replies[0]["holds"]
        if self._manifest is not None and held != self._base:  # (None: whosever was half-way)
            self._label.keep()  # it is that one's, also where it reads the same
            self._pause.end()
            msg = (
                "another driver has updated this engine, or it was started anew: it holds update "
                f"{held}, expected {self._base}. Let one driver at a time update an engine; leave "
                "it to the other one, or install a later version in full."
            )
            raise WeightUpdateRejectedError(msg)

    def take_over(self) -> bool:
        """End what a driver that ended inside of an update left, and let requests go on.

        What all ranks hold, proven, is committed; what they do not is taken back, and what they
        only staged is let go of. Without anything left, nothing happens, nor in the middle of an
        update of this driver's own. `prepare` does the same.

        Raises:
            WeightBridgeError: the engine is gone, or could not be brought to one version.

        """
        if self._manifest is None:
            self._look_at_ranks()
            self._all("forget", {})
            self._pause.end()
        return False

    def abandon(self) -> None:
        """Let all ranks forget what they staged."""
        if self._is_installed or self._is_left:
            return
        try:
            if self._manifest is not None:
                self._given_up = {"reason": self._refusal, **self._meant()}
                self._manifest = None
            if self._given_up is not None:
                self._all("abandon", {**self._given_up, "pauses": self._pause.is_on})
                self._given_up = None
        finally:
            self._pause.end()

    def commit(self) -> None:
        """Let all ranks acknowledge. Called again, those that have done so say nothing more."""
        if self._manifest is not None:
            self._committed = self._base = self._found = self._manifest.update_id
        self._is_installed = self._may_have_run = False
        before, self._manifest = self._label.keep(), None
        try:
            replies = self._all("commit", {"update_id": self._committed})
        except WeightUpdateRejectedError:
            if not self._is_anywhere(self._committed):
                self._label.take_back_to(before)  # another driver has gone on from it
            raise
        if replies[0]["in_model"] != self._committed:
            self._label.take_back_to(before)  # as above
        self._pause.settle(replies)

    def release(self, update_id: str) -> None:
        """Nothing is kept of an update: the engine has memory of its own."""

    def describe(self) -> list[dict[str, Any]]:
        """What each rank holds: update, version, root."""
        return self._all("describe", {})

    def close(self) -> None:
        """Close the connection to a server; the engine goes on."""
        self._handle.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _is_anywhere(self, update_id: str | None) -> bool:
        """Whether a rank has that update of this driver's still, committed or about to be."""
        replies = self._all("describe", {})
        return any(reply["mine"] or reply["update_id"] == update_id for reply in replies)

    def _look_at_ranks(self) -> None:
        """Refuse engines whose ranks cannot decide together, and end what a driver left behind.

        An update that ranks hold, proven, and that nobody committed, was left by a driver that
        ended in between. Requests may have been served by it, so the way is forward. What is not
        proven is taken back.
        """
        require_alone(self._handle)
        replies = self._all("describe", {})
        require_all(replies)
        self._held = version_name(replies[0]["weight_version"])
        self._found = held_by(replies, self._committed, is_undone=self._is_installed)
        if not self._is_installed:  # else an undo is due that leads back to the one before
            self._base = replies[0]["update_id"] or self._committed
        self._is_left = not self._is_installed and any(r["torn"] or r["exchanged"] for r in replies)
        self._pause.look(replies)
        is_due = self._is_installed and self._manifest is None  # as at the last look
        if is_due or are_half_way(replies):
            _LOG.warning("what was left half-way is undone")
            self._is_installed = self._may_have_run = True
            self._manifest = None  # whosever it is
        if self._is_installed:
            self._settle_own(replies)
            return  # on all ranks: nothing is left that could be committed
        left = next((reply["installed"] for reply in replies if reply["installed"]), None)
        if left is None:
            return
        # In this order: cut off anywhere, it is done again.
        manifest = WeightUpdateManifest.from_json(left)
        _LOG.warning("version %d was left uncommitted: it is now", manifest.weight_version)
        self._caches.drop_left()
        self._label.keep()
        if self._label.is_wanted:
            self._label.set(self._label.of(manifest))
        replies = self._all("commit", {"if_installed": True, "pauses": self._pause.is_on})
        self._found = replies[0]["in_model"]
        self._base = self._found or self._committed
        if replies[0]["in_model"] == manifest.update_id:
            self._label.keep()
            self._held = version_name(manifest.weight_version)
        else:
            self._label.take_back()  # its own driver has undone it in between
        self._is_left = False

    def _settle_own(self, replies: Replies) -> None:
        """End an update whose undo is due still: it failed before, or its answer was lost."""
        is_there = self._manifest is None or any(reply["mine"] for reply in replies)
        if is_there or replies[0]["update_id"] == self._base:
            self._back()
            self._pause.end()
        # Else another driver has gone on from it: there is no undo, and a later version mends it.

    def _meant(self) -> dict[str, Any]:
        """Names the update to the ranks: by now they may have another driver's."""
        return {} if self._manifest is None else {"update_id": self._manifest.update_id}

    def _all(self, verb: str, payload: dict[str, Any]) -> Replies:
        return self._ranks.ask(verb, payload)

    def _timed(self, phase: str, action: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return action()
        finally:
            self._phases_ms[phase] = (time.perf_counter() - start) * 1e3
