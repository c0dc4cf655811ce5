"""Which backends of the library work here: each is opened, in a process that it may end."""

import ctypes
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from rl_bridge.transports.nixl import library
from rl_bridge.transports.nixl.bare import bare_command

__all__ = ["BACKENDS", "causes", "main"]

BACKENDS = {
    "UCX": "RDMA, TCP, or the memory of another process: what nixl uses unless told otherwise",
    "LIBFABRIC": "fabrics of libfabric, such as EFA",
    "GPUNETIO": "RDMA that a GPU starts by itself",
    "POSIX": "files: not for weights on their way",
    "GDS": "files, straight to a GPU: not for weights on their way",
    "GDS_MT": "files, straight to a GPU: not for weights on their way",
    "OBJ": "object stores: not for weights on their way",
    "AZURE_BLOB": "object stores: not for weights on their way",
    "GUSLI": "block devices: not for weights on their way",
    "INFINIA": "object stores: not for weights on their way",
}
"""What each one is for."""

_PATIENCE_S = 60.0
_MARK = "backends: "


def causes() -> dict[str, str | None]:
    """Backends that the library brings -> what they lack here; None if nothing.

    Raises:
        ImportError: the library is not here.
        RuntimeError: they cannot be asked.

    """
    library.find()
    try:
        child = subprocess.run(  # noqa: S603 - our own interpreter, our own words
            bare_command(__name__), capture_output=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        msg = f"its backends cannot be asked: {error}"
        raise RuntimeError(msg) from error
    # The library and its backends write to the same place; ours is the last line.
    lines = child.stdout.decode("utf-8", "replace").splitlines()
    found = [line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)]
    if not found:
        msg = f"the process that opens its backends ended with {child.returncode}"
        raise RuntimeError(msg)
    answer: dict[str, str | None] = json.loads(found[-1])
    return answer


def main() -> None:
    """Open one after the other, and say after each what is known by then."""
    module, _ = library.find()
    known: dict[str, str | None] = dict.fromkeys(library.plugins(), "it ended the process")
    for name in known:
        cause = library.backend_cause(name)
        known[name] = None if cause is None else _precisely(module, name, cause)
        os.write(1, f"\n{_MARK}{json.dumps(known)}\n".encode())
    # Backends that failed half-way do not all end well.
    os._exit(0)


def _precisely(module: Any, name: str, cause: str) -> str:
    """A library that is missing is named by the loader, and not by NIXL."""
    folder = Path(module.__file__).resolve().parents[1]
    for path in folder.glob(f".*nixl*/plugins/libplugin_{name}.so"):
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            return f"its plugin cannot be loaded: {error}"
    return f"{cause}: it wants settings or a device of its own"
