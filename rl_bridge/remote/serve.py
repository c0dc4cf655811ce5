"""Runs a side-car: finds its engine, and listens. Needs the extra ``remote``."""

import importlib
import ipaddress
import logging
import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.executor import TwoPhaseExecutor
from rl_bridge.engines.sglang.client import connect as sglang_client
from rl_bridge.engines.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.installers.base import TransactionalAdapter
from rl_bridge.remote.config import SidecarConfig, needed
from rl_bridge.remote.signing import read_secret
from rl_bridge.transports.wire.tls import TLSFiles, load_tls

_LOG = logging.getLogger(__name__)


class EngineServer(StrEnum):
    """Whose server a URL is."""

    VLLM = "vllm"
    SGLANG = "sglang"


def find_executor(
    engine: str,
    *,
    transport: str = "shared-memory",
    server: EngineServer | str = EngineServer.VLLM,
    api_key_file: str | os.PathLike[str] | None = None,
    timeout_s: float = 600.0,
) -> TwoPhaseExecutor:
    """The executor of an engine that is named on a command line.

    Args:
        engine: a server's URL, or ``module:function``, a function without arguments that makes a
            `TwoPhaseExecutor`; it is looked for in the working directory as well.
        transport: by which the bytes come, for a URL.
        server: whose server it is, for a URL.
        api_key_file: with the key that SGLang's server asks for, mode 0600.
        timeout_s: deadline of each call to a server.

    Raises:
        ValueError: no such server, or a key for one that takes none.
        WeightBridgeUnavailableError: there is no such engine, or the key's file cannot be used.

    """
    if engine.startswith(("http://", "https://")):
        adapter = _adapter(engine, EngineServer(server), api_key_file, timeout_s)
        return TwoPhaseExecutor(
            weight_bridge=make_weight_bridge(transport, source_worker="sidecar"),
            weight_install_adapter=adapter,
        )
    module, _, name = engine.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        msg = (
            f"there is no engine {engine!r}: {error}. Name a server's URL, or a function that "
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


def _adapter(
    url: str,
    server: EngineServer,
    api_key_file: str | os.PathLike[str] | None,
    timeout_s: float,
) -> TransactionalAdapter:
    if server is EngineServer.SGLANG:
        key = None if api_key_file is None else _api_key(api_key_file)
        client = sglang_client(url, timeout_s=timeout_s, api_key=key)
        return SGLangInstallAdapter(client)
    if api_key_file is not None:
        msg = "a vLLM server's update routes take no API key. Leave --api-key-file out."
        raise ValueError(msg)
    return VLLMEngineAdapter(url, timeout_s=timeout_s)


def _api_key(path: str | os.PathLike[str]) -> str:
    text = read_secret(path).decode("latin-1").strip()
    if not (text and text.isascii() and text.isprintable()):
        msg = f"the file {path} holds no API key, expected one line of text. Write it there."
        raise WeightBridgeUnavailableError(msg)
    return text


def create_app(
    executor: TwoPhaseExecutor,
    *,
    key_file: str | os.PathLike[str],
    state_dir: str | os.PathLike[str],
    config: SidecarConfig | None = None,
) -> object:
    """Make a side-car as an ASGI application, for any server of such, with one worker.

    Args:
        executor: the engine's; nobody else updates with it. Stays yours to close.
        key_file: the shared key, at least 32 bytes, mode 0600.
        state_dir: this side-car's own directory; it outlives the process.
        config: limits.

    Raises:
        WeightBridgeUnavailableError: the extra is missing, or key or directory cannot be used.
        WeightBridgeError: what an earlier side-car left there is damaged.
        TypeError: an executor that cannot stop between its steps.

    """
    needed("fastapi"), needed("prometheus_client")
    from rl_bridge.remote import app

    return app.create_app(executor, key_file=key_file, state_dir=state_dir, config=config)


def serve(
    executor: TwoPhaseExecutor,
    *,
    key_file: str | os.PathLike[str],
    state_dir: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 8471,
    config: SidecarConfig | None = None,
    tls: TLSFiles | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; from the main thread.

    Args:
        executor: the engine's; stays yours to close.
        key_file: see `create_app`.
        state_dir: see `create_app`.
        host: address to listen on. Requests are signed, and without `tls` not encrypted: beyond
            this machine they then belong into a private network.
        port: to listen on.
        config: limits.
        tls: certificate, key and authority: requests come over TLS, from clients whose certificate
            the authority signed. They are signed all the same.

    Raises:
        WeightBridgeUnavailableError: the extra is missing, or the key, the directory or a file of
            `tls` cannot be used, or the address cannot be listened on.

    """
    anyio, _ = needed("anyio"), needed("h11")
    config = config or SidecarConfig()
    secured = load_tls(tls)
    if secured is None and not _is_loopback(host):
        _LOG.warning("listening on %s: requests are signed, and nothing is encrypted", host)
    app: Any = create_app(executor, key_file=key_file, state_dir=state_dir, config=config)
    from rl_bridge.remote.listening import HTTPServer

    if anyio.run(HTTPServer(app, config, secured).run, host, port) is signal.SIGTERM:
        signal.raise_signal(signal.SIGTERM)  # a step that hangs must not keep the process


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
