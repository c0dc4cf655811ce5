"""Engines behind HTTP: `RemoteEngine` where the trainer is, a side-car where the engine is.

The side-car's half needs the extra ``remote``, the client's half httpx, which is in it.
"""

from rl_bridge.bridge.executor import TwoPhaseExecutor
from rl_bridge.remote.answers import Recovery, Status, UpdateView
from rl_bridge.remote.client import RemoteEngine, RemoteWeightLoader
from rl_bridge.remote.config import SidecarConfig
from rl_bridge.remote.serve import create_app, serve

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
