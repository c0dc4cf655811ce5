"""Engines that are not left alone: untied, reloaded, updated under torch's global modes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, SharedMemoryTensorBridge, TensorBridge
from rl_bridge.errors import (
    IncompatibleUpdate,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.memory.tensors import ModuleState
from rl_bridge.remote import TwoPhaseExecutor
from tests.bridge.engines import fours

Mode = Literal["copy", "alias", "flip"]


MODES: list[Mode] = ["copy", "alias", "flip"]


def executor_of(adapter: ModuleInstallAdapter) -> RolloutExecutor:
    return RolloutExecutor(
        weight_bridge=SharedMemoryTensorBridge(source_worker="rollout"),
        weight_install_adapter=adapter,
        suspicious="off",
    )


def tied(value: float) -> dict[str, torch.Tensor]:
    weight = torch.full((4,), float(value))
    return {"embed": weight, "head": weight}


def test_two_objects_over_one_memory_that_part_later_are_both_updated(
    trainer: TensorBridge,
) -> None:
    memory = torch.zeros(4)
    engine = {"embed": memory, "head": memory.view(4)}
    executor = executor_of(ModuleInstallAdapter(engine))
    executor.update_weights(trainer.publish(tied(1), weight_version=1))
    engine["head"].data = engine["head"].data.clone()  # as after an offload and a reload
    executor.update_weights(trainer.publish(tied(2), weight_version=2))
    assert {name: tensor.tolist() for name, tensor in engine.items()} == {
        "embed": [2.0] * 4,
        "head": [2.0] * 4,
    }


def test_two_objects_that_part_during_an_install_fail_the_proof(
    trainer: TensorBridge,
) -> None:
    memory = torch.zeros(4)
    engine = {"embed": memory, "head": memory.view(4)}

    class Parting(ModuleInstallAdapter):
        def install(self, manifest: Any, tensors: Any) -> None:
            super().install(manifest, tensors)
            engine["head"].data = torch.full((4,), -7.0)

    executor = executor_of(Parting(engine))
    with pytest.raises(WeightBridgeError, match="tensors moved during the install"):
        executor.update_weights(trainer.publish(tied(1), weight_version=1))
    assert executor.active_weight_version is None


CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference-mode": torch.inference_mode,
    "no-grad": torch.no_grad,
    "device-meta": lambda: torch.device("meta"),
    "plain": nullcontext,
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("mode", MODES)
def test_updates_under_torchs_global_modes_leave_ordinary_parameters(
    mode: Mode, context: str, trainer: TensorBridge
) -> None:
    engine, source = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    for module in (engine, source):
        module.register_buffer("nothing", torch.zeros(0, 3))
        module.register_buffer("count", torch.tensor(0))
    executor = executor_of(ModuleInstallAdapter(engine, mode=mode))
    for version in (1, 2, 3):
        with torch.no_grad():
            source.weight.fill_(version)
        manifest = trainer.publish(source, weight_version=version)
        with CONTEXTS[context]():
            executor.update_weights(manifest)
        assert engine.weight[0, 0].item() == version
    assert not any(tensor.is_inference() for tensor in engine.state_dict().values())
    assert {tensor.device.type for tensor in engine.state_dict().values()} == {"cpu"}
    engine(torch.ones(1, 4)).sum().backward()
    assert engine.weight.grad is not None


@pytest.mark.parametrize("mode", MODES)
def test_a_lazy_negative_of_one_element_fails_the_proof(mode: Mode, trainer: TensorBridge) -> None:
    engine = {"scale": torch.zeros(1)}

    class Negating(ModuleInstallAdapter):
        def install(self, manifest: Any, tensors: Any) -> None:
            super().install(manifest, tensors)
            engine["scale"].data = torch._neg_view(engine["scale"].data)

    executor = executor_of(Negating(engine, mode=mode))
    with pytest.raises(WeightBridgeError):
        executor.update_weights(trainer.publish({"scale": torch.ones(1)}, weight_version=1))
    assert executor.active_weight_version is None


class Picky(ModuleInstallAdapter):
    """Refuses, or fails behind the install, where it is told to."""

    refuses = fails = False

    def prepare(self, manifest: Any, tensors: Any) -> None:
        super().prepare(manifest, tensors)
        if self.refuses:
            raise ConnectionRefusedError

    def install(self, manifest: Any, tensors: Any) -> None:
        super().install(manifest, tensors)
        if self.fails:
            raise ConnectionError


@pytest.mark.parametrize("mode", MODES)
def test_an_undo_goes_back_to_the_engine_as_it_was_then_not_as_a_refused_update_found_it(
    mode: Mode, trainer: TensorBridge
) -> None:
    engine = {"weight": torch.zeros(4)}
    adapter = Picky(engine, mode=mode)
    executor = executor_of(adapter)
    adapter.refuses = True
    with pytest.raises(ConnectionRefusedError):
        executor.update_weights(trainer.publish({"weight": torch.ones(4)}, weight_version=1))
    adapter.refuses, adapter.fails = False, True
    engine["weight"] = torch.full((4,), 42.0)  # a checkpoint, loaded meanwhile
    loaded = engine["weight"]
    with pytest.raises(ConnectionError):
        executor.update_weights(trainer.publish({"weight": torch.ones(4)}, weight_version=2))
    assert engine["weight"] is loaded
    assert loaded.tolist() == [42.0] * 4


def test_a_held_version_does_not_show_what_the_engine_wrote_over_it(
    trainer: TensorBridge,
) -> None:
    engine = {"weight": torch.zeros(4)}
    executor = executor_of(ModuleInstallAdapter(engine, mode="flip"))
    held = executor.update_weights(trainer.publish({"weight": torch.ones(4)}, weight_version=1))[
        "weight"
    ]
    engine["weight"].fill_(77)
    executor.update_weights(trainer.publish({"weight": torch.full((4,), 2.0)}, weight_version=2))
    assert held.tolist() == [1.0] * 4


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


def test_a_sparse_tensor_beside_the_updates_own_is_a_misfit(
    trainer: TensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    engine = {**fours(0), "sparse": torch.zeros(3).to_sparse()}
    executor = RolloutExecutor(
        weight_bridge=rollout, weight_install_adapter=ModuleInstallAdapter(engine)
    )
    with pytest.raises(IncompatibleUpdate, match="sparse"):
        executor.update_weights(trainer.publish(fours(1), weight_version=1))


def test_a_state_dict_patched_on_the_module_itself_is_seen() -> None:
    module = torch.nn.Linear(2, 2)
    state = ModuleState(module)
    assert list(state.tensors()) == ["weight", "bias"]
    setattr(module, "state_dict", lambda *_, **__: {"weight": module.weight})  # noqa: B010 - as wrappers do it, against torch's stubs
    assert list(state.tensors()) == ["weight"]


@pytest.mark.parametrize("is_reused", [False, True], ids=["freed", "somebody else's now"])
def test_tensors_that_moved_between_prepare_and_install_are_not_written_through_old_addresses(
    trainer: TensorBridge, *, is_reused: bool
) -> None:
    engine = torch.nn.Linear(1 << 12, 1, bias=False)
    source = torch.nn.Linear(1 << 12, 1, bias=False)
    executor = TwoPhaseExecutor(
        weight_bridge=SharedMemoryTensorBridge(source_worker="rollout"),
        weight_install_adapter=ModuleInstallAdapter(engine),
    )
    manifest = trainer.publish(source, weight_version=1)
    executor.import_weights(manifest)
    executor.prepare_weights(manifest)
    before = engine.weight.detach().clone()
    old = engine.weight.data if is_reused else None
    engine.weight.data = engine.weight.data.clone()  # as an offload and a wake-up do
    with pytest.raises(WeightBridgeUnavailableError, match="moved between prepare"):
        executor.commit_weights(manifest)
    assert torch.equal(engine.weight, before)
    assert old is None or torch.equal(old, before)
    assert not executor.is_torn
    executor.update_weights(manifest)
    assert torch.equal(engine.weight, source.weight)
