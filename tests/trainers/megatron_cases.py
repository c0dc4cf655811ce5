"""What the ranks of the Megatron tests run: they load a model, or build one, and report."""

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from mbridge import AutoBridge
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import distributed_c10d

from rl_bridge.errors import WeightBridgeError
from rl_bridge.trainers.megatron import MegatronWeightExtractor
from tests.trainers_torch.publishing import peak_of_publications
from tests.trainers_torch.worlds import full_report, local_report

# What the layers of Megatron itself can do without CUDA.
PLAIN: dict[str, Any] = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
}


def parallel(tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        # Megatron forgets its groups, whose threads never stop looking for something to do.
        world = torch.distributed.group.WORLD
        for group in [one for one in distributed_c10d._world.pg_map if one is not world]:
            torch.distributed.destroy_process_group(group)
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    tensor_parallel.model_parallel_cuda_manual_seed(0)


def loaded(path: str, pad_to: int | None = None, **degrees: int) -> tuple[Any, Any]:
    """A bridge, and the model that it made of a Hugging Face checkpoint."""
    parallel(**degrees)
    bridge = AutoBridge.from_pretrained(path, make_vocab_size_divisible_by=pad_to)
    bridge.dtype = torch.float32
    bridge.set_extra_args(**PLAIN, bf16=False, sequence_parallel=False)
    model = bridge.get_model(weight_path=path, bf16=False, use_cpu_initialization=True)
    return bridge, model


def report(
    path: str, *, is_hf: bool, pad_to: int | None = None, dtype: str | None = None, **degrees: int
) -> Any:
    bridge, model = loaded(path, pad_to, **degrees)
    extractor = MegatronWeightExtractor(model, bridge=bridge if is_hf else None, chunk_nbytes=5000)
    return full_report(extractor, dtype)


def looks(path: str, **degrees: int) -> list[int]:
    """How often the model is looked at for one gather, in few chunks and in many."""
    _, model = loaded(path, **degrees)
    counts = []
    for chunk_nbytes in (1 << 20, 500):
        extractor = MegatronWeightExtractor(model, chunk_nbytes=chunk_nbytes)
        with mock.patch.object(extractor, "_tensors_now", wraps=extractor._tensors_now) as looked:
            for _ in extractor.full():
                pass
        counts.append(looked.call_count)
    return counts


def peak_of_publishing(small: str, large: str, port: int, *, is_hf: bool) -> Any:
    """In two stages of two tensor-parallel ranks."""

    def extractor(path: str) -> MegatronWeightExtractor:
        bridge, model = loaded(path, tp=2, pp=2)
        return MegatronWeightExtractor(model, bridge=bridge if is_hf else None)

    return peak_of_publications(extractor(small), extractor(large), port)


def expert_model(tp: int = 1, ep: int = 1) -> Any:
    """A model with a layer of four experts."""
    parallel(tp=tp, ep=ep)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        ffn_hidden_size=16,
        moe_ffn_hidden_size=6,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_grouped_gemm=False,
        moe_token_dispatcher_type="allgather",
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **PLAIN,
    )
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm")
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=16,
        max_sequence_length=8,
        position_embedding_type="rope",
    )


def experts(tp: int = 1, ep: int = 1) -> Any:
    """A layer of four experts; the weights of expert n are n + 1, in whatever rank's hands."""
    model = expert_model(tp, ep)
    count, number = 4 // ep, parallel_state.get_expert_model_parallel_rank()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
        for at, expert in enumerate(model.decoder.layers[0].mlp.experts.local_experts):
            for parameter in expert.parameters():
                parameter.fill_(number * count + at + 1)
    return local_report(MegatronWeightExtractor(model))


def refusals(path: str) -> Any:
    bridge, model = loaded(path)

    class Converter(type(bridge)):  # type: ignore[misc]  # whatever class it is
        def _weight_to_hf_format(self, *arguments: Any) -> Any:
            return super()._weight_to_hf_format(*arguments)

    answers = {
        "no_module": told(lambda: MegatronWeightExtractor([])),
        "no_bridge": told(lambda: MegatronWeightExtractor(model, bridge=object())),
    }
    bridge.__class__ = Converter
    answers["own_conversion"] = told(
        lambda: MegatronWeightExtractor(model, bridge=bridge).placements()
    )
    parallel_state.destroy_model_parallel()
    answers["no_groups"] = told(lambda: MegatronWeightExtractor(model))
    return answers


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except WeightBridgeError as error:
        return str(error)
    return "nothing"


# ---- Megatron-Core and mbridge without CUDA ------------------------------------------------------


def prepare_megatron() -> None:
    """Let a GPT model of Megatron's be built and run on the CPU."""
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda device="cpu": torch.get_rng_state()
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    moe_utils.te_general_gemm = None  # a name that is missing without Transformer Engine


def prepare_mbridge() -> None:
    """Let mbridge build models of Megatron's own layers, which have norms of their own."""
    from mbridge.core import llm_bridge
    from mbridge.core.bridge import Bridge
    from megatron.core.models.gpt import gpt_layer_specs

    module: Any = torch.nn.Module
    module.cuda = lambda self, device=None: self
    spec = gpt_layer_specs.get_gpt_decoder_block_spec

    def local_spec(config: Any, use_transformer_engine: bool = True, **options: Any) -> Any:
        return spec(config, use_transformer_engine=False, **options)

    local_spec.__signature__ = inspect.signature(spec)  # type: ignore[attr-defined]  # it is looked at
    llm_bridge.get_gpt_decoder_block_spec = local_spec
    names = Bridge._weight_name_mapping_mcore_to_hf
    norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}

    def mapped(self: Any, name: str) -> list[str]:
        layer = name.split(".")[2] if name.startswith("decoder.layers.") else ""
        for ours, theirs in norms.items():
            if name.endswith(f".{ours}.weight"):
                return [f"model.layers.{layer}.{theirs}.weight"]
        return list(names(self, name))

    Bridge._weight_name_mapping_mcore_to_hf = mapped


prepare_megatron()
prepare_mbridge()
