"""``rl_bridge.vllm``: updates of vLLM engines. Importing this module does not import vLLM.

`VLLMEngineAdapter` is for a whole engine, in this process or behind a server, and
`VLLMAdapterFiles` for adapters of a server that does not have rl_bridge; the other adapters are for
code that runs inside a worker, and the builders for vLLM's own update requests.
`RLBridgeTrainerInitInfo` is for a trainer that sends by vLLM's own flow. `probe` says what works
with the vLLM of this environment.
"""

from rl_bridge.engines.vllm.adapter_files import VLLMAdapterFiles
from rl_bridge.engines.vllm.client import connect
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter, VLLMServing, VLLMWeightLoader
from rl_bridge.engines.vllm.external_storage import VLLMCUDAVMMExternalStorageAdapter
from rl_bridge.engines.vllm.model_installer import VLLMModelInstaller
from rl_bridge.engines.vllm.plugin import RLBridgeTrainerInitInfo
from rl_bridge.engines.vllm.probe import probe
from rl_bridge.engines.vllm.reload import VLLMReloadAdapter
from rl_bridge.engines.vllm.requests import (
    VLLMIPCWeightUpdateRequestBuilder,
    VLLMNCCLWeightUpdateRequestBuilder,
)

__all__ = [
    "RLBridgeTrainerInitInfo",
    "VLLMAdapterFiles",
    "VLLMCUDAVMMExternalStorageAdapter",
    "VLLMEngineAdapter",
    "VLLMIPCWeightUpdateRequestBuilder",
    "VLLMModelInstaller",
    "VLLMNCCLWeightUpdateRequestBuilder",
    "VLLMReloadAdapter",
    "VLLMServing",
    "VLLMWeightLoader",
    "connect",
    "probe",
]
