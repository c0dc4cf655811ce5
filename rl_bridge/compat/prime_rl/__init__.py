"""``rl_bridge.compat.prime_rl``: the names of prime-rl's weight broadcast, over this library.

Names, files and requests are those of its design document for adapters over NIXL. The trainer's
side is `setup_weight_broadcast` and the `ParameterServer` below it, the inference server's is
`PrimeRLRoutes`, the orchestrator's `StaticInferencePool`; `PrimeRLConfig` reads their TOML.
"""

from rl_bridge.compat.prime_rl.config import (
    FileSystemWeightBroadcastConfig,
    LoRAConfig,
    NCCLWeightBroadcastConfig,
    NIXLWeightBroadcastConfig,
    PrimeRLConfig,
    WeightBroadcastConfig,
    check_server_names,
)
from rl_bridge.compat.prime_rl.inference import (
    LoadLoRAFromFiles,
    LoadLoRAFromNIXL,
    ParameterClient,
    PrimeRLRoutes,
    StaticInferencePool,
    newest_version,
    trainer_addresses,
)
from rl_bridge.compat.prime_rl.trainer import (
    FileSystemWeightBroadcast,
    NCCLWeightBroadcast,
    NIXLWeightBroadcast,
    ParameterServer,
    WeightBroadcast,
    setup_weight_broadcast,
)
from rl_bridge.transports.files.steps import receive_step

__all__ = [
    "FileSystemWeightBroadcast",
    "FileSystemWeightBroadcastConfig",
    "LoRAConfig",
    "LoadLoRAFromFiles",
    "LoadLoRAFromNIXL",
    "NCCLWeightBroadcast",
    "NCCLWeightBroadcastConfig",
    "NIXLWeightBroadcast",
    "NIXLWeightBroadcastConfig",
    "ParameterClient",
    "ParameterServer",
    "PrimeRLConfig",
    "PrimeRLRoutes",
    "StaticInferencePool",
    "WeightBroadcast",
    "WeightBroadcastConfig",
    "check_server_names",
    "newest_version",
    "receive_step",
    "setup_weight_broadcast",
    "trainer_addresses",
]
