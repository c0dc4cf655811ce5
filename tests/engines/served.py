"""vLLM's HTTP server in a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rl_bridge.testing.processes import free_port, until
from tests.engines.drive import MAX_TOKENS, PROMPTS, Answers, Setting, arguments

ROOT = Path(__file__).resolve().parents[2]
START_S = 240
END_S = 30
CALL_S = 60
DEV = {"VLLM_SERVER_DEV_MODE": "1"}
"""With it, a server has the routes by which weights come."""


@dataclass(slots=True)
class Served:
    """A server that is ready."""

    url: str
    process: "subprocess.Popen[bytes]"

    def call(self, path: str, *, method: str = "POST", **request: Any) -> httpx.Response:
        """Call one route."""
        return httpx.request(method, f"{self.url}/{path}", timeout=CALL_S, **request)

    def generate(
        self, prompt: Sequence[int], tokens: int = MAX_TOKENS, **more: Any
    ) -> dict[str, Any]:
        """One request's only choice: tokens, log-probabilities, versions."""
        sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 3}
        reply = self.call(
            "inference/v1/generate",
            json={"token_ids": list(prompt), "sampling_params": sampling, **more},
        )
        assert reply.is_success, reply.text
        (choice,) = reply.json()["choices"]
        return dict(choice)

    def answers(self, **more: Any) -> Answers:
        """What it answers to the prompts, one after the other, computed anew."""
        assert self.call("reset_prefix_cache").is_success
        choices = [self.generate(prompt, **more) for prompt in PROMPTS]
        return tuple(
            (
                tuple(choice["token_ids"]),
                tuple(
                    candidate["logprob"]
                    for position in choice["logprobs"]["content"]
                    for candidate in sorted(position["top_logprobs"], key=lambda c: c["token_id"])
                ),
            )
            for choice in choices
        )

    def label(self) -> str:
        """Of its weights."""
        return str(self.call("weight_info", method="GET").json()["weight_version"])

    def is_paused(self) -> bool:
        """Whether it is."""
        return bool(self.call("is_paused", method="GET").json()["is_paused"])

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> Any:
        """Call a method of all workers, as an ``LLM`` does."""
        reply = self.call("collective_rpc", json={"method": method, "args": list(args)})
        assert reply.is_success, reply.text
        return reply.json()["results"]

    def end(self) -> None:
        """Kill it, with all of its processes."""
        end(self.process)


@contextmanager
def served(
    setting: Setting,
    path: str,
    log: Path,
    *,
    replicas: int = 1,
    options: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """Start it; it is killed with the block."""
    port = free_port()
    flags = [*_flags(setting, path, options or {}), "--host", "127.0.0.1", "--port", str(port)]
    flags += ["--data-parallel-size", str(replicas)]
    command = ["vllm.entrypoints.openai.api_server", *flags]
    with launched(command, log, PYTHONPATH=str(ROOT), **(environment or {})) as process:
        server = Served(f"http://127.0.0.1:{port}", process)
        wait_until_ready(server, log)
        yield server


@contextmanager
def launched(
    command: Sequence[str], log: Path, **environment: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """A module that runs in a process group of its own, killed with the block."""
    with log.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill it, with all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(END_S)


def wait_until_ready(server: Any, log: Path) -> None:
    """Wait until a server answers ``/health``."""

    def is_ready() -> bool:
        assert server.process.poll() is None, "the server ended by itself"
        try:
            return bool(server.call("health", method="GET").is_success)
        except httpx.TransportError:
            return False

    until(is_ready, what=f"server is ready, see {log}", deadline_s=START_S)


def _flags(setting: Setting, path: str, options: Mapping[str, object]) -> list[str]:
    flags = ["--enable-scale-out"]  # tokens in, tokens out, with their versions
    for name, value in {**arguments(setting, path), **options}.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif name == "weight_transfer_config":
            flags += [flag, '{"backend": "rl_bridge"}']
        elif value is not False:
            flags += [flag, str(value)]
    return flags
