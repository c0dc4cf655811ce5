"""The seam between rl_bridge and a device's virtual memory: a dozen calls, and their errors.

Names, rules and error codes are those of CUDA's driver API (section "Virtual Memory Management" of
its reference). `rl_bridge.cuda.libcuda` passes the calls on to CUDA; `rl_bridge.cuda.host`
keeps the same rules on host memory, so that everything above runs, across processes, without a GPU.

A driver only passes calls on: the caller of `create`, `reserve`, `map` or `export_fd` must undo it.
Use the owners in `rl_bridge.cuda.owners`.
"""

import os
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass

from rl_bridge.errors import DriverError
from rl_bridge.memory import vm
from rl_bridge.processes import close_fd

INVALID_VALUE = "CUDA_ERROR_INVALID_VALUE"
NOT_INITIALIZED = "CUDA_ERROR_NOT_INITIALIZED"
NOT_FOUND = "CUDA_ERROR_NOT_FOUND"
NOT_READY = "CUDA_ERROR_NOT_READY"
CAPTURING = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"

_SHARED_MEMORY = "Use shared-memory with a CPU copy of the weights."
_RESTART = "The device's state is lost for this process: restart it."
_REMEDIES = {
    "BINDINGS_NOT_FOUND": f"Install cuda-bindings (pip install cuda-bindings). {_SHARED_MEMORY}",
    "LIBCUDA_NOT_FOUND": "Install the NVIDIA driver; in a container, start it with the GPU "
    f"(--gpus all). {_SHARED_MEMORY}",
    INVALID_VALUE: "Use sizes and addresses as the driver gave them, and the handle's own process.",
    "CUDA_ERROR_OUT_OF_MEMORY": "Release old versions, drop their tensors, or lower the engine's "
    "share of the device's memory.",
    NOT_INITIALIZED: "CUDA does not survive a fork: start the process by spawn.",
    "CUDA_ERROR_DEINITIALIZED": _RESTART,
    "CUDA_ERROR_STUB_LIBRARY": "Remove the stub libcuda.so of the toolkit from the library path.",
    "CUDA_ERROR_NO_DEVICE": "Make a GPU visible to this process (CUDA_VISIBLE_DEVICES, --gpus). "
    f"{_SHARED_MEMORY}",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "Another process has the GPU for itself: let several share it "
    "(nvidia-smi -c DEFAULT).",
    "CUDA_ERROR_INVALID_DEVICE": "Name a GPU that this process sees, the one that holds the memory "
    "or one that reaches it peer to peer.",
    "CUDA_ERROR_INVALID_CONTEXT": "A legacy IPC handle cannot be opened in the process that made "
    "it: use its pointer there. Otherwise restart the process.",
    "CUDA_ERROR_MAP_FAILED": "Publish again; between containers, share the IPC namespace.",
    "CUDA_ERROR_INVALID_HANDLE": "The exporter freed it or died, or the GPU or the container's IPC "
    "namespace is another: publish again, on one GPU, with a shared IPC namespace.",
    NOT_FOUND: f"Update the NVIDIA driver. {_SHARED_MEMORY}",
    NOT_READY: "Other threads have work pending: stop them and try again.",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "A kernel used memory that was not mapped for it. Stop the "
    f"engine before weights are exchanged. {_RESTART}",
    "CUDA_ERROR_TOO_MANY_PEERS": "Close imports of other GPUs' memory first.",
    "CUDA_ERROR_OPERATING_SYSTEM": "Let the sandbox or container pass the device's ioctls and its "
    f"descriptors. {_SHARED_MEMORY}",
    "CUDA_ERROR_NOT_PERMITTED": "Let the sandbox or container pass the device's ioctls. "
    f"{_SHARED_MEMORY}",
    "CUDA_ERROR_NOT_SUPPORTED": f"Use cuda-ipc. {_SHARED_MEMORY}",
    "CUDA_ERROR_SYSTEM_NOT_READY": "Start the NVIDIA services (fabric manager) of this machine.",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "Restart the machine: driver and library differ.",
    CAPTURING: "Let the capture of the CUDA graph end first.",
}
_UNKNOWN = "See the NVIDIA driver's log (dmesg) for the cause, then restart the process."


def driver_error(call: str, code: str, detail: str) -> DriverError:
    """Make the error of a failed call, with the remedy that belongs to its code.

    Args:
        call: the function, by CUDA's name.
        code: symbolic name of the answer.
        detail: what was asked and what is wrong with it, without a full stop.

    """
    return DriverError(call, code, detail, _REMEDIES.get(code, _UNKNOWN))


