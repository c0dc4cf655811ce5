"""Layers that got nothing from a reload of vLLM's, and why."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_bridge.engines.load_plan import LoadPlan
from rl_bridge.engines.skeleton import Target, User
from rl_bridge.engines.vllm.compat import is_deferred_attention
from rl_bridge.engines.vllm.reload import VLLMReloadAdapter
from rl_bridge.errors import IncompatibleUpdate


def layer() -> Any:
    made = torch.nn.Module()
    made.weight = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    return made


@pytest.mark.parametrize(
    ("is_written", "said"), [(True, "goes past its reload"), (False, "Publish the whole model")]
)
def test_a_layer_that_got_nothing_is_told_from_one_that_is_loaded_past_the_reload(
    is_written: bool, said: str
) -> None:
    model, inner = torch.nn.Module(), layer()
    model.inner = inner

    def info(of: torch.nn.Module) -> Any:
        weights = dict(of.named_parameters(recurse=False))
        return SimpleNamespace(
            restore_metadata=(weights, {}),
            kernel_tensors=(weights, {}),
            can_load=lambda: True,
            load_numel=0,
        )

    reload = SimpleNamespace(
        get_layerwise_info=info, is_deferred_attention_layer=lambda _layer: False
    )
    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))
    adapter = VLLMReloadAdapter(model, config)
    targets = [Target(inner.weight.to("meta"), [User("inner", inner, "weight")])]
    adapter._plan = LoadPlan(targets, {0: []} if is_written else {})
    with pytest.raises(IncompatibleUpdate, match=rf"\['inner'\].*{said}"):
        adapter._check_loaded(reload)


def test_attention_is_found_in_a_vllm_that_has_no_question_for_it() -> None:
    class Attention(torch.nn.Module): ...

    class MLAAttention(torch.nn.Module): ...

    old = SimpleNamespace(Attention=Attention, MLAAttention=MLAAttention)
    new = SimpleNamespace(is_deferred_attention_layer=lambda one: isinstance(one, Attention))
    layers = (Attention(), MLAAttention(), torch.nn.Linear(1, 1))
    assert [is_deferred_attention(old, one) for one in layers] == [True, True, False]
    assert [is_deferred_attention(new, one) for one in layers] == [True, False, False]
