"""The rollout that is a vLLM server: updated through a side-car, sampled with over HTTP.

Trainer, side-car and server are processes of their own. Only manifests and samples go over HTTP;
the bytes of the weights come by the transport. Server and side-car listen on the loopback, print
into files, and end with the demo, also if that is killed.
"""

import ctypes
import importlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch

from rl_bridge.demo.learning import SampleBatch, SortTask
from rl_bridge.demo.qwen import failing_exchange, write_checkpoint
from rl_bridge.demo.rollout import START_TIMEOUT_S, InstallReply, RolloutConfig, SampleReply
from rl_bridge.errors import (
    DeadlineExceeded,
    EngineLost,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.remote.client import RemoteEngine
from rl_bridge.testing.processes import free_port, until

__all__ = ["DemoWorker", "HttpRollout", "Server"]

_REQUEST_TIMEOUT_S = 60.0
_AT_ONCE = 64


class HttpRollout:
    """A vLLM server and its side-car, as the trainer sees them."""

    def __init__(self, config: RolloutConfig) -> None:
        """Start both; `wait_until_ready` waits for them."""
        self._config = config
        self._httpx: Any = importlib.import_module("httpx")
        self._generator = torch.Generator().manual_seed(config.seed)
        self._sampling: Mapping[str, Any] = {
            "temperature": 1.0,
            "max_tokens": config.task.num_digits,
            "ignore_eos": True,
            "allowed_token_ids": list(range(config.task.base)),
            "logprobs": 0,  # of the token that was drawn, and of no other one
        }
        with ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            log = Path(config.engine_log or home / "vllm-http.log")
            checkpoint = home / "checkpoint"
            write_checkpoint(config.task, config.engine_seed, checkpoint)
            self._server = _start_vllm(config.task, str(checkpoint), seed=config.seed, log=log)
            stack.callback(self._server.close)
            key_file = _make_key(home / "key")
            self._sidecar = _start_sidecar(
                self._server.url,
                key_file=key_file,
                state_dir=home / "state",
                transport=config.transport,
                log=log.with_name("sidecar.log"),
            )
            stack.callback(self._sidecar.close)
            self._engine = stack.enter_context(
                RemoteEngine(self._sidecar.url, key_file, timeout_s=_REQUEST_TIMEOUT_S)
            )
            limits = self._httpx.Limits(
                max_connections=_AT_ONCE,
                max_keepalive_connections=0,  # the server closes what idles, at its own moment
            )
            self._client: Any = stack.enter_context(
                self._httpx.Client(
                    base_url=self._server.url,
                    timeout=_REQUEST_TIMEOUT_S,
                    limits=limits,
                    trust_env=False,
                )
            )
            self._threads = stack.enter_context(ThreadPoolExecutor(_AT_ONCE))
            self._closing = stack.pop_all()

    @property
    def place(self) -> str:
        """Where it samples, for people."""
        return f"process {self._server.pid}, beside a side-car in process {self._sidecar.pid}"

    def wait_until_ready(self) -> str:
        """Wait until server and side-car have started, and return the engine's name for people.

        Raises:
            WeightBridgeUnavailableError: one of them did not start.

        """
        self._server.wait_until(self._is_healthy)
        self._sidecar.wait_until(self._sidecar_answers)
        version = str(self._call("GET", "/version").get("version", ""))
        return f"a vLLM {version.partition('+')[0]} server"

    def install(self, manifest_json: str, *, fail_half_way: bool = False) -> InstallReply:
        """Send a manifest to the side-car and say what became of it."""
        start = time.perf_counter()
        try:
            if fail_half_way:
                with self._failing_half_way():
                    acknowledged = self._engine.update_weights(manifest_json)
            else:
                acknowledged = self._engine.update_weights(manifest_json)
        except WeightBridgeError as error:
            return InstallReply(
                active_version=self._engine.active_weight_version,
                error=type(error).__name__,
                message=str(error),
                timings_ms={"failed": (time.perf_counter() - start) * 1e3},
            )
        timings = dict(acknowledged.timings_ms)
        timings.pop("total", None)  # the sum of its phases
        timings["HTTP"] = (time.perf_counter() - start) * 1e3 - sum(timings.values())
        return InstallReply(
            active_version=self._engine.active_weight_version,
            root=acknowledged.root,
            timings_ms=timings,
        )

    def sample(self, *, num_groups: int, group_size: int) -> SampleReply:
        """Ask the server, all prompts at once."""
        start = time.perf_counter()
        prompts = self._config.task.prompts(num_groups, self._generator).tolist()

        def ask(prompt: list[int]) -> list[dict[str, Any]]:
            # (Without seeds: vLLM ends for one of them on the CPU.)
            body = {"token_ids": prompt, "sampling_params": {**self._sampling, "n": group_size}}
            choices = self._call("POST", "/inference/v1/generate", json=body)["choices"]
            return sorted(choices, key=lambda choice: int(choice["index"]))

        answered = list(self._threads.map(ask, prompts))
        answers = [
            (prompt, choice)
            for prompt, choices in zip(prompts, answered, strict=True)
            for choice in choices
        ]
        tokens = torch.tensor([[*prompt, *choice["token_ids"]] for prompt, choice in answers])
        log_probs = torch.tensor(
            [[one["logprob"] for one in choice["logprobs"]["content"]] for _, choice in answers]
        )
        return SampleReply(
            batch=SampleBatch.graded(self._config.task, tokens, log_probs, group_size),
            version=self._engine.active_weight_version,
            sample_ms=(time.perf_counter() - start) * 1e3,
            labels=Counter(_labels([choice for _, choice in answers])),
        )

    def close(self) -> None:
        """End side-car and server. Idempotent."""
        self._closing.close()

    @contextmanager
    def _failing_half_way(self) -> Iterator[None]:
        """Within this context the server's workers fail in the middle of every install."""
        self._plant(is_armed=True)
        try:
            yield
        finally:
            self._plant(is_armed=False)

    def _plant(self, *, is_armed: bool) -> None:
        self._call("POST", "/collective_rpc", json={"method": _METHOD, "args": [int(is_armed)]})

    def _is_healthy(self) -> bool:
        try:
            return bool(self._client.get("/health").is_success)
        except self._httpx.TransportError:
            return False

    def _sidecar_answers(self) -> bool:
        try:
            self._engine.status()
        except EngineLost:
            return False
        return True

    def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        try:
            reply = self._client.request(method, path, **request)
            reply.raise_for_status()
        except self._httpx.HTTPError as error:
            raise EngineLost(
                f"the server did not answer {path}: {error}. What it printed is in "
                f"{self._server.log}."
            ) from error
        answered = reply.json()
        return answered if isinstance(answered, dict) else {}


def _labels(choices: list[dict[str, Any]]) -> Iterator[str]:
    """The version label of each output, which must reach from its first token to its last."""
    for choice in choices:
        spans = choice.get("weight_versions") or []
        if [(span["start"], span["end"]) for span in spans] == [(0, len(choice["token_ids"]))]:
            yield str(spans[0]["version"])
        else:
            yield f"in parts: {spans}"


# ---- the planted fault, in the server's workers -------------------------------------------------

_planted = ExitStack()


class DemoWorker:
    """What the demo adds to the server's workers: their exchange fails half-way, on request.

    vLLM mixes it into its worker class, and lets others call its methods over HTTP.
    """

    def rl_bridge_fail_half_way(self, is_armed: int) -> None:
        """Let every install fail half-way from now on, or none."""
        _planted.close()
        if is_armed:
            _planted.enter_context(failing_exchange())


_METHOD = DemoWorker.rl_bridge_fail_half_way.__name__


# ---- servers ------------------------------------------------------------------------------------

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

    def wait_until(self, answers: Callable[[], bool]) -> None:
        """Wait until it answers.

        Raises:
            WeightBridgeUnavailableError: it ended, or does not answer in time.

        """

        def is_ready() -> bool:
            if self._process.poll() is not None:
                raise EngineLost(f"it ended with {self._process.returncode}")
            return answers()

        try:
            until(is_ready, what=f"{self.url} answers", deadline_s=START_TIMEOUT_S)
        except (EngineLost, DeadlineExceeded) as error:
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


def _start_vllm(task: SortTask, checkpoint: str, *, seed: int, log: Path) -> Server:
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
        "worker-extension-cls": f"{__name__}.{DemoWorker.__name__}",
    }
    switches = ("--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out")
    command = ["vllm.entrypoints.openai.api_server", *switches]
    for flag, value in flags.items():
        command += [f"--{flag}", str(value)]
    return Server("vLLM server", command, port=port, log=log, **_ENVIRONMENT)


def _start_sidecar(
    engine_url: str, *, key_file: Path, state_dir: Path, transport: str, log: Path
) -> Server:
    """Start a side-car beside an engine's server, as a user does."""
    port = free_port()
    command = ["rl_bridge", "sidecar", engine_url, "--port", str(port), "--transport", transport]
    command += ["--key-file", str(key_file), "--state-dir", str(state_dir)]
    return Server("side-car", command, port=port, log=log)


def _make_key(path: Path) -> Path:
    """Write a new key that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    return path


def _end_with_parent() -> None:
    """In the child: the kernel ends it when the thread that started it is gone."""
    _PRCTL(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
