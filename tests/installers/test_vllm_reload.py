"""What a reload refuses, and what it can read: layers that got nothing, parameters of two users."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_bridge.engines.load_plan import LoadPlan
from rl_bridge.engines.skeleton import Target, User
from rl_bridge.engines.vllm.compat import VLLMCompat
from rl_bridge.engines.vllm.reload import VLLMReloadAdapter
from rl_bridge.engines.vllm.reload_proof import _is_readable
from rl_bridge.errors import IncompatibleUpdate


class UnquantizedFusedMoEMethod:
    """Known by its name."""


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


@pytest.mark.parametrize("is_packed", [False, True])
def test_packed_experts_with_two_users_are_not_called_readable(is_packed: bool) -> None:
    class Compat(VLLMCompat):
        def checkpoint_tensors(self, layer: torch.nn.Module) -> Mapping[str, torch.Tensor]:
            return dict(layer.named_parameters())

    one, other = layer(), layer()
    other.weight = one.weight
    if is_packed:
        vars(one)["quant_method"] = vars(other)["quant_method"] = UnquantizedFusedMoEMethod()
    users = [User("one", one, "weight"), User("other", other, "weight")]
    meta = one.weight.to("meta")
    assert _is_readable(users[0], Target(meta, users[:1]), Compat(None))
    assert _is_readable(users[0], Target(meta, users), Compat(None)) is not is_packed
