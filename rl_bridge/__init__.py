"""rl_bridge: weight updates for RL post-training as transactions.

Sealed, verified, installed atomically, undone to the byte on failure, proven after install,
acknowledged with that proof, released without a leak.
"""

from rl_bridge.bridge.acknowledgement import Acknowledgement
from rl_bridge.bridge.bridges import (
    CUDAIPCTensorBridge,
    CUDAVMMTensorBridge,
    LocalTensorCopyBridge,
    SharedMemoryTensorBridge,
    TensorBridge,
    make_weight_bridge,
)
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
    TransportUnavailable,
    UnknownDtype,
    UnknownUpdate,
    VersionNotMonotonic,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightManifestValidationError,
    WeightUpdateRejectedError,
)
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
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.parallel import WeightLayout
from rl_bridge.manifest.table import TensorDescriptor

__version__ = "0.1.0"

__all__ = [
    "Acknowledgement",
    "BadSegmentName",
    "BridgeClosed",
    "CUDAIPCTensorBridge",
    "CUDAVMMTensorBridge",
    "ChecksumMismatch",
    "ConsumerReport",
    "DeadlineExceeded",
    "DigestMismatch",
    "DriverError",
    "DuplicateTensorName",
    "EngineLost",
    "ForeignTransport",
    "GroupAborted",
    "IllegalTransition",
    "IncompatibleUpdate",
    "IncompleteCoverage",
    "InstallProof",
    "LayoutUnknown",
    "LocalTensorCopyBridge",
    "MalformedManifest",
    "ModuleInstallAdapter",
    "NegativeRange",
    "OverlappingRange",
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
    "SuspiciousUpdate",
    "TensorBridge",
    "TensorDescriptor",
    "TornEngine",
    "TransactionalAdapter",
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
    "WeightConsumer",
    "WeightInstallAdapter",
    "WeightLayout",
    "WeightManifestValidationError",
    "WeightPublisher",
    "WeightUpdateManifest",
    "WeightUpdateRejectedError",
    "__version__",
    "make_weight_bridge",
]
