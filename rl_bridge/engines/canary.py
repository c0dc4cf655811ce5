"""Canaries: what shows that a packed copy of a weight is that weight's.

On the CPU, vLLM packs the weights of linear layers for oneDNN and drops them. A pack cannot be read
back, but it can be asked for products. A canary asks it for some of a fixed input, when the pack is
made and the weight is still at hand, and compares them with the weight's own; after the install it
asks again and must get the very same bits from the layer that serves.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from rl_bridge.errors import IncompatibleUpdate, ProofFailed

__all__ = [
    "ROWS",
    "Canary",
    "norms",
    "question",
]

ROWS = 8
"""Rows of the input."""
# Each weight is asked about in one of them, and with an eighth of the others:
# the fewer there are in a sum, the less of a wrong one is lost in rounding.
# Rows of a weight that are squared at a time.
_SQUARED = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Canary:
    """A packed product, the layer that gets it, and what it answered when it was made.

    Attributes:
        path: name of the layer.
        module: the layer.
        product: the packed product.
        inputs: columns of its weight.
        answer: [8, out] in the layer's dtype.

    """

    path: str
    module: torch.nn.Module
    product: Any
    inputs: int
    answer: torch.Tensor

    @classmethod
    def make(
        cls, path: str, module: torch.nn.Module, product: Any, weight: torch.Tensor
    ) -> "Canary":
        """Ask a new pack, and compare its answer with the weight's.

        Raises:
            IncompatibleUpdate: `weight`, shape [out, in], holds NaN or Inf (each number is in a
                product).
            ProofFailed: the pack is not that of `weight`.

        """
        inputs = weight.shape[1]
        asked = question(inputs, weight.dtype)
        weight = weight.detach()
        # As `linear(asked, weight)`, which would lay the weight out anew, at half the speed.
        answer, expected = product(asked, weight, None), (weight @ asked.t()).t()
        if not expected.isfinite().all():
            msg = (
                f"layer {path!r}: products of its weight are NaN or Inf; the engine keeps its "
                "version. See which training step made such weights."
            )
            raise IncompatibleUpdate(msg)
        wrong = _differ(answer, expected, inputs, expected.abs().amax(1, keepdim=True))
        if wrong:  # sums that cancel are rounded as coarsely as what they are made of
            largest = norms(weight, asked).amax(0).unsqueeze(1)
            wrong = _differ(answer, expected, inputs, largest)
        if wrong:
            msg = (
                f"layer {path!r}: {wrong} of {answer.numel()} products of its packed weight differ "
                "from the weight's own. The engine was not touched; publish again, and look at "
                "the machine's memory if it happens again."
            )
            raise ProofFailed(msg)
        return cls(path, module, product, inputs, answer)

    def check(self, known: set[tuple[int, int]]) -> None:
        """Ask the layer that serves.

        Args:
            known: packs, each with the parameter beside it, that answered as they should in this
                proof; tied layers share one, which is asked once.

        Raises:
            ProofFailed: it computes with something else.

        """
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
        msg = (
            f"layer {self.path!r}: its packed weight {what}. Install the update again; if that "
            "fails too, something else writes to the engine."
        )
        raise ProofFailed(msg)


@lru_cache(maxsize=64)
def question(inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The fixed input, [8, inputs]: every input in one row, as 1 or -1."""
    generator = torch.Generator("cpu").manual_seed(inputs)
    signs = torch.randint(0, 2, (inputs,), generator=generator, device="cpu") * 2 - 1
    rows = torch.zeros(ROWS, inputs, dtype=torch.float32, device="cpu")
    columns = torch.arange(inputs, device="cpu")
    rows[columns % ROWS, columns] = signs.float()
    return rows.to(dtype)


def norms(weight: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    """How large what is summed is: norms of the terms of ``weight @ asked.t()``, in float64.

    Args:
        weight: shape [out, in].
        asked: shape [rows, in].

    Returns:
        Shape [out, rows].

    """
    squares = asked.double().square().t()
    parts = weight.chunk(-(-len(weight) // _SQUARED))
    return torch.cat([part.double().square() @ squares for part in parts]).sqrt()


def _differ(
    answer: torch.Tensor, expected: torch.Tensor, inputs: int, largest: torch.Tensor
) -> int:
    """Count products that differ by more than rounding can make them differ.

    Both sum in single precision, each in its own order, and round once. `largest`, shape [8, 1],
    says how large sums are on their way.
    """
    number = torch.finfo(answer.dtype)
    # (Below its smallest normal number a dtype's steps are absolute.)
    size = torch.maximum(answer.abs(), expected.abs()).float().clamp_min(number.tiny)
    summing = 2 * (inputs / ROWS) ** 0.5 * torch.finfo(torch.float32).eps
    within = number.eps * size + summing * largest
    fits = (answer.float() - expected.float()).abs() <= within
    return int((~fits).sum())  # (NaN does not fit)
