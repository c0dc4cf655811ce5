"""The samplers that are vLLM: an engine in the rollout's own process, or a server with a side-car.

With the server, only manifests and samples go over HTTP; the bytes of the weights come by the
transport. Server and side-car listen on the loopback, and end with the demo, also if that is
killed.
"""

import ctypes
import importlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar, Final

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.demo.learning import SortTask
from rl_bridge.demo.lora import ADAPTER, RANK, build_base
from rl_bridge.demo.qwen import (
    MAX_SEQUENCES,
    Answer,
    EngineSampler,
    QwenPolicy,
    plant_fault,
    version_label,
)
from rl_bridge.engines.adapters import Resident
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.engines.vllm.lora import VLLMAdapterInstaller
from rl_bridge.engines.vllm.plugin import register
from rl_bridge.errors import EngineLost
from rl_bridge.remote.client import RemoteEngine
from rl_bridge.testing.installer_faults import EngineFault
from rl_bridge.testing.processes import free_port, until

_CACHE_NBYTES: Final = 128 << 20
_ENVIRONMENT: Final = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # The trainer needs cores too: no thread is bound to one.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def _sampling(task: SortTask) -> dict[str, Any]:
    return {
        "temperature": 1.0,
        "max_tokens": task.num_digits,
        "ignore_eos": True,
        "allowed_token_ids": list(range(task.base)),
        "logprobs": 0,  # of the token that was drawn, and of no other one
    }


class VLLMSampler(EngineSampler):
    """An ``LLM`` whose workers run in this process."""

    product = "vLLM"
    options: ClassVar[dict[str, Any]] = {}
    """For the engine, beside what it needs anyway."""

    def _start(self, checkpoint: str, seed: int) -> str:
        # In this process, so that a fault can be planted in the middle of an install.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        vllm: Any = importlib.import_module("vllm")
        register()  # as the plugin does, where the environment keeps it from being loaded
        self.llm = vllm.LLM(
            model=checkpoint,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=self._task.num_tokens + 1,
            max_num_seqs=MAX_SEQUENCES,
            kv_cache_memory_bytes=_CACHE_NBYTES,
            logprobs_mode="processed_logprobs",
            seed=seed,
            **self.options,
        )
        self.adapter = VLLMEngineAdapter(self.llm)
        self._params = vllm.SamplingParams
        return str(vllm.__version__)

    def _plant(self, *, is_armed: bool) -> None:
        plant_fault(is_armed=is_armed)

    def _answers(self, prompts: list[list[int]], group_size: int) -> list[Answer]:
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            self._params(n=group_size, detokenize=False, **_sampling(self._task)),
            use_tqdm=False,
            lora_request=self._lora_request(),
        )
        return [self._answer(output, answer) for output in outputs for answer in output.outputs]

    def _lora_request(self) -> Any:
        return None

    def _answer(self, output: Any, answer: Any) -> Answer:
        del output
        tokens, label = list(answer.token_ids), None
        if hasattr(answer, "weight_versions"):  # vLLM labels outputs since 0.32
            spans = answer.weight_versions or []
            label = version_label([(s.start, s.end, s.version) for s in spans], len(tokens))
        among = zip(tokens, answer.logprobs, strict=True)
        return Answer(tokens, [float(made[token].logprob) for token, made in among], label)

    def close(self) -> None:
        """See `Sampler`."""
        self.llm.llm_engine.engine_core.shutdown()


