"""What no update reaches is found before an update is let in, and named."""

from types import SimpleNamespace

import pytest
import torch

from rl_bridge.engines.vllm import compat
from rl_bridge.engines.vllm.compat import refuse_unreached
from rl_bridge.errors import IncompatibleUpdate


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the buffers that the engine makes anew."""
    names: set[str] = set()
    monkeypatch.setattr(compat, "recorded_buffers", lambda _: names)
    return names


class Mixer(torch.nn.Module):
    """A weight, and a buffer that is a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Linear(4, 2, bias=False)
        self.register_buffer("flat", self.conv.weight.detach().view(8), persistent=False)


class Attention(torch.nn.Module):
    """Computes with what its implementation holds."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
        self.impl = SimpleNamespace(sinks=self.sinks)


def inside(layer: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), layer)


# ---- buffers ------------------------------------------------------------------------------------


def test_a_view_of_a_weight_that_was_packed_since_is_named() -> None:
    mixer = Mixer()
    mixer.conv.weight.data = mixer.conv.weight.data.clone()  # as vLLM packs
    with pytest.raises(IncompatibleUpdate, match=r"buffer '1\.flat': expected a view"):
        refuse_unreached(inside(mixer))


@pytest.mark.parametrize("kind", ["recorded", "persistent", "empty"])
def test_buffers_of_their_own_are_none(kind: str, recorded: set[str]) -> None:
    layer = torch.nn.Module()
    table = torch.zeros(0 if kind == "empty" else 3)
    layer.register_buffer("table", table, persistent=kind == "persistent")
    if kind == "recorded":
        recorded.add("table")
    refuse_unreached(inside(layer))


# ---- attention ----------------------------------------------------------------------------------


def test_the_sinks_of_each_attention_that_a_layer_chooses_from_are_looked_at() -> None:
    layer = Attention()
    other = SimpleNamespace(sinks=layer.sinks.clone())
    layer.impl = SimpleNamespace(sinks=layer.sinks, causal=layer.impl, general=other)
    with pytest.raises(IncompatibleUpdate, match="copy of its sinks"):
        refuse_unreached(inside(layer))


# ---- hooks --------------------------------------------------------------------------------------


class Processed(torch.nn.Module):
    """Makes something of all of its weights."""

    def process_weights_after_loading(self) -> None:
        """Called by vLLM once."""


class Sunk(torch.nn.Module):
    """Makes something of its weights."""

    def post_weight_load(self) -> None:
        """Called by the model's loader."""


def test_a_hook_of_the_whole_model_is_named() -> None:
    with pytest.raises(
        IncompatibleUpdate, match="Processed: its process_weights_after_loading was"
    ):
        refuse_unreached(Processed())
    refuse_unreached(inside(Processed()))  # vLLM calls that of a layer when it reloads, or never


def test_a_hook_of_a_layer_behind_the_loader_is_named() -> None:
    with pytest.raises(IncompatibleUpdate, match="layer '1', Sunk: its post_weight_load was"):
        refuse_unreached(inside(Sunk()))


# ---- what steps make ----------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", ["_combined_gate_weight", "_wp_fp32", "_merged_conv_weight"])
def test_what_a_step_made_of_weights_is_named(leaf: str) -> None:
    layer = torch.nn.Linear(2, 2)
    setattr(layer, leaf, None)
    refuse_unreached(inside(layer))  # its first step will make it of the weights that it has then
    setattr(layer, leaf, layer.weight.detach().clone())
    with pytest.raises(IncompatibleUpdate, match=rf"layer '1', Linear: its {leaf} was made"):
        refuse_unreached(inside(layer))
