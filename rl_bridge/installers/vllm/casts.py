"""Casts that a loader makes: what they may turn into Inf is refused before it is loaded."""

from collections.abc import Mapping

import torch

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.installers.vllm.routes import LoadPlan

__all__ = ["check_casts"]


def check_casts(plan: LoadPlan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse numbers that are finite in an update and not in the engine's dtype.

    Args:
        plan: where the tensors go.
        tensors: the update's, finite.

    Raises:
        IncompatibleUpdate: a tensor has such a number.

    """
    for name, dtype in dict.fromkeys(
        (route.source, plan.targets[route.target].meta.dtype) for route in plan.routes()
    ):
        given = tensors[name]
        if given.dtype == dtype or not given.numel():
            continue
        if not (given.is_floating_point() and dtype.is_floating_point):
            continue
        # (torch cannot compare float8. Rounding keeps the order: the ends tell for all.)
        comparable = given.float() if given.element_size() == 1 else given
        ends = torch.stack(torch.aminmax(comparable))
        if not ends.to(dtype).double().isfinite().all():
            wanted = str(dtype).removeprefix("torch.")
            msg = (
                f"tensor {name!r} has numbers from {ends[0]:g} to {ends[1]:g}, and {wanted} cannot "
                "hold all of them: the engine would load NaN or Inf. Publish in the engine's "
                "dtype, and see which training step made them."
            )
            raise IncompatibleUpdate(msg)
