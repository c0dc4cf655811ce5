"""One rank's part in an update: it imports, stages, installs, proves, undoes and commits.

All ranks of an engine take each step together, between two steps of the model. Nothing is installed
before every rank has staged the whole update; and within the call that installs, the ranks vote: if
one of them failed or has no proof, all of them go back before any runs a step of the model.

An engine may put its weights to sleep by calls of its own. Meanwhile nothing is staged, installed
or undone. One that threw its weights away is a fresh engine when it wakes: no driver has it, and it
holds no version until one is installed in full.

What is of the engine itself (the model, the group of its ranks, what is refused, what installs) is
its `RankHost`. What comes from a driver comes in through `answer`.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch

from rl_bridge.assembly.wanted import ReadScope
from rl_bridge.engines.rank_bridges import EngineBridges
from rl_bridge.engines.rpc import OTHER_RANK, RankGroup, Reply, clear_frames, failure_reply
from rl_bridge.engines.session import Session, asleep_error
from rl_bridge.engines.shards import Shard
from rl_bridge.errors import (
    TornEngine,
    WeightBridgeError,
    WeightUpdateRejectedError,
    describe,
    is_shortage,
)
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.lifecycle import State
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.parts import Scope
from rl_bridge.memory.views import ImportedTensors

_LOG = logging.getLogger(__name__)

Payload = Mapping[str, Any]

_ATTRIBUTE = "_rl_bridge_ranks"
_ASLEEP = "_rl_bridge_is_asleep"


class Stage(StrEnum):
    """How far the pending update is; written before the step."""

    IDLE = "idle"
    PREPARED = "prepared"
    INSTALLING = "installing"  # the model may be a mixture
    PROVEN = "proven"
    COMMITTING = "committing"  # proven on all ranks: forward is the only way


class RankInstaller(TransactionalAdapter):
    """What installs into one rank's model; as it stands, one that takes each tensor whole."""

    staging: str = ""
    """Where the update that was prepared last is made: see `InstallProof`."""

    def scope_of(self, manifest: WeightUpdateManifest) -> ReadScope:  # noqa: ARG002 - of any
        """What `prepare` reads of an update.

        Of a group it may be boxes of its whole tensors. `prepare` then takes these boxes instead of
        the whole tensors, and the manifest of what was assembled.

        Raises:
            IncompatibleUpdate: the update does not fit, which `prepare` says as well.

        """
        return Scope.ALL

    def shards(self, manifest: WeightUpdateManifest) -> list[Shard]:  # noqa: ARG002 - of any
        """The parts of an update's tensors that the model takes."""
        return []

    def retire(self, update_ids: Sequence[str], *, ends: bool = False) -> None:
        """Drop versions that the engine holds beside the active one, if it holds several.

        With `ends`, the active one too.
        """

    def check_base(self, root: str) -> None:
        """Refuse base weights of this root under what the engine holds, if that has a base.

        Raises:
            IncompatibleUpdate: what it holds belongs to other weights.

        """

    def begin(self) -> None:
        """The engine's own loader writes into the model from now on: `undo` brings it back.

        Called instead of `install`, if the update was not imported here.
        """
        raise NotImplementedError

    def expect(self, parts: Sequence[bytes]) -> None:
        """Note the digests that `shards` must have, if the update was not imported here."""
        raise NotImplementedError


class RankHost(ABC):
    """What a rank is in its engine."""

    name: str  # the engine's, as publishers are told it
    model: torch.nn.Module  # this rank's
    group: RankGroup  # the ranks that compute one model together
    replica: int = 0  # which of the engine's replicas that model is, if it has several

    @property
    def rank(self) -> int:
        """Its number among the ranks of all replicas."""
        return self.replica * self.group.size + self.group.rank

    @abstractmethod
    def make_installer(self, options: Mapping[str, Any]) -> RankInstaller:
        """What installs into this rank's model."""

    def check(self, given: Payload) -> None:  # noqa: B027 - some engines refuse nothing
        """Refuse engines whose ranks cannot decide together, or hold what cannot be proven."""

    def facts(self) -> Reply:
        """What `describe` tells of this engine beside the update."""
        return {}

    @property
    def may_sleep(self) -> bool:
        """Whether the engine can put its weights to sleep."""
        return False

    def forget(self) -> None:  # noqa: B027 - most keep nothing that is not in the model
        """The engine throws the model's weights away, and what lies beside them."""

    @property
    def verbs(self) -> Mapping[str, Callable[[Payload], Reply]]:
        """Verbs of this engine's own, which change nothing of an update: they need no session."""
        return {}


