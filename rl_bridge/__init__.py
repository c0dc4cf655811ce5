"""rl_bridge: weight updates for RL post-training as transactions.

Sealed, verified, installed atomically, undone to the byte on failure, proven after install,
acknowledged with that proof, released without a leak.
"""

from rl_bridge.bridge.bridges import (
    BroadcastTensorBridge,
    CUDAIPCTensorBridge,
    CUDAVMMTensorBridge,
    LocalTensorCopyBridge,
    NIXLTensorBridge,
    SharedMemoryTensorBridge,
    TensorBridge,
    make_weight_bridge,
)
from rl_bridge.bridge.engine_state import Acknowledgement
from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.bridge.protocols import WeightBridge, WeightConsumer, WeightPublisher
from rl_bridge.bridge.publisher import ConsumerReport
from rl_bridge.engines.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.engines.sglang.loader import SGLangWeightLoader
from rl_bridge.engines.sglang.model_installer import SGLangModelInstaller
from rl_bridge.engines.vllm.checkpoint_reload import VLLMCheckpointReloadAdapter
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.engines.vllm.external_storage import VLLMCUDAVMMExternalStorageAdapter
from rl_bridge.engines.vllm.loader import VLLMWeightLoader
from rl_bridge.engines.vllm.model_installer import VLLMModelInstaller
from rl_bridge.engines.vllm.reload import VLLMReloadAdapter
from rl_bridge.engines.vllm.requests import (
    VLLMIPCWeightUpdateRequestBuilder,
    VLLMNCCLWeightUpdateRequestBuilder,
)
from rl_bridge.errors import (
    BadSegmentName,
    BridgeClosed,
    ChecksumMismatch,
    DeadlineExceeded,
    DigestMismatch,
    DriverError,
    DuplicateTensorName,
    EngineLost,
    ForeignTransport,
    GroupAborted,
    IllegalTransition,
    IncompatibleUpdate,
    IncompleteCoverage,
    LayoutUnknown,
    MalformedManifest,
    NegativeRange,
    OverlappingRange,
    ProofFailed,
    RangeBeyondSegment,
    RangeOverflow,
    RanksDisagree,
    SegmentError,
    ShapeMismatch,
    SignatureRefused,
    SlotsExhausted,
    StaleUpdate,
    SuspiciousUpdate,
    TornEngine,
    TransferTimeout,
    TransportUnavailable,
    UnknownDtype,
    UnknownUpdate,
    VersionNotMonotonic,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightManifestValidationError,
    WeightUpdateRejectedError,
)
from rl_bridge.groups.bridge import GroupBridge
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.hooks import StepPublisher, StepSender, weight_sync_callback
from rl_bridge.installers.base import InstallProof, TransactionalAdapter, WeightInstallAdapter
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.lifecycle import State
from rl_bridge.manifest.compare import Policy
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.parallel import Piece, Placement, WeightLayout
from rl_bridge.manifest.table import TensorDescriptor
from rl_bridge.strategies.loader import BatchedLoadAdapter, ExecutorWeightLoader, WeightLoader
from rl_bridge.strategies.receiver import WeightTransferReceiver
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
from rl_bridge.strategies.sender import InferenceClient, WeightTransferSender
from rl_bridge.strategies.strategy import (
    BroadcastTransferStrategy,
    CudaIpcTransferStrategy,
    PackedCudaIpcTransferStrategy,
    SharedMemoryTransferStrategy,
    WeightTransferConfig,
    WeightTransferStrategy,
    make_transfer_strategy,
)
from rl_bridge.trainers.base import WeightExtractor, WeightMetadata
from rl_bridge.trainers.chunks import WeightChunk
from rl_bridge.trainers.deepspeed import DeepSpeedExtractor, DeepSpeedWeightExtractor
from rl_bridge.trainers.fsdp import FSDPExtractor, FSDPWeightExtractor
from rl_bridge.trainers.megatron import MegatronExtractor, MegatronWeightExtractor
from rl_bridge.trainers.state_dict import StateDictExtractor
from rl_bridge.transports.broadcast.init_info import TorchDistributedWeightSyncInitInfo

