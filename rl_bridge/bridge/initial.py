"""The engine's weights before its first update, kept for the undo of that one."""

from collections.abc import Mapping

import torch

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.installers.base import TransactionalAdapter, WeightInstallAdapter
from rl_bridge.installers.wrapped import Version

__all__ = ["sealed_initial"]


def sealed_initial(
    adapter: WeightInstallAdapter | TransactionalAdapter | None,
    weights: Mapping[str, torch.Tensor] | torch.nn.Module | None,
) -> Version | None:
    """Copy the initial weights into a version of their own, which lives until the first commit.

    Raises:
        ValueError: this adapter would never use them.
        WeightBridgeError: tensors that cannot be copied.

    """
    if weights is None:
        return None
    if adapter is None or callable(getattr(adapter, "undo", None)):
        who = "there is no adapter" if adapter is None else f"{type(adapter).__name__} has an undo"
        msg = (
            f"initial_weights= would never be used: {who}. They are for adapters without undo(), "
            "whose first update is undone by installing them. Leave them out."
        )
        raise ValueError(msg)
    with make_weight_bridge("local-clone", source_worker="initial") as bridge:
        manifest = bridge.publish(weights, weight_version=0)
        # They outlive the bridge, and are the only copy then.
        return manifest, bridge.import_update(manifest)
