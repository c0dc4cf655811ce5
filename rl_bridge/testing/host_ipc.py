"""``cuda-ipc`` on host memory: the transport with real processes, without a GPU.

Only what the GPU and its driver do by themselves is missing.
"""

from typing import ClassVar

from rl_bridge.memory.vmm.local import DriverName
from rl_bridge.transports.cuda_ipc import CUDAIPC

__all__ = ["HostIPC"]


class HostIPC(CUDAIPC):
    """The ``cuda-ipc`` transport on host memory; registered by whoever wants it by name."""

    name: ClassVar[str] = "cuda-ipc-on-host"
    driver_name: ClassVar[DriverName] = "host"
