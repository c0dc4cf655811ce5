"""Side-cars as processes of their own, which can be killed and started again."""

import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_bridge.errors import DeadlineExceeded, EngineLost
from rl_bridge.remote import RemoteEngine, Status
from rl_bridge.testing.processes import DEADLINE_S, until

__all__ = ["SidecarProcess", "free_port", "make_key"]

ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0
# What hosting platforms set for web servers: a side-car has one worker all the same.
PLATFORM = {"WEB_CONCURRENCY": "4"}


def free_port() -> int:
    """One that nobody listens on.

    Below those that the kernel gives to whoever connects: a server may take minutes until it
    listens on it.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class SidecarProcess:
    """``rl-bridge sidecar``, which can be killed and started again with the same state."""

    def __init__(self, directory: Path, key_file: Path) -> None:
        self.directory, self.key_file = directory, key_file
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.state_dir = directory / "state"
        self.log = directory / "sidecar.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, engine: str = "plain", **options: Any) -> Status:
        """Start it and wait until it answers; returns its first status.

        One that does not answer is made to say where each of its threads is.

        `engine` is one of `tests.remote.engines`, or whatever ``rl-bridge sidecar`` takes.
        """
        named = engine if ":" in engine else f"tests.remote.engines:{engine}"
        extra = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-X", "faulthandler", "-m", "rl_bridge", "sidecar"),
                    named,
                    *("--key-file", str(self.key_file), "--state-dir", str(self.state_dir)),
                    *("--port", str(self.port), *extra),
                ],
                cwd=self.directory,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | PLATFORM,
                stdout=log,
                stderr=log,
            )
        found: list[Status] = []

        def answers(client: RemoteEngine) -> bool:
            assert self.is_alive, self.log.read_text()
            try:
                found.append(client.status())
            except EngineLost:
                return False
            return True

        try:
            # One client: to make one takes longer than to ask, and the side-car waits for the core.
            with self.client(timeout_s=START_S) as client:
                until(lambda: answers(client), what="the side-car answers", deadline_s=START_S)
        except DeadlineExceeded as error:
            self._end(signal.SIGABRT)
            raise AssertionError(self.log.read_text()) from error
        return found[0]

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self, **options: Any) -> RemoteEngine:
        return RemoteEngine(self.url, self.key_file, **options)

    def kill(self) -> None:
        """As the machine would: no handler runs."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def died(self) -> None:
        """Wait until it died by itself."""
        assert self._process is not None
        self._process.wait(DEADLINE_S)

    def _end(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(DEADLINE_S)


def make_key(directory: Path) -> Path:
    path = directory / "key"
    path.touch(mode=0o600)
    path.write_bytes(bytes(range(32)))
    return path
