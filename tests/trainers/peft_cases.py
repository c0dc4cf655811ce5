"""What the ranks of the peft tests run."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.trainers.fsdp import FSDPWeightExtractor
from tests.trainers_torch.worlds import as_lists, filled, full_report


def base() -> Any:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    return filled(LlamaForCausalLM(config).to(torch.float32))


def adapted() -> Any:
    """With adapters whose products are exact, so that two ways to merge agree to the bit."""
    options = LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]
    )
    model = get_peft_model(base(), options)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_" in name:
                one.copy_((torch.arange(one.numel()) % 5 - 2).view(one.shape) / 4)
            elif "modules_to_save" in name:
                one.add_(1)
    return model


def sharded() -> Any:
    model = adapted()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def parts(adapters: str) -> Any:
    model = sharded()
    if adapters == "merged":
        model.merge_adapter()
    return full_report(FSDPWeightExtractor(model, adapters=adapters))


def forgotten() -> str:
    """The second update, before which nobody merged."""
    model = sharded()
    extractor = FSDPWeightExtractor(model)
    model.merge_adapter()
    list(extractor.local())
    model.unmerge_adapter()
    try:
        list(extractor.local())
    except IncompatibleUpdate as error:
        return str(error)
    return "nothing"


def expected(adapters: str) -> Any:
    """What one process has, by peft's own means."""
    model = adapted()
    if adapters == "only":
        found = get_peft_model_state_dict(model)
    elif adapters == "base":
        found = base().state_dict()
    else:
        found = model.merge_and_unload().state_dict()
    return {name: [str(t.dtype), list(t.shape), as_lists(t)] for name, t in found.items()}
