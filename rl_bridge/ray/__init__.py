"""``rl_bridge.ray``: weight updates between actors of Ray.

`WeightPublisherActor` and `RolloutActor` are mixins for your own actors, `RolloutFleet` is what the
driver calls. `register_direct_transport` makes ``@ray.method(tensor_transport="rl_bridge")`` return
sealed, verified tensors. Importing this module does not import Ray.
"""

from rl_bridge.ray.actors import (
    RolloutActor,
    WeightPublisherActor,
    register_direct_transport,
)
from rl_bridge.ray.calls import Announcement, RolloutAnswer
from rl_bridge.ray.fleet import FleetUpdate, RolloutFleet
from rl_bridge.ray.pairing import EndpointFacts, PairChoice, choose_transport, look_around
from rl_bridge.ray.publisher_endpoint import EndpointOptions, PublisherEndpoint
from rl_bridge.ray.rollout_endpoint import RolloutEndpoint

__all__ = [
    "Announcement",
    "EndpointFacts",
    "EndpointOptions",
    "FleetUpdate",
    "PairChoice",
    "PublisherEndpoint",
    "RolloutActor",
    "RolloutAnswer",
    "RolloutEndpoint",
    "RolloutFleet",
    "WeightPublisherActor",
    "choose_transport",
    "look_around",
    "register_direct_transport",
]
