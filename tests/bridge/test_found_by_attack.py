"""Regressions: each of these once corrupted, crashed, hung or leaked, and was found by attack."""

import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    SharedMemoryTensorBridge,
    TornEngine,
    WeightBridgeUnavailableError,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.errors import BridgeClosed, IncompatibleUpdate, ProofFailed, SegmentError
from rl_bridge.testing.leaks import Holdings
from tests.helpers import forked, forking

MODES = ["copy", "alias", "flip"]


def _weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3, 3), value), "bias": torch.full((3,), value)}


class _Hidden:
    """A seed-style adapter whose engine cannot be seen, beside a module that is not the engine."""

    def __init__(self, beside: torch.nn.Module) -> None:
        self.beside = beside
        self.runner = type("Runner", (), {"model": torch.nn.Linear(3, 3)})()
        self.fail = False

    def install(self, manifest: WeightUpdateManifest, tensors: Any) -> None:
        del manifest
        engine = self.runner.model.state_dict()
        engine["bias"].copy_(tensors["bias"])
        if self.fail:
            self.fail = False
            msg = "half-way"
            raise RuntimeError(msg)
        engine["weight"].copy_(tensors["weight"])

    def release(self, update_id: str) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("beside", [torch.nn.CrossEntropyLoss(), torch.nn.Linear(1, 1)])
def test_a_module_that_is_not_the_engine_does_not_pass_for_its_undo(
    beside: torch.nn.Module,
) -> None:
    adapter = _Hidden(beside)
    with make_weight_bridge("local") as trainer, make_weight_bridge("local") as rollout:
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        executor.update_weights(trainer.publish(_weights(1.0), weight_version=1))
        adapter.fail = True
        with pytest.raises(RuntimeError, match="half-way"):
            executor.update_weights(trainer.publish(_weights(2.0), weight_version=2))
        held = adapter.runner.model.state_dict()
        assert {name: t.flatten()[:1].tolist() for name, t in held.items()} == {
            "weight": [1.0],
            "bias": [1.0],
        }
        fresh = _Hidden(beside)
        fresh.fail = True
        other = RolloutExecutor(
            weight_bridge=make_weight_bridge("local"), weight_install_adapter=fresh
        )
        with pytest.raises(TornEngine):
            other.update_weights(trainer.publish(_weights(3.0), weight_version=3))


