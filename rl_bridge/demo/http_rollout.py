"""The rollout that is a vLLM server: updated through a side-car, sampled with over HTTP.

Trainer, side-car and server are processes of their own. Only manifests and samples go over HTTP;
the bytes of the weights come by the transport.
"""

import importlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from rl_bridge.demo.config import RolloutConfig
from rl_bridge.demo.engines import start_timeout_s
from rl_bridge.demo.failures import PeerGone
from rl_bridge.demo.qwen import write_checkpoint
from rl_bridge.demo.rollout import InstallReply, SampleReply
from rl_bridge.demo.sampler import SampleBatch
from rl_bridge.demo.servers import make_key, start_sidecar, start_vllm
from rl_bridge.demo.vllm_worker import METHOD
from rl_bridge.errors import EngineLost, WeightBridgeError
from rl_bridge.remote.client import RemoteEngine

__all__ = ["HttpRollout"]

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
            # Other random weights than the trainer's: none may be left over.
            write_checkpoint(config.task, config.seed + 1_000_003, checkpoint)
            self._server = start_vllm(config.task, str(checkpoint), seed=config.seed, log=log)
            stack.callback(self._server.close)
            key_file = make_key(home / "key")
            self._sidecar = start_sidecar(
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
    def pid(self) -> int:
        """The server's process id."""
        return self._server.pid

    @property
    def place(self) -> str:
        """Where it samples, for people."""
        return f"process {self._server.pid}, beside a side-car in process {self._sidecar.pid}"

    def wait_until_ready(self) -> str:
        """Wait until server and side-car have started, and return the engine's name for people.

        Raises:
            WeightBridgeUnavailableError: one of them did not start.

        """
        timeout_s = start_timeout_s(self._config.engine)
        self._server.wait_until(self._is_healthy, timeout_s=timeout_s)
        self._sidecar.wait_until(self._sidecar_answers, timeout_s=timeout_s)
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
        batch = SampleBatch(
            tokens=tokens,
            log_probs=log_probs,
            rewards=self._config.task.rewards(tokens),
            group_size=group_size,
        )
        return SampleReply(
            batch=batch,
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
        self._call("POST", "/collective_rpc", json={"method": METHOD, "args": [int(is_armed)]})

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
            raise PeerGone(
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
