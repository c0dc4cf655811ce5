"""`EngineDriver`: a whole engine, all of its ranks, behind the executor's adapter.

All ranks stage an update before any of them installs it, and all install it or none. From the
pause to the resume requests wait; whatever fails in between, no request sees a mixture. The same
for every engine: an engine supplies an `EngineClient`, by which its ranks are called, and in each
rank a `RankHost`.

If a driver dies in the middle of an update, its successor ends that update as it takes over. If all
ranks hold it and have proven it, requests may have been served by it, so it is committed; else it
is undone on all ranks.

An engine may have its model several times, in replicas whose ranks vote for themselves alone. That
all replicas install or none is this driver's to see to, in a pause of all of them: it goes on when
every replica has proven the update, and else takes it back on those that have.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

import torch

from rl_bridge.engines.rpc import EngineClient, Replies, Reply
from rl_bridge.engines.serving import Serving, ServingOptions
from rl_bridge.engines.session import asleep_error, second_driver_error
from rl_bridge.engines.shards import Shard, check_covered, parse_shards, part_digests
from rl_bridge.errors import (
    EngineLost,
    ProofFailed,
    SessionRefused,
    TornEngine,
    WeightBridgeUnavailableError,
    is_shortage,
)
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.processes import process_name

_LOG = logging.getLogger(__name__)

# A live engine answers within this time which driver has it, whatever it computes just now.
_LIFE_S = 60.0
# A driver that leaves waits no longer than this for an engine to take note of it.
_LEAVE_S = 10.0


class Loader:
    """How an update's bytes get into an engine: here its ranks import them themselves.

    An engine whose own loader is to be fed has a subclass with `imports` False.
    """

    imports = True
    """Whether the ranks import each update, and verify it."""

    def prepare(
        self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, Any]:
        """Refuse what can be refused before the ranks are asked; returns more for them to know."""
        del manifest, tensors
        return {}

    def load(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Feed the engine's own loader."""

    def abort(self, *, of_other_driver: bool) -> None:
        """End what `load` may have left open, or the `load` of another driver."""

    def ended(self, *, installed: bool) -> None:
        """The update is committed, or undone: what the other version needed may go."""

    def close(self) -> None:
        """Release what is kept from update to update."""


class _Step(Enum):
    """How far this driver's own update is; written before the step."""

    IDLE = auto()
    PREPARED = auto()
    BEGUN = auto()  # on failure: undo
    COMMITTING = auto()  # on failure: commit again


