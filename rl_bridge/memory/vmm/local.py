"""One driver object for each device of this process: owners of one cannot be used with another."""

import ctypes
import os
import threading
from typing import Literal

import torch

from rl_bridge.memory.places import CPU_PLACE, Place
from rl_bridge.memory.vmm.cuda import CUDADriver, ordinal_of
from rl_bridge.memory.vmm.driver import Device
from rl_bridge.memory.vmm.host_ipc import HostIPCDriver

__all__ = ["DriverName", "cuda_cause", "driver_at", "driver_of", "place_at"]

DriverName = Literal["cuda", "host"]

_LOCK = threading.RLock()
# By process: owners of a parent's drivers do nothing in a forked child, which has its own.
_DRIVERS: dict[tuple[int, str, int | None], CUDADriver | HostIPCDriver] = {}
os.register_at_fork(
    before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
)


def cuda_cause() -> str | None:
    """What this machine lacks for CUDA memory sharing; None if it lacks nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"libcuda.so.1, the NVIDIA driver's library, cannot be loaded ({error})"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "the NVIDIA driver reports no usable device"
    return None


def driver_at(name: DriverName, ordinal: int | None) -> CUDADriver | HostIPCDriver:
    """Find or make the driver of one device.

    Args:
        name: ``cuda``, or ``host`` for its stand-in.
        ordinal: number of the GPU in this process; None for host memory.

    Raises:
        DriverError: with the precise cause why the device cannot be used.

    """
    key = (os.getpid(), name, None if name == "host" else ordinal)
    with _LOCK:
        driver = _DRIVERS.get(key)
        if driver is None:
            driver = HostIPCDriver() if name == "host" else CUDADriver(ordinal or 0)
            _DRIVERS[key] = driver
        return driver


def driver_of(name: DriverName, uuid: str) -> CUDADriver | HostIPCDriver:
    """Find or make the driver of the device that another process names by its UUID.

    Raises:
        DriverError: this process does not see that device, or cannot use it.

    """
    return driver_at(name, None if name == "host" else ordinal_of(uuid))


def place_at(device: Device) -> Place:
    """Who reads and writes a device's memory."""
    if device.ordinal is None:
        return CPU_PLACE
    from rl_bridge.memory.cuda_place import cuda_place

    return cuda_place(device.ordinal)
