"""What the ranks of the tests of Megatron with peft run."""

import zlib
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.tp_layer import LoraParallelLinear
from transformers import AutoModelForCausalLM

from rl_bridge import make_weight_bridge
from rl_bridge.trainers.megatron import MegatronWeightExtractor, unwrapped
from tests.trainers.megatron_cases import expert_model, loaded, told
from tests.trainers_torch.counting import Collectives
from tests.trainers_torch.publishing import publisher_at
from tests.trainers_torch.worlds import as_lists, full_report

OPTIONS: dict[str, Any] = {"r": 2, "lora_alpha": 4}
# Megatron's layers, and those of Hugging Face's that they are.
LAYERS = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
    "output_layer": ["lm_head"],
}


def tensor_of(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


class ParallelLoRA(LoraParallelLinear):  # type: ignore[misc]  # peft has no types here
    """As docs/how-to/connect-megatron.md has it: peft 0.21's own layer cannot be made."""

    def __init__(
        self, base_layer: Any, adapter_name: str, config: Any, *, r: int, lora_alpha: int, **_: Any
    ) -> None:
        options = {"r": r, "lora_alpha": lora_alpha, "megatron_config": config.megatron_config}
        super().__init__(base_layer, adapter_name, config, tensor_parallel, **options)

    def update_layer(self, adapter_name: str, r: int, **options: Any) -> None:
        self.lora_bias[adapter_name] = False
        super().update_layer(adapter_name, r, **options)

    def forward(self, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        result, bias = self.base_layer(x, *args, **options)
        for name in self.active_adapters:
            low = tensor_of(self.lora_A[name](self.lora_dropout[name](x)))
            result = result + tensor_of(self.lora_B[name](low)) * self.scaling[name]
        return result, bias


class Wrapper(torch.nn.Module):
    """As Megatron's own, of data parallelism and of 16 bits."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def in_hf(path: str, targets: list[str], **options: Any) -> Any:
    """The same adapter in Hugging Face's model: modules that Megatron fuses have the same A."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    names = [one for target in targets for one in LAYERS[target]]
    made = get_peft_model(model, LoraConfig(**{**OPTIONS, **options}, target_modules=names))
    fused = {one: target for target, all_of_it in LAYERS.items() for one in all_of_it}
    with torch.no_grad():
        for name, one in made.named_parameters():
            if "lora_" in name:
                words = [
                    fused.get(word, word) if "lora_A" in name else word for word in name.split(".")
                ]
                begin = zlib.crc32(".".join(words).encode())
                # Small quarters: sums of their products are exact, in whatever order.
                values = (torch.arange(one.numel()) * 5 + begin) % 251 - 125
                one.copy_(values.view(one.shape) / 4)
    return made


def with_lora(model: Any, targets: list[str], base: Any = None, **options: Any) -> Any:
    """Megatron's model with peft's layers in it; `base` is that model in a wrapper."""
    config = LoraConfig(
        **{**OPTIONS, **options}, target_modules=targets, megatron_config=model.config
    )
    layers = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)
    config._register_custom_module(dict.fromkeys(layers, ParallelLoRA))
    return get_peft_model(base or model, config)


def adapted(
    path: str,
    targets: list[str],
    *,
    wrapped: str = "",
    expected: Any = None,
    degrees: dict[str, int] | None = None,
    **options: Any,
) -> tuple[Any, list[Any]]:
    """A bridge, and the models with the values of `expected`, which mbridge cuts."""
    bridge, models = loaded(path, **(degrees or {}))
    values = dict((expected or in_hf(path, targets)).named_parameters())
    found = []
    for model in models:
        base = Wrapper(model) if wrapped == "inside" else None
        made = with_lora(model, targets, base, **options)
        fill(bridge, model, values)
        found.append(Wrapper(Wrapper(made)) if wrapped == "outside" else made)
    return bridge, found


def fill(bridge: Any, model: Any, values: dict[str, torch.Tensor]) -> None:
    """Give this rank's parts to the layers, as mbridge cuts the weights of these."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    offset = model.decoder.layers[0].layer_number - 1
    for path, layer in model.named_modules():
        if isinstance(layer, LoraParallelLinear):
            words = path.split(".")
            if "layers" in words:
                at = words.index("layers") + 1
                words[at] = str(int(words[at]) + offset)
            name = ".".join([*words, "weight"])
            hf = [
                f"base_model.model.{one.removesuffix('.weight')}"
                for one in bridge._weight_name_mapping_mcore_to_hf(name)
            ]
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            whole_a = values[f"{hf[0]}.lora_A.default.weight"]
            all_b = [values[f"{one}.lora_B.default.weight"] for one in hf]
            whole_b = bridge._weight_to_mcore_format(name, all_b).reshape(-1, whole_a.shape[0])
            with torch.no_grad():
                if layer.is_parallel_a:
                    a.copy_(whole_a.chunk(size, dim=1)[rank])
                    b.copy_(whole_b)
                else:
                    a.copy_(whole_a)
                    b.copy_(bridge._weight_split_across_tp(name, whole_b, b, size)[rank])


def report(
    path: str,
    targets: list[str],
    *,
    is_hf: bool,
    wrapped: str = "",
    dtype: str | None = None,
    **degrees: int,
) -> Any:
    bridge, models = adapted(path, targets, wrapped=wrapped, degrees=degrees)
    extractor = MegatronWeightExtractor(
        models, bridge=bridge if is_hf else None, adapter="policy", chunk_nbytes=1000
    )
    return full_report(extractor, dtype)


def published(
    path: str,
    targets: list[str],
    port: int,
    *,
    patterns: dict[str, Any] | None = None,
    **degrees: int,
) -> Any:
    """The adapter as a group's version, and what this rank reads of it."""
    rank, alpha = patterns or {}, dict.fromkeys(patterns or {}, 16)
    hf_rank = {one: rank[target] for target in rank for one in LAYERS[target]}
    expected = in_hf(path, targets, rank_pattern=hf_rank, alpha_pattern=dict.fromkeys(hf_rank, 16))
    bridge, models = adapted(
        path, targets, expected=expected, degrees=degrees, rank_pattern=rank, alpha_pattern=alpha
    )
    extractor = MegatronWeightExtractor(models, bridge=bridge, adapter="policy", base_root="0" * 32)
    publisher = publisher_at(port)
    with Collectives() as asked:
        manifest = publisher.publish(extractor, weight_version=1)
    with make_weight_bridge("shared-memory") as reader:
        tensors = reader.import_update(manifest)
        found = {name: [str(t.dtype), list(t.shape), as_lists(t)] for name, t in tensors.items()}
    torch.distributed.barrier()
    publisher.bridge.close()
    return {
        "tensors": found,
        "spec": manifest.adapter.to_metadata()["adapter"],  # type: ignore[union-attr]
        "collectives": asked.names,
    }


def merged(
    path: str,
    targets: list[str],
    *,
    by_peft: bool = False,
    is_exact: bool = True,
    is_hf: bool = True,
    wrapped: str = "",
    **degrees: int,
) -> Any:
    """Weights with the adapter in them, as peft merges it on each rank or as they are published."""
    bridge, models = adapted(path, targets, wrapped=wrapped, degrees=degrees)
    if not is_exact:  # products and sums are rounded
        for one in matrices(models):
            one.sin_()
    if by_peft:
        models = [one.merge_and_unload() for one in models]
    before = held(models)
    found = full_report(
        MegatronWeightExtractor(models, bridge=bridge if is_hf else None, chunk_nbytes=1000)
    )
    assert held(models) == before
    return found


def merged_experts(*, by_peft: bool = False) -> Any:
    """The same of a model of which each of two ranks has two experts."""
    made = with_lora(expert_model(ep=2), ["linear_qkv", "linear_fc1", "linear_fc2"])
    for number, one in enumerate(matrices([made])):
        one.copy_((torch.arange(one.numel()) + number).view(one.shape).sin())
    return full_report(MegatronWeightExtractor(made.merge_and_unload() if by_peft else made))


def matrices(models: list[Any]) -> list[torch.Tensor]:
    """Those of the adapter on this rank, to be written to."""
    named = [item for model in models for item in model.named_parameters()]
    return [one.detach() for name, one in named if "lora_" in name]


def held(models: list[Any]) -> Any:
    """What this rank trains, by peft's names, and where it lies in memory."""
    named = [item for model in models for item in model.named_parameters()]
    return {name: [one.data_ptr(), as_lists(one)] for name, one in named}


def trained(path: str, targets: list[str], **degrees: int) -> Any:
    """The adapter after a step of training."""
    bridge, models = adapted(path, targets, degrees=degrees)
    (model,) = models
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.copy_(one.new_ones(()) if "norm" in name else one.sin() / 3)  # of common sizes
    before = full_report(MegatronWeightExtractor(models, bridge=bridge, adapter="policy"))["full"]
    tokens = torch.arange(8).view(1, 8)
    mask = torch.ones(8, 8).triu(1).bool()
    losses = model(tokens, tokens, mask.view(1, 1, 8, 8), labels=tokens + 1)
    losses.mean().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    after = full_report(MegatronWeightExtractor(models, bridge=bridge, adapter="policy"))
    return {**after, "before": before}


def refusals(path: str) -> Any:
    """On two tensor-parallel ranks."""
    targets = ["linear_qkv"]
    degrees = {"tp": 2}
    bridge, models = adapted(path, targets, degrees=degrees)

    def extracted(given: Any, **options: Any) -> str:
        return told(lambda: MegatronWeightExtractor(given, **options).placements())

    class Exports:
        def export_hf_weights(self) -> None: ...

    class Converter(type(bridge)):  # type: ignore[misc]  # whatever class it is
        def _weight_to_hf_format(self, *arguments: Any) -> Any:
            return super()._weight_to_hf_format(*arguments)

    answers = {
        "unnamed": extracted(models, adapters="only"),
        "no_peft": extracted(loaded(path, **degrees)[1], adapter="policy"),
        "exporter": extracted(models, adapter="policy", bridge=Exports()),
    }
    model: Any = unwrapped(models[0])
    layer = model.decoder.layers[1].self_attention.linear_qkv
    layer.lora_magnitude_vector["default"] = torch.nn.LayerNorm(3, bias=False)
    answers["dora"] = extracted(models, adapter="policy")
    layer.lora_variant = {"default": "dora"}
    answers["not_merged"] = told(lambda: list(MegatronWeightExtractor(models).local()))
    layer.lora_variant = {}
    layer.base_layer.weight0 = layer.base_layer.weight
    answers["grouped"] = extracted(models)
    del layer.base_layer.weight0
    del layer.lora_magnitude_vector["default"]
    layer.lora_B["default"].weight.tensor_model_parallel = False
    answers["no_marks"] = extracted(models, adapter="policy", bridge=bridge)
    layer.lora_B["default"].weight.tensor_model_parallel = True
    answers["sound"] = extracted(models, adapter="policy", bridge=bridge)
    bridge.__class__ = Converter
    answers["own_conversion"] = extracted(models, adapter="policy", bridge=bridge)
    layer.to_wrap, layer.adapter = layer.base_layer, layer.lora_A
    answers["other_layers"] = extracted(models, adapter="policy")
    return answers


def expert_refusal() -> str:
    """With an adapter of experts."""
    made = with_lora(expert_model(ep=2), ["linear_fc1", "linear_qkv"])
    return told(lambda: MegatronWeightExtractor(made, adapter="policy").placements())


def stage_refusal(path: str, targets: list[str], patterns: dict[str, int], **degrees: int) -> str:
    """With layers of other ranks, in a pipeline."""
    bridge, models = loaded(path, **degrees)
    (model,) = models
    alpha = dict.fromkeys(patterns, 16)
    made = with_lora(model, targets, rank_pattern=patterns, alpha_pattern=alpha)
    return told(lambda: MegatronWeightExtractor(made, bridge=bridge, adapter="policy").adapter)


def tied_refusal(path: str) -> Any:
    """With an adapter of the head, which is the embedding."""
    bridge, models = loaded(path)
    (model,) = models
    # (On one rank Megatron's head has no weight, and peft cannot adapt it.)
    model.output_layer.weight = model.embedding.word_embeddings.weight
    made = with_lora(model, ["output_layer"])
    alone = MegatronWeightExtractor(made, bridge=bridge, adapter="policy")
    whole = MegatronWeightExtractor(made, bridge=bridge)
    return [
        told(lambda: alone.adapter),
        told(lambda: list(whole.local())),
        told(lambda: list(whole.full())),
    ]


def saved_refusal(path: str) -> str:
    """With a layer of which peft trains a copy. (One of those that can be copied.)"""
    bridge, models = loaded(path)
    (model,) = models
    made = with_lora(model, ["linear_qkv"], modules_to_save=["final_layernorm"])
    return told(lambda: MegatronWeightExtractor(made, bridge=bridge).placements())


def two_chunks(path: str) -> Any:
    """Names of both parts of a virtual pipeline; the second one has the later layers."""
    targets = ["linear_proj"]
    models = [adapted(path, targets)[1][0] for _ in range(2)]
    later: Any = unwrapped(models[1])
    for layer in later.decoder.layers:
        layer.layer_number += 2
    extractor = MegatronWeightExtractor(models, adapter="policy")
    return [list(extractor.placements()), extractor.adapter.scaling]  # type: ignore[union-attr]
