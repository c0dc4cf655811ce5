"""The sampler that is an SGLang engine: its scheduler is a process of the rollout's."""

import importlib
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rl_bridge.demo.qwen import MAX_SEQUENCES, Answer, EngineSampler, plant_fault, vocabulary_size
from rl_bridge.engines.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.testing.installer_faults import EngineFault

NAME = "fail half-way"
"""Of the tensor that `plant` is given: it holds 1 for a fault, 0 for none."""
LOADER = f"{__name__}.plant"

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


class SGLangSampler(EngineSampler):
    """An ``Engine``."""

    product = "SGLang"
    adapter: SGLangInstallAdapter

    def _start(self, checkpoint: str, seed: int) -> str:
        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # the trainer needs cores too
        sglang: Any = importlib.import_module("sglang")
        self._engine = sglang.Engine(
            model_path=checkpoint,
            skip_tokenizer_init=True,
            skip_server_warmup=True,
            dtype="float32",
            context_length=self._task.num_tokens + _SPARE_TOKENS,
            max_running_requests=MAX_SEQUENCES,
            max_total_tokens=2 * MAX_SEQUENCES * self._task.num_tokens,
            mem_fraction_static=0.3,
            random_seed=seed,
            log_level="warning",
            sleep_on_idle=True,  # else it takes a core from the trainer
            custom_weight_loader=[LOADER],
            **(_ON_CPU if on_cpu else {}),
        )
        self.adapter = SGLangInstallAdapter(self._engine)
        return str(sglang.__version__)

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

    def _answers(self, prompts: list[list[int]], group_size: int) -> list[Answer]:
        task = self._task
        sampling = {
            "temperature": 1.0,
            "max_new_tokens": task.num_digits,
            "ignore_eos": True,
            "logit_bias": dict.fromkeys(map(str, range(task.base, vocabulary_size(task))), _NEVER),
        }
        answers = self._engine.generate(
            input_ids=[prompt for prompt in prompts for _ in range(group_size)],
            sampling_params=sampling,
            return_logprob=True,
        )
        return [
            Answer(
                answer["output_ids"],
                [float(number) for number, *_ in answer["meta_info"]["output_token_logprobs"]],
                _label(answer["meta_info"]),
            )
            for answer in answers
        ]

    def close(self) -> None:
        """See `Sampler`."""
        self.adapter.close()
        self._engine.shutdown()


def _label(meta: dict[str, Any]) -> str:
    """The version label of an output, which must hold from its first token to its last."""
    spans = meta.get("weight_versions") or []
    return f"in parts: {spans}" if len(spans) > 1 else str(meta["weight_version"])


# ---- the planted fault, in the engine's scheduler process ---------------------------------------


def plant(model: Any, named: list[tuple[str, Tensor]]) -> None:
    """Let every exchange of weights and every load into `model` fail half-way from now on, or none.

    SGLang calls it as a custom weight loader, which is its own way to let others look at a model.

    Raises:
        EngineFault: the call is none of the demo's.

    """
    (name, is_armed), *others = named
    if name != NAME or others:
        raise EngineFault(
            f"expected one tensor {NAME!r}, got {[name for name, _ in named]}. Use the demo."
        )
    # On the instance it hides the class's own, which is what comes back.
    vars(model).pop("load_weights", None)
    plant_fault(is_armed=bool(is_armed.item()))
    if not is_armed.item():
        return
    load = model.load_weights

    def load_half(weights: Iterable[tuple[str, Tensor]]) -> None:
        given = list(weights)
        half = len(given) // 2
        load(iter(given[:half]))
        raise EngineFault(f"the engine failed after {half} of {len(given)} tensors")

    model.load_weights = load_half
