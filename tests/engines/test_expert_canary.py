"""Packed experts are asked for products by vLLM's own kernel, without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from rl_bridge.engines.vllm.canary import check_experts
from rl_bridge.errors import ProofFailed
from tests.engines.matrix import few_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# experts, intermediate, hidden
SHAPES = [(4, 32, 64), (3, 768, 1024)]
EACH_DTYPE = pytest.mark.parametrize("dtype", few_of(DTYPES, "float32", "bfloat16"))


def pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = cpu_prepack_moe_weight(weight.contiguous(), "vec")
    return packed


class Layer:
    """Experts with the kernel that computes with them, as vLLM keeps them."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        activation: Any,
        scale: float = 1.0,
    ) -> None:
        experts, intermediate, hidden = shape
        made = torch.Generator().manual_seed(7)
        first = torch.randn(experts, 2 * intermediate, hidden, generator=made).to(dtype)
        second = torch.randn(experts, hidden, intermediate, generator=made).to(dtype)
        self.weights = {"w13_weight": first * 0.02, "w2_weight": second * 0.02 * scale}
        self.kernel: Any = object.__new__(CPUUnquantizedExperts)
        self.kernel._use_zentorch = False
        self.kernel.quant_config = SimpleNamespace(w1_bias=None, w2_bias=None)
        self.state: dict[str, Any] = {
            "activation": activation,
            "quant_method": SimpleNamespace(
                moe_kernel=SimpleNamespace(fused_experts=self.kernel),
            ),
            "_parameters": {leaf: pack(weight) for leaf, weight in self.weights.items()},
        }

    def is_asked(self) -> bool:
        return check_experts("mlp.experts", self.state, self.weights)


@EACH_DTYPE
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_that_are_packed_as_their_kernel_reads_them_pass(
    shape: tuple[int, int, int], activation: str, dtype: str
) -> None:
    assert Layer(shape, DTYPES[dtype], MoEActivation(activation)).is_asked()


@EACH_DTYPE
@pytest.mark.parametrize("scale", [0.0, 2.5e-5, 0.025, 1.0])
def test_weights_so_small_that_their_products_are_coarse_pass(scale: float, dtype: str) -> None:
    layer = Layer((4, 768, 2048), DTYPES[dtype], MoEActivation.SILU, scale)
    assert layer.is_asked()


@EACH_DTYPE
@pytest.mark.parametrize("leaf", ["w13_weight", "both"])
@pytest.mark.parametrize("made_of", ["constants", "one_row"])
def test_experts_whose_products_cancel_pass(made_of: str, leaf: str, dtype: str) -> None:
    layer = Layer((4, 256, 512), DTYPES[dtype], MoEActivation.SILU)
    for name in layer.weights if leaf == "both" else [leaf]:
        weight = layer.weights[name].float()
        weight = (
            weight[:, :1] * weight[:, :, :1] * 50 if made_of == "one_row" else weight * 0 + 0.01
        )
        layer.weights[name] = weight.to(DTYPES[dtype])
        layer.state["_parameters"][name] = pack(layer.weights[name])
    assert layer.is_asked()


@EACH_DTYPE
@pytest.mark.parametrize("leaf", ["w13_weight", "w2_weight"])
@pytest.mark.parametrize("wrong", ["shifted", "two_rows", "not_packed", "another_expert"])
@pytest.mark.parametrize("shape", SHAPES[:1], ids=str)
def test_experts_that_are_packed_as_something_else_are_named(
    shape: tuple[int, int, int], wrong: str, leaf: str, dtype: str
) -> None:
    layer = Layer(shape, DTYPES[dtype], MoEActivation.SILU)
    given, packed = layer.weights[leaf], layer.state["_parameters"][leaf]
    made = {
        "shifted": lambda: pack(given.roll(1, 2)),
        "two_rows": lambda: pack(given[:, [1, 0, *range(2, given.shape[1])]]),
        "not_packed": lambda: given,
        "another_expert": lambda: pack(given.flip(0)),
    }[wrong]()
    packed[-1] = made[-1]  # of one expert only
    with pytest.raises(ProofFailed, match=f"'mlp.experts'.*expert {shape[0] - 1} "):
        layer.is_asked()


@pytest.mark.parametrize("why", ["bias", "activation", "kernel"])
def test_experts_that_nobody_knows_how_to_ask_are_not(why: str) -> None:
    """They are packed twice and compared all the same, and digested in every proof."""
    layer = Layer(SHAPES[0], torch.float32, MoEActivation.SILU)
    if why == "bias":
        layer.state["_parameters"]["w13_bias"] = torch.zeros(1)
    if why == "activation":
        layer.state["activation"] = MoEActivation.SWIGLUOAI
    if why == "kernel":
        layer.kernel.apply = lambda output, hidden_states: None
    assert not layer.is_asked()
