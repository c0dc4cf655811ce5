"""``rl_bridge.sglang``: updates of SGLang engines. Importing this module does not import SGLang.

`SGLangInstallAdapter` is for a whole engine, in this process or behind a server;
`SGLangModelInstaller` is for code that runs in the process that has the model. `probe` says what
works with the SGLang of this environment.
"""

from rl_bridge.engines.sglang.client import connect
from rl_bridge.engines.sglang.engine_adapter import (
    SGLangInstallAdapter,
    SGLangServing,
    SGLangWeightLoader,
)
from rl_bridge.engines.sglang.host import SGLangModelInstaller
from rl_bridge.engines.sglang.loaders import DiskRoute, DistributedRoute
from rl_bridge.engines.sglang.probe import probe

__all__ = [
    "DiskRoute",
    "DistributedRoute",
    "SGLangInstallAdapter",
    "SGLangModelInstaller",
    "SGLangServing",
    "SGLangWeightLoader",
    "connect",
    "probe",
]
