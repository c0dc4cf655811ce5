"""An interrupt before any line of an update: versions and bytes agree, then and ever after.

Python raises KeyboardInterrupt, and what other threads send, between two instructions of whatever
runs. A tracer raises it here at one line after the other.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, SharedMemoryTensorBridge
from rl_bridge.bridge.consumer import UnreadTensors
from rl_bridge.processes import FORKS
from tests.helpers import tracing
from tests.interrupts import InterruptBefore

Mode = Literal["copy", "alias", "flip", "verifies"]
Weights = dict[str, torch.Tensor]

# Every line would take minutes. The stride has no common factor with loops of 2, 3, 5 or 7 lines,
# and each mode begins elsewhere.
STRIDE = 11


class Failing(ModuleInstallAdapter):
    """Fails behind the install where it is told to."""

    fails = False

    def install(self, manifest: Any, tensors: Any) -> None:
        super().install(manifest, tensors)
        if self.fails:
            raise ConnectionError


class Verifying(Failing):
    """Verifies by itself what the executor only leases."""

    root = ""

    @property
    def imports_itself(self) -> bool:
        return True

    @property
    def verified_root(self) -> str:
        return self.root

    def prepare(self, manifest: Any, tensors: Any) -> None:
        self.root = ""
        assert set(dict(tensors)) == {"a", "b"}  # each read, and verified with the first
        super().prepare(manifest, as_imported(tensors))
        self.root = manifest.root

    def install(self, manifest: Any, tensors: Any) -> None:
        super().install(manifest, as_imported(tensors))


def as_imported(tensors: Any) -> Any:
    """The mapping that is behind one that nobody read."""
    return tensors._attachment.tensors if isinstance(tensors, UnreadTensors) else tensors


class Rig:
    """A trainer and an engine at version 1, and version 2 on its way."""

    def __init__(self, mode: Mode) -> None:
        self.trainer = SharedMemoryTensorBridge(
            source_worker="trainer", suspicious="off", max_slots=2
        )
        self.bridge = SharedMemoryTensorBridge(source_worker="rollout")
        self.engine = self.weights(0)
        if mode == "verifies":
            self.adapter: Failing = Verifying(self.engine, mode="copy")
        else:
            self.adapter = Failing(self.engine, mode=mode)
        self.executor = RolloutExecutor(
            weight_bridge=self.bridge, weight_install_adapter=self.adapter, suspicious="off"
        )
        self.executor.update_weights(self.publish(1))

    @staticmethod
    def weights(version: int) -> Weights:
        return {"a": torch.full((4,), float(version)), "b": torch.full((3,), float(version))}

    def publish(self, version: int) -> Any:
        manifest = self.trainer.publish(self.weights(version), weight_version=version)
        self.trainer.release(manifest.update_id)  # what a reader holds stays
        return manifest

    @property
    def held(self) -> set[float]:
        return {value for tensor in self.engine.values() for value in tensor.tolist()}

    def check(self) -> None:
        """What is reported, what the engine holds and what the bridge knows are the same."""
        version = self.executor.active_weight_version
        assert self.executor.is_torn == (version is None)
        if version is not None:
            assert self.held == {float(version)}
            assert self.bridge.active_weight_version == version

    def interrupt(self, number: int) -> bool:
        """Install version 2, interrupted before a line; False if the update was over before."""
        manifest = self.publish(2)
        tracer = InterruptBefore(number)
        with suppress(KeyboardInterrupt), tracing(tracer):
            self.executor.update_weights(manifest)
        return tracer.struck

    def go_on(self) -> None:
        """A failed update, then more good ones than there are slots."""
        self.executor.recover()  # an update that was cut off holds a slot until somebody calls
        self.check()
        before = self.executor.active_weight_version
        self.adapter.fails = True
        with pytest.raises(ConnectionError):
            self.executor.update_weights(self.publish(3))
        self.adapter.fails = False
        self.check()
        assert before is None or self.executor.active_weight_version == before
        for version in range(4, 9):
            self.executor.update_weights(self.publish(version))
            assert self.executor.active_weight_version == version
            self.check()

    def close(self) -> None:
        self.executor.close()
        self.bridge.close()
        self.trainer.close()


@pytest.fixture
def nobody_keeps_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python swallows inside a finalizer is let go of, as it is outside of tests.

    (The test runner would keep it, with all frames from there up, and with them the tensors.)
    """
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


