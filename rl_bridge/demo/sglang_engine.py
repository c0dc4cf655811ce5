"""The sampler that is an SGLang engine: its scheduler is a process of the rollout's.

It starts from a checkpoint with random weights, written for it to load; whatever it samples with
comes in over `SGLangInstallAdapter`. Its log-probabilities are those of the distribution that it
draws from, and its outputs carry SGLang's own version labels.
"""

import importlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_bridge.demo.learning import SampleBatch, Sampled, SortTask
from rl_bridge.demo.model import EngineFault
from rl_bridge.demo.qwen import failing_exchange, vocabulary_size, write_checkpoint
from rl_bridge.engines.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.errors import WeightBridgeUnavailableError

__all__ = ["NAME", "SGLangSampler", "plant"]

NAME = "fail half-way"
"""Of the tensor that `plant` is given: it holds 1 for a fault, 0 for none."""
LOADER = f"{__name__}.plant"

_MAX_SEQUENCES = 512
_SPARE_TOKENS = 8  # SGLang keeps some of the context for itself
_NEVER = -1e9
# What SGLang needs where there is no GPU.
_ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
}


class SGLangSampler:
    """An ``Engine``. This process's environment is changed for SGLang."""

    def __init__(self, task: SortTask, *, model_seed: int, seed: int) -> None:
        """Start the engine with random weights of its own.

        Args:
            task: what it answers.
            model_seed: of the weights.
            seed: of prompts and samples.

        Raises:
            WeightBridgeUnavailableError: it does not start.

        """
        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            # The trainer needs cores too.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        try:
            with tempfile.TemporaryDirectory() as checkpoint:
                sglang: Any = importlib.import_module("sglang")
                write_checkpoint(task, model_seed, Path(checkpoint))
                self._engine = sglang.Engine(
                    model_path=checkpoint,
                    skip_tokenizer_init=True,
                    skip_server_warmup=True,
                    dtype="float32",
                    context_length=task.num_tokens + _SPARE_TOKENS,
                    max_running_requests=_MAX_SEQUENCES,
                    max_total_tokens=2 * _MAX_SEQUENCES * task.num_tokens,
                    mem_fraction_static=0.3,
                    random_seed=seed,
                    log_level="warning",
                    sleep_on_idle=True,  # else it takes a core from the trainer
                    custom_weight_loader=[LOADER],
                    **(_ON_CPU if on_cpu else {}),
                )
        except Exception as error:
            raise WeightBridgeUnavailableError(
                f"SGLang did not start ({type(error).__name__}: {error}). Look at what it printed."
            ) from error
        self.name = f"SGLang {str(sglang.__version__).partition('+')[0]}"
        self.adapter = SGLangInstallAdapter(self._engine)
        self._task = task
        self._generator = torch.Generator().manual_seed(seed)
        self._sampling = {
            "temperature": 1.0,
            "max_new_tokens": task.num_digits,
            "ignore_eos": True,
            "logit_bias": dict.fromkeys(map(str, range(task.base, vocabulary_size(task))), _NEVER),
        }

    @contextmanager
    def failing_half_way(self) -> Iterator[None]:
        """See `Sampler`."""
        self._plant(is_armed=True)
        try:
            yield
        finally:
            self._plant(is_armed=False)

    def _plant(self, *, is_armed: bool) -> None:
        engine, named = self._engine, [(NAME, torch.tensor([float(is_armed)]))]
        steps = (
            engine.begin_weight_update,
            lambda: engine.update_weights_from_tensor(named, load_format=LOADER, flush_cache=False),
            engine.end_weight_update,
        )
        for step in steps:
            succeeded, *said = step()
            if not succeeded:
                raise WeightBridgeUnavailableError(
                    f"SGLang did not take the demo's fault: {said}. Look at what it printed."
                )

    def sample(self, *, num_groups: int, group_size: int) -> Sampled:
        """See `Sampler`."""
        prompts = self._task.prompts(num_groups, self._generator)
        prompts = prompts.repeat_interleave(group_size, dim=0)
        answers = self._engine.generate(
            input_ids=prompts.tolist(), sampling_params=self._sampling, return_logprob=True
        )
        drawn = torch.tensor([answer["output_ids"] for answer in answers])
        log_probs = torch.tensor([_chosen(answer) for answer in answers])
        tokens = torch.cat([prompts, drawn], dim=1)
        batch = SampleBatch.graded(self._task, tokens, log_probs, group_size)
        return Sampled(
            batch=batch, labels=Counter(_label(answer["meta_info"]) for answer in answers)
        )

    def close(self) -> None:
        """See `Sampler`."""
        self.adapter.close()
        self._engine.shutdown()


# ---- the planted fault, in the engine's scheduler process ---------------------------------------

_planted = ExitStack()


def plant(model: Any, named: list[tuple[str, Tensor]]) -> None:
    """Let every exchange of weights and every load into `model` fail half-way from now on, or none.

    SGLang calls it as a custom weight loader, which is its own way to let others look at a model.

    Raises:
        EngineFault: the call is none of the demo's.

    """
    (name, is_armed), *others = named
    if name != NAME or others:
        msg = f"expected one tensor {NAME!r}, got {[name for name, _ in named]}. Use the demo."
        raise EngineFault(msg)
    # On the instance it hides the class's own, which is what comes back.
    vars(model).pop("load_weights", None)
    _planted.close()
    if not is_armed.item():
        return
    _planted.enter_context(failing_exchange())
    load = model.load_weights

    def load_half(weights: Iterable[tuple[str, Tensor]]) -> None:
        given = list(weights)
        half = len(given) // 2
        load(iter(given[:half]))
        raise EngineFault(f"the engine failed after {half} of {len(given)} tensors")

    model.load_weights = load_half


# ---- what SGLang answers ------------------------------------------------------------------------


def _chosen(answer: dict[str, Any]) -> list[float]:
    """Log-probability of each token that was drawn."""
    told = [
        (token, float(log_prob))
        for log_prob, token, *_ in answer["meta_info"]["output_token_logprobs"]
    ]
    return [log_prob for _, log_prob in told]


def _label(meta: dict[str, Any]) -> str:
    """The version label of an output, which must hold from its first token to its last."""
    spans = meta.get("weight_versions") or []
    return f"in parts: {spans}" if len(spans) > 1 else str(meta["weight_version"])
