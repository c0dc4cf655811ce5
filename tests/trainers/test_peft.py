"""peft under FSDP2: merged weights, base weights, or adapters alone, under the right names."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.hooks import StepPublisher
from rl_bridge.trainers import StateDictExtractor
from tests.trainers import peft_cases
from tests.trainers_torch.worlds import World, assembled


@pytest.fixture
def two(worlds: Callable[[int, str], World]) -> World:
    return worlds(2, "peft_cases")


@pytest.mark.parametrize("adapters", ["merged", "base", "only"])
def test_ranks_publish_what_peft_itself_would_save(two: World, adapters: str) -> None:
    reports = two.run("parts", adapters=adapters)
    whole = peft_cases.expected(adapters)
    assert assembled(reports) == whole
    assert [report["full"] for report in reports] == [whole, whole]


def test_an_update_that_was_not_merged_is_refused_also_after_one_that_was(two: World) -> None:
    assert all("Call model.merge_adapter()" in answer for answer in two.run("forgotten"))


def test_a_hook_that_merges_around_each_update_sends_what_peft_itself_would_merge() -> None:
    model, engine = peft_cases.adapted(), peft_cases.base()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.25)  # halves them: merging stays exact

    class MergedPublisher(StepPublisher):
        def publish(self) -> WeightUpdateManifest:
            model.merge_adapter()
            try:
                return super().publish()
            finally:
                model.unmerge_adapter()

    with make_weight_bridge("shared-memory") as bridge, make_weight_bridge("shared-memory") as it:
        adapter = ModuleInstallAdapter(engine, mode="copy")
        with RolloutExecutor(weight_bridge=it, weight_install_adapter=adapter) as executor:
            extractor = StateDictExtractor(model)
            MergedPublisher(bridge, extractor.local, send=executor.update_weights).after_steps_of(
                optimizer
            )
            for step in range(3):
                optimizer.zero_grad()
                loss: Any = torch.stack([one.square().sum() for one in trained]).sum()
                loss.backward()
                optimizer.step()
                merged = copy.deepcopy(model).merge_and_unload()
                assert executor.active_weight_version == step
                expected = merged.state_dict()
                assert all(t.equal(expected[name]) for name, t in engine.state_dict().items())