@pytest.fixture(autouse=True)
def forks_is_given_back() -> Iterator[None]:
    """Else the next test's threads would wait for it for ever."""
    yield
    found: list[bool] = []

    def take() -> None:
        found.append(FORKS.acquire(timeout=10.0))
        if found[0]:
            FORKS.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    assert found == [True]


@pytest.mark.usefixtures("nobody_keeps_errors")
@pytest.mark.parametrize(
    ("mode", "first"), [("copy", 0), ("alias", 4), ("flip", 8), ("verifies", 2)]
)
def test_an_interrupt_before_any_line_leaves_version_and_bytes_in_agreement(
    mode: Mode, first: int
) -> None:
    number = first
    struck = True
    while struck:
        rig = Rig(mode)
        try:
            struck = rig.interrupt(number)
            rig.check()
            rig.go_on()
        except Exception as error:
            error.add_note(f"interrupted before line number {number}")
            raise
        finally:
            rig.close()
        number += STRIDE
    assert number > 1000


@pytest.mark.usefixtures("nobody_keeps_errors")
def test_an_interrupt_before_any_line_of_a_publication_keeps_no_slot() -> None:
    number = 0
    struck = True
    while struck:
        with SharedMemoryTensorBridge(suspicious="off", max_slots=2) as trainer:
            first = trainer.publish(Rig.weights(1), weight_version=1)
            tracer = InterruptBefore(number)
            with suppress(KeyboardInterrupt), tracing(tracer):
                second = trainer.publish(Rig.weights(2), weight_version=2)
                trainer.release(second.update_id)
            struck = tracer.struck
            latest = trainer.latest_manifest
            assert latest is not None
            assert trainer.update_status(latest.update_id) in {"published", "released"}
            trainer.release(first.update_id)
            trainer.release(latest.update_id)
            for version in (3, 4, 5):
                manifest = trainer.publish(Rig.weights(version), weight_version=version)
                trainer.release(manifest.update_id)
        number += STRIDE
    assert number > 400


def held_of(directory: Path) -> set[str]:
    """What this process holds of segments and of a directory: descriptors, mappings and names."""
    marks = ("rlb-", str(directory))
    found = [path.name for path in directory.rglob("rlb-*")]
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all that is needed
        with suppress(OSError):  # the descriptor of this very listing
            found.append(str(Path(f"/proc/self/fd/{entry}").readlink()))
    lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    found += [line.split(maxsplit=5)[-1] for line in lines]
    return {name for name in found if any(mark in name for mark in marks)}


@pytest.mark.usefixtures("nobody_keeps_errors")
@pytest.mark.parametrize(("is_named", "first"), [(False, 0), (True, 1)], ids=["memfd", "file"])
def test_a_close_that_was_cut_off_before_any_line_is_made_up_for_by_the_next(
    is_named: bool, first: int, tmp_path: Path
) -> None:
    directory = tmp_path / "segments" if is_named else None
    state_dir = tmp_path / "state"
    number = first
    struck = True
    while struck:
        before = held_of(tmp_path)
        trainer = SharedMemoryTensorBridge(
            suspicious="off", directory=directory, state_dir=state_dir
        )
        rollout = SharedMemoryTensorBridge(directory=directory)
        adapter = ModuleInstallAdapter(Rig.weights(0), mode="copy")
        executor = RolloutExecutor(
            weight_bridge=rollout, weight_install_adapter=adapter, suspicious="off"
        )
        for version in (2 * number + 1, 2 * number + 2):
            executor.update_weights(trainer.publish(Rig.weights(1), weight_version=version))
        tracer = InterruptBefore(number)
        with suppress(KeyboardInterrupt), tracing(tracer):
            close_all(executor, rollout, trainer)
        struck = tracer.struck
        close_all(executor, rollout, trainer)
        # Although all of them live: no finalizer did it.
        assert not held_of(tmp_path) - before, f"interrupted before line number {number}"
        number += 2
    assert number > 600


def close_all(*ends: RolloutExecutor | SharedMemoryTensorBridge) -> None:
    for end in ends:
        end.close()
