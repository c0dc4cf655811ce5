"""Engine side: how a version gets into an engine, out of it again, and is proven.

`ModuleInstallAdapter` is for a `torch.nn.Module` or a mapping of tensors; `TransactionalAdapter` is
the contract of an installer of your own.
"""

from rl_bridge.installers.base import (
    InstallProof,
    TransactionalAdapter,
    WeightInstallAdapter,
)
from rl_bridge.installers.module import ModuleInstallAdapter

__all__ = [
    "InstallProof",
    "ModuleInstallAdapter",
    "TransactionalAdapter",
    "WeightInstallAdapter",
]
