"""Finds NVIDIA's library: the package of it that is installed, and the backends that work.

The library comes as one package per CUDA release, each of which works without a GPU, and a meta
package that requires all of them. Any of the packages will do.

Some backends end the process that opens them. So `causes` opens each in another process, which
starts this module's `main` without the rest of rl_bridge and without torch.
"""

import ctypes
import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
"""Packages that may hold the library, in the order in which they are tried."""

_RDMA = Path("/sys/class/infiniband")
_LOCK = threading.Lock()
_LOGGER = "nixl"


def find() -> tuple[Any, str]:
    """Import the library.

    Returns:
        Its module, and the version of its package.

    Raises:
        ImportError: no package of it is installed, or none can be loaded.

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
    raise ImportError(f"no package of NIXL can be imported ({'; '.join(causes)})")


def is_installed() -> bool:
    """Whether a package of it is there, whether or not it can be imported."""
    return any(importlib.util.find_spec(package) is not None for package in PACKAGES)


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "unknown"


def _quieten() -> None:
    # The library reports every agent on standard output, where a program's own answers belong.
    logger = logging.getLogger(_LOGGER)
    if logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)


def has_rdma() -> bool:
    """Whether this machine has a device that reads memory by itself."""
    return _RDMA.is_dir() and any(_RDMA.iterdir())


def failures(module: Any) -> tuple[type[Exception], ...]:
    """List the errors that its calls raise: they have no common base."""
    names = [name for name in dir(module.nixlBind) if name.startswith("nixl")]
    found = [getattr(module.nixlBind, name) for name in names if name.endswith("Error")]
    return (*(kind for kind in found if isinstance(kind, type)), RuntimeError)


def new_agent(module: Any, name: str, backend: str, params: dict[str, str]) -> Any:
    """Make an agent with one backend.

    Raises:
        RuntimeError: the backend cannot be loaded here.

    """
    # Its progress thread would take a core as long as the agent lives, so this library makes
    # progress itself; several threads do, so the agent needs its lock.
    config = module.nixl_agent_config(
        enable_prog_thread=False,
        backends=[],
        sync_mode=module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    try:
        agent = module.nixl_agent(name, config)
        if backend not in agent.get_plugin_list():
            found = ", ".join(sorted(agent.get_plugin_list()))
            raise RuntimeError(f"it has no plugin {backend!r}, but: {found}")
        agent.create_backend(backend, params)
    except failures(module) as error:
        raise RuntimeError(
            f"NIXL is here and its backend {backend!r} cannot be opened: {error}"
        ) from error
    return agent


def backend_cause(backend: str) -> str | None:
    """The part that this machine lacks for a backend; None if it lacks nothing."""
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
    """List the backends that the library offers.

    Raises:
        ImportError: the library is not installed.

    """
    module, _ = find()
    config = module.nixl_agent_config(enable_prog_thread=False, backends=[])
    return sorted(module.nixl_agent("rl_bridge-probe", config).get_plugin_list())


# The packages that the module is in, without their `__init__`, which would import torch.
_PROGRAM = """
import importlib, json, sys, types
sys.path[:], root, module = json.loads(sys.argv[1])
names = module.split(".")
for end in range(1, len(names)):
    name = ".".join(names[:end])
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = ["/".join([root, *names[:end]])]
importlib.import_module(module).main()
"""
_ROOT = str(Path(__file__).resolve().parents[3])


def command_without_torch(module: str) -> list[str]:
    """Make the command that runs `main` of a module with this process's module search path."""
    given = json.dumps([sys.path, _ROOT, module])
    return [sys.executable, "-I", "-c", _PROGRAM, given]


# ---- which backends work here -------------------------------------------------------------------

BACKENDS = {
    "UCX": "RDMA, TCP, or the memory of another process: the default of nixl",
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
"""Backend -> what it is for."""

_TIMEOUT_S = 60.0
_MARK = "backends: "


def causes() -> dict[str, str | None]:
    """Find the cause that keeps each backend of the library from working here; None if it works.

    Raises:
        ImportError: the library is not installed.
        RuntimeError: the process that opens the backends failed.

    """
    find()
    try:
        child = subprocess.run(  # noqa: S603 - our own interpreter, our own words
            command_without_torch(__name__), capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"its backends cannot be asked: {error}") from error
    # The library and its backends write there too; the answer is the last marked line.
    lines = child.stdout.decode("utf-8", "replace").splitlines()
    found = [line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)]
    if not found:
        raise RuntimeError(f"the process that opens its backends ended with {child.returncode}")
    answer: dict[str, str | None] = json.loads(found[-1])
    return answer


def main() -> None:
    """Open one backend after the other; after each, print the causes so far."""
    module, _ = find()
    known: dict[str, str | None] = dict.fromkeys(plugins(), "it ended the process")
    for name in known:
        cause = backend_cause(name)
        known[name] = None if cause is None else _explain(module, name, cause)
        os.write(1, f"\n{_MARK}{json.dumps(known)}\n".encode())
    os._exit(0)  # some backends that failed half-way hang or crash at exit


def _explain(module: Any, name: str, cause: str) -> str:
    """Name a library that is missing: the loader does so, NIXL does not."""
    folder = Path(module.__file__).resolve().parents[1]
    for path in folder.glob(f".*nixl*/plugins/libplugin_{name}.so"):
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            return f"its plugin cannot be loaded: {error}"
    return f"{cause}: it wants settings or a device of its own"
