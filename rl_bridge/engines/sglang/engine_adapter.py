"""`SGLangInstallAdapter`: a whole SGLang engine behind the executor's adapter.

    executor = RolloutExecutor(
        weight_bridge=bridge, weight_install_adapter=SGLangInstallAdapter(engine)
    )
    executor.update_weights(manifest)

From the pause to the resume no request is computed. What SGLang answers to a load is not believed:
the engine's own parameters are read, on all of its ranks, and after any failure put back, byte for
byte.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from rl_bridge.bridge.consumer import is_shortage
from rl_bridge.engines.rank_bridges import TransportOptions
from rl_bridge.engines.sglang.handles import PauseMode, handle_of
from rl_bridge.engines.sglang.routes import RouteName, options_for, route_of
from rl_bridge.engines.sglang.serving import Serving
from rl_bridge.engines.sglang.shares import Shares
from rl_bridge.engines.vllm.labels import checked_label, default_label, label_of
from rl_bridge.errors import EngineLost, TornEngine, WeightUpdateRejectedError
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "CachePolicy",
    "SGLangInstallAdapter",
]

_LOG = logging.getLogger(__name__)

CachePolicy = Literal["flush", "keep"]
"""What becomes of cached prefixes that the old weights made: dropped, or left as they are."""


class SGLangInstallAdapter(TransactionalAdapter):
    """Installs updates into an SGLang engine: an ``Engine``, or a server by its URL.

    The engine's environment needs rl_bridge, and no option: SGLang finds it as a plugin.
    """

    def __init__(
        self,
        engine: Any,
        *,
        route: RouteName = "import",
        directory: str | Path | None = None,
        address: str | None = None,
        pause: PauseMode = "retract",
        cache: CachePolicy = "flush",
        label: Callable[[WeightUpdateManifest], str] | None = default_label,
        exchange: bool = True,
        memory_budget_nbytes: int | None = None,
        transports: TransportOptions | None = None,
        timeout_s: float = 600.0,
        api_key: str | None = None,
    ) -> None:
        """Configure; the engine is not called.

        Args:
            engine: an ``Engine``, or a server's URL.
            route: how bytes get into the engine. ``import``: its process reads the trainer's memory
                by the update's transport. ``tensor``: SGLang's ``update_weights_from_tensor`` with
                a flattened bucket in shared memory, for transports that reach only this process.
                ``distributed``: its ``update_weights_from_distributed``, one bucket over a process
                group. ``disk``: its ``update_weights_from_disk``.
            directory: for ``disk``, where versions are written; it must outlive the engine.
            address: for ``distributed``, this machine's as the engine reaches it; None is
                127.0.0.1.
            pause: what running requests do. ``retract``: they go on with the new weights, computed
                anew from their tokens. ``in_place``: they freeze and keep what the old weights
                cached, so while there are any, ``cache="flush"`` refuses the update. ``abort``:
                they end.
            cache: what becomes of cached prefixes.
            label: makes the version label that SGLang puts on outputs; None leaves it alone.
            exchange: for ``import`` on the CPU: whether the engine's parameters may get other
                memory. False lets SGLang's loader write into what they have, as the other routes
                do; it is for code of your own in the engine that keeps addresses of weights.
            memory_budget_nbytes: what the second copy of the engine's weights, which undo needs,
                may take; None takes what there is.
            transports: for ``import``: name of a transport -> options of the ranks' bridges, such
                as ``{"shared-memory": {"directory": path}}``; they travel as JSON.
            timeout_s: deadline of each call to the engine.
            api_key: of a server that asks for one; its admin's, where it has one.

        Raises:
            TypeError: no engine; `exchange` no bool; `label` no function; no option of a transport.
            ValueError: no such route, pause or cache policy; a directory without ``disk``, or none;
                an address without ``distributed``; transports without ``import``.
            WeightBridgeUnavailableError: what the engine or the route needs is missing here.

        """
        if pause not in {"retract", "in_place", "abort"}:
            raise ValueError(f"pause={pause!r}: expected 'retract', 'in_place' or 'abort'.")
        if cache not in {"flush", "keep"}:
            raise ValueError(f"cache={cache!r}: expected 'flush' or 'keep'.")
        if not isinstance(exchange, bool):
            raise TypeError(f"exchange={exchange!r}: expected True or False.")
        self._handle = handle_of(engine, timeout_s, api_key)
        self._route = route_of(route, self._handle, directory, address)
        self._route_name = route
        self._serving = Serving(self._handle, pause)
        self._cache: CachePolicy = cache
        self._label = checked_label(label)
        self._options = dict[str, Any](exchange=exchange, **options_for(route, transports))
        self._options["memory_budget_nbytes"] = memory_budget_nbytes
        self._shares = Shares()
        self._parts: list[list[str]] = []
        self._phases_ms: dict[str, float] = {}
        self._verified = ""
        self._refusal: str | None = None  # a rank's; None: the update may come again
        self._manifest: WeightUpdateManifest | None = None
        self._proof: InstallProof | None = None
        # Each is noted before the step that it tells of: an interrupt may come behind any.
        self._is_begun = self._may_have_run = self._is_committing = False
        self._base: str | None = None  # the update that it held, which an undo leads back to
        self._committed: str | None = None
        self._found: str | None = None  # what it held when it was looked at last

    @property
    def is_overtaken(self) -> bool:
        """Whether the engine holds another driver's version, or none, instead of this one's."""
        return self._committed is not None and self._found != self._committed

    @property
    def imports_itself(self) -> bool:
        """By the route ``import`` the ranks read every byte, each for itself; else the executor."""
        return self._route.imports

    @property
    def verified_root(self) -> str:
        """Root of what all ranks verified when they prepared; empty if one did not."""
        return self._verified

    @property
    def phases_ms(self) -> Mapping[str, float]:
        """Phases of the update under way: pause, cache, label; the slowest rank's verify, prove."""
        return self._phases_ms

    # ---- the steps ------------------------------------------------------------------------------

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compare with the engine's model, and make a second copy; nothing of it is written.

        Raises:
            IncompatibleUpdate: the update does not fit, or memory does not suffice.
            EngineLost: the engine is gone.

        """
        self._phases_ms, self._verified, self._refusal = {}, "", None
        self._look_for_remains()
        self._route.prepare(manifest, tensors)
        self._manifest = manifest
        is_new = not self._shares.knows(manifest)
        given = {"manifest": manifest.to_json(), "options": self._options, "cuts": is_new}
        given["drops"] = self._cache == "flush"
        try:
            reply = self._handle.call("prepare", **given, **{"import": self._route.imports})
        except Exception as error:
            may_come_again = is_shortage(error) or isinstance(error, EngineLost)
            self._refusal = None if may_come_again else "another rank refused it"
            raise
        if self._route.imports:
            self._phases_ms["verify"] = reply["timings_ms"].get("verify", 0.0)
            self._verified = reply["verified"]
        if is_new:
            self._shares.learn(manifest, reply["cuts"])
        self._parts = [] if self._route.imports else self._shares.digests(manifest, tensors)

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Pause, load by the route, and read what the engine holds then.

        Raises:
            WeightBridgeError: call `undo`.

        """
        self._manifest = manifest
        meant = self._meant()
        self._timed("pause", lambda: self._serving.stop(meant))  # refused, nothing was touched
        self._is_begun = True
        start = time.perf_counter()
        self._handle.call("install", **meant)
        self._route.load(manifest, tensors)
        told = (manifest.weight_version, self._route_name, time.perf_counter() - start)
        _LOG.info("version %d: loaded by route %s in %.3f s", *told)
        self._timed("prove", self._prove)

    def prove(self) -> InstallProof:
        """What was found in the engine when it was installed."""
        assert self._proof is not None
        return self._proof

    def resume(self) -> None:
        """Drop what the old weights cached, set the label, and let requests go on.

        Raises:
            WeightUpdateRejectedError: requests hold cached prefixes, or another driver has taken
                the update back.
            TypeError: the label is no text.

        """
        assert self._manifest is not None
        label = None if self._label is None else label_of(self._manifest, self._label)
        if self._cache == "flush":
            self._timed("cache", self._flush)
        # Right behind each other: who is overtaken in between labels what is another one's.
        self._timed("label", lambda: self._serving.announce(label, self._meant()))
        if label is not None:
            self._timed("label", lambda: self._serving.relabel(label))
        self._may_have_run = True
        self._serving.go_on(self._meant())

    def undo(self) -> None:
        """Put the weights back, with caches and label, and let requests go on.

        Raises:
            TornEngine: they do not come back, or the engine is gone.

        """
        try:
            if self._is_begun:
                self._back()
            else:
                self.abandon()
        except EngineLost as error:
            raise TornEngine(str(error)) from error
        finally:
            if not self._is_begun:
                self._serving.end_pause()  # also where the pause itself failed, or was cut off

    def abandon(self) -> None:
        """Let the engine forget what was prepared."""
        if self._is_begun:
            return
        try:
            if self._manifest is not None:
                meant, self._manifest = self._meant(), None
                self._handle.call("abandon", reason=self._refusal, **meant)
        finally:
            self._serving.end_pause()

    def take_over(self) -> bool:
        """End what a driver that ended inside of an update left, and let requests go on.

        It is taken back, as `prepare` does it. Without anything left, nothing happens, nor in the
        middle of an update of this driver's own.

        Raises:
            WeightBridgeError: the engine is gone, or the weights do not come back.

        """
        if self._manifest is None:
            self._look_for_remains()
            self._handle.call("abandon", reason=None)
            self._serving.end_pause()
        return False

    def commit(self) -> None:
        """Let the engine's half acknowledge. Called again, it does so where it did not."""
        if self._manifest is not None:
            self._committed = self._found = self._manifest.update_id
        self._is_committing = True
        self._handle.call("commit", update_id=self._committed)
        self._is_begun = self._may_have_run = self._is_committing = False
        self._manifest = None
        self._route.ended(installed=True)

    def release(self, update_id: str) -> None:
        """Nothing is kept of an update: the engine has memory of its own."""

    def describe(self) -> dict[str, Any]:
        """What the engine holds: update, version, root."""
        return self._handle.call("describe")

    def close(self) -> None:
        """Close the connection to a server; the engine goes on."""
        self._route.close()
        self._handle.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _look_for_remains(self) -> None:
        """Take back what was left half-way, by this driver or by one that ended: it is no version.

        Raises:
            TornEngine: the weights do not come back, or prefixes that they made do not go.

        """
        found = self._handle.call("describe")
        if self._is_committing and found["mine"]:
            self.commit()  # it is acknowledged: there is no way back
            found = self._handle.call("describe")
        # (What another driver left half-way is no update's; this one's is undone.)
        self._found = found["update_id"] if found["mine"] or not found["begun"] else None
        self._shares.meet(found["engine"])
        self._handle.device = found["device"]
        if not found["begun"]:
            # Else the engine is another one now, or another driver has taken it over.
            self._is_begun = self._may_have_run = self._is_committing = False
            if found["pausing"] is not None:
                self._serving.take_over(begun=False)  # it ends with this update
        else:
            _LOG.warning("update %s was left half-way: it is undone", found["pending"])
            if found["mine"] and self._is_begun:
                self._back()
            else:
                found = self._take_back()
            self._serving.end_pause()
        self._base = self._found = found["update_id"]

    def _take_back(self) -> dict[str, Any]:
        """Undo another driver's update. In this order: cut off anywhere, it is done again."""
        self._serving.take_over(begun=True)
        found = self._handle.call("describe")  # till then its driver may have gone on with it
        if found["begun"]:
            self._drop_undone(*self._serving.stop_and_drop())
            self._serving.label_back(found["labels"])
            if found["by_sglang"]:
                # Its driver's session may be open: SGLang would refuse every other one for ever.
                self._handle.ask("end_weight_update")
            self._handle.call("undo")
            self._serving.label_back(found["labels"])  # one that is overtaken may have set it late
        self._is_begun = self._may_have_run = self._is_committing = False
        return found

    def _prove(self) -> None:
        reply = self._handle.call("prove", parts=self._parts, **self._meant())
        self._proof = InstallProof(**reply["proof"])

    def _back(self) -> None:
        told = self._handle.call("describe")
        if told["mine"]:
            self._take_own_back(told)
        else:
            if not told["by_sglang"]:  # else the session may be the other one's
                self._route.end_session()
            self._serving.label_right(told["label"])
            self._require_base(told)  # then it was taken back before, with all that was of it
        self._is_begun = self._may_have_run = False
        self._manifest = None
        self._route.ended(installed=False)

    def _take_own_back(self, told: Mapping[str, Any]) -> None:
        meant = self._meant()
        # Again, where it is not known whether the engine goes on.
        self._serving.stop(meant, undoes=True)
        if self._may_have_run:
            self._drop_undone(*self._serving.stop_and_drop())
        self._serving.label_back(told["labels"])
        self._route.end_session()
        try:
            self._handle.call("undo", **meant)
        except WeightUpdateRejectedError:
            self._serving.end_pause()  # another driver's update is here by now
            raise

    def _require_base(self, told: Mapping[str, Any]) -> None:
        """Refuse to take another driver's version for the one that this driver went back to."""
        held = told["pending"] if told["begun"] else told["update_id"]
        if held != self._base:
            self._serving.end_pause()
            msg = (
                "another driver has updated this engine, or it was started anew: it holds update "
                f"{held}, expected {self._base}. Let one driver at a time update an engine; leave "
                "it to the other one, or install a later version in full."
            )
            raise WeightUpdateRejectedError(msg)

    def _drop_undone(self, is_dropped: bool, said: str) -> None:  # noqa: FBT001 - an `Answer`
        """Requests may have cached keys and values of what is undone."""
        if not is_dropped:
            msg = (
                f"the engine keeps cached prefixes of the version that is undone ({said}). Call "
                "recover() when its requests are done."
            )
            raise TornEngine(msg)

    def _flush(self) -> None:
        flushed, said = self._serving.drop(all=True)
        if not flushed:
            msg = (
                f"cached prefixes of the old weights could not be dropped ({said}). Use "
                "pause='retract' or 'abort', or cache='keep'."
            )
            raise WeightUpdateRejectedError(msg)

    def _meant(self) -> dict[str, Any]:
        """Names the update to the engine: by now it may have another driver's."""
        return {} if self._manifest is None else {"update_id": self._manifest.update_id}

    def _timed(self, phase: str, step: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            step()
        finally:
            spent = (time.perf_counter() - start) * 1e3
            self._phases_ms[phase] = self._phases_ms.get(phase, 0.0) + spent
