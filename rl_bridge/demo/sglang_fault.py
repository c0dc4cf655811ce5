"""The fault that the demo plants in an SGLang engine: its installs fail half-way, on request.

`plant` runs in the engine's scheduler process. SGLang calls it there as a custom weight loader,
which is its own way to let others look at a model.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from rl_bridge.demo.half_way import EngineFault, failing_exchange

__all__ = ["LOADER", "NAME", "plant"]

NAME = "fail half-way"
"""Of the tensor that `plant` is given: it holds 1 for a fault, 0 for none."""
LOADER = f"{__name__}.plant"

_planted = ExitStack()


def plant(model: Any, named: list[tuple[str, Tensor]]) -> None:
    """Let every exchange of weights and every load into `model` fail half-way from now on, or none.

    Raises:
        EngineFault: the call is none of the demo's.

    """
    (name, is_armed), *others = named
    if name != NAME or others:
        msg = f"expected one tensor {NAME!r}, got {[name for name, _ in named]}. Use the demo."
        raise EngineFault(msg)
    # On the instance it hides the class's own, which is what comes back.
    vars(model).pop("load_weights", None)
    _planted.close()
    if not is_armed.item():
        return
    _planted.enter_context(failing_exchange())
    load = model.load_weights

    def load_half(weights: Iterable[tuple[str, Tensor]]) -> None:
        given = list(weights)
        half = len(given) // 2
        load(iter(given[:half]))
        raise EngineFault(f"the engine failed after {half} of {len(given)} tensors")

    model.load_weights = load_half
