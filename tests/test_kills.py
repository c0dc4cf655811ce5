"""SIGKILL at every transition of the lifecycle table, in either process.

After each: others keep their bytes, the kernel tells who is gone, memory is used again, and a
restarted side reaches a version and bytes that agree.
"""

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.errors import IncompatibleUpdate, VersionNotMonotonic
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.lifecycle import TABLE, Event, Role, State, Transition
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.testing.faults import Fault, FaultInjecting, KillAt, Step
from rl_bridge.testing.installer_faults import Sabotage, Stage
from rl_bridge.testing.peer import BridgeOver, Peer, engine_weights, hashes, sample_weights
from rl_bridge.testing.processes import Child, ChildDied, until
from rl_bridge.testing.tensors import contents_of
from rl_bridge.transports.shared_memory import SharedMemory

Move = tuple[State, Event]
Mode = Literal["copy", "alias", "flip"]


class Victim:
    """A rollout process that is at version 1 and dies on the way to version 2.

    Each method leads update 2 through one move of the consumer's table, the way that life does:
    through the executor where it makes the move, else through the bridge.
    """

    def __init__(self, directory: str | None, source: str, event: str) -> None:
        kill = KillAt(event, source=source, weight_version=2)
        self.meanwhile: Any = None
        self.transport = FaultInjecting(SharedMemory(directory=directory))
        self.bridge = BridgeOver(self.transport, source_worker="victim", observer=self.watch)
        self.kill = kill
        self.engine = engine_weights(0)
        self.sabotage = Sabotage(ModuleInstallAdapter(self.engine), self.engine)
        self.executor = RolloutExecutor(
            weight_bridge=self.bridge, weight_install_adapter=self.sabotage.wrapped()
        )

    def watch(self, step: Transition) -> None:
        self.kill(step)
        if step.weight_version == 2 and step.event is Event.IMPORT and self.meanwhile is not None:
            self.meanwhile()

    def begin(self, manifest: str) -> int | None:
        self.executor.update_weights(manifest)
        return self.executor.active_weight_version

    def install(self, manifest: str, update_id: str) -> None:
        self.executor.update_weights(manifest)

    def install_and_release(self, manifest: str, update_id: str) -> None:
        self.executor.update_weights(manifest)
        self.bridge.release(update_id)

    def acknowledge_without_executor(self, manifest: str, update_id: str) -> None:
        self.bridge.import_update(manifest)
        self.bridge.acknowledge(update_id)

    def reject_unseen(self, manifest: str, update_id: str) -> None:
        self.bridge.reject(WeightUpdateManifest.from_json(manifest), "not wanted")

    def reject_and_release(self, manifest: str, update_id: str) -> None:
        self.reject_unseen(manifest, update_id)
        self.bridge.release(update_id)

    def reject_verified(self, manifest: str, update_id: str) -> None:
        del self.engine["scale"]  # prepare refuses
        with suppress(IncompatibleUpdate):
            self.executor.update_weights(manifest)

    def reject_corrupt(self, manifest: str, update_id: str) -> None:
        parsed = WeightUpdateManifest.from_json(manifest)
        digests = bytes(byte ^ 1 for byte in parsed.digests)
        self.bridge.import_update(parsed.model_copy(update={"digests": digests}))

    def release_verified(self, manifest: str, update_id: str) -> None:
        self.bridge.import_update(manifest)
        self.bridge.release(update_id)

    def release_announced(self, manifest: str, update_id: str) -> None:
        release = Fault(Step.BEFORE_ATTACH, lambda: self.bridge.release(update_id), count=2)
        self.transport.faults.append(release)
        self.bridge.import_update(manifest)

    def release_imported(self, manifest: str, update_id: str) -> None:
        self.meanwhile = lambda: self.bridge.release(update_id)
        self.bridge.import_update(manifest)

    def close_staged(self, manifest: str, update_id: str) -> None:
        self.sabotage.plan(Stage.BEFORE_INSTALL, action=self.bridge.close)
        self.executor.update_weights(manifest)

    def fail_staged(self, manifest: str, update_id: str) -> None:
        self.sabotage.plan(Stage.HALF_WAY)
        self.executor.update_weights(manifest)

    def fail_installed(self, manifest: str, update_id: str) -> None:
        self.sabotage.plan(Stage.AFTER_PROOF)
        self.executor.update_weights(manifest)

    def run_short_installed(self, manifest: str, update_id: str) -> None:
        self.sabotage.plan(Stage.AFTER_PROOF, action=_run_short)
        self.executor.update_weights(manifest)

    def tear_staged(self, manifest: str, update_id: str) -> None:
        self.sabotage.fails_undo = True
        self.fail_staged(manifest, update_id)

    def tear_installed(self, manifest: str, update_id: str) -> None:
        self.sabotage.fails_undo = True
        self.fail_installed(manifest, update_id)

    def recover_torn(self, manifest: str, update_id: str) -> None:
        with suppress(RuntimeError):
            self.tear_staged(manifest, update_id)
        self.sabotage.fails_undo = False
        self.executor.recover()

    def install_torn(self, manifest: str, update_id: str) -> None:
        with suppress(RuntimeError):
            self.tear_staged(manifest, update_id)
        self.executor.update_weights(manifest)


