"""A training with an engine in its process, which ends with it; what came of it is in a file."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from rl_bridge import WeightBridgeError
from rl_bridge.compat.trl import bridged
from tests.frameworks import tiny
from tests.frameworks.test_trl import arguments, logged


def main(checkpoint: str, home: Path) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from vllm import SamplingParams

    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}
    args = GRPOConfig(**arguments(home, beta=0.0, vllm_gpu_memory_utilization=0.3, **options))
    data = Dataset.from_dict({"prompt": [f"{one} {two}" for one in range(8) for two in range(8)]})
    trainer = bridged(GRPOTrainer)(
        model=checkpoint, reward_funcs=tiny.digits, args=args, train_dataset=data
    )
    generation = trainer.vllm_generation
    engine = generation.weight_transfer.engine
    trainer.train()
    greedy = SamplingParams(temperature=0, max_tokens=tiny.LENGTH)

    def answer() -> list[int]:
        (given,) = generation.llm.generate([{"prompt_token_ids": [5, 6]}], greedy, use_tqdm=False)
        return list(given.outputs[0].token_ids)

    told: dict[str, Any] = {
        "rewards": logged(trainer, "reward"),
        "difference": max(logged(trainer, "sampling/sampling_logp_difference/max")),
        "dtype": str(generation.llm.llm_engine.model_config.dtype),
        "version": engine.active_weight_version,
        "answers": [answer()],
    }
    with torch.no_grad():
        trainer.model.model.norm.weight[3] = float("nan")
    try:
        generation.sync_weights()
    except WeightBridgeError as error:
        told["refused"] = str(error)
    told["answers"].append(answer())
    told["behind"] = engine.active_weight_version
    (home / "told.json").write_text(json.dumps(told), "utf-8")
    generation.weight_transfer.destroy()


if __name__ == "__main__":  # vLLM may start processes that import this file
    main(sys.argv[1], Path(sys.argv[2]))
