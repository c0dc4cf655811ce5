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
    SharedMemoryTensorBridge,
    TensorBridge,
    make_weight_bridge,
)
from rl_bridge.bridge.group_import import GroupBridge
from rl_bridge.bridge.group_publish import GroupPublisher
from rl_bridge.bridge.protocols import WeightBridge, WeightConsumer, WeightPublisher
from rl_bridge.bridge.publisher import ConsumerReport
from rl_bridge.bridge.rollout import RolloutExecutor
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
from rl_bridge.installers.vllm.model_installer import VLLMModelInstaller
from rl_bridge.installers.vllm.reload import VLLMReloadAdapter
from rl_bridge.integrations.vllm.checkpoint_reload import VLLMCheckpointReloadAdapter
from rl_bridge.integrations.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.integrations.vllm.external_storage import VLLMCUDAVMMExternalStorageAdapter
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

__version__ = "0.1.0"

__all__ = [
    "Acknowledgement",
    "BadSegmentName",
    "BridgeClosed",
    "BroadcastTensorBridge",
    "CUDAIPCTensorBridge",
    "CUDAVMMTensorBridge",
    "ChecksumMismatch",
    "ConsumerReport",
    "DeadlineExceeded",
    "DeepSpeedExtractor",
    "DeepSpeedWeightExtractor",
    "DigestMismatch",
    "DriverError",
    "DuplicateTensorName",
    "EngineLost",
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
    "InstallProof",
    "LayoutUnknown",
    "LocalTensorCopyBridge",
    "MalformedManifest",
    "MegatronExtractor",
    "MegatronWeightExtractor",
    "ModuleInstallAdapter",
    "NegativeRange",
    "OverlappingRange",
    "Piece",
    "Placement",
    "Policy",
    "ProofFailed",
    "RangeBeyondSegment",
    "RangeOverflow",
    "RanksDisagree",
    "RolloutExecutor",
    "SegmentError",
    "ShapeMismatch",
    "SharedMemoryTensorBridge",
    "SlotsExhausted",
    "StaleUpdate",
    "State",
    "StateDictExtractor",
    "SuspiciousUpdate",
    "TensorBridge",
    "TensorDescriptor",
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
    "VersionNotMonotonic",
    "WeightBridge",
    "WeightBridgeError",
    "WeightBridgeUnavailableError",
    "WeightChunk",
    "WeightConsumer",
    "WeightExtractor",
    "WeightInstallAdapter",
    "WeightLayout",
    "WeightManifestValidationError",
    "WeightMetadata",
    "WeightPublisher",
    "WeightUpdateManifest",
    "WeightUpdateRejectedError",
    "__version__",
    "make_weight_bridge",
]
