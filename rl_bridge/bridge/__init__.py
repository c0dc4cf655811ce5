"""One version from a trainer to an engine: the bridges, and the executor that installs.

`make_weight_bridge` makes a bridge by its transport's name; `RolloutExecutor` installs what
arrives, all of it or nothing. The other names are their types.
"""

from rl_bridge.bridge.arguments import (
    WeightBridge,
    WeightConsumer,
    WeightPublisher,
)
from rl_bridge.bridge.bridges import (
    BroadcastTensorBridge,
    CUDAIPCTensorBridge,
    CUDAVMMTensorBridge,
    FilesTensorBridge,
    LocalTensorCopyBridge,
    NIXLTensorBridge,
    SharedMemoryTensorBridge,
    make_weight_bridge,
)
from rl_bridge.bridge.engine_state import Acknowledgement, InstalledUpdate
from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.bridge.publisher import ConsumerReport
from rl_bridge.bridge.tensor_bridge import TensorBridge

__all__ = [
    "Acknowledgement",
    "BroadcastTensorBridge",
    "CUDAIPCTensorBridge",
    "CUDAVMMTensorBridge",
    "ConsumerReport",
    "FilesTensorBridge",
    "InstalledUpdate",
    "LocalTensorCopyBridge",
    "NIXLTensorBridge",
    "RolloutExecutor",
    "SharedMemoryTensorBridge",
    "TensorBridge",
    "WeightBridge",
    "WeightConsumer",
    "WeightPublisher",
    "make_weight_bridge",
]
