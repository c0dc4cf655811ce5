"""Canaries of packed weights: each layer that serves is looked at, each pack is asked once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl_bridge.errors import ProofFailed
from rl_bridge.installers.vllm import canary
from rl_bridge.installers.vllm.canary import Canary


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


def tied() -> tuple[Pack, list[torch.nn.Module], list[Canary]]:
    """Two layers that compute with one pack of one parameter."""
    weight = torch.nn.Parameter(torch.randn(6, 16))
    pack = Pack(weight.detach())
    layers = [layer(pack, weight) for _ in range(2)]
    first = Canary.make("embed", layers[0], pack, weight)
    second = Canary("head", layers[1], pack, first.inputs, first.answer)
    pack.asked = 0
    return pack, layers, [first, second]


def prove(canaries: list[Canary]) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [0.1, 1e-6])
def test_a_pack_passes_whose_products_cancel(size: float, dtype: torch.dtype) -> None:
    """One that sums in another order, of a weight of which all rows and columns are alike."""
    weight = torch.full((6, 4096), size, dtype=dtype)
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(3))

    def product(given: torch.Tensor, _weight: Any, _bias: None) -> torch.Tensor:
        halves = (given[:, order].float() * weight[0, 0].float()).chunk(2, dim=1)
        sums = (halves[0].cumsum(1)[:, -1] + halves[1].cumsum(1)[:, -1]).unsqueeze(1)
        return sums.expand(-1, 6).to(dtype)

    Canary.make("layer", torch.nn.Module(), product, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pack_of_another_weight_is_named_where_products_cancel(dtype: torch.dtype) -> None:
    weight = torch.full((6, 4096), 0.1, dtype=dtype)
    other = weight.clone()
    other[2, 7] = 0.2
    with pytest.raises(ProofFailed, match="layer 'layer'"):
        Canary.make("layer", torch.nn.Module(), Pack(other), weight)
