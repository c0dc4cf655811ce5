"""Engines behind HTTP: `RemoteEngine` where the trainer is, a side-car where the engine is.

The side-car's half needs the extra ``remote``, the client's half httpx, which is in it.
"""

import os

from rl_bridge.bridge.two_phase import TwoPhaseExecutor
from rl_bridge.remote.client import RemoteEngine, RemoteWeightLoader
from rl_bridge.remote.config import SidecarConfig, needed
from rl_bridge.remote.serve import serve
from rl_bridge.remote.views import Recovery, Status, UpdateView

__all__ = [
    "Recovery",
    "RemoteEngine",
    "RemoteWeightLoader",
    "SidecarConfig",
    "Status",
    "TwoPhaseExecutor",
    "UpdateView",
    "create_app",
    "serve",
]


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