def _run_short() -> None:
    raise MemoryError


CONSUMER_MOVES: dict[Move, str] = {
    (State.ANNOUNCED, Event.IMPORT): "install",
    (State.ANNOUNCED, Event.REJECT): "reject_unseen",
    (State.ANNOUNCED, Event.RELEASE): "release_announced",
    (State.IMPORTED, Event.VERIFY): "install",
    (State.IMPORTED, Event.REJECT): "reject_corrupt",
    (State.IMPORTED, Event.RELEASE): "release_imported",
    (State.VERIFIED, Event.STAGE): "install",
    (State.VERIFIED, Event.ACKNOWLEDGE): "acknowledge_without_executor",
    (State.VERIFIED, Event.REJECT): "reject_verified",
    (State.VERIFIED, Event.RELEASE): "release_verified",
    (State.STAGED, Event.INSTALL): "install",
    (State.STAGED, Event.TEAR): "tear_staged",
    (State.STAGED, Event.REJECT): "fail_staged",
    (State.STAGED, Event.RELEASE): "close_staged",
    (State.INSTALLED, Event.ACKNOWLEDGE): "install",
    (State.INSTALLED, Event.TEAR): "tear_installed",
    (State.INSTALLED, Event.REJECT): "fail_installed",
    (State.INSTALLED, Event.UNDO): "run_short_installed",
    (State.ACKNOWLEDGED, Event.RELEASE): "install_and_release",
    (State.TORN, Event.UNDO): "recover_torn",
    (State.TORN, Event.INSTALL): "install_torn",
    (State.REJECTED, Event.RELEASE): "reject_and_release",
}
PUBLISHER_MOVES: tuple[Move, ...] = (
    (State.PREPARING, Event.PUBLISH),
    (State.PUBLISHED, Event.RELEASE),
)


def move_name(move: object) -> str:
    return "-".join(move) if isinstance(move, tuple) else str(move)


def test_every_move_of_the_table_has_its_kill() -> None:
    for role, moves in ((Role.CONSUMER, CONSUMER_MOVES), (Role.PUBLISHER, PUBLISHER_MOVES)):
        table = {(state, event) for state, events in TABLE[role].items() for event in events}
        assert set(moves) == table


