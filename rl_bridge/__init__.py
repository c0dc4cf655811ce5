"""rl_bridge: weight updates for RL post-training as transactions.

Sealed, verified, installed atomically, undone to the byte on failure, proven after install,
acknowledged with that proof, released without a leak.

Here are the names that are typed daily. The others are one level below, by subject: `FACES` lists
the packages and modules that are public. A name is imported when it is first asked for, so that the
command line answers without torch.
"""

from importlib import import_module
from importlib.util import find_spec
from inspect import currentframe
from typing import TYPE_CHECKING

__version__ = "0.1.0"

FACES = (
    "bridge",
    "compat.miles",
    "compat.prime_rl",
    "compat.skyrl",
    "compat.trl",
    "compat.verl",
    "engines",
    "errors",
    "groups",
    "hooks",
    "installers",
    "lifecycle",
    "manifest",
    "ray",
    "remote",
    "sglang",
    "strategies",
    "testing",
    "trainers",
    "transports",
    "transports.wire",
    "vllm",
)
"""Packages and modules below `rl_bridge` whose names are public."""

__all__ = [
    "FACES",
    "Acknowledgement",
    "BroadcastTransferStrategy",
    "BroadcastWeightUpdateRequest",
    "CUDAIPCTensorBridge",
    "CUDAVMMTensorBridge",
    "CudaIpcTransferStrategy",
    "CudaIpcWeightUpdateRequest",
    "DeepSpeedWeightExtractor",
    "EmptyWeightSyncInitInfo",
    "EngineLost",
    "FSDPWeightExtractor",
    "InstallProof",
    "LocalTensorCopyBridge",
    "MegatronWeightExtractor",
    "ModuleInstallAdapter",
    "PackedCudaIpcTransferStrategy",
    "PackedCudaIpcWeightUpdateRequest",
    "RolloutExecutor",
    "SGLangWeightLoader",
    "SharedMemoryTensorBridge",
    "SimpleAdapter",
    "TensorBridge",
    "TensorDescriptor",
    "TorchDistributedWeightSyncInitInfo",
    "TornEngine",
    "TransactionalAdapter",
    "VLLMCUDAVMMExternalStorageAdapter",
    "VLLMIPCWeightUpdateRequestBuilder",
    "VLLMWeightLoader",
    "WeightBridgeError",
    "WeightBridgeUnavailableError",
    "WeightChunk",
    "WeightConsumer",
    "WeightExtractor",
    "WeightInstallAdapter",
    "WeightLayout",
    "WeightLoader",
    "WeightManifestValidationError",
    "WeightPublisher",
    "WeightSyncInitInfo",
    "WeightTransferReceiver",
    "WeightTransferSender",
    "WeightTransferStrategy",
    "WeightUpdateManifest",
    "WeightUpdateRejectedError",
    "WeightUpdateRequest",
    "__version__",
    "make_weight_bridge",
]

if TYPE_CHECKING:
    from rl_bridge.bridge import (
        Acknowledgement,
        CUDAIPCTensorBridge,
        CUDAVMMTensorBridge,
        LocalTensorCopyBridge,
        RolloutExecutor,
        SharedMemoryTensorBridge,
        TensorBridge,
        WeightConsumer,
        WeightPublisher,
        make_weight_bridge,
    )
    from rl_bridge.errors import (
        EngineLost,
        TornEngine,
        WeightBridgeError,
        WeightBridgeUnavailableError,
        WeightManifestValidationError,
        WeightUpdateRejectedError,
    )
    from rl_bridge.installers import (
        InstallProof,
        ModuleInstallAdapter,
        SimpleAdapter,
        TransactionalAdapter,
        WeightInstallAdapter,
    )
    from rl_bridge.manifest import (
        TensorDescriptor,
        WeightLayout,
        WeightUpdateManifest,
    )
    from rl_bridge.sglang import SGLangWeightLoader
    from rl_bridge.strategies import (
        BroadcastTransferStrategy,
        BroadcastWeightUpdateRequest,
        CudaIpcTransferStrategy,
        CudaIpcWeightUpdateRequest,
        EmptyWeightSyncInitInfo,
        PackedCudaIpcTransferStrategy,
        PackedCudaIpcWeightUpdateRequest,
        TorchDistributedWeightSyncInitInfo,
        WeightLoader,
        WeightSyncInitInfo,
        WeightTransferReceiver,
        WeightTransferSender,
        WeightTransferStrategy,
        WeightUpdateRequest,
    )
    from rl_bridge.trainers import (
        DeepSpeedWeightExtractor,
        FSDPWeightExtractor,
        MegatronWeightExtractor,
        WeightChunk,
        WeightExtractor,
    )
    from rl_bridge.vllm import (
        VLLMCUDAVMMExternalStorageAdapter,
        VLLMIPCWeightUpdateRequestBuilder,
        VLLMWeightLoader,
    )
else:
    # Where the names above are, those first that need the least.
    _HOMES = (
        *("errors", "manifest", "bridge", "installers", "strategies", "trainers"),
        *("sglang", "vllm"),
    )

    def __getattr__(name: str) -> object:
        """Import a name that is asked for, or say where one lives that is not at the top."""
        if name in __all__:
            homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
            value = next(getattr(home, name) for home in homes if name in home.__all__)
            globals()[name] = value
            return value
        msg = f"module {__name__!r} has no attribute {name!r}"
        if name.startswith("_"):
            raise AttributeError(msg, name=name)
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        for face in FACES:
            if name in import_module(f"{__name__}.{face}").__all__:
                msg = f"{name} is in {__name__}.{face}: from {__name__}.{face} import {name}"
                # `from rl_bridge import NAME` asks here first, and drops an AttributeError's text.
                caller = currentframe()
                if caller and caller.f_back and caller.f_back.f_code.co_name == "_handle_fromlist":
                    raise ImportError(msg, name=name)
                break
        raise AttributeError(msg, name=name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
