"""What vLLM's own code makes beside its parameters, and no update reaches: refused by both ways.

No engine starts: small models of vLLM's own layers are loaded, processed and run by vLLM's code.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.v1.attention.backends import cpu_attn

from rl_bridge import Acknowledgement, RolloutExecutor
from rl_bridge.engines.vllm.model_installer import VLLMModelInstaller
from rl_bridge.engines.vllm.reload import VLLMReloadAdapter
from rl_bridge.errors import IncompatibleUpdate
from tests.engines.trainer import Trainer

WAYS = pytest.mark.parametrize("way", [VLLMModelInstaller, VLLMReloadAdapter])
CHANNELS, TAPS = 64, 4


class Model(torch.nn.Module):
    """Loads its parameters by their names."""

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy."""
        parameters: dict[str, Any] = dict(self.named_parameters())
        for name, tensor in given:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", _copy)(parameter, tensor)


def _copy(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded)


class Convolution(torch.nn.Module):
    """A weight as Mamba2's mixer makes it of a linear layer's."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.quant_method = UnquantizedLinearMethod()
        made = torch.empty(CHANNELS, TAPS, dtype=dtype)
        self.weight = torch.nn.Parameter(made, requires_grad=False)
        self.weight.data = self.weight.data.unsqueeze(1)


class Mixer(Model):
    """Computes with a buffer that is a view of the weight."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv1d = Convolution(dtype)
        view = self.conv1d.weight.view(CHANNELS, TAPS)
        self.register_buffer("conv_weights", view, persistent=False)


class Attention(torch.nn.Module):
    """What the implementation for the CPU asks of its layer."""

    def __init__(self, sinks: torch.Tensor) -> None:
        super().__init__()
        self.isa, self._k_scale_float, self._v_scale_float = "vec", 1.0, 1.0
        self.impl = object.__new__(cpu_attn.CPUAttentionBackendImpl)
        vars(self.impl).update(
            sinks=sinks,
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            scale=1.0,
            sliding_window=-1,
            logits_soft_cap=0,
            alibi_slopes=None,
            kv_cache_dtype="auto",
            use_zentorch_sdpa=False,
            is_fp8_kv_cache=False,
        )


class Sunk(Model):
    """Attention with sinks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.zeros(8, dtype=dtype), requires_grad=False)
        self.attn = Attention(self.sinks)

    def step(self, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
        """Returns the sinks that vLLM's code hands to its kernel."""
        asked: dict[str, Any] = {}

        class Kernels:
            def __getattr__(self, _: str) -> Any:
                return lambda *_, **options: asked.update(options)

        some = torch.zeros(1, 8, 4)
        said = dict.fromkeys(
            (
                "query_start_loc",
                "seq_lens",
                "block_table",
                "slot_mapping",
                "scheduler_metadata",
                "dynamic_causal",
            )
        )
        meta = SimpleNamespace(num_actual_tokens=1, causal=True, **said)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_attn, "ops", Kernels())
            cache = torch.zeros(1, 8, 1, 8)
            self.attn.impl.forward(self.attn, some, some, some, cache, meta, some)
        found: torch.Tensor = asked["s_aux"]
        return found


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    made = VllmConfig()
    made.model_config = SimpleNamespace(dtype=torch.float32)
    return made


def loaded(model: Any, config: VllmConfig, weights: dict[str, torch.Tensor]) -> Any:
    record_metadata_for_reloading(model)
    with set_current_vllm_config(config), torch.no_grad():
        model.load_weights(weights.items())
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(layer)
    return model


def update(
    way: Any,
    model: torch.nn.Module,
    config: VllmConfig,
    trainer: Trainer,
    sent: dict[str, torch.Tensor],
) -> Acknowledgement:
    adapter = way(model, config)
    executor = RolloutExecutor(
        weight_bridge=trainer.bridge, weight_install_adapter=adapter, suspicious="off"
    )
    executor.update_weights(trainer.publish(sent))
    assert executor.last_ack is not None
    return executor.last_ack


def taps(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    made = torch.randn(CHANNELS, 1, TAPS, generator=torch.Generator().manual_seed(seed))
    return {"conv1d.weight": made.to(dtype)}


@WAYS
@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM packs it for no such CPU"
)
def test_a_convolution_that_computes_with_what_was_packed_away_is_refused(
    way: Any, config: VllmConfig, trainer: Trainer
) -> None:
    first = taps(torch.bfloat16, 1)
    model = loaded(Mixer(torch.bfloat16), config, first)
    with pytest.raises(IncompatibleUpdate, match=r"buffer 'conv_weights': expected a view"):
        update(way, model, config, trainer, taps(torch.bfloat16, 2))
    assert torch.equal(model.conv_weights, first["conv1d.weight"].view(CHANNELS, TAPS))


