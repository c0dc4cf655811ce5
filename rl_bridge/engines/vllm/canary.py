"""Canaries: what shows that a packed copy of a weight is that weight's.

On the CPU, vLLM packs the weights of linear layers for oneDNN and drops them. A pack cannot be read
back, but it can be asked for products. A canary asks it for some of a fixed input, when the pack is
made and the weight is still at hand, and compares them with the weight's own; after the install it
asks again and must get the very same bits from the layer that serves.

The weights of experts vLLM packs for a kernel of its own. Such a pack can be read, and is digested
in every proof, but in an order that only that kernel knows. So it is asked, expert by expert, when
the pack is made.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

from rl_bridge.errors import IncompatibleUpdate, ProofFailed

_LOG = logging.getLogger(__name__)

# Rows of the input. Each weight is asked about in one of them, and with an eighth of the others:
# the fewer there are in a sum, the less of a wrong one is lost in rounding.
_ROWS = 8
# Rows of a weight that are squared at a time.
_SQUARED = 4096

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


@dataclass(frozen=True, slots=True, eq=False)
class PackCanary:
    """A packed product, the layer that gets it, and what it answered when it was made."""

    path: str  # name of the layer
    module: torch.nn.Module  # the layer
    product: Any  # the packed product
    inputs: int  # columns of its weight
    answer: torch.Tensor  # [8, out] in the layer's dtype

    @classmethod
    def make(
        cls, path: str, module: torch.nn.Module, product: Any, weight: torch.Tensor
    ) -> "PackCanary":
        """Ask a new pack, and compare its answer with the weight's."""
        inputs = weight.shape[1]
        asked = question(inputs, weight.dtype)
        weight = weight.detach()
        # As `linear(asked, weight)`, which would lay the weight out anew, at half the speed.
        answer, expected = product(asked, weight, None), (weight @ asked.t()).t()
        if not expected.isfinite().all():
            raise IncompatibleUpdate(
                f"layer {path!r}: products of its weight are NaN or Inf; the engine keeps its "
                "version. See which training step made such weights."
            )
        size = torch.maximum(answer.abs(), expected.abs())
        wrong = _differ(answer, expected, size, inputs, expected.abs().amax(1, keepdim=True))
        if wrong:  # sums that cancel are rounded as coarsely as what they are made of
            largest = _norms(weight, asked).amax(0).unsqueeze(1)
            wrong = _differ(answer, expected, size, inputs, largest)
        if wrong:
            raise ProofFailed(
                f"layer {path!r}: {wrong} of {answer.numel()} products of its packed weight differ "
                "from the weight's own. The engine was not touched; publish again, and look at "
                "the machine's memory if it happens again."
            )
        return cls(path, module, product, inputs, answer)

    def check(self, known: set[tuple[int, int]]) -> None:
        """Ask the layer that serves, unless its pack is `known` to have answered in this proof."""
        serving: Any = vars(self.module).get("cpu_linear")
        weight = self.module._parameters["weight"]  # noqa: SLF001 - torch has no other way in
        what = "is not the one that was made for this version"
        if serving is self.product:
            pair = (id(serving), id(weight))
            if pair in known:
                return
            asked = question(self.inputs, self.answer.dtype)
            if torch.equal(serving(asked, weight, None), self.answer):
                known.add(pair)
                return
            what = "answers otherwise than when it was made"
        raise ProofFailed(
            f"layer {self.path!r}: its packed weight {what}. Install the update again; if that "
            "fails too, something else writes to the engine."
        )


@lru_cache(maxsize=64)
def question(inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The fixed input, [8, inputs]: every input in one row, as 1 or -1."""
    generator = torch.Generator("cpu").manual_seed(inputs)
    signs = torch.randint(0, 2, (inputs,), generator=generator, device="cpu") * 2 - 1
    rows = torch.zeros(_ROWS, inputs, dtype=torch.float32, device="cpu")
    columns = torch.arange(inputs, device="cpu")
    rows[columns % _ROWS, columns] = signs.float()
    return rows.to(dtype)


def _norms(weight: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    """Norms of the terms that ``weight @ asked.t()`` sums, [out, rows], in float64."""
    squares = asked.double().square().t()
    parts = weight.chunk(-(-len(weight) // _SQUARED))
    return torch.cat([part.double().square() @ squares for part in parts]).sqrt()


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
        if not expected.isfinite().all():
            continue  # too large to be asked about in this dtype; weights themselves are finite
        summed, largest = sum(first.shape[1:]), expected.abs().amax(dim=1, keepdim=True)
        wrong = _differ(answer, expected, _ROUNDINGS * largest.float(), summed, largest)
        if wrong:  # as in `PackCanary.make`
            gates, ups = _norms(first[expert], asked).chunk(2)
            largest = _norms(second[expert], (gates * ups).t()).amax(0).unsqueeze(1)
            wrong = _differ(answer, expected, _ROUNDINGS * largest.float(), summed, largest)
        if wrong:
            raise ProofFailed(
                f"layer {path!r}: {wrong} of {answer.numel()} products of its packed expert "
                f"{expert} differ from the weights' own. The update is not installed; publish "
                "it again, and look at the machine's memory if it happens again."
            )
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
    answer: torch.Tensor,
    expected: torch.Tensor,
    rounded: torch.Tensor,
    summed: int,
    largest: torch.Tensor,
) -> int:
    """Count products that differ by more than rounding can make them differ.

    Both sum in single precision, each in its own order.

    Args:
        answer: of the pack, shape [8, out].
        expected: of the weight, shape [8, out].
        rounded: how large numbers are when they are rounded to the dtype of the answer.
        summed: how many numbers are in a sum.
        largest: how large sums are on their way, shape [8, 1].

    """
    number = torch.finfo(answer.dtype)
    # (Below its smallest normal number a dtype's steps are absolute.)
    step = number.eps * rounded.float().clamp_min(number.tiny)
    within = step + 2 * (summed / _ROWS) ** 0.5 * torch.finfo(torch.float32).eps * largest.float()
    return int((~((answer.float() - expected.float()).abs() <= within)).sum())  # (NaN does not fit)
