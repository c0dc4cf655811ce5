"""Finding NVIDIA's library: which package of it is here, and what it can do.

Its distribution comes as one package per CUDA release, each of which works without a GPU, and a
meta package that asks for all of them. Any one will do.
"""

import importlib
import logging
import threading
from pathlib import Path
from typing import Any

__all__ = ["PACKAGES", "backend_cause", "failures", "find", "has_rdma", "new_agent", "plugins"]

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