def test_undo_puts_buffers_back_that_no_state_dict_shows() -> None:
    class Engine(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("fused", torch.zeros(3), persistent=False)

    class Adapter:
        def __init__(self) -> None:
            self.engine = Engine()

        def install(self, manifest: WeightUpdateManifest, tensors: Any) -> None:
            del manifest
            self.engine.load_state_dict(dict(tensors))
            self.engine.get_buffer("fused").copy_(tensors["bias"])
            msg = "after everything"
            raise RuntimeError(msg)

        def release(self, update_id: str) -> None:
            """Nothing is kept."""

    adapter = Adapter()
    with make_weight_bridge("local") as trainer, make_weight_bridge("local") as rollout:
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        with pytest.raises(RuntimeError, match="after everything"):
            executor.update_weights(trainer.publish(_weights(2.0), weight_version=1))
    assert adapter.engine.get_buffer("fused").tolist() == [0.0, 0.0, 0.0]


def _cut(nbytes: int) -> Callable[[torch.Tensor], None]:
    return lambda tensor: tensor.untyped_storage().resize_(nbytes)


@pytest.mark.parametrize("nbytes", [0, 4])
def test_a_tensor_whose_storage_was_freed_or_cut_is_refused(nbytes: int) -> None:
    with make_weight_bridge("local") as trainer, make_weight_bridge("local") as rollout:
        weights = _weights(1.0)
        first = trainer.publish(weights, weight_version=1)
        _cut(nbytes)(weights["weight"])
        with pytest.raises(WeightBridgeUnavailableError, match="'weight' has lost its storage"):
            trainer.publish(weights, weight_version=2)
        engine = _weights(0.0)
        _cut(nbytes)(engine["weight"])
        adapter = ModuleInstallAdapter(engine)
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        with pytest.raises(IncompatibleUpdate, match=r"'weight'.*has lost its storage"):
            executor.update_weights(first)


@pytest.mark.parametrize("mode", MODES)
def test_a_lazy_conjugate_is_no_proof(mode: Any) -> None:
    class Conjugating(ModuleInstallAdapter):
        def install(self, manifest: Any, tensors: Any) -> None:
            super().install(manifest, tensors)
            engine["w"].data = engine["w"].data.conj()

    engine = {"w": torch.zeros(4, dtype=torch.complex64)}
    with SharedMemoryTensorBridge() as trainer, SharedMemoryTensorBridge() as rollout:
        executor = RolloutExecutor(
            weight_bridge=rollout, weight_install_adapter=Conjugating(engine, mode=mode)
        )
        weights = {"w": torch.full((4,), 1 + 2j, dtype=torch.complex64)}
        with pytest.raises((ProofFailed, TornEngine)):
            executor.update_weights(trainer.publish(weights, weight_version=1))
        assert executor.active_weight_version is None


def test_a_meta_tensor_beside_the_engine_does_not_crash_the_undo() -> None:
    class Adapter:
        def __init__(self) -> None:
            self.engine = torch.nn.Linear(3, 3)
            self.engine.register_buffer("nowhere", torch.empty(3, device="meta"))

        def install(self, manifest: WeightUpdateManifest, tensors: Any) -> None:
            del manifest
            self.engine.load_state_dict(dict(tensors), strict=False)

        def release(self, update_id: str) -> None:
            """Nothing is kept."""

    adapter = Adapter()
    with make_weight_bridge("local") as trainer, make_weight_bridge("local") as rollout:
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        executor.update_weights(trainer.publish(_weights(2.0), weight_version=1))
    assert adapter.engine.weight.flatten()[:1].tolist() == [2.0]


@forking
def test_a_forked_child_is_told_even_if_a_thread_of_its_parent_held_the_locks() -> None:
    with SharedMemoryTensorBridge() as trainer, SharedMemoryTensorBridge() as rollout:
        manifest = trainer.publish(_weights(1.0), weight_version=1)
        executor = RolloutExecutor(weight_bridge=rollout)
        executor.update_weights(manifest)
        locks = [
            trainer._lock,
            trainer.publisher._lock,
            rollout._lock,
            rollout.consumer._lock,
            executor._lock,
        ]
        taken, done = threading.Event(), threading.Event()

        def hold() -> None:
            for lock in locks:
                lock.acquire()
            taken.set()
            done.wait(60)
            for lock in locks:
                lock.release()

        holder = threading.Thread(target=hold)
        holder.start()
        taken.wait(60)

        def child() -> bool:
            signal.alarm(30)  # a hang ends in a signal, and then it says nothing
            calls: list[Callable[[], object]] = [
                lambda: trainer.publish(_weights(2.0), weight_version=2),
                trainer.consumers,
                lambda: rollout.import_update(manifest),
                lambda: rollout.acknowledge(manifest.update_id),
                lambda: rollout.reject(manifest.update_id, "no"),
                lambda: executor.update_weights(manifest),
                executor.release_weights,
                executor.recover,
            ]
            for call in calls:
                with pytest.raises(BridgeClosed, match="belongs to the parent process"):
                    call()
            trainer.close()
            rollout.close()
            return True

        try:
            assert forked(child)
        finally:
            done.set()
            holder.join(60)


def test_kept_exceptions_pin_no_slots() -> None:
    class Failing(ModuleInstallAdapter):
        def install(self, manifest: Any, tensors: Any) -> None:
            msg = f"no {manifest.weight_version} of {len(tensors)}"
            raise RuntimeError(msg)

    kept = []
    with (
        SharedMemoryTensorBridge(max_slots=2) as trainer,
        SharedMemoryTensorBridge() as rollout,
    ):
        executor = RolloutExecutor(
            weight_bridge=rollout, weight_install_adapter=Failing(_weights(0.0))
        )
        for version in range(1, 8):
            manifest = trainer.publish(_weights(float(version)), weight_version=version)
            with pytest.raises(RuntimeError, match=f"no {version} of 2") as caught:
                executor.update_weights(manifest)
            kept.append(caught.value)
            trainer.release(manifest.update_id)
    assert len(kept) == 7


def test_a_bridge_that_is_dropped_instead_of_closed_leaves_nothing() -> None:
    with SharedMemoryTensorBridge(max_consumers=2) as trainer:
        manifest = trainer.publish(_weights(1.0), weight_version=1)
        before = Holdings.now()
        for _ in range(10):
            SharedMemoryTensorBridge(source_worker="dropped").import_update(manifest)
            gc.collect()
        after = Holdings.now()
        assert len(after.descriptors) <= len(before.descriptors)


def test_tensors_moved_within_the_live_range_are_bound_anew() -> None:
    engine = {"a": torch.zeros(64), "b": torch.zeros(64)}
    with SharedMemoryTensorBridge() as trainer, SharedMemoryTensorBridge() as rollout:
        executor = RolloutExecutor(
            weight_bridge=rollout, weight_install_adapter=ModuleInstallAdapter(engine, mode="flip")
        )
        for version in (1, 2, 3):
            weights = {"a": torch.full((64,), version), "b": torch.full((64,), -version)}
            weights = {name: tensor.float() for name, tensor in weights.items()}
            executor.update_weights(trainer.publish(weights, weight_version=version))
            assert engine["a"].flatten()[:1].tolist() == [float(version)]
            assert engine["b"].flatten()[:1].tolist() == [-float(version)]
            engine["a"].data, engine["b"].data = engine["b"].data, engine["a"].data


@pytest.mark.parametrize("mode", MODES)
def test_an_update_may_untie_what_an_earlier_one_tied(mode: Any) -> None:
    engine = {"a": torch.zeros(8), "b": torch.zeros(8)}
    shared = torch.ones(8)
    with SharedMemoryTensorBridge() as trainer, SharedMemoryTensorBridge() as rollout:
        executor = RolloutExecutor(
            weight_bridge=rollout, weight_install_adapter=ModuleInstallAdapter(engine, mode=mode)
        )
        tied = {"a": shared, "b": shared}
        executor.update_weights(trainer.publish(tied, weight_version=1))
        apart = {"a": torch.full((8,), 2.0), "b": torch.full((8,), 3.0)}
        executor.update_weights(trainer.publish(apart, weight_version=2))
        assert engine["a"].flatten()[:1].tolist() == [2.0]
        assert engine["b"].flatten()[:1].tolist() == [3.0]


def test_an_exception_that_cannot_be_printed_comes_out_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    class Adapter(ModuleInstallAdapter):
        def install(self, manifest: Any, tensors: Any) -> None:
            del manifest, tensors
            raise Mute

    with make_weight_bridge("local") as trainer, make_weight_bridge("local") as rollout:
        executor = RolloutExecutor(
            weight_bridge=rollout, weight_install_adapter=Adapter(_weights(0.0))
        )
        manifest = trainer.publish(_weights(1.0), weight_version=1)
        with pytest.raises(Mute):
            executor.update_weights(manifest)
        assert rollout.update_status(manifest.update_id) == "rejected"


def test_a_handle_to_a_terminal_is_never_opened() -> None:
    master, slave = os.openpty()
    try:
        with SharedMemoryTensorBridge() as trainer, SharedMemoryTensorBridge() as rollout:
            manifest = trainer.publish(_weights(1.0), weight_version=1)
            status = os.fstat(slave)
            slot = {**manifest.handle["slot"], "fd": slave}
            slot |= {"device": status.st_dev, "inode": status.st_ino}
            hostile = manifest.model_copy(update={"handle": {**manifest.handle, "slot": slot}})
            with pytest.raises(SegmentError, match="was replaced"):
                rollout.import_update(hostile)
    finally:
        os.close(master)
        os.close(slave)
