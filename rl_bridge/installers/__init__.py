"""Engine side: how a version gets into an engine, out of it again, and is proven.

`ModuleInstallAdapter` is for a `torch.nn.Module` or a mapping of tensors, `SimpleAdapter` for an
engine that can read and load one tensor; `TransactionalAdapter` is the contract of an installer of
your own.
"""

from rl_bridge.installers.base import (
    InstallProof,
    TransactionalAdapter,
    WeightInstallAdapter,
)
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.installers.simple import SimpleAdapter

__all__ = [
    "InstallProof",
    "ModuleInstallAdapter",
    "SimpleAdapter",
    "TransactionalAdapter",
    "WeightInstallAdapter",
]
