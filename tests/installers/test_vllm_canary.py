"""Canaries of packed weights: each layer that serves is looked at, each pack is asked once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl_bridge.engines.vllm import canary
from rl_bridge.engines.vllm.canary import PackCanary
from rl_bridge.errors import ProofFailed


class Pack:
    """A packed weight, which counts how often it is asked."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.clone()
        self.asked = 0

    def __call__(self, given: torch.Tensor, weight: Any, bias: None) -> torch.Tensor:
        del weight, bias
        self.asked += 1
        return torch.nn.functional.linear(given, self.weight)


@pytest.fixture
def narrow() -> Iterator[None]:
    """As in an engine that loads its model in bf16."""
    canary.question.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("narrow")
def test_a_pack_is_asked_the_same_under_another_default_dtype() -> None:
    asked = canary.question(24, torch.float32)
    assert asked.dtype == torch.float32
    assert asked.abs().sum(0).tolist() == [1] * 24


def layer(pack: Pack, weight: torch.nn.Parameter) -> torch.nn.Module:
    made = torch.nn.Module()
    made.weight = weight
    vars(made)["cpu_linear"] = pack
    return made


def tied() -> tuple[Pack, list[torch.nn.Module], list[PackCanary]]:
    """Two layers that compute with one pack of one parameter."""
    weight = torch.nn.Parameter(torch.randn(6, 16))
    pack = Pack(weight.detach())
    layers = [layer(pack, weight) for _ in range(2)]
    first = PackCanary.make("embed", layers[0], pack, weight)
    second = PackCanary("head", layers[1], pack, first.inputs, first.answer)
    pack.asked = 0
    return pack, layers, [first, second]


def prove(canaries: list[PackCanary]) -> None:
    answered: set[tuple[int, int]] = set()
    for one in canaries:
        one.check(answered)


def test_a_pack_that_tied_layers_share_is_asked_once_for_all_of_them() -> None:
    pack, _, canaries = tied()
    prove(canaries)
    assert pack.asked == 1
    prove(canaries)  # each proof asks anew
    assert pack.asked == 2


@pytest.mark.parametrize(("index", "name"), [(0, "embed"), (1, "head")])
def test_a_tied_layer_that_computes_with_another_pack_is_named(index: int, name: str) -> None:
    pack, layers, canaries = tied()
    vars(layers[index])["cpu_linear"] = Pack(pack.weight)
    with pytest.raises(ProofFailed, match=f"'{name}': its packed weight is not the one"):
        prove(canaries)


def test_a_pack_that_went_bad_is_found() -> None:
    pack, _, canaries = tied()
    pack.weight[3, 5] += 1
    with pytest.raises(ProofFailed, match="answers otherwise"):
        prove(canaries)


def test_a_tied_layer_with_another_parameter_is_asked_by_itself() -> None:
    pack, layers, canaries = tied()
    layers[1].weight = torch.nn.Parameter(torch.zeros(6, 16))
    prove(canaries)
    assert pack.asked == 2


def cancelling(inputs: int) -> torch.Tensor:
    """A weight of equal rows, whose products with the question are nothing but rounding."""
    asked = canary.question(inputs, torch.float64)
    row = torch.randn(inputs, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    row -= asked.t() @ ((asked @ row) / asked.square().sum(1))
    return row.float().expand(6, inputs).contiguous()


def test_a_pack_passes_whose_products_cancel() -> None:
    """It sums in another order."""
    weight = cancelling(4096)

    def product(given: torch.Tensor, _weight: Any, _bias: None) -> torch.Tensor:
        return (given.flip(1) * weight[0].flip(0)).cumsum(1)[:, -1:].expand(-1, 6)

    PackCanary.make("layer", torch.nn.Module(), product, weight)


@pytest.mark.parametrize("size", [1e-6, 1e-7])
def test_a_pack_of_numbers_so_small_that_products_are_coarse_passes(size: float) -> None:
    weight = torch.full((6, 64), size, dtype=torch.float16)

    def product(given: torch.Tensor, _weight: Any, _bias: None) -> torch.Tensor:
        found = given @ weight.t()
        return found + torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps

    PackCanary.make("layer", torch.nn.Module(), product, weight)


def test_a_pack_of_another_weight_is_named_where_products_cancel() -> None:
    weight = cancelling(4096)
    other = weight.clone()
    other[2, 7] *= 1.1
    with pytest.raises(ProofFailed, match="layer 'layer'"):
        PackCanary.make("layer", torch.nn.Module(), Pack(other), weight)