class EngineRank:
    """One rank of an engine. Not thread-safe: engines call a rank from one thread."""

    def __init__(self, host: RankHost) -> None:
        """Look at a rank; nothing is opened before the first update."""
        self.host = host
        self.session = Session()
        self.is_paused = False
        """Whether a driver pauses the engine for its update."""
        self.options: Reply = {}
        """What the installer was made with."""
        self.covered = ""
        """The layout of which all ranks together were last found to take every element."""
        self._made: RankInstaller | None = None
        self._bridges = EngineBridges(host.name)
        self._active: WeightUpdateManifest | None = None
        self.pending: WeightUpdateManifest | None = None
        """The update that is staged or installed, and not committed."""
        self.stage = Stage.IDLE
        self._imports = True
        # What was imported of it: the update itself, or what was assembled of a group's parts.
        self._imported: WeightUpdateManifest | None = None
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._proof: InstallProof | None = None
        self._timings_ms: dict[str, float] = {}
        self._torn = ""

    # ---- what it holds --------------------------------------------------------------------------

    @property
    def is_begun(self) -> bool:
        """Whether the model may be a mixture, or holds what is not committed."""
        return self.stage not in {Stage.IDLE, Stage.PREPARED}

    @property
    def active_root(self) -> str:
        """Root of what was committed last; empty if nothing was."""
        return "" if self._active is None else self._active.root

    @property
    def next_root(self) -> str:
        """Root of what the model holds as soon as the update is over that has begun, if one has."""
        pending = self.pending if self.is_begun else None
        return self.active_root if pending is None else pending.root

    @property
    def is_asleep(self) -> bool:
        """Whether the model's weights are not where the model looks for them."""
        return bool(vars(self.host.model).get(_ASLEEP, False))

    def takes_load_of(self, driver: str) -> bool:
        """Whether the engine's own loader is being fed now, by that driver."""
        is_fed = self.stage is Stage.INSTALLING and not self._imports
        return is_fed and self.session.driver == driver

    def describe(self) -> Reply:
        """What this rank holds, and which driver has it."""
        active, pending = self._active, self.pending
        is_proven = self.stage in {Stage.PROVEN, Stage.COMMITTING} and not self._torn
        return {
            **self.session.to_dict(),
            "world_size": self.host.group.size,
            "update_id": None if active is None else active.update_id,
            "weight_version": None if active is None else active.weight_version,
            "root": None if active is None else active.root,
            "pending": None if pending is None else pending.update_id,
            "stage": self.stage,
            "manifest": pending.to_json() if pending is not None and is_proven else None,
            "loads": self.stage is Stage.INSTALLING and not self._imports,
            "paused": self.is_paused,
            "torn": self._torn,
            "asleep": self.is_asleep,
            "may_sleep": self.host.may_sleep,
            "model": type(self.host.model).__name__,
            **self.host.facts(),
        }

    def check_base(self, root: str) -> None:
        """Refuse base weights of this root under an adapter, if one is here. See `RankInstaller`.

        Raises:
            IncompatibleUpdate: the adapter belongs to other weights.

        """
        if self._made is not None:
            self._made.check_base(root)

    def configure(self, options: Payload) -> None:
        """Take options: ``transports`` of `EngineBridges`, all others of the host's installer."""
        if (self._made is not None and dict(options) == self.options) or self.is_begun:
            return
        self.abandon(None)  # by the options before
        wanted = dict(options)
        transports = wanted.pop("transports", {})
        installer = self.host.make_installer(wanted)
        self._bridges.configure(transports)
        self.options, self._made = dict(options), installer

    # ---- the steps ------------------------------------------------------------------------------

    def prepare(
        self, manifest: WeightUpdateManifest, *, imports: bool = True, given: Payload | None = None
    ) -> Reply:
        """Import, verify and stage; the model goes on serving what it has.

        Without `imports` the engine's own loader brings the bytes.
        """
        self.host.check(given or {})
        self._require_awake()
        if self.stage is Stage.COMMITTING:
            self._finish_commit()
        self._require_idle()
        self._check_adapters(manifest)
        self.abandon(None)
        bridge = self._bridges.of(manifest, self.host.rank) if imports else None
        start, told = time.perf_counter(), dict[str, float]()
        self.pending, self.stage, self._imports = manifest, Stage.PREPARED, imports
        self._imported = manifest
        try:
            if bridge is not None:
                scope, rank = self._scope_of(manifest), self.host.rank
                self._imported, self._tensors = self._bridges.bring(manifest, rank, scope)
                told = dict(bridge.timings(manifest.update_id))
            imported = time.perf_counter()
            self.installer.prepare(self._imported, self._tensors)
        except BaseException as error:
            self._end(None if is_shortage(error) else describe(error))
            raise
        self._timings_ms = {
            "import": (imported - start) * 1e3,
            "stage": (time.perf_counter() - imported) * 1e3,
        }
        reply: Reply = {
            "timings_ms": {**told, **self._timings_ms},
            "verified": manifest.root if imports else "",
            "staging": self.installer.staging,
        }
        if given and given.get("shards"):
            reply["shards"] = self.shards(manifest)
        return reply

    def _scope_of(self, manifest: WeightUpdateManifest) -> ReadScope:
        """What this rank reads of an update.

        Raises:
            IncompatibleUpdate: a group does not fit; its trainer is told.

        """
        try:
            return self.installer.scope_of(manifest)
        except Exception as error:
            if isinstance(manifest, GroupManifest):
                # All of it would be assembled here before `prepare` could refuse it.
                if not is_shortage(error):
                    bridge = self._bridges.of(manifest, self.host.rank)
                    bridge.reject(manifest, describe(error))
                raise
            # `prepare` refuses the update for the same reason, when its trainer can be told.
            _LOG.debug("version %d does not fit", manifest.weight_version, exc_info=True)
            return Scope.ALL

    def shards(self, manifest: WeightUpdateManifest) -> list[list[Any]]:
        """The parts of tensors that this rank takes, of the update that was prepared; as JSON."""
        return [shard.to_json() for shard in self.installer.shards(manifest)]

    def install(self, update_id: str) -> Reply:
        """Install and prove, on all ranks or on none; all ranks must call it.

        If the engine's own loader brings the bytes, that comes next, and then `prove`.
        """

        def step() -> None:
            manifest = self._meant(update_id)
            self._require_awake()
            self._check_adapters(manifest)  # again: one may have come since this was prepared
            start = time.perf_counter()
            self.stage = Stage.INSTALLING
            if self._imports:
                assert self._imported is not None
                self.installer.install(self._imported, self._tensors)
            else:
                self.installer.begin()
            self._timings_ms["install"] = (time.perf_counter() - start) * 1e3
            if self._imports:
                self._prove(manifest)

        self._together(step)
        return self._proven() if self._imports else {"timings_ms": self._timings_ms}

    def prove(self, update_id: str, parts: Sequence[Sequence[str]]) -> Reply:
        """Prove what the engine's own loader brought, on all ranks or on none; all must call it.

        The `parts` are digests of what each rank must hold, by rank, as hex.
        """

        def step() -> None:
            manifest = self._meant(update_id)
            mine = parts[self.host.rank]
            self.installer.expect([bytes.fromhex(part) for part in mine])
            self._prove(manifest)

        self._together(step)
        return self._proven()

    def _prove(self, manifest: WeightUpdateManifest) -> None:
        start = time.perf_counter()
        proof = self.installer.prove()
        assert self._imported is not None
        if proof.method != "unproven":
            if proof.root != self._imported.root:
                raise WeightUpdateRejectedError(
                    f"the engine holds root {proof.root}, expected {self._imported.root}. Install "
                    "the update again."
                )
            # The installer proved what was assembled here, and that was verified against the group:
            # the proof therefore holds for the group's root, too.
            proof = replace(proof, root=manifest.root)
        self._timings_ms["prove"] = (time.perf_counter() - start) * 1e3
        self._proof = proof

    def _together(self, step: Callable[[], None]) -> None:
        """Take a step of the install on all ranks, or take the update back on all of them."""
        error: Exception | None = None
        try:
            step()
        except Exception as caught:  # noqa: BLE001 - raised below, after the vote
            error = caught
        group = self.host.group
        mine = "yes" if error is None else "short" if is_shortage(error) else "no"
        said = set(group.vote(mine))
        if said == {"yes"}:
            return
        reason = "a rank failed to install it" if error is None else describe(error)
        try:
            # If no rank refused the update, and some were short of something, it may come again.
            self.undo(reason if "no" in said else None)
        finally:
            # This vote ends before any rank runs a step of the model.
            all_back = set(group.vote("no" if self._torn else "yes")) == {"yes"}
        if error is not None:
            try:
                raise error
            finally:
                error = None  # else it and this frame keep each other, and the update's memory
        if not all_back:
            raise TornEngine(
                f"{OTHER_RANK} failed to install it and is torn. Start a fresh engine."
            )
        raise WeightUpdateRejectedError(
            f"{OTHER_RANK} failed to install it; this one is back. See that rank's error."
        )

    def _proven(self) -> Reply:
        assert self._proof is not None
        self.stage = Stage.PROVEN  # after the vote: before it, the way is back
        return {"proof": self._proof.to_dict(), "timings_ms": self._timings_ms}

    def serves(self, update_id: str) -> None:
        """Requests are about to go on with the proven update."""
        self._meant(update_id)
        if self.stage is not Stage.PROVEN:
            raise WeightUpdateRejectedError(f"update {update_id} is not proven. Install it first.")

    def undo(self, reason: str | None) -> None:
        """Take back what is not committed; without anything pending, nothing happens.

        The reason is for its trainer. None: it was not refused, and may come again.
        """
        if self.stage is Stage.COMMITTING:
            self._finish_commit()
        if self.pending is None:
            return
        if self.is_begun:
            self._require_awake()
        try:
            self.installer.undo()
        except Exception as error:
            self._torn = describe(error)
            version = self.pending.weight_version
            raise TornEngine(
                f"version {version}: the undo failed: {self._torn}. Call recover()."
            ) from error
        self._torn = ""
        self._end(reason)

    def abandon(self, reason: str | None) -> None:
        """Release what was staged and not begun to be installed; `reason` as for `undo`."""
        if self.stage is Stage.PREPARED:
            self._end(reason)

    def commit(self, update_id: str) -> Reply:
        """Acknowledge the proven update; it is what an undo goes back to from now on."""
        active = None if self._active is None else self._active.update_id
        if self.pending is None and update_id == active:
            return {}  # asked again, because an answer was lost
        self._meant(update_id)
        if self.stage not in {Stage.PROVEN, Stage.COMMITTING}:
            raise WeightUpdateRejectedError(f"update {update_id} is not proven. Install it first.")
        self.stage = Stage.COMMITTING
        return self._finish_commit()

    def _finish_commit(self) -> Reply:
        manifest, proof = self.pending, self._proof
        assert manifest is not None
        assert proof is not None
        self.installer.commit()  # if it fails, it is done again: the update is proven still
        self._active = manifest
        self._forget_tensors()
        answer = self._acknowledge(manifest, proof) if self._imports else {}
        self._clear()
        self.is_paused = False
        return answer

    def _acknowledge(self, manifest: WeightUpdateManifest, proof: InstallProof) -> Reply:
        """Tell the trainer, once, that its update is active here; a failure is in the answer."""
        bridge = self._bridges.of(manifest, self.host.rank)
        try:
            if bridge.active_update_id != manifest.update_id:
                evidence, timings = proof.to_dict(), dict(self._timings_ms)
                bridge.acknowledge(manifest.update_id, proof=evidence, timings_ms=timings)
        except WeightBridgeError as error:
            # Other ranks have committed: there is no way back, and none is needed.
            version = manifest.weight_version
            _LOG.exception("version %d is active, but its trainer is not told", version)
            return {"not_told": describe(error)}
        finally:
            # The slot is free for the next version, unless the installer wrote this one through: it
            # then keeps the tensors for its undo until the next commit.
            bridge.release_imported(manifest.update_id)
        return {}

    def close(self) -> None:
        """Take back what is not committed, and close the bridges."""
        try:
            self.undo("the engine shut down")
        finally:
            self._bridges.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _check_adapters(self, manifest: WeightUpdateManifest) -> None:
        """Refuse weights that an adapter in the engine does not belong to.

        Requests that have the adapter would go on over another base.
        """
        if known_rank(self.host.model) is self:
            for other in ranks_of(self.host.model).values():
                if other is not self:
                    other.check_base(manifest.root)

    @property
    def installer(self) -> RankInstaller:
        """What installs into this rank's model."""
        if self._made is None:
            self._made = self.host.make_installer({})
        return self._made

    def _require_awake(self) -> None:
        if self.is_asleep:
            raise asleep_error()

    def forget_all(self) -> None:
        """The model's weights were thrown away: nothing here speaks for what it holds."""
        if self.pending is not None:
            self._end(None)
        self.host.forget()
        if self._active is not None:
            version = self._active.weight_version
            _LOG.warning("the engine threw its weights away: version %d is not in it", version)
        self._active = self._made = None
        self.options, self.covered, self._torn, self.is_paused = {}, "", "", False
        self.session.leave()

    def _require_idle(self) -> None:
        if self._torn:
            raise TornEngine(
                f"the engine is torn: {self._torn}. Call recover(), or start a fresh engine."
            )
        if self.is_begun and self.pending is not None:
            # Requests may have been served by it: that is not this call's to take back.
            raise WeightUpdateRejectedError(
                f"version {self.pending.weight_version} (update {self.pending.update_id}) is "
                "installed on this rank, and neither committed nor undone. Call recover()."
            )

    def _meant(self, update_id: str) -> WeightUpdateManifest:
        if self.pending is None or self.pending.update_id != update_id:
            held = "none" if self.pending is None else self.pending.update_id
            raise WeightUpdateRejectedError(
                f"update {update_id} is not pending here, expected it, got {held}. Publish a later "
                "version."
            )
        return self.pending

    def _end(self, reason: str | None) -> None:
        """The pending update is refused, undone or given up: its publisher is told."""
        manifest, is_imported = self.pending, self._imports
        assert manifest is not None
        self._clear()
        steps: list[Callable[[], object]] = [] if self._made is None else [self._made.abandon]
        if is_imported and (bridge := self._bridges.made(manifest)) is not None:
            state = bridge.consumer.state(manifest.update_id)
            if reason is not None and state in {State.IMPORTED, State.VERIFIED}:
                # In another state the import failed, and the bridge has judged the update itself.
                steps.append(lambda: bridge.reject(manifest.update_id, reason))
            steps.append(lambda: bridge.release_imported(manifest.update_id))
        for step in steps:
            try:
                step()
            except Exception:  # noqa: BLE001 - logged in full
                # The model is as it should be, and the trainer's slot must not wait for the rest.
                _LOG.exception("version %d could not be released", manifest.weight_version)

    def _forget_tensors(self) -> None:
        tensors, self._tensors = self._tensors, {}
        if isinstance(tensors, ImportedTensors):
            tensors.forget()  # a kept exception's frames must not keep the trainer's slot

    def _clear(self) -> None:
        self._forget_tensors()
        self.pending = self._imported = self._proof = None
        self.stage = Stage.IDLE