class VLLMLoRASampler(VLLMSampler):
    """An ``LLM`` on two ranks that applies an adapter."""

    product = "two ranks of vLLM"
    options: ClassVar[dict[str, Any]] = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "enable_lora": True,
        "max_loras": 4,
        "max_lora_rank": RANK,
        "worker_extension_cls": f"{__name__}.DemoWorker",
    }

    def updated_over(self, transport: str) -> RolloutExecutor:
        """See `Sampler`."""
        self._executor = RolloutExecutor(
            weight_transport=transport, weight_install_adapter=self.adapter
        )
        return self._executor

    def _built(self, seed: int) -> QwenPolicy:
        return build_base(self._task, seed)

    def _plant(self, *, is_armed: bool) -> None:
        self.llm.collective_rpc("rl_bridge_fail_half_way", args=(int(is_armed),))

    def _lora_request(self) -> Any:
        return self._executor.lora_request(ADAPTER)

    def _answer(self, output: Any, answer: Any) -> Answer:
        # (The name of its request is that label, and behind it the update's id.)
        label = output.lora_request.lora_name.rpartition("-")[0]
        return super()._answer(output, answer)._replace(label=label)


# ---- a server, and the side-car beside it -------------------------------------------------------

_LOOPBACK: Final = "127.0.0.1"
_AT_ONCE: Final = 64
_REQUEST_TIMEOUT_S: Final = 50.0
_START_TIMEOUT_S: Final = 240.0
_STOP_TIMEOUT_S: Final = 20.0


class DemoWorker:
    """Lets the installs of an engine's workers fail half-way, on request.

    vLLM mixes it into its worker class, and lets others call its methods over HTTP.
    """

    rank: int  # vLLM's own

    def rl_bridge_fail_half_way(self, is_armed: int) -> None:
        """Let every install fail half-way from now on, or none; an adapter's on the last rank."""
        plant_fault(is_armed=bool(is_armed))
        if self.rank > 0:
            read = _fail_to_read if is_armed else _read
            VLLMAdapterInstaller.read = read  # type: ignore[method-assign,assignment]


_read = VLLMAdapterInstaller.read


def _fail_to_read(_: VLLMAdapterInstaller, version: Resident) -> int:
    raise EngineFault(f"the engine failed after adapter {version.label} was written")


