"""A model-based test of the whole transaction: publisher, consumer, executor, engine, and faults.

Hypothesis plays: it publishes, corrupts, installs, lets installs and undos fail at chosen places,
replays old manifests, releases, restarts either side, holds tensors and writes into them. The model
knows one thing: which version the engine must be at, with which bytes, or that it is torn. After
every step the real thing is compared with it.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import xxhash
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.errors import (
    ChecksumMismatch,
    ProofFailed,
    SlotsExhausted,
    TornEngine,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.installers.base import TransactionalAdapter
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.lifecycle import State
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.installer_faults import EngineFault, Sabotage, Stage, poke
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.testing.tensors import bytes_of, random_tensor
from rl_bridge.transports.base import Transport
from rl_bridge.transports.shared_memory import SharedMemory

_MAX_SLOTS = 12
Contents = dict[str, str]


def _weights(seed: int) -> dict[str, torch.Tensor]:
    found = {
        "a": random_tensor("float32", (5, 4), seed),
        "b": random_tensor("bfloat16", (2100,), seed + 1),
        "c": random_tensor("int8", (3, 3), seed + 2),
        "empty": random_tensor("float32", (0,), seed + 3),
    }
    found["tied"] = found["a"]
    return found


def _contents(tensors: Any) -> Contents:
    return {name: xxhash.xxh3_64_hexdigest(bytes_of(t)) for name, t in tensors.items()}


@dataclass
class _Update:
    """One published update, as the model knows it."""

    manifest: WeightUpdateManifest
    contents: Contents
    is_corrupt: bool = False
    is_released: bool = False
    is_refused: bool = False


@dataclass
class _Model:
    """The state that the engine must be in."""

    version: int | None = None
    contents: Contents = field(default_factory=dict)
    torn: dict[str, "_Update"] = field(default_factory=dict)
    installed: str | None = None
    active: str | None = None
    floor: dict[str, int] = field(default_factory=dict)


class LifecycleMachine(RuleBasedStateMachine):
    """Run ``LifecycleMachine.TestCase``; subclasses choose transport and mode."""

    mode: ClassVar[Any] = "copy"

    def __init__(self) -> None:
        """Start without a trainer and without an engine; `begin` makes both."""
        super().__init__()
        self.updates: list[_Update] = []
        self.held: list[tuple[str, Any, Contents]] = []
        self.trainer: BridgeOver | None = None
        self.consumer: BridgeOver | None = None
        self.next_version = 1

    def make_transport(self) -> Transport:
        """One end's transport."""
        return SharedMemory(max_slots=_MAX_SLOTS, max_consumers=8)

    def make_adapter(self, engine: dict[str, torch.Tensor]) -> TransactionalAdapter:
        """The adapter of a new engine."""
        return ModuleInstallAdapter(engine, mode=self.mode)

    # ---- beginnings -----------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """A trainer and an engine with initial weights."""
        self._start_trainer()
        self._start_engine()

    def _start_trainer(self) -> None:
        self.faults = FaultInjecting(self.make_transport())
        self.trainer = BridgeOver(self.faults, source_worker="trainer")
        self.next_version = 1

    def _start_engine(self) -> None:
        self.consumer = BridgeOver(self.make_transport(), source_worker="rollout")
        self.engine = copy.deepcopy(_weights(0))
        self.engine["c"] = self.engine["c"].t().contiguous().t()
        self.engine["tied"] = self.engine["a"]
        self.sabotage = Sabotage(
            self.make_adapter(self.engine), self.engine, rebinds=self.mode != "copy"
        )
        self.executor = RolloutExecutor(
            weight_bridge=self.consumer,
            weight_install_adapter=self.sabotage.wrapped(),
            suspicious="off",
        )
        self.model = _Model(contents=_contents(self.engine))

    @rule()
    def restart_trainer(self) -> None:
        """A new publisher: another stream, whose versions begin anew."""
        self._closed(self.trainer)
        for update in self.updates:
            update.is_released = True
        self._start_trainer()

    @rule()
    def restart_engine(self) -> None:
        """A new rollout process: initial weights, and no memory of what it refused."""
        self._closed(self.consumer)
        for update in self.updates:
            update.is_refused = False
        self._start_engine()

    # ---- the trainer ----------------------------------------------------------------------------

    @rule(seed=st.integers(1, 50), is_corrupt=st.integers(0, 5).map(lambda x: x == 0))
    def publish(self, seed: int, *, is_corrupt: bool) -> None:
        """Publish a version, now and then one whose bytes are damaged."""
        assert self.trainer is not None
        source = _weights(100 * seed)
        contents = _contents(source)
        self.faults.corrupt_next = is_corrupt
        try:
            manifest = self.trainer.publish(source, weight_version=self.next_version)
        except SlotsExhausted:
            live = sum(not update.is_released for update in self.updates)
            assert live + len(self.held) + 2 >= _MAX_SLOTS, "memory that nobody holds is not reused"
            return
        self.next_version += 1
        self.updates.append(_Update(manifest, contents, is_corrupt))

    @rule(data=st.data())
    @precondition(lambda self: self.updates)
    def release_by_trainer(self, data: st.DataObject) -> None:
        """The trainer releases an update, whatever the consumer does with it."""
        assert self.trainer is not None
        update = data.draw(st.sampled_from(self.updates))
        self.trainer.release(update.manifest.update_id)
        update.is_released = True

    # ---- the rollout ----------------------------------------------------------------------------

    @rule(
        data=st.data(),
        stage=st.sampled_from([None, None, None, *Stage]),
        is_poked=st.booleans(),
        undo_fails=st.integers(0, 2).map(lambda x: x == 0),
    )
    @precondition(lambda self: self.updates)
    def update(
        self, data: st.DataObject, stage: Stage | None, *, is_poked: bool, undo_fails: bool
    ) -> None:
        """Install an update, fresh or old, with or without a failure on the way."""
        update = data.draw(st.sampled_from(self.updates[-4:]))
        if stage is Stage.AFTER_INSTALL and is_poked:
            self.sabotage.plan(stage, action=lambda: poke(self.engine["b"], -1))
        else:
            self.sabotage.plan(stage)
        self.sabotage.fails_undo = undo_fails
        try:
            self._update(update, stage, undo_fails=undo_fails)
        finally:
            self.sabotage.plan(None)
            self.sabotage.fails_undo = False
        # An import, and an undo, show the published bytes again to whoever wrote over them.
        self._look_again(update.manifest.update_id)
        self._look_again(self.model.installed)

    def _update(self, update: _Update, stage: Stage | None, *, undo_fails: bool) -> None:
        model, manifest = self.model, update.manifest
        update_id = manifest.update_id
        must_refuse = update.is_corrupt or update.is_refused or self._is_old(manifest)
        # It may be gone, or be the active one.
        may_refuse = must_refuse or update.is_released or update_id == model.active
        try:
            self.executor.update_weights(manifest.to_json())
        except TornEngine:
            assert stage is not None
            assert undo_fails
            model.torn[update_id] = update
        except (EngineFault, ProofFailed):
            assert stage is not None
            assert not undo_fails
            update.is_refused = True
            if update_id in model.torn:
                self._heal()
        except ChecksumMismatch:
            assert update.is_corrupt
            update.is_refused = True
        except WeightBridgeError:
            if not may_refuse:
                raise
            # An update that reached the engine is refused for good; others may come again.
            assert self.consumer is not None
            if self.consumer.consumer.state(update_id) is not None:
                update.is_refused = self.consumer.update_state(update_id) is State.REJECTED
        else:
            assert not must_refuse
            assert stage is None
            model.torn.pop(update_id, None)
            self._heal()
            model.version, model.contents = manifest.weight_version, update.contents
            model.active = model.installed = update_id
            model.floor[manifest.publisher_id] = manifest.weight_version

    def _heal(self) -> None:
        """The engine is a version again: what tore it is over for good."""
        for update in self.model.torn.values():
            update.is_refused = True
        self.model.torn.clear()

    def _is_old(self, manifest: WeightUpdateManifest) -> bool:
        floor = self.model.floor.get(manifest.publisher_id)
        return floor is not None and manifest.weight_version < floor

    @rule(undo_fails=st.booleans())
    def recover(self, *, undo_fails: bool) -> None:
        """Try the undo once more; a no-op where nothing is torn."""
        self.sabotage.fails_undo = undo_fails
        try:
            self.executor.recover()
        except TornEngine:
            assert self.model.torn
            assert undo_fails
        else:
            assert not (self.model.torn and undo_fails)
            self._heal()
        finally:
            self.sabotage.fails_undo = False
        self._look_again(self.model.installed)

    @rule()
    def release_weights(self) -> None:
        """Release the active update; the engine goes on with its bytes."""
        self.executor.release_weights()
        self.model.active = None

    @rule()
    @precondition(lambda self: len(self.held) < 3 and self.executor.shared_weights)
    def hold(self) -> None:
        """Keep the imported tensors of the active version, for much longer than it is active."""
        tensors = dict(self.executor.shared_weights)
        self.held.append((self.executor.active_weight_update_id or "", tensors, _contents(tensors)))

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def drop(self, data: st.DataObject) -> None:
        """Drop held tensors."""
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @rule(data=st.data())
    @precondition(lambda self: self.held and self.mode == "copy")
    def write(self, data: st.DataObject) -> None:
        """Write into held tensors: nobody else may see it, and no undo may bring it back."""
        index = data.draw(st.integers(0, len(self.held) - 1))
        update_id, tensors, _ = self.held[index]
        tensors["b"].view(torch.uint8).bitwise_not_()
        self._look_again(update_id)

    def _look_again(self, update_id: str | None) -> None:
        """All mappings of one update are one memory; an import shows the published bytes."""
        self.held = [
            (held_id, kept, _contents(kept) if held_id == update_id else contents)
            for held_id, kept, contents in self.held
        ]

    # ---- what must hold after every step --------------------------------------------------------

    @invariant()
    def the_engine_is_at_its_version_or_torn(self) -> None:
        """Its bytes are those of the version that it reports; a torn one does not serve."""
        if self.trainer is None:
            return
        assert self.executor.is_torn == bool(self.model.torn)
        if self.model.torn:
            assert self.executor.active_weight_version is None
            self._assert_not_servable(TornEngine)
            return
        assert self.executor.active_weight_version == self.model.version
        assert _contents(self.engine) == self.model.contents
        assert self.engine["tied"].data_ptr() == self.engine["a"].data_ptr()
        if self.model.version is None:
            self._assert_not_servable(WeightBridgeUnavailableError)
        else:
            self.executor.check_servable()

    def _assert_not_servable(self, kind: type[Exception]) -> None:
        try:
            self.executor.check_servable()
        except kind:
            return
        raise AssertionError("an engine that must not serve says that it may")

    @invariant()
    def held_tensors_keep_their_bytes(self) -> None:
        """Whatever has happened since: publications, releases, installs, restarts."""
        for _, tensors, contents in self.held:
            assert _contents(tensors) == contents

    @invariant()
    def at_most_one_update_is_acknowledged(self) -> None:
        """And it is the active one."""
        if self.consumer is None or self.consumer_is_new():
            return
        known = [u.manifest.update_id for u in self.updates]
        active = [
            update_id
            for update_id in known
            if self.consumer.consumer.state(update_id) is State.ACKNOWLEDGED
        ]
        assert active == ([] if self.model.active is None else [self.model.active])

    def consumer_is_new(self) -> bool:
        """Whether this consumer has not imported anything yet."""
        return self.consumer is None or self.consumer.active_weight_version is None

    @staticmethod
    def _closed(bridge: BridgeOver | None) -> None:
        if bridge is not None:
            bridge.close()

    def teardown(self) -> None:
        """Close both ends."""
        self.held.clear()
        self._closed(self.consumer)
        self._closed(self.trainer)
