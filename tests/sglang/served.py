"""SGLang's HTTP server in a process of its own."""

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rl_bridge.testing.processes import free_port
from tests.engines.served import end, launched, wait_until_ready
from tests.sglang.bench import (
    CALL_S,
    PROMPTS,
    SAMPLING,
    Answers,
    checksums,
    cores_for,
    forget,
    options,
    read,
)

KEY = "a key of the test's own"


def make_api_key(directory: Path) -> Path:
    """A file with the key that the server asks for."""
    path = directory / "api-key"
    path.touch(mode=0o600)
    path.write_text(f"{KEY}\n", "utf-8")
    return path


@dataclass(slots=True)
class Served:
    """A server that is ready."""

    url: str
    process: "subprocess.Popen[bytes]"
    client: httpx.Client

    def call(self, path: str, *, method: str = "POST", **request: Any) -> httpx.Response:
        """Call one route."""
        return self.client.request(method, path, **request)

    def generate(
        self, prompts: Sequence[Sequence[int]], adapter: str | None = None, **sampling: Any
    ) -> list[dict[str, Any]]:
        """What it answers to prompts that it computes together."""
        reply = self.call(
            "generate",
            json={
                "input_ids": [list(prompt) for prompt in prompts],
                "sampling_params": {**SAMPLING, **sampling},
                "return_logprob": True,
                "top_logprobs_num": 3,
                "lora_path": None if adapter is None else [adapter] * len(prompts),
            },
        )
        assert reply.is_success, reply.text
        outputs: list[dict[str, Any]] = reply.json()
        return outputs

    def answers(self, adapter: str | None = None) -> Answers:
        """What it answers; no prefix of an earlier question is used."""
        forget(self.url, KEY)
        return read(self.generate(PROMPTS, adapter))

    def sums(self) -> dict[str, str]:
        """SGLang's own checksums of all parameters."""
        return checksums(self.call("weights_checker", json={"action": "checksum"}).json()["ranks"])

    def label(self) -> str:
        """The version that it says."""
        return str(self.call("model_info", method="GET").json()["weight_version"])

    def stream(
        self,
        prompt: Sequence[int],
        tokens: int,
        on_first: Callable[[], None],
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """One request's last output; tells when the first token is there."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {**SAMPLING, "max_new_tokens": tokens},
            "stream": True,
            "lora_path": adapter,
        }
        last = ""
        with self.client.stream("POST", "generate", json=body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    last = line.removeprefix("data: ")
                    on_first()
        output: dict[str, Any] = json.loads(last)
        return output

    def end(self) -> None:
        """Kill it, with all of its processes."""
        end(self.process)


@contextmanager
def served(path: str, log: Path, ranks: int = 1, **more: Any) -> Iterator[Served]:
    """Start it, with these options beside the usual ones; it is killed with the block."""
    port = free_port()
    flags = ["--host", "127.0.0.1", "--port", str(port), "--admin-api-key", KEY, "--api-key", KEY]
    for name, value in {**options(path, ranks), **more}.items():
        flags.append(f"--{name.replace('_', '-')}")
        if value is not True:
            flags += value if isinstance(value, list) else [str(value)]
    url = f"http://127.0.0.1:{port}"
    command = ["sglang.launch_server", *flags]
    with launched(command, log, **cores_for(ranks)) as process, _client(url) as client:
        server = Served(url, process, client)
        wait_until_ready(server, log)
        yield server


def _client(url: str) -> httpx.Client:
    """One for all calls: to make one takes longer than to ask, and the server waits for the core.

    Without connections that are kept: the server closes what idles, perhaps just when it is used.
    """
    return httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=CALL_S,
        limits=httpx.Limits(max_keepalive_connections=0),
        trust_env=False,
    )