class VLLMServerSampler(EngineSampler):
    """A vLLM server, updated through a side-car and sampled with over HTTP."""

    product = "a server of vLLM"

    def _start(self, checkpoint: str, seed: int) -> str:
        httpx: Any = importlib.import_module("httpx")
        self._http_error = httpx.HTTPError
        port = free_port()
        flags = {
            "model": checkpoint,
            "host": _LOOPBACK,
            "port": port,
            "dtype": "float32",
            "max-model-len": self._task.num_tokens + 1,
            "max-num-seqs": MAX_SEQUENCES,
            "kv-cache-memory-bytes": _CACHE_NBYTES,
            "logprobs-mode": "processed_logprobs",
            "seed": seed,
            "worker-extension-cls": f"{__name__}.{DemoWorker.__name__}",
        }
        command = ["vllm.entrypoints.openai.api_server", "--skip-tokenizer-init"]
        command += ["--enforce-eager", "--enable-scale-out"]
        for flag, value in flags.items():
            command += [f"--{flag}", str(value)]
        with ExitStack() as stack:
            # In dev mode it has the routes by which weights come.
            environment = {**_ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1"}
            self._server = Server("vLLM server", command, port=port, **environment)
            stack.callback(self._server.close)
            limits = httpx.Limits(
                max_connections=_AT_ONCE,
                max_keepalive_connections=0,  # the server closes what idles, at its own moment
            )
            client = httpx.Client(
                base_url=self._server.url,
                timeout=_REQUEST_TIMEOUT_S,
                limits=limits,
                trust_env=False,
            )
            self._client: Any = stack.enter_context(client)
            self._threads = stack.enter_context(ThreadPoolExecutor(_AT_ONCE))
            self._server.wait_until(lambda: self._call("GET", "/health"))
            self._closing = stack.pop_all()
        return str(self._call("GET", "/version").get("version", ""))

    def updated_over(self, transport: str) -> RemoteEngine:
        """Start a side-car beside the server, as a user does."""
        home = Path(self._closing.enter_context(tempfile.TemporaryDirectory()))
        key_file, port = home / "key", free_port()
        key_file.touch(mode=0o600)
        key_file.write_bytes(secrets.token_bytes(32))
        command = ["rl_bridge", "sidecar", self._server.url, "--port", str(port)]
        command += ["--transport", transport]
        command += ["--key-file", str(key_file), "--state-dir", str(home / "state")]
        sidecar = Server("side-car", command, port=port)
        self._closing.callback(sidecar.close)
        engine = RemoteEngine(sidecar.url, key_file, timeout_s=_REQUEST_TIMEOUT_S)
        self._closing.callback(engine.close)
        sidecar.wait_until(engine.status)
        return engine

    def _plant(self, *, is_armed: bool) -> None:
        method = DemoWorker.rl_bridge_fail_half_way.__name__
        self._call("POST", "/collective_rpc", json={"method": method, "args": [int(is_armed)]})

    def _answers(self, prompts: list[list[int]], group_size: int) -> list[Answer]:
        """All prompts are asked at once."""
        sampling = {**_sampling(self._task), "n": group_size}

        def ask(prompt: list[int]) -> list[Answer]:
            # (Without seeds: vLLM ends for one of them on the CPU.)
            body = {"token_ids": prompt, "sampling_params": sampling}
            choices = self._call("POST", "/inference/v1/generate", json=body)["choices"]
            return [_answer(made) for made in sorted(choices, key=lambda one: int(one["index"]))]

        return [answer for answers in self._threads.map(ask, prompts) for answer in answers]

    def close(self) -> None:
        """See `Sampler`; the side-car ends first."""
        self._closing.close()

    def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        try:
            reply = self._client.request(method, path, **request)
            reply.raise_for_status()
        except self._http_error as error:
            raise EngineLost(f"the server did not answer {path}: {error}") from error
        answered = reply.json() if reply.content else {}
        return answered if isinstance(answered, dict) else {}


def _answer(choice: dict[str, Any]) -> Answer:
    tokens, spans = choice["token_ids"], choice.get("weight_versions") or []
    return Answer(
        tokens,
        [one["logprob"] for one in choice["logprobs"]["content"]],
        version_label([(one["start"], one["end"], one["version"]) for one in spans], len(tokens)),
    )


_PR_SET_PDEATHSIG: Final = 1
_PRCTL: Final = ctypes.CDLL(None, use_errno=True).prctl  # found before the fork


class Server:
    """A process that listens at a URL, with whatever processes it starts."""

    def __init__(self, name: str, command: Sequence[str], *, port: int, **environment: str) -> None:
        """Start it.

        Args:
            name: for messages.
            command: the module to run with this Python, and its arguments.
            port: where it will listen.
            environment: what it gets beside this process's own.

        """
        self.name, self.url = name, f"http://{_LOOPBACK}:{port}"
        self._process = subprocess.Popen(  # noqa: S603 - this Python, and our own arguments
            [sys.executable, "-m", *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            # A group of its own: Ctrl-C is the trainer's, and all of it can be ended at once.
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - one call of the kernel
        )
        self.pid = self._process.pid

    def wait_until(self, answers: Callable[[], object]) -> None:
        """Wait until a call to it raises `EngineLost` no longer.

        Raises:
            EngineLost: it ended.
            DeadlineExceeded: it does not answer in time.

        """

        def is_ready() -> bool:
            if self._process.poll() is not None:
                raise EngineLost(f"the {self.name} ended with {self._process.returncode}")
            with suppress(EngineLost):
                answers()
                return True
            return False

        until(is_ready, what=f"the {self.name} answers", deadline_s=_START_TIMEOUT_S)

    def close(self) -> None:
        """End it; what does not end in time is killed. Idempotent."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                # The group's last: a server that is gone may have left processes behind.
                os.killpg(self.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)


def _end_with_parent() -> None:
    """In the child: the kernel ends it when the thread that started it is gone."""
    _PRCTL(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