def rank_of(
    model: torch.nn.Module, make_host: Callable[[], RankHost], adapter: str = ""
) -> EngineRank:
    """The rank whose model this is, made with the first call.

    The model keeps it, so that both go together. For each of its adapters it has another one, with
    a session and versions of its own; an empty name is for the model's weights.
    """
    ranks: dict[str, EngineRank] = vars(model).setdefault(_ATTRIBUTE, {})
    if adapter not in ranks:
        ranks[adapter] = EngineRank(make_host())
    return ranks[adapter]


def ranks_of(model: torch.nn.Module) -> Mapping[str, EngineRank]:
    """Every rank of the model that anybody asked for: of its weights, and of its adapters."""
    found: dict[str, EngineRank] = vars(model).get(_ATTRIBUTE, {})
    return found


def note_sleep(model: torch.nn.Module, *, keeps_weights: bool) -> None:
    """The engine puts the model's weights to sleep, or throws them away."""
    vars(model)[_ASLEEP] = True
    if not keeps_weights:
        for rank in ranks_of(model).values():
            rank.forget_all()


def note_wake(model: torch.nn.Module) -> None:
    """The memory of the model's weights is there again."""
    vars(model)[_ASLEEP] = False


def known_rank(model: torch.nn.Module) -> EngineRank | None:
    """The rank whose model this is, if anybody asked for it before."""
    return ranks_of(model).get("")


