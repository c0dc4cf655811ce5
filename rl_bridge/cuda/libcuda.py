"""CUDA's virtual memory management, and legacy IPC handles, through ``cuda.bindings.driver``.

Written from the reference of the driver API and of cuda-bindings 12 and 13. Traps it deals with:

* The bindings answer with tuples, ``(CUresult, values...)``, and raise `RuntimeError` where libcuda
  or a function of it is missing, at the first call and not at the import.
* The context is per thread: each call runs under the device's primary context, the one that torch
  uses, and leaves the thread's own context as it was.
* Some calls break the capture of a CUDA graph: all are refused before they begin.
* An attribute that says "supported" is not enough, above all in sandboxes: `CUDADriver.probe`
  tries.
"""

import ctypes
import importlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from rl_bridge.cuda.driver import (
    CAPTURING,
    INVALID_VALUE,
    NOT_FOUND,
    NOT_READY,
    Device,
    VMMDriver,
    driver_error,
)
from rl_bridge.cuda.ipc import IPC_HANDLE_NBYTES, IPCDriver
from rl_bridge.errors import DeadlineExceeded, DriverError
from rl_bridge.processes import forget_fd_in_children, no_fork

# ---- libcuda's functions, with `DriverError` for their failures ----------------------------------

_SUCCESS = 0


class Library:
    """The driver's functions, whose failures are `DriverError`s."""

    def __init__(self, bindings: Any) -> None:
        if bindings is None:
            try:
                bindings = importlib.import_module("cuda.bindings.driver")
            except ImportError as error:
                cause = f"the package cuda-bindings cannot be imported ({error})"
                raise driver_error("cuInit", "BINDINGS_NOT_FOUND", cause) from error
        self.types = bindings
        try:
            self.call("cuInit", 0)
        except DriverError:
            raise
        except (ImportError, RuntimeError) as error:
            # Which class and words the bindings have for it differs from one version to the next.
            said = str(error).partition("\n")[0]
            cause = f"libcuda.so.1, the NVIDIA driver's library, cannot be loaded ({said})"
            raise driver_error("cuInit", "LIBCUDA_NOT_FOUND", cause) from error

    def call(self, name: str, *arguments: Any, about: str = "") -> Any:
        """Call a function of the driver.

        Returns:
            Its value; a tuple if there are several, None if there is none.

        Raises:
            DriverError: it answered with anything but success, or does not exist.

        """
        try:
            code, *values = getattr(self.types, name)(*arguments)
        except RuntimeError as error:
            # Its class cannot be asked: the package that defines it has changed its place.
            is_missing = "NotFound" in type(error).__name__ or "not found" in str(error)
            if name == "cuInit" or not is_missing:
                raise  # of cuInit, whatever it is says why there is no driver
            cause = f"this driver has no such function ({error})"
            raise driver_error(name, NOT_FOUND, cause) from error
        if int(code) != _SUCCESS:
            symbol = getattr(code, "name", f"CUDA_ERROR_{int(code)}")
            raise driver_error(name, symbol, about or "the driver refused")
        return values[0] if len(values) == 1 else tuple(values) or None

    def uuid(self, ordinal: int) -> str:
        """UUID of a device of this process, as torch prints it."""
        device = self.call("cuDeviceGet", ordinal, about=f"device {ordinal} of this process")
        # In cuda-bindings 12 only the second function tells the parts of a GPU in MIG mode apart.
        has_second = hasattr(self.types, "cuDeviceGetUuid_v2")
        name = "cuDeviceGetUuid_v2" if has_second else "cuDeviceGetUuid"
        return str(uuid.UUID(bytes=bytes(self.call(name, device).bytes)))


# ---- the driver ----------------------------------------------------------------------------------

_NEEDED = (
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
)

_FAILED_BEFORE = "an earlier kernel failed, or the device is lost"
_POLL_S = 20e-6
_NEEDED_FOR_IPC = "CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED"


def _is_capturing(ordinal: int) -> bool:
    """Whether this thread's current stream of a GPU records a graph; asks torch, which knows it."""
    if torch.version.cuda is None:
        return False
    try:
        with torch.cuda.device(ordinal):  # torch looks at the current device's stream only
            return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False  # a device that is lost captures nothing; what is wrong, the call itself says


def ordinal_of(device_uuid: str) -> int:
    """Find this process's number of a GPU, by its `Device.uuid`.

    Raises:
        DriverError: there is no such GPU here, or no CUDA.

    """
    library = Library(None)
    found = [library.uuid(number) for number in range(int(library.call("cuDeviceGetCount")))]
    if device_uuid not in found:
        detail = f"GPU {device_uuid!r} is not visible to this process, which sees {found}"
        raise driver_error("cuDeviceGetUuid", "CUDA_ERROR_INVALID_DEVICE", detail)
    return found.index(device_uuid)


