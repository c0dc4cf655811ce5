"""Loaders that do more than copy: what they do to a tensor or a buffer is not taken for a copy."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from rl_bridge.engines.load_plan import LoadPlan, learn
from rl_bridge.engines.skeleton import EngineCompat
from rl_bridge.errors import IncompatibleUpdate

Loads = Callable[["Layer", torch.Tensor], Any]

WIDTH = 8
# One of which the trial takes little, one of which it takes much: numbers of one and more digits.
ROWS = (64, 300_000)


class Layer(torch.nn.Module):
    """A parameter, a buffer, and a loader."""

    def __init__(self, rows: int, loads: Loads) -> None:
        super().__init__()
        made = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device="meta")
        self.weight = torch.nn.Parameter(made, requires_grad=False)
        self.register_buffer("table", torch.empty_like(made))
        self._loads = loads

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What engines do."""
        for _, tensor in given:
            self._loads(self, tensor)


def learned(rows: int, loads: Loads) -> LoadPlan:
    kinds = {"weight": (torch.bfloat16, (rows, WIDTH))}
    return learn(Layer(rows, loads), kinds, EngineCompat(), admit=lambda *_: None)


def changing(change: Callable[[torch.Tensor], Any]) -> Loads:
    def loads(layer: Layer, tensor: torch.Tensor) -> None:
        change(tensor)
        layer.weight.data.copy_(tensor)

    return loads


def with_a_buffer(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> Loads:
    def loads(layer: Layer, tensor: torch.Tensor) -> None:
        layer.weight.data.copy_(tensor)
        write(layer.get_buffer("table"), tensor)

    return loads


def with_memory_of_its_own(layer: Layer, tensor: torch.Tensor) -> None:
    torch.empty_like(tensor).copy_(tensor).mul_(2)
    layer.get_buffer("table").zero_()
    layer.weight.data.copy_(tensor)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "zeroed": lambda tensor: tensor.zero_(),
    "doubled": lambda tensor: tensor.mul_(2),
    "negated": lambda tensor: torch.neg(tensor, out=tensor),
    "a row": lambda tensor: tensor[3].fill_(1),
    "in a list": lambda tensor: torch._foreach_zero_([tensor]),  # as optimizers do
}


def behind_the_library(tensor: torch.Tensor) -> None:
    """As compiled code does: no call of torch's tells of it."""
    if tensor.device.type != "meta":
        tensor.numpy()[5] = 0


BUFFERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "copied": lambda table, tensor: table.copy_(tensor),
    "computed": lambda table, tensor: table.copy_(tensor * 2),
    "by out=": lambda table, tensor: torch.neg(tensor, out=table),
}


@pytest.mark.parametrize("rows", ROWS)
def test_a_loader_may_use_memory_of_its_own_and_clear_a_buffer(rows: int) -> None:
    assert learned(rows, with_memory_of_its_own).taken == {"weight"}


@pytest.mark.parametrize("how", CHANGES)
def test_a_tensor_that_its_loader_changes_is_not_taken_for_copied(how: str) -> None:
    with pytest.raises(IncompatibleUpdate, match="'weight' is changed by the loader"):
        learned(64, changing(CHANGES[how]))


@pytest.mark.parametrize("rows", ROWS)
def test_what_changes_a_tensor_unseen_is_found_by_its_numbers(rows: int) -> None:
    with pytest.raises(IncompatibleUpdate, match="did not put tensor 'weight' twice"):
        learned(rows, changing(behind_the_library))


@pytest.mark.parametrize("how", BUFFERS)
def test_a_buffer_that_is_made_of_an_update_is_named(how: str) -> None:
    with pytest.raises(IncompatibleUpdate, match="buffer 'table' is loaded"):
        learned(64, with_a_buffer(BUFFERS[how]))


@pytest.mark.parametrize(
    ("to", "given"),
    [
        (torch.int16, torch.bfloat16),
        (torch.bfloat16, torch.int16),
        (torch.int16, torch.int16),
    ],
)
def test_bytes_that_are_read_as_other_numbers_are_no_copy(
    to: torch.dtype, given: torch.dtype
) -> None:
    def loads(layer: Layer, tensor: torch.Tensor) -> None:
        layer.weight.data.view(to).copy_(tensor.view(given))

    with pytest.raises(IncompatibleUpdate, match="'weight' is computed from the checkpoint"):
        learned(64, loads)
