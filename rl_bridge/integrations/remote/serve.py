"""Runs a side-car: finds its engine, and listens. Needs the extra ``remote``."""

import importlib
import ipaddress
import logging
import os
import sys
from pathlib import Path

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.two_phase import TwoPhaseExecutor
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.integrations.remote.config import SidecarConfig
from rl_bridge.integrations.remote.needed import needed
from rl_bridge.integrations.vllm.engine_adapter import VLLMEngineAdapter

__all__ = ["find_executor", "serve"]

_LOG = logging.getLogger(__name__)
_GRACE_S = 10
_KEEP_ALIVE_S = 30


def find_executor(engine: str, *, transport: str = "shared-memory") -> TwoPhaseExecutor:
    """The executor of an engine that is named on a command line.

    Args:
        engine: a vLLM server's URL, or ``module:function``, a function without arguments that
            makes a `TwoPhaseExecutor`; it is looked for in the working directory as well.
        transport: by which the bytes come, for a URL.

    Raises:
        WeightBridgeUnavailableError: there is no such engine.

    """
    if engine.startswith(("http://", "https://")):
        return TwoPhaseExecutor(
            weight_bridge=make_weight_bridge(transport, source_worker="sidecar"),
            weight_install_adapter=VLLMEngineAdapter(engine),
        )
    module, _, name = engine.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        msg = (
            f"there is no engine {engine!r}: {error}. Name a vLLM server's URL, or a function that "
            "makes a TwoPhaseExecutor as module:function."
        )
        raise WeightBridgeUnavailableError(msg) from error
    made = make()
    if not isinstance(made, TwoPhaseExecutor):
        msg = (
            f"{engine} made a {type(made).__name__}, expected a TwoPhaseExecutor. Make it return "
            "rl_bridge.remote.TwoPhaseExecutor(weight_bridge=..., weight_install_adapter=...)."
        )
        raise WeightBridgeUnavailableError(msg)
    return made


def serve(
    executor: TwoPhaseExecutor,
    *,
    key_file: str | os.PathLike[str],
    state_dir: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 8471,
    config: SidecarConfig | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; from the main thread.

    Args:
        executor: the engine's; stays yours to close.
        key_file: see `create_app`.
        state_dir: see `create_app`.
        host: address to listen on. Requests are signed, not encrypted: beyond this machine they
            belong into a private network.
        port: to listen on.
        config: limits.

    Raises:
        WeightBridgeUnavailableError: the extra is missing, or the key or directory cannot be used.

    """
    uvicorn = needed("uvicorn")
    needed("fastapi"), needed("prometheus_client")
    from rl_bridge.integrations.remote.app import create_app

    config = config or SidecarConfig()
    if not _is_loopback(host):
        _LOG.warning("listening on %s: requests are signed, and nothing is encrypted", host)
    app = create_app(executor, key_file=key_file, state_dir=state_dir, config=config)
    uvicorn.run(
        app,
        host=host,
        port=port,
        access_log=False,
        server_header=False,
        log_level="info",
        ws="none",
        limit_concurrency=config.max_connections,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
