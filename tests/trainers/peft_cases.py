"""What the ranks of the peft tests run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rl_bridge import (
    DeepSpeedWeightExtractor,
    FSDPWeightExtractor,
    WeightExtractor,
    make_weight_bridge,
)
from rl_bridge.compat.skyrl import LoRAConfig, LoRADiskWriter
from rl_bridge.errors import IncompatibleUpdate
from tests.trainers_torch.counting import Collectives, peak_nbytes
from tests.trainers_torch.publishing import publisher_at
from tests.trainers_torch.worlds import as_lists, described, filled, full_report


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


LAYER = "model.layers.0"
TRAINED = {
    f"{LAYER}.self_attn.q_proj.weight",
    f"{LAYER}.mlp.down_proj.weight",
    "lm_head.weight",
}
"""What changes of the merged weights when the adapters do, and the copy of the head."""


def adapted(*, is_exact: bool = True, dtype: str = "float32") -> Any:
    """With adapters whose products are exact, so that two ways to merge agree to the bit; or not.

    Not: every product and sum is rounded, and another order of them would be seen.
    """
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
            if not is_exact:
                one.copy_((torch.arange(one.numel()) + len(name)).view(one.shape).sin())
    if dtype == "mixed":  # as peft makes them of a model in 16 bits
        model.to(torch.bfloat16)
        for name, one in model.named_parameters():
            if "lora_" in name:
                one.data = one.data.float()
        return model
    return model.to(getattr(torch, dtype))


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


Made = tuple[Any, Callable[..., WeightExtractor]]


def trained_by(trainer: str, model: Any) -> Made:
    """A peft model that a trainer has cut, and what makes an extractor of it."""
    if trainer == "fsdp2":
        made = sharded(model)
        return made, partial(FSDPWeightExtractor, made)
    if trainer.startswith("fsdp1"):
        options: Any = {"use_orig_params": True, "device_id": torch.device("cpu")}
        if trainer == "fsdp1-whole":
            options["sharding_strategy"] = ShardingStrategy.NO_SHARD
        if trainer == "fsdp1-apart":  # each matrix in a unit of its own, as peft's policy has it
            kinds = {torch.nn.Linear, torch.nn.Embedding, LlamaRMSNorm}
            options |= {"use_orig_params": False, "auto_wrap_policy": ModuleWrapPolicy(kinds)}
        root: Any = FullyShardedDataParallel(model, **options)
        return root, partial(FSDPWeightExtractor, root)
    # (It changes PATH for its process when it is imported.)
    from tests.trainers.deepspeed_cases import engine

    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    made = engine(int(trainer.removeprefix("zero")), model=model, dtype=dtype)
    return made.module, partial(DeepSpeedWeightExtractor, made)


def parts(adapters: str, *, is_merged: bool) -> Any:
    """Of FSDP2."""
    model, extractor_of = trained_by("fsdp2", adapted())
    if is_merged:
        model.merge_adapter()
    return full_report(extractor_of(adapters=adapters))


def merged(trainer: str, dtype: str) -> Any:
    """Merged weights of adapters that round, in chunks of a module each."""
    model, extractor_of = trained_by(trainer, adapted(is_exact=False, dtype=dtype))
    extractor = extractor_of(chunk_nbytes=400)
    before = held_by(extractor_of)
    found = full_report(extractor)
    assert held_by(extractor_of) == before
    assert all(not getattr(one, "merged", False) for one in model.modules())
    return found


def held_by(extractor_of: Callable[..., WeightExtractor]) -> Any:
    """What this rank holds of the training weights, and of the adapter."""
    return [
        described(list(extractor_of(adapters=adapters).local())) for adapters in ("base", "only")
    ]


def not_by_adding(trainer: str) -> str:
    options = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], use_dora=True)
    return refusal(trainer, get_peft_model(base(), options))


def with_biases(trainer: str) -> str:
    """Of an adapter alone."""
    options = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], bias="lora_only")
    return refusal(trainer, get_peft_model(base(), options), adapter="policy")


def tied_head(trainer: str) -> str:
    """With an adapter of the head, which is the embedding."""
    model = get_peft_model(base(), LoraConfig(r=2, target_modules=["lm_head"]))
    model.base_model.model.lm_head.base_layer.weight = model.get_input_embeddings().weight
    return refusal(trainer, model)


def refusal(trainer: str, model: Any, **options: Any) -> str:
    _, extractor_of = trained_by(trainer, model)
    try:
        list(extractor_of(**options).local())
    except IncompatibleUpdate as error:
        return str(error)
    return "nothing"


def peak(trainer: str) -> Any:
    """Memory that merging takes over the chunks, and bytes of all weights."""
    config = LoraConfig(r=8, target_modules=[str(one) for one in range(32)])
    layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(32)))
    _, extractor_of = trained_by(trainer, get_peft_model(layers, config))
    extractor = extractor_of(chunk_nbytes=4 << 20)
    for _ in extractor.full():
        pass
    return [*peak_nbytes(extractor.full()), 32 * 512 * 512 * 4]


def adapter_extractor(trainer: str) -> WeightExtractor:
    return trained_by(trainer, adapted())[1](adapter="policy")


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


def expected(adapters: str, **options: Any) -> Any:
    """What one process has, by peft's own means."""
    model = adapted(**options)
    if adapters == "only":
        found = get_peft_model_state_dict(model)
    elif adapters == "base":
        found = base().state_dict()
    else:
        found = model.merge_and_unload().state_dict()
    return {name: [str(t.dtype), list(t.shape), as_lists(t)] for name, t in found.items()}
