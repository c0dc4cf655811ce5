"""One driver object for each device of this process: owners of one cannot be used with another."""

import ctypes
import os
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.cuda.digest import DevicePass
from rl_bridge.cuda.digest_engines import bytes_at
from rl_bridge.cuda.driver import Device
from rl_bridge.cuda.host import HostIPCDriver
from rl_bridge.cuda.libcuda import CUDADriver, ordinal_of
from rl_bridge.memory.places import CPU_PLACE, Pass, Place

DriverName = Literal["cuda", "host"]

_LIBRARY = "libcuda.so.1"
_CONTROL_DEVICE = Path("/dev/nvidiactl")

_LOCK = threading.RLock()
# By process: owners of a parent's drivers do nothing in a forked child, which has its own.
_DRIVERS: dict[tuple[int, str, int | None], CUDADriver | HostIPCDriver] = {}
os.register_at_fork(
    before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
)


def has_driver() -> bool:
    """Whether NVIDIA's driver is on this machine, in whatever state."""
    if _CONTROL_DEVICE.exists():
        return True
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def cuda_cause() -> str | None:
    """What this machine lacks for CUDA memory sharing; None if it lacks nothing."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return f"{_LIBRARY}, the NVIDIA driver's library, cannot be loaded ({error})"
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
    """The functions that read and write a device's memory."""
    if device.ordinal is None:
        return CPU_PLACE
    return cuda_place(device.ordinal)


# ---- a GPU's memory as a place: tensors over it, and the pass that runs on it --------------------


class CUDAPlace(Place):
    """Memory of one GPU."""

    def __init__(self, ordinal: int) -> None:
        """Name the GPU by its number in this process."""
        self.device = torch.device("cuda", ordinal)

    def plan(self, nbytes: npt.NDArray[np.uint64], dtypes: Sequence[str] | None = None) -> Pass:
        """The pass on this GPU, on torch's current stream."""
        return DevicePass(nbytes, self.device, dtypes=dtypes)

    def tensor(self, owner: Any, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Look at memory; the tensor's storage keeps `owner` alive."""
        address = ctypes.addressof(owner) + offset
        return bytes_at(address, nbytes, self.device, owner=owner).view(dtype)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """Look at memory."""
        return bytes_at(address, nbytes, self.device)

    def private_ranges(self, address: int, nbytes: int) -> list[tuple[int, int]] | None:
        """None is this process's own: versions are mapped to be read only."""
        del address, nbytes
        return []


@lru_cache(maxsize=64)
def cuda_place(ordinal: int) -> CUDAPlace:
    """The place of a GPU; one object for each, so that places can be compared."""
    return CUDAPlace(ordinal)


def place_of(tensors: Iterable[torch.Tensor]) -> Place:
    """Where tensors lie that must lie together: the first decides, the CPU if there is none.

    Of a device that is neither the CPU nor CUDA the CPU's place says what is wrong with it.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            return cuda_place(tensor.device.index)
        break
    return CPU_PLACE
