"""What tensors are called behind wrappers. (peft itself: tests/trainers.)"""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.trainers import StateDictExtractor
from rl_bridge.trainers.modules import Adapters, clean_name, naming_of


class Adapted(nn.Module):
    """A layer as peft wraps it."""

    def __init__(self, *, merged: bool) -> None:
        super().__init__()
        self.base_layer = nn.Linear(2, 2, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 1, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(1, 2, bias=False)})
        self.lora_A["other"] = nn.Linear(2, 1, bias=False)
        self.active_adapters = ["default"]
        self.merged = merged


class Saved(nn.Module):
    """A layer that peft trains a copy of."""

    def __init__(self) -> None:
        super().__init__()
        self.original_module = nn.Linear(2, 2, bias=False)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)})
        self.active_adapter = "default"


def model(*, merged: bool = True) -> nn.Module:
    inner = nn.ModuleDict(
        {"q_proj": Adapted(merged=merged), "norm": nn.LayerNorm(2, bias=False), "head": Saved()}
    )
    peft = nn.Module()
    peft.base_model = nn.Module()
    peft.base_model.model = inner
    return peft


@pytest.mark.parametrize(
    ("adapters", "names"),
    [
        ("merged", {"q_proj.weight", "norm.weight", "head.weight"}),
        ("base", {"q_proj.weight", "norm.weight", "head.weight"}),
        (
            "only",
            {
                "base_model.model.q_proj.lora_A.weight",
                "base_model.model.q_proj.lora_B.weight",
                "base_model.model.head.weight",
            },
        ),
    ],
)
def test_what_is_published_has_the_models_names_or_those_of_peft_s_checkpoints(
    adapters: str, names: set[str]
) -> None:
    assert set(StateDictExtractor(model(), adapters=adapters).placements()) == names


def test_frozen_weights_are_not_taken_for_merged_ones() -> None:
    made = model()
    extractor = StateDictExtractor(made)
    list(extractor.local())
    made.base_model.model["q_proj"].merged = False  # type: ignore[index, union-attr]
    with pytest.raises(IncompatibleUpdate, match="merge_adapter"):
        next(extractor.local())
    assert list(StateDictExtractor(model(merged=False), adapters="base").local())


def test_a_choice_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="'merged', 'base', 'only'"):
        naming_of(model(), "all")
    assert naming_of(nn.Linear(1, 1), Adapters.ONLY)("weight") == "weight"


def test_words_of_wrappers_are_left_out() -> None:
    name = "_fsdp_wrapped_module.a._checkpoint_wrapped_module.b._orig_mod.weight"
    assert clean_name(name) == "a.b.weight"
    assert clean_name("a_orig_mod.weight") == "a_orig_mod.weight"


def test_checkpointed_and_compiled_modules_keep_their_names() -> None:
    inner = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)))
    compiled = torch.compile(inner, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert set(StateDictExtractor(compiled).placements()) == {"0.weight", "0.bias"}
