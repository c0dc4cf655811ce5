"""Servers that the demo starts: a vLLM server and a side-car, each a process of its own.

They listen on the loopback, print into files, and end with the demo, also where that is killed.
"""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rl_bridge.demo.failures import PeerGone
from rl_bridge.demo.task import SortTask
from rl_bridge.demo.vllm_worker import EXTENSION
from rl_bridge.errors import DeadlineExceeded, WeightBridgeUnavailableError
from rl_bridge.testing.processes import free_port, until

__all__ = ["Server", "make_key", "start_sidecar", "start_vllm"]

_LOOPBACK: Final = "127.0.0.1"
_STOP_TIMEOUT_S: Final = 20.0
_PR_SET_PDEATHSIG: Final = 1
_MAX_SEQUENCES: Final = 512
_CACHE_NBYTES: Final = 128 << 20
_ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes by which weights come
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # The trainer needs cores too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
_PRCTL: Final = ctypes.CDLL(None, use_errno=True).prctl  # found before the fork


class Server:
    """A process that listens at a URL, with whatever processes it starts."""

    def __init__(
        self, name: str, command: Sequence[str], *, port: int, log: Path, **environment: str
    ) -> None:
        """Start it.

        Args:
            name: for messages.
            command: the module to run with this Python, and its arguments.
            port: where it will listen.
            log: file for what it prints.
            environment: what it gets beside this process's own.

        """
        self.name, self.port, self.log = name, port, log
        self.url = f"http://{_LOOPBACK}:{port}"
        with log.open("wb") as file:
            self._process = subprocess.Popen(  # noqa: S603 - this Python, and our own arguments
                [sys.executable, "-m", *command],
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                # A group of its own: Ctrl-C is the trainer's, and all of it can be ended at once.
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - one call of the kernel
            )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def wait_until(self, answers: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait until it answers.

        Raises:
            WeightBridgeUnavailableError: it ended, or does not answer in time.

        """

        def is_ready() -> bool:
            if self._process.poll() is not None:
                raise PeerGone(f"it ended with {self._process.returncode}")
            return answers()

        try:
            until(is_ready, what=f"{self.url} answers", deadline_s=timeout_s)
        except (PeerGone, DeadlineExceeded) as error:
            raise WeightBridgeUnavailableError(
                f"the {self.name} did not start: {error}. Look at what it printed: {self.log}."
            ) from error

    def close(self) -> None:
        """End it; what does not end in time is killed. Idempotent."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                # The group's last: a server that is gone may have left processes behind.
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)


def start_vllm(task: SortTask, checkpoint: str, *, seed: int, log: Path) -> Server:
    """Start a vLLM server with a checkpoint."""
    port = free_port()
    flags = {
        "model": checkpoint,
        "host": _LOOPBACK,
        "port": port,
        "dtype": "float32",
        "max-model-len": task.num_tokens + 1,
        "max-num-seqs": _MAX_SEQUENCES,
        "kv-cache-memory-bytes": _CACHE_NBYTES,
        "logprobs-mode": "processed_logprobs",
        "seed": seed,
        "worker-extension-cls": EXTENSION,
    }
    switches = ("--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out")
    command = ["vllm.entrypoints.openai.api_server", *switches]
    for flag, value in flags.items():
        command += [f"--{flag}", str(value)]
    return Server("vLLM server", command, port=port, log=log, **_ENVIRONMENT)


def start_sidecar(
    engine_url: str, *, key_file: Path, state_dir: Path, transport: str, log: Path
) -> Server:
    """Start a side-car beside an engine's server, as a user does."""
    port = free_port()
    command = ["rl_bridge", "sidecar", engine_url, "--port", str(port), "--transport", transport]
    command += ["--key-file", str(key_file), "--state-dir", str(state_dir)]
    return Server("side-car", command, port=port, log=log)


def make_key(path: Path) -> Path:
    """Write a new key that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    return path


def _end_with_parent() -> None:
    """In the child: the kernel ends it when the thread that started it is gone."""
    _PRCTL(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
