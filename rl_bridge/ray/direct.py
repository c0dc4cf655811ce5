"""Register rl_bridge as tensor transports of Ray Direct Transport."""

import torch

from rl_bridge.ray.calls import require

DIRECT_NAME = "rl_bridge"
"""What users write within a node: ``@ray.method(tensor_transport="rl_bridge")``."""
ACROSS_NAME = "rl_bridge_nixl"
"""What they write where the receiver may be on another node; both need NIXL."""


def register_direct_transport() -> None:
    """Make the tensor transports ``rl_bridge`` and ``rl_bridge_nixl`` known to Ray. Idempotent.

    Call it in the process that creates the actors, before it creates them: Ray tells each actor.
    What such a method returns is sealed when it returns, and verified to the byte where it arrives.
    ``rl_bridge`` is carried by shared memory, for actors of one machine: elsewhere the receiver
    says why not. ``rl_bridge_nixl`` is carried by nixl, also between nodes.

    Raises:
        WeightBridgeUnavailableError: Ray is not installed, or has no Direct Transport.

    """
    known = require("ray.experimental.rdt.util").transport_manager_info
    experimental = require("ray.experimental")
    # Only now: the module of the classes needs Ray, and each actor imports them by their names.
    managers = require("rl_bridge.ray.direct_manager")
    for manager in (managers.DirectTransport, managers.DirectTransportAcross):
        if manager.name.upper() not in known:
            experimental.register_tensor_transport(manager.name, ["cpu"], manager, torch.Tensor)
