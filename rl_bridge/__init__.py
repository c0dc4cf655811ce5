"""rl_bridge: weight updates for RL post-training as transactions.

Sealed, verified, installed atomically, undone to the byte on failure, proven after install,
acknowledged with that proof, released without a leak.
"""

from rl_bridge.bridge.acknowledgement import Acknowledgement
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
from rl_bridge.bridge.group_import import GroupBridge
from rl_bridge.bridge.group_publish import GroupPublisher
from rl_bridge.bridge.protocols import WeightBridge, WeightConsumer, WeightPublisher
from rl_bridge.bridge.publisher import ConsumerReport
from rl_bridge.bridge.rollout import RolloutExecutor
from rl_bridge.bridge.transfer.config import WeightTransferConfig
from rl_bridge.bridge.transfer.init_info import (
    EmptyWeightSyncInitInfo,
    WeightSyncInitInfo,
    init_info_from_json,
)
from rl_bridge.bridge.transfer.loader import BatchedLoadAdapter, ExecutorWeightLoader, WeightLoader
from rl_bridge.bridge.transfer.receiver import WeightTransferReceiver
from rl_bridge.bridge.transfer.requests import (
    AbandonedWeightUpdateRequest,
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    PackedCudaIpcWeightUpdateRequest,
    SharedMemoryWeightUpdateRequest,
    WeightUpdateRequest,
)
from rl_bridge.bridge.transfer.sender import InferenceClient, WeightTransferSender
from rl_bridge.bridge.transfer.strategy import (
    BroadcastTransferStrategy,
    CudaIpcTransferStrategy,
    PackedCudaIpcTransferStrategy,
    SharedMemoryTransferStrategy,
    WeightTransferStrategy,
    make_transfer_strategy,
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
from rl_bridge.extractors.base import WeightExtractor, WeightMetadata
from rl_bridge.extractors.chunks import WeightChunk
from rl_bridge.extractors.deepspeed import DeepSpeedExtractor, DeepSpeedWeightExtractor
from rl_bridge.extractors.fsdp import FSDPExtractor, FSDPWeightExtractor
from rl_bridge.extractors.megatron import MegatronExtractor, MegatronWeightExtractor
from rl_bridge.extractors.state_dict import StateDictExtractor
from rl_bridge.installers.base import InstallProof, TransactionalAdapter, WeightInstallAdapter
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.installers.sglang.model_installer import SGLangModelInstaller
from rl_bridge.installers.vllm.model_installer import VLLMModelInstaller
from rl_bridge.installers.vllm.reload import VLLMReloadAdapter
from rl_bridge.integrations.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.integrations.sglang.loader import SGLangWeightLoader
from rl_bridge.integrations.step_hooks import StepPublisher, StepSender
from rl_bridge.integrations.trl import weight_sync_callback
from rl_bridge.integrations.vllm.checkpoint_reload import VLLMCheckpointReloadAdapter
from rl_bridge.integrations.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.integrations.vllm.external_storage import VLLMCUDAVMMExternalStorageAdapter
from rl_bridge.integrations.vllm.loader import VLLMWeightLoader
from rl_bridge.integrations.vllm.requests import (
    VLLMIPCWeightUpdateRequestBuilder,
    VLLMNCCLWeightUpdateRequestBuilder,
)
from rl_bridge.lifecycle.table import State
from rl_bridge.manifest.compare import Policy
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.parallel import WeightLayout
from rl_bridge.manifest.placement import Piece, Placement
from rl_bridge.manifest.table import TensorDescriptor
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
