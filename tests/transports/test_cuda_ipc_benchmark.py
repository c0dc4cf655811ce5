"""The benchmark's mode ``cuda-ipc`` on host memory: it runs, or says what only a consumer sees."""

import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.cuda import views as ipc_view
from rl_bridge.errors import TransportUnavailable
from rl_bridge.testing.host_devices import HostIPC
from rl_bridge.transports import registry

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The command's module, whose mode ``cuda-ipc`` takes host memory and a thread as consumer."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module: Any = import_module("_lib.smoke")
    threads: list[threading.Thread] = []

    class ThreadChild(module._Child):  # type: ignore[misc]  # found at run time
        def __init__(self, target: Callable[[Connection], None]) -> None:
            self.connection, theirs = Pipe()
            threads.append(threading.Thread(target=target, args=(theirs,)))
            threads[-1].start()

        def __exit__(self, *_: object) -> None:
            threads[-1].join(20)
            self.connection.close()

    monkeypatch.setitem(registry._KINDS, HostIPC.name, HostIPC)
    monkeypatch.setitem(module._TRANSPORTS, module.Mode.CUDA_IPC, HostIPC.name)
    monkeypatch.setattr(module, "_Child", ThreadChild)
    monkeypatch.setattr(module.SmokeConfig, "device", "cpu")
    yield module
    assert not any(thread.is_alive() for thread in threads)


def run(smoke: Any) -> Any:
    config = smoke.SmokeConfig(weights={"w": torch.ones(64)}, first_version=1, warmup=0, updates=3)
    return smoke.run_mode(smoke.Mode.CUDA_IPC, config)


def test_the_mode_moves_every_version(smoke: Any) -> None:
    outcome = run(smoke)
    assert (outcome.status, outcome.active_weight_version) == ("pass", 3)


def test_a_runtime_that_opens_no_handle_is_blocked_and_no_failure(
    smoke: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> int:
        told = "CUDA IPC handle reconstruction failed: as on WSL2"
        raise TransportUnavailable("cuda-ipc", told, "Use cuda-vmm.")

    monkeypatch.setattr(ipc_view.IPCView, "_open", refuse)
    outcome = run(smoke)
    assert outcome.status == "blocked"
    assert outcome.notes == [
        "CUDA IPC handle reconstruction failed: as on WSL2 (remedy: Use cuda-vmm.)"
    ]
