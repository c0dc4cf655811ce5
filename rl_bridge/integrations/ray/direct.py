"""Register rl_bridge as a tensor transport of Ray Direct Transport."""

import torch

from rl_bridge.integrations.ray.library import require

__all__ = ["DIRECT_NAME", "register_direct_transport"]

DIRECT_NAME = "rl_bridge"
"""What users write: ``@ray.method(tensor_transport="rl_bridge")``."""


def register_direct_transport() -> None:
    """Make ``tensor_transport="rl_bridge"`` known to Ray; again changes nothing.

    Call it in the process that creates the actors, before it creates them: Ray tells each actor.
    What such a method returns is sealed when it returns, carried by shared memory, and verified to
    the byte where it arrives. It serves actors of one machine: elsewhere the receiver says why not.

    Raises:
        WeightBridgeUnavailableError: Ray is not installed, or has no Direct Transport.

    """
    known = require("ray.experimental.rdt.util").transport_manager_info
    if DIRECT_NAME.upper() in known:
        return
    experimental = require("ray.experimental")
    # Only now: the module of the class needs Ray, and each actor imports it by its name.
    manager = require("rl_bridge.integrations.ray.direct_manager").DirectTransport
    experimental.register_tensor_transport(DIRECT_NAME, ["cpu"], manager, torch.Tensor)
