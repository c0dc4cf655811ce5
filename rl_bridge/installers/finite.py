"""Numbers that no engine may compute with: what one request leaves of them outlives the update."""

from collections.abc import Iterable, Mapping

import torch

from rl_bridge.errors import IncompatibleUpdate

__all__ = ["check_finite"]


def check_finite(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    """Refuse NaN and Inf: a request that ran once with them leaves them in its cached blocks."""
    for name in names:
        tensor = tensors[name]
        if not tensor.numel() or not tensor.is_floating_point():
            continue
        if tensor.element_size() == 1:
            tensor = tensor.to(torch.float32)  # torch cannot compare float8
        # NaN and Inf stay in a sum, which takes half as long as a look at each number; but a sum
        # of finite numbers may be too large for its dtype.
        if not tensor.sum().isfinite() and (bad := int((~torch.isfinite(tensor)).sum())):
            msg = (
                f"tensor {name!r}: {bad} of its {tensor.numel()} numbers are NaN or Inf; the "
                "engine keeps its version. See which training step made them."
            )
            raise IncompatibleUpdate(msg)
