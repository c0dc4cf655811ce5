"""Processes that an engine spawns begin with what it imports, as our own children do.

A spawned process of vLLM or SGLang imports for ten seconds, most of what a test with an engine
takes. Where this module was imported they come from the server of `rl_bridge.testing.processes`,
with the environment and output of who starts them; they share no memory with him, as before.
"""

import multiprocessing
from multiprocessing import context, forkserver, popen_forkserver, spawn
from typing import Any

from rl_bridge.testing.processes import Surroundings

_prepared = spawn.get_preparation_data
_server_class: Any = forkserver.ForkServer
_start_server = _server_class.ensure_running
_spawned_class: Any = multiprocessing.get_context("spawn").Process


def _with_surroundings(name: str) -> dict[str, Any]:
    return {**_prepared(name), "surroundings": Surroundings()}


def _ensure_running(server: Any) -> None:
    """As its docstring says: a child of the server uses the same one (CPython starts another)."""
    if server._forkserver_pid is not None or server._forkserver_address is None:
        _start_server(server)


spawn.get_preparation_data = _with_surroundings
_server_class.ensure_running = _ensure_running
_spawned_class._Popen = staticmethod(popen_forkserver.Popen)
assert context.SpawnProcess is _spawned_class