class EngineDriver(TransactionalAdapter):
    """Installs updates into an engine, on all of its ranks or on none. Not thread-safe.

    Every call to the engine raises `EngineLost` where that is gone, and `SessionRefused` where
    another driver has it.

    Attributes:
        serving: what requests see of an update.
        options: what the ranks make their installer with, and their bridges.
        may_take_over: whether the first update takes the engine from a driver that has it.

    """

    imports_itself: bool = True
    """Whether the ranks read an update, each its share of it; else the executor reads all."""
    verified_root: str = ""
    """Root of the update whose shares all ranks verified in `prepare`; empty if one did not."""

    def __init__(
        self,
        client: EngineClient,
        *,
        serving: ServingOptions,
        options: Mapping[str, Any],
        loader: Loader | None = None,
        take_over: bool = False,
    ) -> None:
        """Configure; the engine is not called.

        Args:
            client: calls the engine's ranks.
            serving: what requests see of an update.
            options: what the ranks make their installer with, and their bridges; plain JSON.
            loader: how an update's bytes get into the engine; None: the ranks import them.
            take_over: True takes the engine from a driver that has it, in the first update. False
                refuses that update with the name of the driver; `recover()` takes it then.

        """
        self._client = client
        self.serving, self.options, self.may_take_over = serving, dict(options), take_over
        self._serving = Serving(client, serving)
        self._loader = loader or Loader()
        self.imports_itself = self._loader.imports
        self._takes_over = take_over  # once
        self._step = _Step.IDLE
        self._may_have_served = False  # requests may have run with an update that is not committed
        self._manifest: WeightUpdateManifest | None = None
        self._refusal: str | None = None  # a rank's; None: the update may come again
        self._held = ""  # what the ranks hold, in words
        self._replicas = 1
        self._may_sleep = False
        self._layout: tuple[str, int] | None = None  # whose parts are known, and in which session
        self._shards: list[list[Shard]] = []  # the parts that each rank takes
        self._proofs: list[dict[str, Any]] = []
        self._phases_ms: dict[str, float] = {}

    @property
    def client(self) -> EngineClient:
        """By which the engine's ranks are called."""
        return self._client

    @property
    def is_overtaken(self) -> bool:
        """Whether the engine may hold another version than this driver's last one.

        Another driver has had it since, or it was started anew.
        """
        return self._client.is_lost

    @property
    def may_sleep(self) -> bool:
        """Whether the engine can throw its version away unasked. See `TransactionalAdapter`."""
        return self._may_sleep

    @property
    def phases_ms(self) -> Mapping[str, float]:
        """Phases of the update under way: pause, cache, label; the slowest rank's verify, prove."""
        return self._phases_ms

    # ---- the steps ------------------------------------------------------------------------------

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Import, verify and stage on all ranks; the engine goes on serving what it has.

        Raises:
            IncompatibleUpdate: a rank refuses it; no rank was touched.
            SessionRefused: another driver has the engine.
            EngineLost: the engine is gone.

        """
        self._phases_ms = {}
        self.verified_root, self._refusal = "", None
        self._ensure_session()
        given = dict(self._loader.prepare(manifest, tensors))
        given |= {"manifest": manifest.to_json(), "options": self.options}
        # Another engine may be there in another session.
        layout = (manifest.table.digest, self._client.epoch)
        given |= {"imports": self.imports_itself, "shards": layout != self._layout}
        given |= {"replicas": self._replicas}
        self._step, self._manifest = _Step.PREPARED, manifest
        try:
            replies = self._client.ask("prepare", **given)
            if layout != self._layout:
                shards = [parse_shards(reply["shards"], manifest) for reply in replies]
                size = len(shards) // self._replicas
                for start in range(0, len(shards), size):
                    check_covered(manifest, shards[start : start + size])
                self._layout, self._shards = layout, shards
        except Exception as error:
            self._refusal = self._refusal_of(error)
            raise
        if self.imports_itself:  # else the executor's own verification has that name
            slowest = max(reply["timings_ms"].get("verify", 0.0) for reply in replies)
            self._phases_ms["verify"] = slowest
            roots = {reply["verified"] for reply in replies}
            self.verified_root = roots.pop() if len(roots) == 1 else ""
        staging = _joined(reply.get("staging", "") for reply in replies)
        _LOG.info("version %d is staged on all ranks: %s", manifest.weight_version, staging or "-")

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Pause, then install and prove on all ranks or on none; after a failure all are back."""
        self._manifest = manifest
        self._timed("pause", self._serving.stop)
        self._step = _Step.BEGUN
        self._may_have_served |= not self._serving.pauses
        replies = self._client.ask("install", update_id=manifest.update_id)
        if not self.imports_itself:
            # Made of the bytes that the executor verified: no manifest has digests of parts.
            parts = [
                [one.hex() for one in part_digests(manifest, tensors, shards, num_threads=None)]
                for shards in self._shards
            ]
            self._loader.load(manifest, tensors)
            replies = self._client.ask("prove", update_id=manifest.update_id, parts=parts)
        self._proofs = [reply["proof"] for reply in replies]
        self._phases_ms["prove"] = max(reply["timings_ms"]["prove"] for reply in replies)

    def prove(self) -> InstallProof:
        """What all ranks found in their models when they installed."""
        return _joined_proof(self._proofs)

    def resume(self) -> None:
        """Drop what the old weights cached, set the label, and let requests go on."""
        assert self._manifest is not None
        label = self._serving.label_of(self._manifest)
        self._timed("cache", self._serving.drop_old)
        # The ranks do not see the label and the resume, so they are asked once more before these:
        # another driver may have taken over meanwhile.
        self._client.ask("serves", update_id=self._manifest.update_id)
        if label is not None:
            self._timed("label", lambda: self._serving.set_label(label))
        self._may_have_served = True
        self._serving.go_on()

    def undo(self) -> None:
        """Bring all ranks back, with caches and label, and let requests go on.

        Raises:
            TornEngine: they are not back.
            SessionRefused: another driver has the engine, and ends what this one left in it.

        """
        try:
            if self._step is _Step.BEGUN:
                self._client.ask("describe", within_s=_LIFE_S)  # a dead engine is told early
                self._undo_on_ranks(of_other_driver=False)
            self.abandon()
        except SessionRefused:
            raise
        except EngineLost as error:
            raise TornEngine(str(error)) from error

    def abandon(self) -> None:
        """Let all ranks forget what they staged, and requests go on if they were paused for it."""
        if self._step is _Step.BEGUN:
            return
        try:
            if self._step is _Step.PREPARED:
                self._step, self._manifest = _Step.IDLE, None
                self._client.ask("abandon", within_s=_LIFE_S, reason=self._refusal)
        finally:
            self._serving.end_pause()

    def commit(self) -> None:
        """Let all ranks acknowledge. Called again, those that have done so say nothing more."""
        if self._manifest is None:
            return
        self._step, self._client.is_lost = _Step.COMMITTING, False
        self._serving.keep_label()
        self._client.ask("commit", update_id=self._manifest.update_id)
        self._serving.forget()
        self._held = _describe_version(self._manifest.weight_version)
        self._end_update(installed=True)

    def take_over(self) -> bool:
        """Take the engine from whichever driver has it, and end what was left half-way.

        What all ranks hold, proven, is committed; what they do not is taken back, and what they
        only staged is released. A pause that a driver left ends. An engine that this driver has,
        and left nothing in, stays as it is.

        Returns:
            Whether the engine was another driver's or nobody's: what it holds is not known here.

        """
        replies = self._describe_ranks()
        is_new = not self._has_session(replies)
        if is_new:
            replies = self._open_session(replies, take_over=True)
        self._end_left(replies)
        return is_new

    def has_engine(self) -> bool:
        """Whether all ranks are in this driver's session; they are asked."""
        return bool(self._client.epoch) and self._has_session(self._describe_ranks())

    def leave(self) -> None:
        """Leave the engine to the next driver, which ends what is left half-way."""
        if self._client.epoch:
            try:
                self._client.ask("leave", within_s=_LEAVE_S)
            except Exception as error:  # noqa: BLE001 - whatever a client of an engine raises
                _LOG.warning("the engine was not told that its driver leaves it: %s", error)
            self._client.epoch = 0

    def release(self, update_id: str) -> None:
        """Keep nothing of an update here; a rank that wrote it through does, for an undo."""

    def describe(self) -> Replies:
        """What each rank holds: update, version, root; and which driver has it."""
        return self._client.ask("describe")

    def close(self) -> None:
        """Leave the engine, which goes on, and close the connection."""
        self.leave()
        self._loader.close()
        self._client.close()

    # ---- the session ----------------------------------------------------------------------------

    def _describe_ranks(self) -> Replies:
        """What the ranks say of themselves. An engine that does not answer is told early."""
        self._replicas = self._client.replicas()
        if self._replicas > 1 and not self._serving.pauses:
            raise WeightBridgeUnavailableError(
                f"the engine has {self._replicas} replicas, which do not install at the same "
                "moment: without a pause, requests are answered by two versions. Let updates "
                "pause it."
            )
        replies = self._client.ask("describe", within_s=_LIFE_S)
        ranks = self._replicas * replies[0]["world_size"]
        answered = {reply["rank"] for reply in replies}
        if answered != set(range(ranks)):
            # The others would be waited for in a vote, or serve another version.
            raise WeightBridgeUnavailableError(
                f"{len(answered)} of the engine's ranks answered, expected {ranks}: this process "
                "reaches only some of its workers, as with "
                "distributed_executor_backend='external_launcher' or an external load balancer. "
                "Let the engine start all of them."
            )
        self._may_sleep = replies[0]["may_sleep"]
        if any(reply["asleep"] for reply in replies):
            raise asleep_error()
        self._held = _describe_version(replies[0]["weight_version"])
        return replies

    def _has_session(self, replies: Replies) -> bool:
        """Whether this driver has all ranks, in one session."""
        mine = (self._client.driver, self._client.epoch)
        return all((reply["driver"], reply["epoch"]) == mine for reply in replies)

    def _open_session(self, replies: Replies, *, take_over: bool) -> Replies:
        others = [r for r in replies if r["driver"] not in {"", self._client.driver}]
        self._client.is_lost = True
        if others and not take_over:
            raise second_driver_error(others[0]["driver_name"])
        if others:
            _LOG.warning("the engine is taken over from driver %s", others[0]["driver_name"])
        before, self._client.epoch = self._client.epoch, 1 + max(r["epoch"] for r in replies)
        try:
            self._client.ask("open", name=process_name(), take_over=take_over)
        except BaseException:
            self._client.epoch = before  # ranks that have opened it know this driver by its id
            raise
        self._step, self._manifest, self._may_have_served = _Step.IDLE, None, False
        self._serving.forget()
        self._takes_over = False
        return self._describe_ranks()

    def _ensure_session(self) -> None:
        """Have the engine, with nothing left in it, before the next update."""
        replies = self._describe_ranks()
        if not self._has_session(replies):
            replies = self._open_session(replies, take_over=self._takes_over)
        self._end_left(replies)

    # ---- what is left half-way ------------------------------------------------------------------

    def _end_left(self, replies: Replies) -> None:
        """Bring the engine to one version that is committed. Cut off anywhere, it is done again."""
        self._serving.adopt(replies)
        own_undo_failed = self._step is _Step.BEGUN
        if own_undo_failed or _is_mixture(replies):
            _LOG.warning("an update was left half-way: it is taken back")
            self._may_have_served |= not own_undo_failed
            self._step = _Step.BEGUN
            self._undo_on_ranks(of_other_driver=any(reply["loads"] for reply in replies))
        elif any(reply["manifest"] for reply in replies):
            self._commit_left(replies)
        elif any(reply["pending"] for reply in replies):
            self._client.ask("abandon", reason=None)
        self._serving.end_pause()
        self._step, self._manifest = _Step.IDLE, None

    def _commit_left(self, replies: Replies) -> None:
        """Commit what all ranks hold, proven; a driver that finds it may have to serve it first."""
        text = next(reply["manifest"] for reply in replies if reply["manifest"])
        manifest = WeightUpdateManifest.from_json(text)
        if self._step is not _Step.COMMITTING:  # else requests go on with it, under its label
            _LOG.warning("version %d was left uncommitted: it is now", manifest.weight_version)
            self._serving.drop_old(everything=True)
            self._serving.set_label(self._serving.label_of(manifest))
        self._serving.go_on()  # before the commit, which drops the ranks' note of the pause
        self._manifest = manifest
        self.commit()

    def _undo_on_ranks(self, *, of_other_driver: bool) -> None:
        """Take the update back, the weights last.

        A driver that takes over and finds the old weights assumes that caches and label are undone.
        """
        if self._may_have_served:
            self._serving.stop(undoes=True)  # again: it is not known whether the engine goes on
            self._serving.drop_undone()
        self._serving.take_label_back()
        self._loader.abort(of_other_driver=of_other_driver)
        # Nothing is said against the update: what is wrong with it, its executor tells.
        self._client.ask("undo", reason=None)
        if self._may_have_served and not self._serving.pauses:
            self._serving.drop_undone()  # requests went on until here
        self._end_update(installed=False)

    def _end_update(self, *, installed: bool) -> None:
        self._step, self._manifest, self._may_have_served = _Step.IDLE, None, False
        self._loader.ended(installed=installed)

    # ---- inside ---------------------------------------------------------------------------------

    def _refusal_of(self, error: Exception) -> str | None:
        """Why no rank lets an update in again that one refused; None if it may come again."""
        if isinstance(error, EngineLost):
            return None
        # The note says it because the executor may not know: one that was started anew has
        # installed nothing yet, while the engine holds what the one before it installed.
        error.add_note(f"rl_bridge: the engine's ranks hold {self._held}.")
        return None if is_shortage(error) else "another rank refused it"

    def _timed(self, phase: str, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        try:
            action()
        finally:
            self._phases_ms[phase] = (time.perf_counter() - start) * 1e3


def _is_mixture(replies: Replies) -> bool:
    """Whether ranks are inside of an update that is not proven on all of them."""
    begun = [reply for reply in replies if _has_begun(reply)]
    held = {reply["pending" if _has_begun(reply) else "update_id"] for reply in replies}
    return any(reply["torn"] or not reply["manifest"] for reply in begun) or (
        bool(begun) and len(held) > 1
    )


def _has_begun(reply: Reply) -> bool:
    return reply["stage"] not in {"idle", "prepared"}


def _joined_proof(proofs: Sequence[dict[str, Any]]) -> InstallProof:
    """One proof of what all ranks found."""
    roots = {proof["root"] for proof in proofs}
    if len(roots) > 1:
        roots.discard("")  # of ranks that can read only part of what they hold
    methods = {proof["method"] for proof in proofs}
    if len(roots) != 1:
        raise ProofFailed(
            f"the ranks hold different weights: roots {sorted(roots)}, expected one. Install "
            "the update again."
        )
    return InstallProof(
        method="unproven" if "unproven" in methods else max(methods, key=len),
        root="" if "unproven" in methods else roots.pop(),
        digested_nbytes=sum(proof["digested_nbytes"] for proof in proofs),
        identical_nbytes=sum(proof["identical_nbytes"] for proof in proofs),
        tensors=max(proof["tensors"] for proof in proofs),
        staging=_joined(proof["staging"] for proof in proofs),
    )


def _joined(said: Iterable[str]) -> str:
    """The words of all ranks as one, each word once: ``beside``, or ``beside+through``."""
    return "+".join(sorted({*said} - {""}))


def _describe_version(version: int | None) -> str:
    return "no version that rl_bridge installed" if version is None else f"version {version}"
