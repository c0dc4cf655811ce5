"""Tied names: an update may hold one of them, or all with equal bytes, and nothing else."""

from typing import Literal

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    SharedMemoryTensorBridge,
    make_weight_bridge,
)
from rl_bridge.errors import IncompatibleUpdate

Mode = Literal["copy", "alias", "flip"]
MODES: list[Mode] = ["copy", "alias", "flip"]
every_mode = pytest.mark.parametrize("mode", MODES)


def tied_model(value: float, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(3, 2, dtype=dtype)
    model.head = torch.nn.Linear(2, 3, bias=False, dtype=dtype)
    model.head.weight = model.embed.weight
    torch.nn.init.constant_(model.embed.weight, value)
    return model


def executor_of(engine: torch.nn.Module, mode: Mode, *, strict: bool = True) -> RolloutExecutor:
    return RolloutExecutor(
        weight_bridge=make_weight_bridge("shared-memory", source_worker="rollout"),
        weight_install_adapter=ModuleInstallAdapter(engine, mode=mode, strict=strict),
        suspicious="off",
    )


def cast(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """As people publish it: every name a tensor of its own."""
    return {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}


def held(engine: torch.nn.Module) -> set[float]:
    return {value for tensor in engine.state_dict().values() for value in tensor.flatten().tolist()}


@every_mode
def test_a_cast_that_parts_tied_tensors_fits_as_long_as_their_bytes_are_equal(
    mode: Mode, trainer: SharedMemoryTensorBridge
) -> None:
    engine = tied_model(0.0, torch.bfloat16)
    executor = executor_of(engine, mode)
    for version in (1, 2, 3):
        manifest = trainer.publish(cast(tied_model(version)), weight_version=version)
        executor.update_weights(manifest)
        assert held(engine) == {version}
        assert engine.head.weight is engine.embed.weight  # type: ignore[union-attr]
        trainer.release(manifest.update_id)


@every_mode
@pytest.mark.parametrize("is_first", [True, False])
def test_tied_names_with_different_bytes_are_refused_before_the_engine_is_touched(
    mode: Mode, trainer: SharedMemoryTensorBridge, *, is_first: bool
) -> None:
    engine = tied_model(0.0, torch.bfloat16)
    executor = executor_of(engine, mode)
    if not is_first:  # the layout is known then, and matched already
        executor.update_weights(trainer.publish(cast(tied_model(0.0)), weight_version=1))
    weights = cast(tied_model(5.0))
    weights["head.weight"][1, 1] = 6.0
    with pytest.raises(IncompatibleUpdate, match=r"ties 'embed.weight' and 'head.weight'"):
        executor.update_weights(trainer.publish(weights, weight_version=2))
    assert held(engine) == {0.0}
    executor.update_weights(trainer.publish(cast(tied_model(3.0)), weight_version=3))
    assert held(engine) == {3.0}


@every_mode
def test_one_name_of_tied_tensors_covers_them_all(
    mode: Mode, trainer: SharedMemoryTensorBridge
) -> None:
    engine = tied_model(0.0)
    executor = executor_of(engine, mode)
    for version in (1, 2):
        # named_parameters leaves the second name of a tied parameter out.
        source = dict(tied_model(version).named_parameters())
        assert len(source) == 1
        executor.update_weights(trainer.publish(source, weight_version=version))
        assert held(engine) == {version}


@every_mode
def test_a_name_that_was_covered_and_is_untied_is_missed(
    mode: Mode, trainer: SharedMemoryTensorBridge
) -> None:
    engine = tied_model(0.0)
    executor = executor_of(engine, mode)
    source = dict(tied_model(1.0).named_parameters())
    executor.update_weights(trainer.publish(source, weight_version=1))
    engine.head.weight = torch.nn.Parameter(torch.full((3, 2), 9.0))  # type: ignore[union-attr]
    with pytest.raises(IncompatibleUpdate, match=r"does not hold \['head.weight'\]"):
        executor.update_weights(trainer.publish(source, weight_version=2))


class Loading:
    """An adapter of the user's own; which of the tied names it writes last is its affair."""

    def __init__(self, engine: torch.nn.Module, names: list[str]) -> None:
        self.engine = engine
        self.names = names

    def install(self, manifest: object, tensors: dict[str, torch.Tensor]) -> None:
        for name in self.names:
            self.engine.state_dict()[name].copy_(tensors[name])

    def release(self, update_id: str) -> None:
        pass


@pytest.mark.parametrize(
    "names", [["embed.weight", "head.weight"], ["head.weight", "embed.weight"]]
)
def test_an_engine_that_cannot_hold_both_of_two_weights_proves_neither(
    names: list[str], trainer: SharedMemoryTensorBridge
) -> None:
    engine = tied_model(0.0)
    executor = RolloutExecutor(
        weight_bridge=make_weight_bridge("shared-memory", source_worker="rollout"),
        weight_install_adapter=Loading(engine, names),  # type: ignore[arg-type]  # by its verbs
    )
    weights = {"embed.weight": torch.ones(3, 2), "head.weight": torch.zeros(3, 2)}
    executor.update_weights(trainer.publish(weights, weight_version=1))
    assert executor.last_ack is not None
    assert executor.last_ack.proof.method == "unproven"