# ---- calls of the driver ------------------------------------------------------------------------


def answer(rank: EngineRank, verb: str, payload: object) -> Reply:
    """Do what a driver asks. Never raises: a failure is an answer, too.

    A rank that raised would leave the answers of those behind it to be taken for the next call's.
    """
    given: Payload = payload if isinstance(payload, Mapping) else {}
    reply: Reply = {"rank": rank.host.rank, "call": given.get("call")}
    try:
        if not isinstance(payload, Mapping):
            msg = f"payload is a {type(payload).__name__}, expected an object. Pass one."
            raise WeightUpdateRejectedError(msg)  # noqa: TRY301 - answered like all others
        rank.host.group.timeout_s = float(given.get("timeout_s", rank.host.group.timeout_s))
        return {"ok": True, **reply, **_step_of(rank, verb, given)(given)}
    except Exception as error:  # noqa: BLE001 - it is the answer
        _LOG.warning("%s failed", verb, exc_info=True)
        clear_frames(error)
        return {**reply, **failure_reply(error)}


def _step_of(rank: EngineRank, verb: str, given: Payload) -> Callable[[Payload], Reply]:
    """What a verb does on a rank, once its call is accepted."""
    own = rank.host.verbs
    if verb in own:
        return own[verb]
    if verb not in _VERBS:
        raise WeightUpdateRejectedError(
            f"{verb!r} is no verb of a rank, expected one of {sorted((*_VERBS, *own))}."
        )
    if verb not in _WITHOUT_SESSION:
        rank.session.require(given)
    return lambda given: _VERBS[verb](rank, given) or {}


