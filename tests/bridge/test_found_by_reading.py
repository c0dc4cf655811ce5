"""Defects that a reader found before anybody met them; each test fails without its mend."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, SharedMemoryTensorBridge
from rl_bridge.errors import ForeignTransport, IncompatibleUpdate, WeightBridgeError
from rl_bridge.lifecycle import Event, Transition
from rl_bridge.manifest.canonical import thaw
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.tensors import ModuleState


@pytest.fixture
def trainer() -> Iterator[SharedMemoryTensorBridge]:
    with SharedMemoryTensorBridge(source_worker="trainer", suspicious="off") as bridge:
        yield bridge


@pytest.fixture
def rollout() -> Iterator[SharedMemoryTensorBridge]:
    with SharedMemoryTensorBridge(source_worker="rollout") as bridge:
        yield bridge


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((4,), float(version))}


class Hooked(ModuleInstallAdapter):
    """Calls a function behind its install, or in its commit."""

    behind_install: Any = None
    in_commit: Any = None

    def install(self, manifest: Any, tensors: Any) -> None:
        super().install(manifest, tensors)
        if self.behind_install is not None:
            self.behind_install(manifest)

    def commit(self) -> None:
        if self.in_commit is not None:
            self.in_commit()
        super().commit()


def test_an_update_that_is_released_in_the_middle_is_undone_and_the_next_one_works(
    trainer: SharedMemoryTensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    engine = weights(0)
    adapter = Hooked(engine)
    executor = RolloutExecutor(
        weight_bridge=rollout, weight_install_adapter=adapter, suspicious="off"
    )
    executor.update_weights(trainer.publish(weights(1), weight_version=1))
    adapter.behind_install = lambda manifest: rollout.release(manifest.update_id)
    with pytest.raises(WeightBridgeError):
        executor.update_weights(trainer.publish(weights(2), weight_version=2))
    assert engine["weight"].tolist() == [1.0] * 4
    assert executor.active_weight_version == 1
    adapter.behind_install = None
    executor.update_weights(trainer.publish(weights(3), weight_version=3))
    assert engine["weight"].tolist() == [3.0] * 4


def test_a_state_dict_patched_on_the_module_itself_is_seen() -> None:
    module = torch.nn.Linear(2, 2)
    state = ModuleState(module)
    assert list(state.tensors()) == ["weight", "bias"]
    setattr(module, "state_dict", lambda *_, **__: {"weight": module.weight})  # noqa: B010 - as wrappers do it, against torch's stubs
    assert list(state.tensors()) == ["weight"]


def test_a_forged_manifest_does_not_silence_the_consumer(
    trainer: SharedMemoryTensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    first = trainer.publish(weights(1), weight_version=1)
    rollout.import_update(first)
    rollout.acknowledge(first.update_id)
    second = trainer.publish(weights(2), weight_version=2)
    handle: Any = thaw(second.handle)
    handle["control"]["inode"] += 1
    forged = second.model_copy(update={"handle": handle, "update_id": "f" * 32})
    with pytest.raises(WeightBridgeError):
        rollout.import_update(forged)
    rollout.import_update(second)
    rollout.acknowledge(second.update_id)
    told = {report.state for report in trainer.holders(second.update_id)}
    assert told == {"acknowledged"}


def test_a_manifest_refused_at_the_door_leaves_the_good_update_of_its_id_alone(
    trainer: SharedMemoryTensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    good = trainer.publish(weights(1), weight_version=1)
    executor = RolloutExecutor(
        weight_bridge=rollout, weight_install_adapter=ModuleInstallAdapter(weights(0))
    )
    rollout.import_update(good)
    with pytest.raises(ForeignTransport):
        executor.update_weights(good.model_copy(update={"transport": "local-clone"}))
    executor.update_weights(good)
    assert executor.active_weight_version == 1


def test_a_rejected_update_that_an_observer_releases_at_once_stays_rejected(
    trainer: SharedMemoryTensorBridge,
) -> None:
    def release_what_was_rejected(step: Transition) -> None:
        if step.event is Event.REJECT:
            watched.release(step.update_id)

    with SharedMemoryTensorBridge(
        source_worker="rollout", observer=release_what_was_rejected
    ) as watched:
        manifest = trainer.publish(weights(1), weight_version=1)
        watched.import_update(manifest)
        watched.reject(manifest.update_id, "not this one")
        with pytest.raises(WeightBridgeError, match="was rejected"):
            watched.import_update(manifest)


class OwnConsumer:
    """A bridge of a user's own: the four verbs, and what was said."""

    def __init__(self, inner: SharedMemoryTensorBridge) -> None:
        self._inner = inner
        self.said: list[str] = []

    def import_update(self, manifest: WeightUpdateManifest) -> Any:
        return self._inner.import_update(manifest)

    def acknowledge(self, update_id: str) -> None:
        self._inner.acknowledge(update_id)
        self.said.append("acknowledged")

    def reject(self, update_id: str, reason: str) -> None:
        self._inner.reject(update_id, reason)
        self.said.append("rejected")

    def release(self, update_id: str) -> None:
        self._inner.release(update_id)


def test_an_interrupt_behind_the_acknowledgement_rejects_nothing_on_a_bridge_of_ones_own(
    trainer: SharedMemoryTensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    def interrupt() -> None:
        adapter.in_commit = None
        raise KeyboardInterrupt

    engine = weights(0)
    adapter = Hooked(engine)
    own = OwnConsumer(rollout)
    executor = RolloutExecutor(weight_bridge=own, weight_install_adapter=adapter)
    adapter.in_commit = interrupt
    with pytest.raises(KeyboardInterrupt):
        executor.update_weights(trainer.publish(weights(1), weight_version=1))
    assert executor.active_weight_version == 1
    executor.recover()
    assert (executor.active_weight_version, own.said) == (1, ["acknowledged"])
    assert engine["weight"].tolist() == [1.0] * 4


def test_a_library_imported_in_inference_mode_refuses_views_all_the_same() -> None:
    program = """
import torch
with torch.inference_mode():
    from rl_bridge import ModuleInstallAdapter
module = torch.nn.Linear(2, 2)
try:
    ModuleInstallAdapter(module.state_dict(), mode="alias")
except ValueError as error:
    print("refused", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("refused")


def test_a_sparse_tensor_beside_the_updates_own_is_a_misfit(
    trainer: SharedMemoryTensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    engine = {**weights(0), "sparse": torch.zeros(3).to_sparse()}
    executor = RolloutExecutor(
        weight_bridge=rollout, weight_install_adapter=ModuleInstallAdapter(engine)
    )
    with pytest.raises(IncompatibleUpdate, match="sparse"):
        executor.update_weights(trainer.publish(weights(1), weight_version=1))
