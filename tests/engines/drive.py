"""Starting real engines, and what they answer.

An engine in this process shares vLLM's global process groups with any other one here, and takes
them along when it ends: there is one at a time.
"""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from rl_bridge import RolloutExecutor, WeightUpdateManifest, make_weight_bridge
from rl_bridge.engines.vllm.client import connect
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter, VLLMServing
from tests.engines.models import Kind

PROMPTS: tuple[tuple[int, ...], ...] = (
    (1, 5, 9, 17, 33),
    (1, 100, 200),
    (*[7] * 40, 3, 4, 5),
)
MAX_TOKENS = 24

Answers = tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]
"""For each prompt the tokens, and the log-probabilities of all candidates that were told."""

_alive: list[str] = []


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine: the kind of its model and how it runs."""

    kind: Kind = field(default_factory=Kind)
    compiled: bool = False
    in_process: bool = True
    ranks: int = 1

    def __str__(self) -> str:
        where = "in-process" if self.in_process else "multi-process"
        return f"{self.kind}-{'compiled' if self.compiled else 'eager'}-{where}-tp{self.ranks}"


def arguments(setting: Setting, path: str) -> dict[str, Any]:
    """What every engine of these tests is started with."""
    return {
        "model": path,
        "dtype": setting.kind.dtype,
        "enforce_eager": not setting.compiled,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "seed": 0,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": setting.ranks,
        "weight_transfer_config": {"backend": "rl_bridge"},
        "worker_extension_cls": "tests.engines.faults.FaultyWorker",
    }


@contextmanager
def start(setting: Setting, path: str, **options: Any) -> Iterator[Any]:
    """An `LLM`, ended with the block."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    assert not (_alive and setting.in_process), f"{_alive} is alive in this process"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not setting.in_process))
    if setting.in_process:
        _alive.append(str(setting))
    llm = None
    try:
        llm = LLM(**{**arguments(setting, path), **options})
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        if setting.in_process:
            _alive.clear()
            cleanup_dist_env_and_memory()
        gc.collect()


def greedy(max_tokens: int = MAX_TOKENS) -> Any:
    """Sampling parameters under which tokens depend on the weights alone."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True, logprobs=3
    )


def prompts_for(prompts: Sequence[Sequence[int]], salt: str | None = None) -> list[Any]:
    """Prompts as vLLM takes them."""
    extra = {} if salt is None else {"cache_salt": salt}
    return [{"prompt_token_ids": list(prompt), **extra} for prompt in prompts]


def read(outputs: Sequence[Any]) -> Answers:
    """Tokens and log-probabilities of requests that finished."""
    return tuple(
        (
            tuple(output.outputs[0].token_ids),
            tuple(
                entry.logprob
                for position in output.outputs[0].logprobs
                for _, entry in sorted(position.items())
            ),
        )
        for output in outputs
    )


def answers(llm: Any, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> Answers:
    """What an engine answers, computed anew: no prefix of an earlier question is used."""
    assert llm.reset_prefix_cache()
    with _held_back(llm):
        llm.enqueue(prompts_for(prompts), greedy(), use_tqdm=False, **options)
    return read(llm.wait_for_completion(use_tqdm=False))


@contextmanager
def _held_back(llm: Any) -> Iterator[None]:
    """Let an engine in a process of its own begin when all prompts are there.

    Else it begins with those that came in time; in other company the same prompt's bfloat16
    products are other ones, also of an engine that was never updated.
    """
    ask = getattr(llm.llm_engine.engine_core, "call_utility", None)
    if ask is None:  # in this process nothing begins by itself
        yield
        return
    ask("pause_scheduler", "keep", False)
    try:
        yield
    finally:
        ask("resume_scheduler")


@contextmanager
def executor_for(
    engine: Any,
    *,
    loop: Any = None,
    serving: Mapping[str, Any] | None = None,
    take_over: bool = True,
    **options: Any,
) -> Iterator[RolloutExecutor]:
    """An executor of its own bridge around an engine.

    Args:
        engine: an `LLM`, an `AsyncLLM` or a server's URL.
        loop: of an `AsyncLLM`.
        serving: what `VLLMServing` takes.
        take_over: True takes the engine from the executor that a test began with; that one has it
            again with its next update.
        options: what `VLLMEngineAdapter` takes.

    """
    if loop is not None:
        engine = connect(engine, loop=loop, timeout_s=options.get("timeout_s", 600.0))
    if serving is not None:
        options["serving"] = VLLMServing(**serving)
    with (
        make_weight_bridge("shared-memory", source_worker="rollout") as bridge,
        closing(VLLMEngineAdapter(engine, take_over=take_over, **options)) as adapter,
        RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=adapter, suspicious="off"
        ) as executor,
    ):
        yield executor


def leave(llm: Any) -> None:
    """Let whichever driver has an engine leave it: vLLM's own calls are a driver, too."""
    (session, *_) = llm.collective_rpc("rl_bridge", args=("describe",))
    named = {name: session[name] for name in ("driver", "epoch")}
    llm.collective_rpc("rl_bridge", args=("leave", named))


def native_update(llm: Any, manifest: WeightUpdateManifest) -> None:
    """An update by vLLM's own calls."""
    leave(llm)
    llm.start_weight_update()
    llm.update_weights({"update_info": {"manifest": manifest.to_json()}})
    llm.finish_weight_update(f"v{manifest.weight_version}")


def model_of(llm: Any) -> Any:
    """The model of an engine in this process."""
    (model,) = llm.apply_model(lambda model: model)
    return model
