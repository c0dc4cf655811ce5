"""SIGKILL at every transition of the table, in either process: the others, and the restart."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    SharedMemoryTensorBridge,
    WeightUpdateManifest,
)
from rl_bridge.errors import VersionNotMonotonic
from rl_bridge.lifecycle.table import CONSUMER, PUBLISHER, Event, State
from rl_bridge.testing.faults import InjectedFault, KillAt, die
from rl_bridge.testing.processes import Child, ChildDied, ChildError, until

_KILLED = -9


def build_engine(fill: float) -> torch.nn.Module:
    """The engine, every element of every tensor at `fill`."""
    engine = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    with torch.no_grad():
        for tensor in engine.state_dict(keep_vars=True).values():
            tensor.fill_(fill)
    return engine


class Adapter(ModuleInstallAdapter):
    """Copies; on demand it fails, cannot undo, or dies after half of the tensors."""

    plan = ""

    def install(self, manifest: Any, tensors: Any) -> None:
        """Install, or do what was planned in the middle of it."""
        if not self.plan:
            super().install(manifest, tensors)
            return
        if not self._way.is_prepared(manifest):
            self.prepare(manifest, tensors)
        engine = self._way.memory.tensors()
        for name in list(engine)[: len(engine) // 2]:
            engine[name].data.copy_(tensors[name])
        if self.plan == "die":
            die()
        raise InjectedFault(self.plan)

    def undo(self) -> None:
        """Undo, unless that was to fail."""
        if self.plan == "tear":
            raise InjectedFault(self.plan)
        super().undo()


class Rollout:
    """What the child serves: an engine that dies at one transition."""

    def __init__(self, event: str = "", source: str = "", plan: str = "") -> None:
        """Build an engine that holds zeros."""
        observer = KillAt(event, source=source) if event else None
        self.engine = build_engine(0.0)
        self.adapter = Adapter(self.engine)
        self.plan = plan
        self.bridge = SharedMemoryTensorBridge(source_worker="rollout", observer=observer)
        self.executor = RolloutExecutor(
            weight_bridge=self.bridge, weight_install_adapter=self.adapter
        )

    def update(self, text: str, faulty: bool = False) -> list[Any]:
        """Update; with `faulty` as was planned. Returns version, root and the engine's values."""
        self.adapter.plan = self.plan if faulty else ""
        try:
            self.executor.update_weights(text)
        finally:
            self.adapter.plan = ""
        return self.holds()

    def refuse(self, text: str) -> None:
        """Reject a manifest that was never imported."""
        self.bridge.reject(WeightUpdateManifest.from_json(text), "not wanted")

    def recover(self) -> list[Any]:
        """Take the failed undo up again."""
        self.executor.recover()
        return self.holds()

    def let_go(self) -> None:
        """Release the active update."""
        self.executor.release_weights()

    def holds(self) -> list[Any]:
        """Version, and all distinct values in the engine."""
        values = torch.cat([t.flatten() for t in self.engine.state_dict().values()])
        return [self.executor.active_weight_version, sorted(set(values.tolist()))]


class Trainer:
    """What the child serves: a publisher with a state directory that dies at one transition."""

    def __init__(self, state_dir: str, event: str = "") -> None:
        """Open the publisher."""
        observer = KillAt(event, role="publisher") if event else None
        self.bridge = SharedMemoryTensorBridge(
            source_worker="trainer", state_dir=state_dir, observer=observer
        )

    def publish(self, version: int) -> str:
        """Publish weights that are all `version`."""
        return self.bridge.publish(build_engine(float(version)), weight_version=version).to_json()

    def release(self, update_id: str) -> None:
        """Release an update."""
        self.bridge.release(update_id)


# How an executor gets to each move of the consumer's table: the faulty plan, and the last call.
_WAYS: dict[tuple[State, Event], tuple[str, str]] = {
    (State.ANNOUNCED, Event.IMPORT): ("", "update"),
    (State.ANNOUNCED, Event.REJECT): ("", "refuse"),
    (State.IMPORTED, Event.VERIFY): ("", "update"),
    (State.VERIFIED, Event.STAGE): ("", "update"),
    (State.STAGED, Event.INSTALL): ("", "update"),
    (State.STAGED, Event.REJECT): ("fail", "update"),
    (State.STAGED, Event.TEAR): ("tear", "update"),
    (State.INSTALLED, Event.ACKNOWLEDGE): ("", "update"),
    (State.ACKNOWLEDGED, Event.RELEASE): ("", "let_go"),
    (State.TORN, Event.UNDO): ("tear", "recover"),
    (State.TORN, Event.INSTALL): ("tear", "again"),
}

