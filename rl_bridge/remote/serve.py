"""Runs a side-car. Needs the extra ``remote``."""

import ipaddress
import logging
import os
import signal
from typing import Any

from rl_bridge.bridge.executor import TwoPhaseExecutor
from rl_bridge.remote.config import SidecarConfig, needed
from rl_bridge.transports.wire.tls import TLSFiles, load_tls

_LOG = logging.getLogger(__name__)


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

    After Ctrl-C it returns. After SIGTERM the signal is raised once more, for whoever handled it
    before; by default that ends the process.

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

    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        told = anyio.run(HTTPServer(app, config, secured).run, host, port)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if told is signal.SIGTERM:
        signal.raise_signal(told)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
