"""Alias and flip give tensors other storages: what only looks at an engine's memory is refused."""

import subprocess
import sys
from collections.abc import Callable
from typing import Literal

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    make_weight_bridge,
)

Mode = Literal["alias", "flip"]


Dict = dict[str, torch.Tensor]


every_mode = pytest.mark.parametrize("mode", ["alias", "flip"])


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(4, 4)


def slices(fused: torch.Tensor) -> Dict:
    return {"q": fused[:2], "k": fused[2:]}


LOOKING: dict[str, Callable[[torch.nn.Linear], Dict]] = {
    "state dict": lambda module: module.state_dict(),
    "data": lambda module: {name: p.data for name, p in module.named_parameters()},
    "slices of a fused weight": lambda module: slices(module.weight),
    "slices of its data": lambda module: slices(module.weight.data),
    "transposed": lambda module: {"w": module.weight.detach().t()},
}


@every_mode
@pytest.mark.parametrize("what", LOOKING)
def test_tensors_that_only_look_at_the_engines_memory_are_refused(mode: Mode, what: str) -> None:
    module = linear()
    with pytest.raises(ValueError, match=r"a tensor outside of the dict looks too.*mode='copy'"):
        ModuleInstallAdapter(LOOKING[what](module), mode=mode)


def test_a_copy_into_tensors_that_look_at_the_engines_memory_updates_the_engine() -> None:
    module, source = linear(), linear()
    executor = RolloutExecutor(
        weight_bridge=make_weight_bridge("local-clone"),
        weight_install_adapter=ModuleInstallAdapter(slices(module.weight.data)),
    )
    trainer = make_weight_bridge("local-clone")
    executor.update_weights(trainer.publish(slices(source.weight.data), weight_version=1))
    assert executor.last_ack is not None
    assert executor.last_ack.proof.method == "digest"
    assert torch.equal(module.weight, source.weight)


def tied() -> Dict:
    memory = torch.zeros(4)
    return {"embed": memory, "head": memory}


OWN: dict[str, Callable[[], Dict]] = {
    "plain": lambda: {"w": torch.zeros(4)},
    "parameters": lambda: dict(linear().named_parameters()),
    "state dict of nothing else": lambda: linear().state_dict(),
    "view of nothing else": lambda: {"w": torch.zeros(12).view(3, 4).t()},
    "both halves": lambda: dict(zip("ab", torch.zeros(2, 2).unbind(), strict=True)),
    "tied": tied,
    "empty": lambda: {"w": torch.zeros(0)},
    "made without gradients": torch.no_grad()(lambda: {"w": torch.zeros(12).view(3, 4)}),
}


@every_mode
@pytest.mark.parametrize("what", OWN)
def test_tensors_of_nobody_else_are_taken(mode: Mode, what: str) -> None:
    ModuleInstallAdapter(OWN[what](), mode=mode)


@every_mode
def test_the_parameters_of_a_module_that_lives_are_its_own(mode: Mode) -> None:
    module = linear()
    ModuleInstallAdapter(dict(module.named_parameters()), mode=mode)
    ModuleInstallAdapter(module.state_dict(keep_vars=True), mode=mode)


@every_mode
def test_an_engine_is_taken_again_after_its_executor_was_closed(mode: Mode) -> None:
    engine = {"w": torch.zeros(4)}
    for version in (1, 2):
        with (
            make_weight_bridge("shared-memory") as trainer,
            make_weight_bridge("shared-memory") as rollout,
            RolloutExecutor(
                weight_bridge=rollout,
                weight_install_adapter=ModuleInstallAdapter(engine, mode=mode),
            ) as executor,
        ):
            weights = {"w": torch.full((4,), float(version))}
            executor.update_weights(trainer.publish(weights, weight_version=version))
        assert engine["w"].tolist() == [version] * 4


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
