"""Finding NVIDIA's library: which package of it is here, and what it can do.

Its distribution comes as one package per CUDA release, each of which works without a GPU, and a
meta package that asks for all of them. Any one will do.
"""

import ctypes
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = [
    "BACKENDS",
    "PACKAGES",
    "backend_cause",
    "bare_command",
    "causes",
    "failures",
    "find",
    "has_rdma",
    "main",
    "new_agent",
    "plugins",
]

PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
"""Where the library may be, in the order in which they are tried."""

_RDMA = Path("/sys/class/infiniband")
_LOCK = threading.Lock()
_LOGGER = "nixl"


def find() -> tuple[Any, str]:
    """Import the library.

    Returns:
        Its module, and the version of its package.

    Raises:
        ImportError: no package of it is here, or none that can be loaded.

    """
    causes = []
    with _LOCK:
        for package in PACKAGES:
            try:
                module = importlib.import_module(f"{package}._api")
            except ImportError as error:
                causes.append(f"{package}: {error}")
                continue
            _quieten()
            return module, _version(package)
    msg = f"no package of NIXL can be imported ({'; '.join(causes)})"
    raise ImportError(msg)


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "unknown"


def _quieten() -> None:
    # It tells of every agent on standard output, where a program's own answers go.
    logger = logging.getLogger(_LOGGER)
    if logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)


def has_rdma() -> bool:
    """Whether this machine has a device that reads memory by itself."""
    return _RDMA.is_dir() and any(_RDMA.iterdir())


def failures(module: Any) -> tuple[type[Exception], ...]:
    """What its calls raise: classes with no base of their own."""
    names = [name for name in dir(module.nixlBind) if name.startswith("nixl")]
    found = [getattr(module.nixlBind, name) for name in names if name.endswith("Error")]
    return (*(kind for kind in found if isinstance(kind, type)), RuntimeError)


def new_agent(module: Any, name: str, backend: str, params: dict[str, str]) -> Any:
    """Make an agent with one backend.

    Raises:
        RuntimeError: the backend cannot be loaded here.

    """
    # Without its progress thread, which takes a core for as long as the agent lives: whoever needs
    # progress makes it. And with its lock: that is done from several threads.
    config = module.nixl_agent_config(
        enable_prog_thread=False,
        backends=[],
        sync_mode=module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    try:
        agent = module.nixl_agent(name, config)
        if backend not in agent.get_plugin_list():
            found = ", ".join(sorted(agent.get_plugin_list()))
            msg = f"it has no plugin {backend!r}, but: {found}"
            raise RuntimeError(msg)
        agent.create_backend(backend, params)
    except failures(module) as error:
        msg = f"NIXL is here and its backend {backend!r} cannot be opened: {error}"
        raise RuntimeError(msg) from error
    return agent


def backend_cause(backend: str) -> str | None:
    """What this machine lacks for a backend; None if it lacks nothing."""
    try:
        module, _ = find()
    except ImportError as error:
        return str(error)
    try:
        new_agent(module, "rl_bridge-probe", backend, {})
    except RuntimeError as error:
        return str(error)
    return None


def plugins() -> list[str]:
    """Names of the backends that the library offers.

    Raises:
        ImportError: the library is not here.

    """
    module, _ = find()
    config = module.nixl_agent_config(enable_prog_thread=False, backends=[])
    return sorted(module.nixl_agent("rl_bridge-probe", config).get_plugin_list())


# ---- Programs of this package that start without the rest of the library, and without torch.

# A package without its `__init__`, which would import torch.
_PROGRAM = """
import importlib, json, sys, types
sys.path[:], folder, module = json.loads(sys.argv[1])
package = sys.modules["rl_bridge"] = types.ModuleType("rl_bridge")
package.__path__ = [folder]
importlib.import_module(module).main()
"""
_FOLDER = str(Path(__file__).resolve().parents[2])


def bare_command(module: str) -> list[str]:
    """The command that runs `main` of a module, with this process's own places for modules."""
    given = json.dumps([sys.path, _FOLDER, module])
    return [sys.executable, "-I", "-c", _PROGRAM, given]


# ---- Which backends of the library work here: each is opened, in a process that it may end.

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
    find()
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
    module, _ = find()
    known: dict[str, str | None] = dict.fromkeys(plugins(), "it ended the process")
    for name in known:
        cause = backend_cause(name)
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
