"""The sampler that is a vLLM engine, in the rollout's own process.

It starts from a checkpoint with random weights, written for it to load; whatever it samples with
comes in over `VLLMEngineAdapter`. Its log-probabilities are those of the distribution that it draws
from (``processed_logprobs``), and its outputs carry vLLM's own version labels.
"""

import importlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from rl_bridge.demo.learning import SampleBatch, Sampled, SortTask
from rl_bridge.demo.qwen import failing_exchange, write_checkpoint
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.engines.vllm.plugin import register
from rl_bridge.errors import WeightBridgeUnavailableError

__all__ = ["VLLMSampler"]

_MAX_SEQUENCES = 512
_CACHE_NBYTES = 128 << 20


class VLLMSampler:
    """An ``LLM`` whose workers run in this process. Its environment is changed for vLLM."""

    def __init__(self, task: SortTask, *, model_seed: int, seed: int) -> None:
        """Start the engine with random weights of its own.

        Args:
            task: what it answers.
            model_seed: of the weights.
            seed: of prompts and samples.

        Raises:
            WeightBridgeUnavailableError: it does not start.

        """
        # In this process, so that a fault can be planted in the middle of an install.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # The trainer needs cores too: no thread is bound to one.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        try:
            with tempfile.TemporaryDirectory() as checkpoint:
                vllm: Any = importlib.import_module("vllm")
                register()  # as the plugin does, where the environment keeps it from being loaded
                write_checkpoint(task, model_seed, Path(checkpoint))
                self.llm = vllm.LLM(
                    model=checkpoint,
                    skip_tokenizer_init=True,
                    dtype="float32",
                    enforce_eager=True,
                    max_model_len=task.num_tokens + 1,
                    max_num_seqs=_MAX_SEQUENCES,
                    kv_cache_memory_bytes=_CACHE_NBYTES,
                    logprobs_mode="processed_logprobs",
                    seed=seed,
                )
        except Exception as error:
            raise WeightBridgeUnavailableError(
                f"vLLM did not start ({type(error).__name__}: {error}). Look at what it printed."
            ) from error
        self.name = f"vLLM {str(vllm.__version__).partition('+')[0]}"
        self.adapter = VLLMEngineAdapter(self.llm)
        self._task = task
        self._generator = torch.Generator().manual_seed(seed)
        self._sampling = {
            "temperature": 1.0,
            "max_tokens": task.num_digits,
            "ignore_eos": True,
            "allowed_token_ids": list(range(task.base)),
            "logprobs": 0,  # of the token that was drawn, and of no other one
            "detokenize": False,
        }
        self._params = vllm.SamplingParams

    def failing_half_way(self) -> AbstractContextManager[None]:
        """See `Sampler`."""
        return failing_exchange()

    def sample(self, *, num_groups: int, group_size: int) -> Sampled:
        """See `Sampler`."""
        prompts = self._task.prompts(num_groups, self._generator).tolist()
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            self._params(n=group_size, **self._sampling),
            use_tqdm=False,
        )
        answers = [
            (prompt, one)
            for prompt, output in zip(prompts, outputs, strict=True)
            for one in output.outputs
        ]
        tokens = torch.tensor([[*prompt, *answer.token_ids] for prompt, answer in answers])
        log_probs = torch.tensor([_chosen(answer) for _, answer in answers])
        batch = SampleBatch.graded(self._task, tokens, log_probs, group_size)
        return Sampled(batch=batch, labels=Counter(_labels([answer for _, answer in answers])))

    def close(self) -> None:
        """See `Sampler`."""
        self.llm.llm_engine.engine_core.shutdown()


def _chosen(answer: Any) -> list[float]:
    """Log-probability of each token that was drawn."""
    return [
        float(among[token].logprob)
        for token, among in zip(answer.token_ids, answer.logprobs, strict=True)
    ]


def _labels(answers: list[Any]) -> Iterator[str]:
    """The version label of each output, which must reach from its first token to its last."""
    for answer in answers:
        if not hasattr(answer, "weight_versions"):
            return  # vLLM labels outputs since 0.32
        spans = answer.weight_versions or []
        if [(span.start, span.end) for span in spans] == [(0, len(answer.token_ids))]:
            yield str(spans[0].version)
        else:
            yield f"in parts: {spans}"