__version__ = "0.1.0"

__all__ = [
    "AbandonedWeightUpdateRequest",
    "Acknowledgement",
    "BadSegmentName",
    "BatchedLoadAdapter",
    "BridgeClosed",
    "BroadcastTensorBridge",
    "BroadcastTransferStrategy",
    "BroadcastWeightUpdateRequest",
    "CUDAIPCTensorBridge",
    "CUDAVMMTensorBridge",
    "ChecksumMismatch",
    "ConsumerReport",
    "CudaIpcTransferStrategy",
    "CudaIpcWeightUpdateRequest",
    "DeadlineExceeded",
    "DeepSpeedExtractor",
    "DeepSpeedWeightExtractor",
    "DigestMismatch",
    "DriverError",
    "DuplicateTensorName",
    "EmptyWeightSyncInitInfo",
    "EngineLost",
    "ExecutorWeightLoader",
    "FSDPExtractor",
    "FSDPWeightExtractor",
    "ForeignTransport",
    "GroupAborted",
    "GroupBridge",
    "GroupManifest",
    "GroupPublisher",
    "IllegalTransition",
    "IncompatibleUpdate",
    "IncompleteCoverage",
    "InferenceClient",
    "InstallProof",
    "LayoutUnknown",
    "LocalTensorCopyBridge",
    "MalformedManifest",
    "MegatronExtractor",
    "MegatronWeightExtractor",
    "ModuleInstallAdapter",
    "NIXLTensorBridge",
    "NegativeRange",
    "OverlappingRange",
    "PackedCudaIpcTransferStrategy",
    "PackedCudaIpcWeightUpdateRequest",
    "Piece",
    "Placement",
    "Policy",
    "ProofFailed",
    "RangeBeyondSegment",
    "RangeOverflow",
    "RanksDisagree",
    "RolloutExecutor",
    "SGLangInstallAdapter",
    "SGLangModelInstaller",
    "SGLangWeightLoader",
    "SegmentError",
    "ShapeMismatch",
    "SharedMemoryTensorBridge",
    "SharedMemoryTransferStrategy",
    "SharedMemoryWeightUpdateRequest",
    "SignatureRefused",
    "SlotsExhausted",
    "StaleUpdate",
    "State",
    "StateDictExtractor",
    "StepPublisher",
    "StepSender",
    "SuspiciousUpdate",
    "TensorBridge",
    "TensorDescriptor",
    "TorchDistributedWeightSyncInitInfo",
    "TornEngine",
    "TransactionalAdapter",
    "TransferTimeout",
    "TransportUnavailable",
    "UnknownDtype",
    "UnknownUpdate",
    "VLLMCUDAVMMExternalStorageAdapter",
    "VLLMCheckpointReloadAdapter",
    "VLLMEngineAdapter",
    "VLLMIPCWeightUpdateRequestBuilder",
    "VLLMModelInstaller",
    "VLLMNCCLWeightUpdateRequestBuilder",
    "VLLMReloadAdapter",
    "VLLMWeightLoader",
    "VersionNotMonotonic",
    "WeightBridge",
    "WeightBridgeError",
    "WeightBridgeUnavailableError",
    "WeightChunk",
    "WeightConsumer",
    "WeightExtractor",
    "WeightInstallAdapter",
    "WeightLayout",
    "WeightLoader",
    "WeightManifestValidationError",
    "WeightMetadata",
    "WeightPublisher",
    "WeightSyncInitInfo",
    "WeightTransferConfig",
    "WeightTransferReceiver",
    "WeightTransferSender",
    "WeightTransferStrategy",
    "WeightUpdateManifest",
    "WeightUpdateRejectedError",
    "WeightUpdateRequest",
    "__version__",
    "init_info_from_json",
    "make_transfer_strategy",
    "make_weight_bridge",
    "weight_sync_callback",
]