# Moves that only a caller without an executor, or damaged memory, can make: the transport suite
# kills there.
_NOT_THE_EXECUTORS = {
    (State.ANNOUNCED, Event.RELEASE),
    (State.IMPORTED, Event.REJECT),
    (State.IMPORTED, Event.RELEASE),
    (State.VERIFIED, Event.ACKNOWLEDGE),
    (State.VERIFIED, Event.REJECT),
    (State.VERIFIED, Event.RELEASE),
    (State.STAGED, Event.RELEASE),
    (State.INSTALLED, Event.REJECT),
    (State.INSTALLED, Event.TEAR),
    (State.REJECTED, Event.RELEASE),
}


def test_every_move_of_the_consumers_table_is_killed_at_or_named_as_not_an_executors() -> None:
    moves = {(source, event) for source, events in CONSUMER.items() for event in events}
    assert moves == _WAYS.keys() | _NOT_THE_EXECUTORS
    assert not _WAYS.keys() & _NOT_THE_EXECUTORS


def _drive(victim: Child, text: str, plan: str, call: str) -> None:
    """Do what leads to the victim's death, whatever it answers before that."""
    try:
        match call:
            case "update":
                victim.call("update", text=text, faulty=bool(plan))
            case "refuse":
                victim.call("refuse", text=text)
            case "let_go":
                victim.call("update", text=text)
                victim.call("let_go")
            case _:
                with pytest.raises(ChildError, match="TornEngine"):
                    victim.call("update", text=text, faulty=True)
                victim.call(
                    "recover" if call == "recover" else "update",
                    **({} if call == "recover" else {"text": text}),
                )
    except ChildDied:
        pass


@pytest.mark.parametrize(
    ("move", "way"), _WAYS.items(), ids=[f"{source}-{event}" for source, event in _WAYS]
)
def test_a_rollout_killed_at_a_transition_leaves_a_restart_that_agrees(
    move: tuple[State, Event], way: tuple[str, str]
) -> None:
    plan, call = way
    source, event = move
    with (
        SharedMemoryTensorBridge(source_worker="trainer", max_slots=3) as trainer,
        Child(Rollout, event=event, source=source, plan=plan) as victim,
    ):
        neighbour = Rollout()
        first = trainer.publish(build_engine(1.0), weight_version=1)
        assert neighbour.update(first.to_json()) == [1, [1.0]]
        _drive(victim, first.to_json(), plan, call)
        assert victim.exitcode() == _KILLED
        until(
            lambda: (
                {r.presence for r in trainer.holders(first.update_id) if r.pid == victim.pid}
                <= {"gone"}
            ),
            what="the kernel drops the victim's locks",
        )
        # Nobody else noticed, and a restart that installs the same manifest agrees with it.
        assert neighbour.holds() == [1, [1.0]]
        with Child(Rollout) as restarted:
            assert restarted.call("update", text=first.to_json()) == [1, [1.0]]
        trainer.release(first.update_id)
        # Its slot is used again: three versions more would not fit into three slots otherwise.
        for version in range(2, 8):
            manifest = trainer.publish(build_engine(float(version)), weight_version=version)
            assert neighbour.update(manifest.to_json()) == [version, [float(version)]]
            trainer.release(manifest.update_id)


def test_a_rollout_killed_in_the_middle_of_its_install_comes_back_whole() -> None:
    with (
        SharedMemoryTensorBridge(source_worker="trainer") as trainer,
        Child(Rollout, plan="die") as victim,
    ):
        first = trainer.publish(build_engine(1.0), weight_version=1)
        assert victim.call("update", text=first.to_json()) == [1, [1.0]]
        second = trainer.publish(build_engine(2.0), weight_version=2)
        with pytest.raises(ChildDied):
            victim.call("update", text=second.to_json(), faulty=True)
        assert victim.exitcode() == _KILLED
        with Child(Rollout) as restarted:
            assert restarted.call("holds") == [None, [0.0]]
            assert restarted.call("update", text=second.to_json()) == [2, [2.0]]


@pytest.mark.parametrize(
    "event", sorted({event for moves in PUBLISHER.values() for event in moves})
)
def test_a_publisher_killed_at_a_transition_leaves_its_consumers_and_its_numbers_alone(
    event: Event, tmp_path: Path
) -> None:
    with Child(Rollout) as rollout:
        with Child(Trainer, state_dir=str(tmp_path)) as healthy:
            first = healthy.call("publish", version=1)
            assert rollout.call("update", text=first) == [1, [1.0]]
        with Child(Trainer, state_dir=str(tmp_path), event=event) as victim:
            if event is Event.RELEASE:
                text = victim.call("publish", version=2)
                update_id = json.loads(text)["header"]["update_id"]
                victim.tell("release", update_id=update_id)
            else:
                victim.tell("publish", version=2)
            assert victim.exitcode() == _KILLED
        assert rollout.call("holds") == [1, [1.0]]
        with Child(Trainer, state_dir=str(tmp_path)) as restarted:
            # Whether or not anybody saw version 2, its number is used up.
            with pytest.raises(ChildError, match=VersionNotMonotonic.__name__):
                restarted.call("publish", version=2)
            third = restarted.call("publish", version=3)
            assert rollout.call("update", text=third) == [3, [3.0]]
