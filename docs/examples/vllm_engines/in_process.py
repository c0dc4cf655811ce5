"""A trainer and a vLLM engine on one machine: publish, install on all ranks, sample."""

import sys

import torch
from vllm import LLM, SamplingParams

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.vllm import VLLMEngineAdapter


def trained(llm: LLM, step: int) -> dict[str, torch.Tensor]:
    """Stands for your trainer: its checkpoint's tensors after a step."""
    from safetensors.torch import load_file

    path = llm.llm_engine.model_config.model
    return {
        name: tensor * (1 + step) for name, tensor in load_file(f"{path}/model.safetensors").items()
    }


def main(model: str) -> None:
    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
    )
    publisher = make_weight_bridge("shared-memory", source_worker="trainer")
    executor = RolloutExecutor(
        weight_transport="shared-memory", weight_install_adapter=VLLMEngineAdapter(llm)
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    with publisher, executor:
        for step in (1, 2, 3):
            manifest = publisher.publish(trained(llm, step), keep=1)
            installed = executor.update_weights(manifest)
            [answer] = llm.generate([{"prompt_token_ids": [1, 5, 9]}], sampling, use_tqdm=False)
            assert installed.proof.root == manifest.root
            took = f"{installed.timings_ms['total']:.1f} ms"
            print(step, list(answer.outputs[0].token_ids), took)


if __name__ == "__main__":  # vLLM starts processes of its own, which import this file
    main(sys.argv[1])
