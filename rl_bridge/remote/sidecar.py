"""`Sidecar`: one engine's updates, step by step, and what a crash between two of them leaves.

Every step is written down before it changes the engine and after it did. A side-car that was killed
brings its engine back at its next start: to the update whose commit had begun, else to the one that
was committed last. If the bytes of neither are there any longer, the engine has to wait for the
next update, and the status says so.
"""

import logging
from typing import Final

from rl_bridge.bridge.executor import TwoPhaseExecutor
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import (
    EngineLost,
    IllegalTransition,
    StaleUpdate,
    TornEngine,
    UnknownUpdate,
    WeightBridgeError,
    describe,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.remote.answers import Recovery, Stage, Status, UpdateView
from rl_bridge.remote.state import Entry, Ledger, Step

_LOG = logging.getLogger(__name__)
_REMEMBERED: Final = 64


class Sidecar:
    """Takes updates step by step. Steps come from one thread; `status` from any."""

    def __init__(self, executor: TwoPhaseExecutor, ledger: Ledger) -> None:
        """Stand beside an engine; nothing is done to it before `start`.

        Args:
            executor: the engine's; nobody else updates with it.
            ledger: the steps of this engine's updates so far.

        """
        self.executor = executor
        self._ledger = ledger
        self._recovery = Recovery()
        self._known: dict[str, UpdateView] = {}
        self._manifest: WeightUpdateManifest | None = None
        self._lost = ""

    def start(self) -> None:
        """Bring the engine back to what the ledger says; a failure is in the status."""
        ledger, executor = self._ledger, self.executor
        interrupted, active = ledger.pending, ledger.active
        at = None if interrupted is None else interrupted.step
        in_doubt = interrupted if at == "committing" else None
        tried: list[str] = []
        outcome = Recovery()
        if interrupted is not None or active is not None:
            self._take_engine(tried)
        for entry in (in_doubt, active):
            if entry is not None and outcome.outcome != "reinstalled":
                outcome = self._bring_back(entry.manifest, tried)
        words = "; ".join(tried) or "nothing was committed before this start"
        self._recovery = outcome.model_copy(
            update={
                "interrupted": None if interrupted is None else interrupted.manifest.update_id,
                "interrupted_at": at if at in {"prepared", "committing"} else None,
                "detail": words,
            }
        )
        if interrupted is not None:
            self._end_interrupted(interrupted)
        level = logging.WARNING if interrupted or outcome.outcome == "lost" else logging.INFO
        version = executor.active_weight_version
        _LOG.log(level, "started; the engine is at version %s: %s", version, words)

    def status(self) -> Status:
        """Where the engine stands."""
        executor = self.executor
        pending_id = executor.pending_weight_update_id
        ack, version = executor.last_ack, executor.active_weight_version
        is_torn = executor.is_torn
        lost = self._lost
        if lost:
            version = None
        state = "torn" if is_torn else "lost" if lost else "empty" if version is None else "serving"
        bridge = executor.bridge
        is_active = ack is not None and ack.weight_version == version
        return Status.model_validate(
            {
                "state": state,
                "servable": state == "serving",
                "lost": lost,
                "active_weight_version": version,
                "active_update_id": None if lost else executor.active_weight_update_id,
                "active_root": ack.root if ack is not None and is_active else None,
                "pending": self._known.get(pending_id or ""),
                "transport": bridge.transport if isinstance(bridge, TensorBridge) else "",
                "recovery": self._recovery,
                "last_acknowledgement": ack,
            }
        )

    # ---- the steps ------------------------------------------------------------------------------

    def bring(self, text: bytes) -> UpdateView:
        """Import an update and verify every byte. A repeated call changes nothing.

        Raises:
            WeightBridgeError: refused; the engine was not asked.

        """
        manifest = WeightUpdateManifest.from_json(text)
        known = self._known.get(manifest.update_id)
        if known is not None and self._waits_for(manifest):
            return known
        self._refuse_late(manifest)
        if self._lost and self.executor.active_weight_update_id is not None:
            self.executor.release_weights()  # the engine lost it, so it may come again
        before = self.executor.pending_weight_update_id
        try:
            self.executor.import_weights(manifest)
        finally:
            self._given_up(
                before, f"version {manifest.weight_version} came before it was committed"
            )
        self._manifest = manifest
        return self._now(manifest, "imported")

    def prepare(self, update_id: str) -> UpdateView:
        """Find every reason to refuse it; the engine serves on. A repeated call changes nothing.

        Raises:
            UnknownUpdate: it was not imported, or was aborted.
            WeightBridgeError: refused, and aborted; the engine is what it was.
            Exception: the adapter's own.

        """
        known, manifest = self._waiting(update_id, "prepare")
        if known.stage == "prepared":
            return known
        self._look_at_engine()
        try:
            self.executor.prepare_weights(update_id)
            self._ledger.note(manifest, "prepared")
        except Exception as error:
            if self.executor.pending_weight_update_id == update_id:
                self.executor.abort_weights(update_id, describe(error))  # it was not written down
            self._failed(manifest, error)
            raise
        return self._now(manifest, "prepared")

    def commit(self, update_id: str) -> UpdateView:
        """Install, prove and acknowledge it, or leave everything as it was; once, however often.

        Raises:
            UnknownUpdate: it was not imported, or was aborted.
            IllegalTransition: it is not prepared.
            WeightBridgeError: undone; the engine is at its previous version.
            TornEngine: install and undo both failed; the engine must not serve.
            Exception: the adapter's own, after the undo.

        """
        known = self._known.get(update_id)
        if known is not None and known.stage == "committed":
            if self.executor.active_weight_update_id == update_id:
                return known
            raise StaleUpdate(
                f"update {update_id} was committed, and is not active any more. Send a later one."
            )
        known, manifest = self._waiting(update_id, "commit")
        if known.stage != "prepared":
            raise IllegalTransition(
                f"version {known.weight_version} (update {update_id}) is {known.stage}, expected "
                f"it to be prepared. Send POST /updates/{update_id}/prepare first."
            )
        self._ledger.note(manifest, "committing")
        try:
            self.executor.commit_weights(update_id)
        except Exception as error:
            self._failed(manifest, error)
            raise
        self._lost = ""
        self._written(manifest, "committed")
        self._manifest = None
        return self._now(manifest, "committed")

    def abort(self, update_id: str, reason: str) -> UpdateView:
        """Abort it; the engine is what it was. A repeated call changes nothing.

        Raises:
            UnknownUpdate: it was not imported.
            IllegalTransition: it is committed.

        """
        known = self._known.get(update_id)
        if known is not None and known.stage == "committed":
            raise IllegalTransition(
                f"update {update_id} is committed, expected one that is not. Send a later one."
            )
        if known is not None and known.stage not in {"imported", "prepared"}:
            return known
        _, manifest = self._waiting(update_id, "abort")
        self.executor.abort_weights(update_id, reason)
        return self._ended(manifest, "aborted", reason)

    def update(self, update_id: str) -> UpdateView:
        """What became of an update.

        Raises:
            UnknownUpdate: nothing is known of it here.

        """
        known = self._known.get(update_id)
        if known is None:
            raise UnknownUpdate(_unknown(update_id, self.executor.pending_weight_update_id))
        return known

    # ---- inside ---------------------------------------------------------------------------------

    def _take_engine(self, tried: list[str]) -> None:
        """Take the engine over from the side-car that died: it had the engine until now."""
        try:
            self.executor.recover()
        except Exception as error:  # noqa: BLE001 - told in the status, in the log by `start`
            tried.append(f"the engine could not be taken over: {describe(error)}")

    def _bring_back(self, manifest: WeightUpdateManifest, tried: list[str]) -> Recovery:
        version, executor = manifest.weight_version, self.executor
        try:
            # (Not of an engine that outlived the side-car's application, in one process.)
            if executor.active_weight_update_id != manifest.update_id:
                executor.update_weights(manifest)
                self._now(manifest, "committed")
            self._ledger.note(manifest, "committed")
        except Exception as error:  # noqa: BLE001 - told in the status, in the log by `start`
            tried.append(f"version {version} could not be brought back: {describe(error)}")
            return Recovery(outcome="lost", weight_version=version)
        tried.append(f"version {version} is installed and proven again")
        return Recovery(outcome="reinstalled", weight_version=version)

    def _end_interrupted(self, entry: Entry) -> None:
        """Note the end of an update that was on its way, unless the engine has it now."""
        if self.executor.active_weight_update_id != entry.manifest.update_id:
            self._now(entry.manifest, "aborted", f"the side-car died when it was {entry.step}")
            if self._ledger.pending is not None:
                self._ledger.note(entry.manifest, "ended")

    def _refuse_late(self, manifest: WeightUpdateManifest) -> None:
        """Refuse a late update: the bridge does so too, but knows only what this process saw."""
        last = self._ledger.active
        if last is None or last.manifest.publisher_id != manifest.publisher_id:
            return
        if manifest.weight_version < last.manifest.weight_version:
            raise StaleUpdate(
                f"version {manifest.weight_version} (update {manifest.update_id}) is late: version "
                f"{last.manifest.weight_version} of its publisher was committed here. Publish a "
                "later one."
            )

    def _waits_for(self, manifest: WeightUpdateManifest) -> bool:
        waits = self.executor.pending_weight_update_id == manifest.update_id
        return waits and self._manifest == manifest

    def _waiting(self, update_id: str, verb: str) -> tuple[UpdateView, WeightUpdateManifest]:
        """The pending update, which must be this one."""
        pending, manifest = self.executor.pending_weight_update_id, self._manifest
        known = self._known.get(update_id)
        if known is None:
            raise UnknownUpdate(_unknown(update_id, pending))
        if known.stage not in {"imported", "prepared"} or pending != update_id or manifest is None:
            raise IllegalTransition(
                f"version {known.weight_version} (update {update_id}) is {known.stage}"
                f"{': ' if known.reason else ''}{known.reason}. There is nothing to {verb}: send a "
                "later one."
            )
        return known, manifest

    def _given_up(self, update_id: str | None, reason: str) -> None:
        """Note an abort: the executor may have ended the update that was pending before."""
        manifest = self._manifest
        if manifest is None or manifest.update_id != update_id:
            return
        if self.executor.pending_weight_update_id != update_id:
            self._ended(manifest, "aborted", reason)

    def _look_at_engine(self) -> None:
        """Find out whether the engine was replaced since it got the last update."""
        expected = self.executor.active_weight_update_id
        tell = getattr(self.executor.weight_install_adapter, "describe", None)
        if tell is None or expected is None or self.executor.is_torn:
            return
        try:
            told = tell()
        except WeightBridgeError:
            return  # preparing reports the cause
        held = {rank["update_id"] for rank in (told if isinstance(told, list) else [told])}
        if held != {expected}:
            names = ", ".join(sorted(str(name) for name in held))
            self._lost = f"it holds update {names}, expected {expected}: it was started anew"
            _LOG.warning("the engine is another one: %s", self._lost)

    def _failed(self, manifest: WeightUpdateManifest, error: Exception) -> None:
        if isinstance(error, TornEngine):
            stage: Stage = "torn"
        else:
            stage = "undone" if self._known[manifest.update_id].stage == "prepared" else "refused"
        if isinstance(error, EngineLost):
            self._lost = describe(error)
        self._ended(manifest, stage, describe(error))

    def _ended(self, manifest: WeightUpdateManifest, stage: Stage, reason: str) -> UpdateView:
        pending = self._ledger.pending
        if pending is not None and pending.manifest.update_id == manifest.update_id:
            self._written(manifest, "ended")
        self._manifest = None
        return self._now(manifest, stage, reason)

    def _written(self, manifest: WeightUpdateManifest, step: Step) -> None:
        """Note a step that was taken: a file that cannot be written does not undo it."""
        try:
            self._ledger.note(manifest, step)
        except WeightBridgeError:
            _LOG.exception("version %d is %s; not written down", manifest.weight_version, step)

    def _now(self, manifest: WeightUpdateManifest, stage: Stage, reason: str = "") -> UpdateView:
        ack = self.executor.last_ack if stage == "committed" else None
        view = UpdateView(
            update_id=manifest.update_id,
            weight_version=manifest.weight_version,
            root=manifest.root,
            stage=stage,
            reason=reason,
            acknowledgement=ack,
        )
        self._known.pop(manifest.update_id, None)
        self._known[manifest.update_id] = view  # as the newest
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        return view


def _unknown(update_id: str, pending: str | None) -> str:
    waits = "none is on its way" if pending is None else f"update {pending} is on its way"
    return f"no update {update_id} is known here: {waits}. Send its manifest to POST /updates."