@pytest.fixture(params=["memfd", "files"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return None if request.param == "memfd" else str(tmp_path / "segments")


@pytest.fixture
def trainer(directory: str | None) -> Iterator[BridgeOver]:
    with BridgeOver(SharedMemory(directory=directory), source_worker="trainer") as bridge:
        yield bridge


class Rollout:
    """A rollout in this process: the neighbour, or the victim's successor."""

    def __init__(self, directory: str | None, name: str, mode: Mode = "copy") -> None:
        self.bridge = BridgeOver(SharedMemory(directory=directory), source_worker=name)
        self.engine = engine_weights(0)
        self.executor = RolloutExecutor(
            weight_bridge=self.bridge,
            weight_install_adapter=ModuleInstallAdapter(self.engine, mode=mode),
        )

    def is_at(self, version: int) -> bool:
        """Whether version and bytes agree."""
        return self.executor.active_weight_version == version and hashes(self.engine) == hashes(
            sample_weights(version)
        )


@pytest.mark.parametrize(
    ("move", "directory"),
    [
        *((move, "memfd") for move in CONSUMER_MOVES),
        *(pytest.param(move, "files", marks=pytest.mark.full) for move in CONSUMER_MOVES),
    ],
    indirect=["directory"],
    ids=move_name,
)
def test_a_rollout_killed_at_any_move_disturbs_nobody_and_comes_back(
    move: Move, directory: str | None, trainer: BridgeOver
) -> None:
    source, event = move
    # Its weights are the very pages that it shares with the victim.
    neighbour = Rollout(directory, "neighbour", "flip" if directory is None else "alias")
    first = trainer.publish(sample_weights(1), weight_version=1)
    neighbour.executor.update_weights(first)
    with Child(Victim, directory=directory, source=str(source), event=str(event)) as victim:
        assert victim.call("begin", manifest=first.to_json()) == 1
        trainer.release(first.update_id)
        second = trainer.publish(sample_weights(2), weight_version=2)
        with pytest.raises(ChildDied):
            victim.call(
                CONSUMER_MOVES[move],
                manifest=second.to_json(),
                update_id=second.update_id,
            )
        assert victim.exitcode() == -signal.SIGKILL

    until(lambda: presence_of(trainer, "victim") == {"gone"}, what="the victim's locks are gone")
    assert neighbour.is_at(1)
    neighbour.executor.update_weights(second)
    assert neighbour.is_at(2)

    successor = Rollout(directory, "successor")
    successor.executor.update_weights(second.to_json())
    assert successor.is_at(2)
    told = {report.worker: report for report in trainer.holders(second.update_id)}
    assert told["successor"].state == "acknowledged"
    trainer.release(second.update_id)

    taken = []
    for version in range(3, 9):
        manifest = trainer.publish(sample_weights(version), weight_version=version)
        taken.append(trainer.published_nbytes)
        for rollout in (neighbour, successor):
            rollout.executor.update_weights(manifest)
            assert rollout.is_at(version)
        trainer.release(manifest.update_id)
    assert max(taken) == taken[0], "what the victim held is never used again"
    for rollout in (neighbour, successor):
        rollout.bridge.close()


def presence_of(trainer: BridgeOver, worker: str) -> set[str]:
    return {report.presence for report in trainer.consumers() if report.worker == worker}


@pytest.mark.parametrize("move", PUBLISHER_MOVES, ids=move_name)
def test_a_trainer_killed_at_any_move_leaves_the_rollout_its_version(
    move: Move, directory: str | None, tmp_path: Path
) -> None:
    source, event = move
    state_dir = str(tmp_path / "state")
    kill = KillAt(str(event), source=str(source), role="publisher", weight_version=2)
    rollout = Rollout(directory, "rollout")
    with Child(
        Peer,
        transport_class=SharedMemory,
        transport_kwargs={"directory": directory},
        worker="trainer",
        observer=kill,
        state_dir=state_dir,
    ) as victim:
        first = victim.call("publish", seed=1, weight_version=1)
        rollout.executor.update_weights(first)
        with suppress(ChildDied):
            second = victim.call("publish", seed=2, weight_version=2)
            victim.call("release", update_id=WeightUpdateManifest.from_json(second).update_id)
        assert victim.exitcode() == -signal.SIGKILL

    assert rollout.is_at(1)
    held = dict(rollout.executor.shared_weights)
    assert contents_of(held) == contents_of(sample_weights(1))

    with BridgeOver(SharedMemory(directory=directory), state_dir=state_dir) as trainer:
        for version in (1, 2):  # 2 was claimed, whether or not anybody got to see it
            with pytest.raises(VersionNotMonotonic):
                trainer.publish(sample_weights(9), weight_version=version)
        if directory is not None:
            mine = trainer.publisher_id[:12]
            left = {path.name for path in Path(directory).iterdir()}
            assert all(name.startswith(f"rlb-{mine}") for name in left)
        third = trainer.publish(sample_weights(3), weight_version=3)
        rollout.executor.update_weights(third.to_json())
        assert rollout.is_at(3)
        assert [report.state for report in trainer.holders(third.update_id)] == ["acknowledged"]
    assert contents_of(held) == contents_of(sample_weights(1))
    rollout.bridge.close()


def test_the_victims_faults_are_what_they_seem() -> None:
    """The matrix proves nothing if its victims die for another reason than the planned one."""
    with (
        Child(Victim, directory=None, source="no", event="such move") as victim,
        BridgeOver(SharedMemory()) as trainer,
    ):
        first = trainer.publish(sample_weights(1), weight_version=1)
        second = trainer.publish(sample_weights(2), weight_version=2)
        assert victim.call("begin", manifest=first.to_json()) == 1
        victim.call("install", manifest=second.to_json(), update_id=second.update_id)
        assert victim.stop() == 0