class CUDADriver(VMMDriver, IPCDriver):
    """`VMMDriver` on one GPU, and the calls of legacy IPC. Calls may come from any thread.

    It retains the device's primary context until the process ends, as torch does.
    """

    name = "cuda"

    def __init__(
        self,
        device_index: int = 0,
        *,
        bindings: Any = None,
        is_capturing: Callable[[int], bool] = _is_capturing,
        drain_timeout_s: float = 60.0,
    ) -> None:
        """Initialise CUDA and take the device's primary context.

        Args:
            device_index: number of the GPU in this process, as in ``torch.device("cuda", n)``.
            bindings: the module that stands for ``cuda.bindings.driver``; None for itself.
            is_capturing: tells whether this thread records a CUDA graph on that GPU now.
            drain_timeout_s: how long `fence` waits for the device.

        Raises:
            DriverError: no package, no libcuda, no device, no context.

        """
        super().__init__()
        self._library = Library(bindings)
        self._is_capturing = is_capturing
        self._ordinal = device_index
        self._drain_timeout_s = drain_timeout_s
        self._has_context_events = True  # until the driver says that it has none
        self._device = self._library.call(
            "cuDeviceGet", device_index, about=f"device {device_index} of this process"
        )
        self.device = Device(self._library.uuid(device_index), device_index)
        self._context = self._library.call("cuDevicePrimaryCtxRetain", self._device)
        types = self._library.types
        self._fd_type = types.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        location = types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._prop = types.CUmemAllocationProp()
        self._prop.type = types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._prop.requestedHandleTypes = self._fd_type
        self._prop.location.type = location
        self._prop.location.id = device_index
        self._access = {}
        for writable, flags in (
            (False, types.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ),
            (True, types.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
        ):
            access = types.CUmemAccessDesc()
            access.location.type = location
            access.location.id = device_index
            access.flags = flags
            self._access[writable] = access
        self._granularity = 0

    # ---- calling --------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any, about: str = "") -> Any:
        with self._allowed(name):
            return self._library.call(name, *arguments, about=about)

    @contextmanager
    def _allowed(self, name: str) -> Iterator[None]:
        """Run calls under the primary context, if the process and its captures allow `name`."""
        self._require_own_process(name)
        if self._is_capturing(self._ordinal):
            detail = "the current stream of this thread captures a CUDA graph"
            raise driver_error(name, CAPTURING, detail)
        with self._primary_context():
            yield

    @contextmanager
    def _primary_context(self) -> Iterator[None]:
        """Make the primary context current on this thread; afterwards its own one again."""
        before = self._library.call("cuCtxGetCurrent")
        if int(before) == int(self._context):
            yield
            return
        try:
            self._library.call("cuCtxSetCurrent", self._context)
            yield
        finally:
            self._library.call("cuCtxSetCurrent", before)

    # ---- virtual memory -------------------------------------------------------------------------

    def granularity(self) -> int:
        """Bytes: what the driver recommends, which is a multiple of what it needs.

        Raises:
            DriverError: the driver refuses.

        """
        if not self._granularity:
            which = self._library.types.CUmemAllocationGranularity_flags
            self._granularity = int(
                self._call(
                    "cuMemGetAllocationGranularity",
                    self._prop,
                    which.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
                )
            )
        return self._granularity

    def create(self, nbytes: int) -> int:
        """Allocate memory of the device that can be exported; its bytes are not cleared."""
        about = f"{nbytes} bytes on GPU {self.device.uuid}"
        return int(self._call("cuMemCreate", nbytes, self._prop, 0, about=about))

    def release(self, handle: int) -> None:
        """Give back a handle. CUDA does not check that the number is a handle."""
        self._call("cuMemRelease", handle, about=f"handle {handle:#x}")

    def export_fd(self, handle: int) -> int:
        """Export as a POSIX descriptor."""
        about = f"handle {handle:#x}"
        call = "cuMemExportToShareableHandle"
        with no_fork():  # a child that is forked in between would keep it
            fd = int(self._call(call, handle, self._fd_type, 0, about=about))
            forget_fd_in_children(fd)
        os.set_inheritable(fd, False)  # noqa: FBT003 - Python's own signature
        return fd

    def import_fd(self, fd: int, nbytes: int) -> int:
        """Import a POSIX descriptor; a wrong `nbytes` is found by `map`."""
        about = f"descriptor {fd}, said to be {nbytes} bytes on GPU {self.device.uuid}"
        call = "cuMemImportFromShareableHandle"
        if fd < 0:
            raise driver_error(call, INVALID_VALUE, about)
        return int(self._call(call, fd, self._fd_type, about=about))

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses, where the driver likes."""
        about = f"{nbytes} bytes of addresses"
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0, about=about))

    def free(self, address: int, nbytes: int) -> None:
        """Give back a reservation."""
        self._call("cuMemAddressFree", address, nbytes, about=f"{nbytes} bytes at {address:#x}")

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map from the allocation's first byte on: other offsets are not served by drivers."""
        about = f"{nbytes} bytes of handle {handle:#x} at {address:#x}"
        self._call("cuMemMap", address, nbytes, 0, handle, 0, about=about)

    def set_access(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Grant this device access. Without `writable`, a kernel that writes there is a fault."""
        about = f"{nbytes} bytes at {address:#x}, writable={writable}"
        self._call("cuMemSetAccess", address, nbytes, [self._access[writable]], 1, about=about)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap; the driver does not wait for kernels."""
        self._call("cuMemUnmap", address, nbytes, about=f"{nbytes} bytes at {address:#x}")

    def shows(self, address: int, nbytes: int, handle: int) -> bool:
        """Ask for the handle behind the first and the last byte: mappings cannot be split."""
        return all(self._is_behind(at, handle) for at in (address, address + nbytes - 1))

    def _is_behind(self, address: int, handle: int) -> bool:
        try:
            found = self._call("cuMemRetainAllocationHandle", address, about=f"{address:#x}")
        except DriverError as error:
            if error.code == INVALID_VALUE:
                return False  # nothing is mapped there
            raise
        self.release(int(found))  # what was asked for is a reference of its own
        return int(found) == handle

    def fence(self) -> None:
        """Wait for the whole primary context: all streams of this process on this device.

        A driver older than CUDA 12.5 has no event for a context: there the wait has no deadline.

        Raises:
            DeadlineExceeded: what was submitted before did not end in time.

        """
        with self._allowed("cuCtxSynchronize"):
            if self._has_context_events:
                self._await_context()
            # The order of all that follows rests on this call; after the event it is a short one.
            self._library.call("cuCtxSynchronize", about=_FAILED_BEFORE)

    def _await_context(self) -> None:
        """Wait, until the deadline, for all that was submitted to the context."""
        flags = int(self._library.types.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        event = self._library.call("cuEventCreate", flags, about=_FAILED_BEFORE)
        try:
            self._library.call("cuCtxRecordEvent", self._context, event, about=_FAILED_BEFORE)
            deadline = time.monotonic() + self._drain_timeout_s
            while not self._is_over(event):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"GPU {self.device.uuid} did not end within {self._drain_timeout_s:.3g} s "
                        "what this process submitted to it: nothing was unmapped. Stop the engine "
                        "before weights are exchanged, and see what runs there."
                    )
                time.sleep(_POLL_S)
        except DriverError as error:
            if error.code != NOT_FOUND:
                raise
            self._has_context_events = False
        finally:
            with suppress(DriverError):  # with a device that is lost, the event is lost as well
                self._library.call("cuEventDestroy", event)

    def _is_over(self, event: Any) -> bool:
        try:
            self._library.call("cuEventQuery", event, about=_FAILED_BEFORE)
        except DriverError as error:
            if error.code != NOT_READY:
                raise
            return False
        return True

    def probe(self) -> None:
        """Ask for the attributes, then try: allocate, export, import and map.

        Raises:
            DriverError: with the precise cause.

        """
        for name in _NEEDED:
            self._require(name)
        super().probe()

    def _require(self, name: str) -> None:
        """Refuse a device that lacks what an attribute names."""
        attribute = getattr(self._library.types.CUdevice_attribute, name)
        if not self._call("cuDeviceGetAttribute", attribute, self._device):
            detail = f"{name} is 0 on GPU {self.device.uuid}"
            raise driver_error("cuDeviceGetAttribute", "CUDA_ERROR_NOT_SUPPORTED", detail)

    # ---- legacy IPC -----------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> int:
        """Allocate plain device memory."""
        about = f"{nbytes} bytes on GPU {self.device.uuid}"
        return int(self._call("cuMemAlloc", nbytes, about=about))

    def dealloc(self, address: int) -> None:
        """Free what `alloc` returned."""
        self._call("cuMemFree", address, about=f"address {address:#x}")

    def ipc_handle(self, address: int) -> bytes:
        """Name memory of `alloc` for other processes."""
        handle = self._call("cuIpcGetMemHandle", address, about=f"address {address:#x}")
        return ctypes.string_at(int(handle.getPtr()), IPC_HANDLE_NBYTES)

    def open_ipc(self, handle: bytes) -> int:
        """Map another process's memory."""
        call = "cuIpcOpenMemHandle"
        if len(handle) != IPC_HANDLE_NBYTES:
            detail = f"a handle of {len(handle)} bytes, expected {IPC_HANDLE_NBYTES}"
            raise driver_error(call, INVALID_VALUE, detail)
        types = self._library.types
        raw = types.CUipcMemHandle()
        ctypes.memmove(int(raw.getPtr()), handle, IPC_HANDLE_NBYTES)
        flags = int(types.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        about = f"a handle to memory on GPU {self.device.uuid}"
        return int(self._call(call, raw, flags, about=about))

    def close_ipc(self, address: int) -> None:
        """Give back one `open_ipc`."""
        self._call("cuIpcCloseMemHandle", address, about=f"address {address:#x}")

    def size_at(self, address: int) -> int | None:
        """Ask for the range around an address. Not every driver knows it for opened memory."""
        try:
            base, nbytes = self._call("cuMemGetAddressRange", address)
        except DriverError as error:
            if error.code == CAPTURING:
                raise
            return None
        return int(nbytes) if int(base) == address else None

    def probe_ipc(self) -> None:
        """Ask for the attribute, then allocate and name a little memory."""
        self._require(_NEEDED_FOR_IPC)
        super().probe_ipc()