@dataclass(frozen=True, slots=True)
class Device:
    """The device that the handles of a driver belong to.

    Attributes:
        uuid: the GPU's UUID as torch prints it (``8-4-4-4-12`` lower-case hexadecimal digits), the
            same in every process; ``host`` for host memory.
        ordinal: number of the device in this process only; None for host memory.

    """

    uuid: str
    ordinal: int | None


class VMMDriver(ABC):
    """The calls of a device's virtual memory management.

    Addresses, handles and descriptors are plain integers. Every size is in bytes and a multiple of
    `granularity`. A driver belongs to the process that made it: in a forked child every call is
    refused. Every call may raise `DriverError`, also where its section does not say so.

    Attributes:
        name: ``cuda`` or ``host``.
        device: where its memory is.

    """

    name: str
    device: Device

    def __init__(self) -> None:
        """Belong to this process."""
        self._pid = os.getpid()

    def _require_own_process(self, call: str) -> None:
        if os.getpid() != self._pid:
            raise driver_error(
                call, NOT_INITIALIZED, f"driver {self.name!r} of pid {self._pid} in a forked child"
            )

    @abstractmethod
    def granularity(self) -> int:
        """Every size and address is a multiple of this many bytes."""

    def round_up(self, nbytes: int) -> int:
        """Smallest size of an allocation, not 0, that holds `nbytes`."""
        return vm.round_up(max(nbytes, 1), self.granularity())

    @abstractmethod
    def create(self, nbytes: int) -> int:
        """Allocate memory, mapped nowhere yet; returns a handle, which is one reference to it.

        Raises:
            DriverError: CUDA_ERROR_OUT_OF_MEMORY, or a size that is not granular.

        """

    @abstractmethod
    def release(self, handle: int) -> None:
        """Give back a handle. Mappings, descriptors and other handles keep the memory."""

    @abstractmethod
    def export_fd(self, handle: int) -> int:
        """Make a descriptor of the memory for other processes.

        Returns:
            A descriptor, a reference of its own, close-on-exec and closed in forked children. The
            caller closes it with `close_fd`, or makes a `Descriptor` of it.

        """

    @abstractmethod
    def import_fd(self, fd: int, nbytes: int) -> int:
        """Make a handle from a descriptor, of which the caller stays the owner.

        Args:
            fd: from another process's, or this one's, `export_fd`.
            nbytes: size of the memory; it does not travel with the descriptor.

        Returns:
            A handle that needs its own `release`.

        Raises:
            DriverError: no descriptor of such memory, of another size, or of another device.

        """

    @abstractmethod
    def reserve(self, nbytes: int) -> int:
        """Reserve addresses, where nothing lies yet; returns the first."""

    @abstractmethod
    def free(self, address: int, nbytes: int) -> None:
        """Give back a reservation: exactly one, with nothing mapped in it."""

    @abstractmethod
    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map the whole of an allocation at a reserved address; nobody may touch it yet.

        Raises:
            DriverError: something is mapped there, or `nbytes` is not the allocation's size.

        """

    @abstractmethod
    def set_access(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Let this device read, and write if `writable`, a range of whole mappings, no hole."""

    @abstractmethod
    def unmap(self, address: int, nbytes: int) -> None:
        """Take away exactly one mapping; the addresses stay reserved.

        Nothing is waited for: `fence` first, or a running kernel loses its memory.
        """

    @abstractmethod
    def shows(self, address: int, nbytes: int, handle: int) -> bool:
        """Whether that very allocation is mapped there, in full, as the driver itself has it.

        Nothing that this library remembers is asked. Access is not looked at.
        """

    @abstractmethod
    def fence(self) -> None:
        """Wait until every kernel of this process on this device has ended: a full drain.

        Never call it to publish; a flip needs it.

        Raises:
            DeadlineExceeded: they did not end in time, and may still run.

        """

    def probe(self) -> None:
        """Allocate, export, import, map and give back a little memory.

        Raises:
            DriverError: with the precise cause why this device, or sandbox, cannot.

        """
        nbytes = self.granularity()
        with ExitStack() as undo:
            handle = self.create(nbytes)
            undo.callback(self.release, handle)
            fd = self.export_fd(handle)
            undo.callback(close_fd, fd)
            imported = self.import_fd(fd, nbytes)
            undo.callback(self.release, imported)
            address = self.reserve(nbytes)
            undo.callback(self.free, address, nbytes)
            self.map(address, nbytes, imported)
            undo.callback(self.unmap, address, nbytes)
            for writable in (True, False):  # as publishers map, and as consumers do
                self.set_access(address, nbytes, writable=writable)
