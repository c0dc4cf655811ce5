"""The functions of libcuda as cuda-bindings has them, with `DriverError` for what goes wrong."""

import importlib
import uuid
from typing import Any

from rl_bridge.errors import DriverError
from rl_bridge.memory.vmm.driver import NOT_FOUND, driver_error

__all__ = ["Library"]

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
        # Of cuda-bindings 12 only the second one tells the parts of a GPU in MIG mode apart.
        has_second = hasattr(self.types, "cuDeviceGetUuid_v2")
        name = "cuDeviceGetUuid_v2" if has_second else "cuDeviceGetUuid"
        return str(uuid.UUID(bytes=bytes(self.call(name, device).bytes)))

    def uuids(self) -> list[str]:
        """UUID of every device that this process sees, by ordinal."""
        return [self.uuid(ordinal) for ordinal in range(int(self.call("cuDeviceGetCount")))]