@WAYS
def test_a_convolution_whose_buffer_is_still_a_view_follows(
    way: Any, config: VllmConfig, trainer: Trainer
) -> None:
    model = loaded(Mixer(torch.float32), config, taps(torch.float32, 1))
    for seed in (2, 3):
        sent = taps(torch.float32, seed)
        update(way, model, config, trainer, sent)
        assert torch.equal(model.conv_weights, sent["conv1d.weight"].view(CHANNELS, TAPS))


@WAYS
@pytest.mark.parametrize("steps", [0, 1])
def test_sinks_that_attention_copies_are_refused_whether_it_ran_yet_or_not(
    way: Any, steps: int, config: VllmConfig, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(Sunk(torch.float16), config, {})
    for _ in range(steps):
        model.step(monkeypatch)
    with pytest.raises(IncompatibleUpdate, match="computes with a copy of its sinks"):
        update(way, model, config, trainer, {"sinks": torch.ones(8, dtype=torch.float16)})
    assert not model.step(monkeypatch).any()


@WAYS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks_that_attention_reads_itself_follow(
    way: Any,
    dtype: torch.dtype,
    config: VllmConfig,
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = loaded(Sunk(dtype), config, {})
    for number in (1, 2):
        model.step(monkeypatch)
        sent = torch.full((8,), number, dtype=dtype)
        update(way, model, config, trainer, {"sinks": sent})
        assert torch.equal(model.step(monkeypatch), sent)


@WAYS
def test_a_copy_that_a_step_makes_while_an_update_is_under_way_is_found(
    way: Any, config: VllmConfig, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(Sunk(torch.float32), config, {})
    real = way.install

    def install(adapter: Any, *update: Any) -> None:
        real(adapter, *update)
        model.attn.impl.sinks = model.sinks.clone()

    monkeypatch.setattr(way, "install", install)
    with pytest.raises(IncompatibleUpdate, match="computes with a copy of its sinks"):
        update(way, model, config, trainer, {"sinks": torch.ones(8)})
    assert not model.sinks.any()


@WAYS
@pytest.mark.parametrize("hook", ["process_weights_after_loading", "post_weight_load"])
def test_a_hook_behind_the_first_load_is_refused(
    way: Any, hook: str, config: VllmConfig, trainer: Trainer
) -> None:
    """Such as those of Kimi-K3 and DeepSeek-V4, which derive something of their weights."""
    model = loaded(Sunk(torch.float32), config, {})
    setattr(model, hook, lambda: None)
    with pytest.raises(IncompatibleUpdate, match=f"Sunk: its {hook}"):
        update(way, model, config, trainer, {"sinks": torch.ones(8)})


@WAYS
@pytest.mark.parametrize("leaf", ["_wp_fp32", "_merged_conv_weight"])
def test_what_a_step_keeps_of_weights_is_refused(
    way: Any, leaf: str, config: VllmConfig, trainer: Trainer
) -> None:
    model = loaded(Sunk(torch.float32), config, {})
    setattr(model.attn, leaf, torch.ones(2))
    with pytest.raises(IncompatibleUpdate, match=f"its {leaf} was made of weights"):
        update(way, model, config, trainer, {"sinks": torch.ones(8)})


class Gates(Model):
    """The gates that vLLM's runner of experts fuses in its first step, by its own code."""

    _maybe_fuse_gate_weights = MoERunner._maybe_fuse_gate_weights

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(8, 4, bias=False).requires_grad_(False)
        self.shared_expert_gate = torch.nn.Linear(8, 1, bias=False).requires_grad_(False)
        self._combined_gate_weight: torch.Tensor | None = None


@WAYS
def test_gates_that_a_step_has_fused_are_refused(
    way: Any, config: VllmConfig, trainer: Trainer
) -> None:
    model = loaded(Gates(), config, {})
    sent = {name: torch.ones_like(weight) for name, weight in model.named_parameters()}
    update(way, model, config, trainer, sent)  # no step was made yet: the first one takes these
    model._maybe_fuse_gate_weights()
    assert (model._combined_gate_weight == 1).all()
    with pytest.raises(IncompatibleUpdate, match="its _combined_gate_weight was made of weights"):
        update(way, model, config, trainer, {name: 2 * weight for name, weight in sent.items()})
