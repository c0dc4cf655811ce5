"""What shows that packed experts are packed as their kernel reads them.

On the CPU, vLLM packs the weights of experts for a kernel of its own. Such a pack can be read, and
is digested in every proof, but in an order that only that kernel knows. So it is asked, expert by
expert, for products of a fixed input, when the pack is made and the weights are still at hand.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from rl_bridge.engines.canary import ROWS, norms, question
from rl_bridge.errors import ProofFailed

__all__ = [
    "check_experts",
]

_LOG = logging.getLogger(__name__)

_WEIGHTS = ("w13_weight", "w2_weight")
_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
}
# What vLLM 0.32's kernels of experts take. Others are not guessed at.
_UNUSED = (
    "expert_map",
    "a1q_scale",
    "a2_scale",
    "workspace13",
    "workspace2",
    "expert_tokens_meta",
)
_TAKEN = {
    *("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids"),
    *("activation", "global_num_experts", "apply_router_weight_on_input", *_UNUSED),
}
# Of the largest in a row: what is between the two halves is rounded by one and not by the
# other. A wrong order makes products differ by about as much as they are large.
_ROUNDINGS = 8


def check_experts(path: str, state: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> bool:
    """Ask packed experts for products, and compare them with those of the weights.

    Args:
        path: name of the layer.
        state: of the layer, as vLLM processed it: parameters that are packed, and what computes
            with them.
        weights: ``w13_weight``, shape [experts, 2 * intermediate, hidden], and ``w2_weight``, shape
            [experts, hidden, intermediate], as they were before.

    Returns:
        Whether they could be asked: not those with a bias, with another activation than SiLU and
        GELU, or of a vLLM whose kernel takes something else.

    Raises:
        ProofFailed: the packs are not those of the weights.

    """
    ask = _kernel(state)
    activation = _ACTIVATIONS.get(str(getattr(state.get("activation"), "value", "")))
    if ask is None or activation is None or not weights.keys() >= set(_WEIGHTS):
        _LOG.debug("layer %r: its packed experts cannot be asked for products", path)
        return False
    packs = [state["_parameters"][leaf].detach() for leaf in _WEIGHTS]
    first, second = (weights[leaf].detach() for leaf in _WEIGHTS)
    asked = question(first.shape[-1], first.dtype)
    for expert in range(first.shape[0]):
        gate, up = (first[expert] @ asked.t()).chunk(2)
        expected = (second[expert] @ (activation(gate) * up)).t()
        answer = ask(asked, *(pack[expert : expert + 1] for pack in packs))
        summed, largest = sum(first.shape[1:]), expected.abs().amax(dim=1, keepdim=True)
        wrong = _differ(answer, expected, summed, largest)
        if wrong:  # sums that cancel are rounded as coarsely as what they are made of
            gates, ups = norms(first[expert], asked).chunk(2)
            largest = norms(second[expert], (gates * ups).t()).amax(0).unsqueeze(1)
            wrong = _differ(answer, expected, summed, largest)
        if wrong:
            msg = (
                f"layer {path!r}: {wrong} of {answer.numel()} products of its packed expert "
                f"{expert} differ from the weights' own. The update is not installed; publish "
                "it again, and look at the machine's memory if it happens again."
            )
            raise ProofFailed(msg)
    return True


def _kernel(state: Mapping[str, Any]) -> Callable[..., torch.Tensor] | None:
    """What computes with packed experts, if it is known how to ask it."""
    kernel = getattr(state.get("quant_method"), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    if not isinstance(getattr(experts, "isa", None), str):
        return None
    if state["_parameters"].keys() & {"w13_bias", "w2_bias"}:
        return None
    apply: Any = experts.apply  # type: ignore[union-attr]  # it has an `isa`
    if inspect.signature(apply).parameters.keys() != _TAKEN:
        return None

    def ask(asked: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        answer = torch.empty_like(asked)
        apply(
            output=answer,
            hidden_states=asked,
            w1=first,
            w2=second,
            topk_weights=torch.ones(len(asked), 1, dtype=torch.float32, device="cpu"),
            topk_ids=torch.zeros(len(asked), 1, dtype=torch.int32, device="cpu"),
            activation=state["activation"],
            global_num_experts=1,
            apply_router_weight_on_input=False,
            **dict.fromkeys(_UNUSED),
        )
        return answer

    return ask


def _differ(
    answer: torch.Tensor, expected: torch.Tensor, summed: int, largest: torch.Tensor
) -> int:
    """Count products that differ by more than rounding can make them differ."""
    if not expected.isfinite().all():
        return 0  # too large to be asked about in this dtype; weights themselves are finite
    # (Below its smallest normal number a dtype's steps are absolute.)
    tiny = torch.finfo(answer.dtype).tiny
    scale = largest.float().clamp_min(tiny)
    summing = 2 * (summed / ROWS) ** 0.5 * torch.finfo(torch.float32).eps
    within = (_ROUNDINGS * torch.finfo(answer.dtype).eps + summing) * scale
    return int((~((answer.float() - expected.float()).abs() <= within)).sum())  # (NaN does not fit)
