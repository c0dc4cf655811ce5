"""Update groups: many ranks publish one version, and each engine rank reads the share it needs.

A rank publishes with `GroupPublisher`, and meets the other ranks over an exchange. A reader names
its share (`parallel`, `slices`, `everything`) and opens a `GroupBridge` with it.
"""

from rl_bridge.assembly.plan import ReshardPlan
from rl_bridge.assembly.wanted import (
    ExpertParallel,
    Fused,
    PipelineParallel,
    TensorParallel,
    WantedLayout,
    WantedTensor,
    everything,
    parallel,
    slices,
)
from rl_bridge.bridge.bridges import GroupBridge
from rl_bridge.groups.exchange import (
    FunctionExchange,
    GroupExchange,
    ProcessGroupExchange,
    StoreExchange,
    StoreOptions,
)
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.parallel import (
    Piece,
    Placement,
)

__all__ = [
    "ExpertParallel",
    "FunctionExchange",
    "Fused",
    "GroupBridge",
    "GroupExchange",
    "GroupManifest",
    "GroupPublisher",
    "Piece",
    "PipelineParallel",
    "Placement",
    "ProcessGroupExchange",
    "ReshardPlan",
    "StoreExchange",
    "StoreOptions",
    "TensorParallel",
    "WantedLayout",
    "WantedTensor",
    "everything",
    "parallel",
    "slices",
]