def _open(rank: EngineRank, given: Payload) -> None:
    rank.session.open(
        str(given.get("driver")),
        str(given.get("name")),
        int(given.get("epoch", 0)),
        take_over=bool(given.get("take_over")),
    )


def _prepare(rank: EngineRank, given: Payload) -> Reply:
    if not isinstance(given.get("manifest"), str):
        raise WeightUpdateRejectedError(
            "prepare came without a manifest. Pass its JSON text as 'manifest'."
        )
    rank.configure(given.get("options") or {})
    manifest = WeightUpdateManifest.from_json(given["manifest"])
    return rank.prepare(manifest, imports=bool(given.get("imports", True)), given=given)


def _pauses(rank: EngineRank, given: Payload) -> None:
    rank.is_paused = bool(given.get("on"))


def _text(given: Payload, key: str) -> str:
    return str(given.get(key, ""))


def _reason(given: Payload) -> str | None:
    reason = given.get("reason")
    return None if reason is None else str(reason)


_WITHOUT_SESSION = frozenset({"describe", "open"})
_VERBS: Mapping[str, Callable[[EngineRank, Payload], Reply | None]] = {
    "describe": lambda rank, _: rank.describe(),
    "open": _open,
    "prepare": _prepare,
    "pauses": _pauses,
    "install": lambda rank, given: rank.install(_text(given, "update_id")),
    "prove": lambda rank, given: rank.prove(_text(given, "update_id"), given.get("parts") or []),
    "serves": lambda rank, given: rank.serves(_text(given, "update_id")),
    "undo": lambda rank, given: rank.undo(_reason(given)),
    "abandon": lambda rank, given: rank.abandon(_reason(given)),
    "commit": lambda rank, given: rank.commit(_text(given, "update_id")),
    "retire": lambda rank, given: rank.installer.retire(
        given.get("update_ids") or [], ends=bool(given.get("ends"))
    ),
    "leave": lambda rank, _: rank.session.leave(),
}
