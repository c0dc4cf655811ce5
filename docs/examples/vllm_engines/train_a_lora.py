"""Reinforcement learning of a LoRA on one machine: sample with the adapter, learn, publish it."""

import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.vllm import VLLMEngineAdapter

STEPS, SAMPLES, LENGTH, RANK = 12, 32, 16, 8
PROMPT = [1, 5, 9]


def reward_of(tokens: torch.Tensor) -> torch.Tensor:
    """Stands for your task: the share of even tokens in each answer."""
    return (tokens % 2 == 0).float().mean(dim=1)


def loss_of(model: Any, tokens: torch.Tensor, reward: torch.Tensor) -> Any:
    """Policy gradient: answers that were better than the mean become more likely."""
    prompt = torch.tensor([PROMPT] * len(tokens))
    logits = model(torch.cat([prompt, tokens], dim=1)).logits[:, len(PROMPT) - 1 : -1]
    chosen = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, :, None]).squeeze(2)
    return -((reward - reward.mean())[:, None] * chosen).mean()


def main(path: str) -> None:
    # vLLM's LoRA kernels for CUDA take 16 bits; the trainer's LoRA stays in float32. On a CPU, vLLM
    # would take nearly all memory for its cache.
    dtype, cache = ("bfloat16", None) if torch.cuda.is_available() else ("float32", 1 << 30)
    llm = LLM(
        model=path,
        enable_lora=True,
        max_loras=4,  # the version that serves, the one before, the next; on a CPU one more
        max_lora_rank=RANK,
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=cache,
    )
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    sampling = SamplingParams(n=SAMPLES, max_tokens=LENGTH, detokenize=False, ignore_eos=True)

    trainer = make_weight_bridge("shared-memory", source_worker="trainer")
    executor = RolloutExecutor(weight_install_adapter=VLLMEngineAdapter(llm))
    with trainer, executor:
        for step in range(1, STEPS + 1):
            manifest = trainer.publish(model, weight_version=step, adapter="policy")
            executor.update_weights(manifest)  # all ranks have it and have proven it, or none
            trainer.release(manifest.update_id)
            [answer] = llm.generate(
                [{"prompt_token_ids": PROMPT}],
                sampling,
                use_tqdm=False,
                lora_request=executor.lora_request("policy"),
            )
            tokens = torch.tensor([list(one.token_ids) for one in answer.outputs])
            reward = reward_of(tokens)
            optimizer.zero_grad()
            loss_of(model, tokens, reward).backward()
            optimizer.step()
            print(f"version {executor.adapter_version('policy')}: reward {reward.mean():.2f}")


if __name__ == "__main__":  # vLLM starts processes of its own, which import this file
    main(sys.argv[1])
