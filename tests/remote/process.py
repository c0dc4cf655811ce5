"""Side-cars as processes of their own, which can be killed and started again."""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from rl_bridge.errors import DeadlineExceeded, EngineLost
from rl_bridge.remote import RemoteEngine, Status
from rl_bridge.testing.processes import DEADLINE_S, free_port, until
from rl_bridge.transports import TLSFiles
from tests.remote.warm import Warm

__all__ = ["SidecarProcess", "make_key", "warm"]

ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0
# What hosting platforms set for web servers: a side-car has one worker all the same.
PLATFORM = {"WEB_CONCURRENCY": "4"}


class SidecarProcess:
    """``rl-bridge sidecar``, which can be killed and started again with the same state."""

    def __init__(self, directory: Path, key_file: Path, *, tls: TLSFiles | None = None) -> None:
        self.directory, self.key_file, self.tls = directory, key_file, tls
        self.port = free_port()
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        self.state_dir = directory / "state"
        self.log = directory / "sidecar.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = -1
        # What stands for the process, whoever started it, and however it ended.
        self._descriptor: int | None = None

    def start(self, engine: str = "plain", *, afresh: bool = False, **options: Any) -> Status:
        """Start it and wait until it answers; returns its first status.

        As users start it where `afresh` is set, and with a real engine; one of the engines of tests
        is started without the time that imports take.

        One that does not answer is made to say where each of its threads is.

        `engine` is one of `tests.remote.engines`, or whatever ``rl-bridge sidecar`` takes.
        """
        named = engine if ":" in engine else f"tests.remote.engines:{engine}"
        if self.tls is not None:
            secured = {f"tls_{name}": path for name, path in self.tls.model_dump().items()}
            options = {**secured, **options}
        extra = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in options.items()
        ]
        arguments = [
            *("sidecar", named, "--key-file", str(self.key_file)),
            *("--state-dir", str(self.state_dir), "--port", str(self.port), *extra),
        ]
        self._let_go()
        if afresh or named == engine:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", "-m", "rl_bridge", *arguments],
                    cwd=self.directory,
                    env=environment(),
                    stdout=log,
                    stderr=log,
                )
            self.pid = self._process.pid
        else:
            self.pid = warm().start(arguments, cwd=self.directory, log=self.log)
        with suppress(ProcessLookupError):  # it may have ended
            self._descriptor = os.pidfd_open(self.pid)
        found: list[Status] = []

        def answers(client: RemoteEngine) -> bool:
            assert self.is_alive, f"it ended with {self._code()}:\n{self.log.read_text()}"
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
        return not self._has_ended(0)

    def _has_ended(self, timeout_s: float) -> bool:
        return self._descriptor is None or bool(
            select.select([self._descriptor], [], [], timeout_s)[0]
        )

    def _code(self) -> int | str:
        return "?" if self._process is None else self._process.wait(DEADLINE_S)

    def client(self, **options: Any) -> RemoteEngine:
        return RemoteEngine(self.url, self.key_file, **{"tls": self.tls, **options})

    def kill(self) -> None:
        """As the machine would: no handler runs."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def died(self) -> None:
        """Wait until it died by itself."""
        assert self._has_ended(DEADLINE_S)

    def _end(self, number: int) -> None:
        if self._descriptor is not None and self.is_alive:
            signal.pidfd_send_signal(self._descriptor, number)
            assert self._has_ended(DEADLINE_S)
        self._let_go()

    def _let_go(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._process is not None:
            self._process.wait(DEADLINE_S)
            self._process = None


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | PLATFORM


@cache
def warm() -> Warm:
    """What starts side-cars quickly; one for all tests of this folder."""
    return Warm(environment())


def make_key(directory: Path) -> Path:
    path = directory / "key"
    path.touch(mode=0o600)
    path.write_bytes(bytes(range(32)))
    return path
