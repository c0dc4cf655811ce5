"""Weight transfer by strategies: config in, sender and receiver out, every sync one transaction.

All chunks of a sync are one update: one manifest, sealed. The requests that go to the engines are
batches of it; an engine serves the update when the last one is installed and proven, or not at all.
"""

from rl_bridge.strategies.receiver import (
    BatchedLoadAdapter,
    ExecutorWeightLoader,
    WeightLoader,
    WeightTransferReceiver,
)
from rl_bridge.strategies.requests import (
    AbandonedWeightUpdateRequest,
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    EmptyWeightSyncInitInfo,
    PackedCudaIpcWeightUpdateRequest,
    SharedMemoryWeightUpdateRequest,
    WeightSyncInitInfo,
    WeightUpdateRequest,
    init_info_from_json,
)
from rl_bridge.strategies.sender import (
    InferenceClient,
    WeightTransferSender,
)
from rl_bridge.strategies.strategy import (
    BroadcastTransferStrategy,
    CudaIpcTransferStrategy,
    PackedCudaIpcTransferStrategy,
    SharedMemoryTransferStrategy,
    WeightTransferConfig,
    WeightTransferStrategy,
    make_transfer_strategy,
)
from rl_bridge.transports.broadcast.messages import TorchDistributedWeightSyncInitInfo

__all__ = [
    "AbandonedWeightUpdateRequest",
    "BatchedLoadAdapter",
    "BroadcastTransferStrategy",
    "BroadcastWeightUpdateRequest",
    "CudaIpcTransferStrategy",
    "CudaIpcWeightUpdateRequest",
    "EmptyWeightSyncInitInfo",
    "ExecutorWeightLoader",
    "InferenceClient",
    "PackedCudaIpcTransferStrategy",
    "PackedCudaIpcWeightUpdateRequest",
    "SharedMemoryTransferStrategy",
    "SharedMemoryWeightUpdateRequest",
    "TorchDistributedWeightSyncInitInfo",
    "WeightLoader",
    "WeightSyncInitInfo",
    "WeightTransferConfig",
    "WeightTransferReceiver",
    "WeightTransferSender",
    "WeightTransferStrategy",
    "WeightUpdateRequest",
    "init_info_from_json",
    "make_transfer_strategy",
]
