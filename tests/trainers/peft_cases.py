"""What the ranks of the peft tests run."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from rl_bridge import (
    DeepSpeedWeightExtractor,
    FSDPWeightExtractor,
    WeightExtractor,
    make_weight_bridge,
)
from rl_bridge.compat.skyrl import LoRAConfig, LoRADiskWriter
from rl_bridge.errors import IncompatibleUpdate
from tests.trainers_torch.counting import Collectives
from tests.trainers_torch.publishing import publisher_at
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


def parts(adapters: str, *, is_merged: bool) -> Any:
    model = sharded()
    before = {name: one.full_tensor() for name, one in model.named_parameters()}
    if is_merged:
        model.merge_adapter()
    found = full_report(FSDPWeightExtractor(model, adapters=adapters))
    after = {name: one.full_tensor() for name, one in model.named_parameters()}
    assert is_merged or all(one.equal(before[name]) for name, one in after.items())
    return found


def forgotten() -> str:
    """The second update, before which nobody merged what lies in flat parameters."""
    options: Any = {"use_orig_params": True, "device_id": torch.device("cpu")}
    model: Any = FullyShardedDataParallel(adapted(), **options)
    extractor = FSDPWeightExtractor(model)
    with FullyShardedDataParallel.summon_full_params(model):
        model.merge_adapter()
    list(extractor.local())
    with FullyShardedDataParallel.summon_full_params(model):
        model.unmerge_adapter()
    try:
        list(extractor.local())
    except IncompatibleUpdate as error:
        return str(error)
    return "nothing"


def adapter_extractor(trainer: str) -> WeightExtractor:
    if trainer == "fsdp2":
        return FSDPWeightExtractor(sharded(), adapter="policy")
    if trainer == "fsdp1":
        options: Any = {"use_orig_params": True, "device_id": torch.device("cpu")}
        return FSDPWeightExtractor(FullyShardedDataParallel(adapted(), **options), adapter="policy")
    # (It changes PATH for its process when it is imported.)
    from tests.trainers.deepspeed_cases import engine

    made = engine(int(trainer.removeprefix("zero")), model=adapted())
    return DeepSpeedWeightExtractor(made, adapter="policy")


def published_adapter(trainer: str, port: int) -> Any:
    """The adapter as a group's version, and what this rank makes of it when it imports it."""
    publisher = publisher_at(port)
    extractor = adapter_extractor(trainer)
    with Collectives() as asked:
        manifest = publisher.publish(extractor, weight_version=1)
    with make_weight_bridge("shared-memory") as bridge:
        tensors = bridge.import_update(manifest)
        found = {name: [str(t.dtype), list(t.shape), as_lists(t)] for name, t in tensors.items()}
    torch.distributed.barrier()
    publisher.bridge.close()
    spec: Any = manifest.adapter
    return {
        "tensors": found,
        "spec": [spec.name, spec.config["r"], spec.scaling],
        "collectives": len(asked.names),
    }


def written_for_skyrl(folder: str) -> Any:
    """What each rank of a sharded trainer gets that writes its adapter as SkyRL does."""
    writer = LoRADiskWriter(LoRAConfig(rank=2, lora_sync_path=Path(folder)))
    return writer.write(adapter_extractor("fsdp2"), weight_version=3)


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
