"""SIGKILL while the bytes move: in the middle of a publisher's pass, and of an installer's.

Each test first shows that the kill came in the middle: the first byte is new, the last one old. On
a busy machine a pass may end before who watches it has its turn: such a kill shows nothing, and the
next one is tried, of new processes.
"""

import mmap
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.manifest.canonical import thaw
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.segment import SegmentRef, open_segment
from rl_bridge.processes import close_fd
from rl_bridge.testing.processes import Child, until

# Large enough that a pass over it lasts many times as long as it takes to send a signal.
SIZE = 192 << 20

TRIES = 20


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((SIZE,), version, dtype=torch.uint8)}


def is_whole(tensor: torch.Tensor, version: int) -> bool:
    return bool((tensor == version).all())


class Trainer:
    """A trainer process."""

    def __init__(self) -> None:
        self._bridge = make_weight_bridge("shared-memory", source_worker="trainer")

    def publish(self, version: int) -> str:
        return self._bridge.publish(weights(version), weight_version=version).to_json()

    def release(self, update_id: str) -> None:
        self._bridge.release(update_id)


class Rollout:
    """A rollout process, whose engine lies in a file that outlives it."""

    def __init__(self, path: str) -> None:
        self._engine = {"weight": torch.from_file(path, shared=True, size=SIZE, dtype=torch.uint8)}
        self._executor = RolloutExecutor(
            weight_bridge=make_weight_bridge("shared-memory", source_worker="rollout"),
            weight_install_adapter=ModuleInstallAdapter(self._engine, mode="copy"),
        )

    def install(self, manifest: str) -> int | None:
        self._executor.update_weights(manifest)
        return self._executor.active_weight_version


class Window:
    """Another process's bytes, as they are at this moment."""

    def __init__(self, fd: int) -> None:
        self._bytes = mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ)

    @property
    def first(self) -> int:
        return self._bytes[0]

    @property
    def last(self) -> int:
        return self._bytes[SIZE - 1]


def slot_of(manifest: str) -> Window:
    handle = thaw(WeightUpdateManifest.from_json(manifest).handle)
    assert isinstance(handle, dict)
    fd = open_segment(SegmentRef.model_validate(handle["slot"]))
    try:
        return Window(fd)
    finally:
        close_fd(fd)


def kill_when_begun(child: Child, windows: list[Window], version: int) -> Window:
    """SIGKILL as soon as the first byte of `version` shows; returns where it does."""
    begun: list[Window] = []

    def has_begun() -> bool:
        # Looked at again and again within each step of the wait: a pass lasts milliseconds.
        for _ in range(20_000):
            begun.extend(window for window in windows if window.first == version)
            if begun:
                os.kill(child.pid, signal.SIGKILL)
                return True
        return False

    until(has_begun, what=f"the first byte of version {version}")
    assert child.exitcode() == -signal.SIGKILL
    return begun[0]


def hits_the_middle(kill: Callable[[], bool]) -> bool:
    """Whether one of the kills came in the middle; what is promised there was asserted then."""
    return any(kill() for _ in range(TRIES))


def test_a_trainer_killed_in_the_middle_of_its_pass_leaves_the_rollout_whole() -> None:
    assert hits_the_middle(_kills_a_trainer_in_the_middle)


def _kills_a_trainer_in_the_middle() -> bool:
    engine = {"weight": torch.zeros(SIZE, dtype=torch.uint8)}
    with (
        make_weight_bridge("shared-memory", source_worker="rollout") as bridge,
        Child(Trainer) as trainer,
    ):
        executor = RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=ModuleInstallAdapter(engine, mode="flip")
        )
        slots = []
        for version in (1, 2):
            manifest = trainer.call("publish", version=version)
            slots.append(slot_of(manifest))
            executor.update_weights(manifest)
            if version == 1:
                first = WeightUpdateManifest.from_json(manifest)
        trainer.call("release", update_id=first.update_id)
        trainer.tell("publish", version=3)
        slot = kill_when_begun(trainer, slots, 3)
        if (slot.first, slot.last) != (3, 1):
            return False
        assert executor.active_weight_version == 2
        assert is_whole(engine["weight"], 2)
        with Child(Trainer) as successor:
            executor.update_weights(successor.call("publish", version=4))
            assert is_whole(engine["weight"], 4)
    return True


@pytest.fixture
def engine_file(tmp_path: Path) -> Path:
    path = tmp_path / "engine"
    path.touch()
    os.truncate(path, SIZE)
    return path


def test_a_rollout_killed_in_the_middle_of_its_copy_is_made_whole_by_its_successor(
    engine_file: Path,
) -> None:
    assert hits_the_middle(lambda: _kills_a_rollout_in_the_middle(engine_file))


def _kills_a_rollout_in_the_middle(engine_file: Path) -> bool:
    trainer = make_weight_bridge("shared-memory", source_worker="trainer")
    with trainer, Child(Rollout, path=str(engine_file)) as victim:
        with engine_file.open("rb") as file:
            engine = Window(file.fileno())
        first = trainer.publish(weights(1), weight_version=1)
        assert victim.call("install", manifest=first.to_json()) == 1
        second = trainer.publish(weights(2), weight_version=2)
        trainer.release(first.update_id)
        victim.tell("install", manifest=second.to_json())
        kill_when_begun(victim, [engine], 2)
        if (engine.first, engine.last) != (2, 1):
            return False
        until(
            lambda: {report.presence for report in trainer.consumers()} == {"gone"},
            what="the kernel tells that the rollout is gone",
        )
        assert not [r for r in trainer.holders(second.update_id) if r.state == "acknowledged"]
        with Child(Rollout, path=str(engine_file)) as successor:
            assert successor.call("install", manifest=second.to_json()) == 2
        found = torch.from_file(str(engine_file), shared=True, size=SIZE, dtype=torch.uint8)
        assert is_whole(found, 2)
        taken = trainer.published_nbytes
        trainer.publish(weights(3), weight_version=3)
        assert trainer.published_nbytes == taken, "what the victim read is never used again"
    return True
