"""The files of an engine that is updated by reloads: none outlives its use."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_bridge import TensorBridge, TornEngine
from tests.integrations.test_checkpoint_reload import (
    LLM,
    broken,
    checkpoint,
    executor_of,
)
from tests.integrations.test_engine_adapter import trainer
from tests.integrations.test_rank import publish

__all__ = ["checkpoint", "trainer"]  # fixtures, for this file, too


def versions(checkpoint: Path) -> list[str]:
    return sorted(p.name.partition("-")[0] for p in (checkpoint.parent / "versions").iterdir())


@pytest.mark.parametrize("ends_by", ["the next version", "the undo"])
def test_what_torn_updates_wrote_is_gone_behind(
    trainer: TensorBridge, checkpoint: Path, ends_by: str
) -> None:
    llm = LLM(checkpoint)
    with executor_of(llm, checkpoint) as executor:
        executor.update_weights(publish(trainer, 1))
        llm.before_loading = broken
        for version in (2, 3):
            with pytest.raises(TornEngine):
                executor.update_weights(publish(trainer, version))
        llm.before_loading = lambda: None
        if ends_by == "the undo":
            executor.recover()
        else:
            executor.update_weights(publish(trainer, 4))
        held = 1 if ends_by == "the undo" else 4
        assert versions(checkpoint) == [f"v{held}"]
        assert llm.loaded[-1] == held


def test_a_tie_is_written_under_both_names_of_the_checkpoint(
    trainer: TensorBridge, checkpoint: Path
) -> None:
    save_file({name: torch.zeros(4) for name in ("w", "head")}, checkpoint / "model.safetensors")
    llm, weight = LLM(checkpoint), torch.ones(4)
    with executor_of(llm, checkpoint) as executor:
        executor.update_weights(trainer.publish({"w": weight, "head": weight}, weight_version=1))
    assert llm.loaded == [1]


@pytest.mark.parametrize("other", ["a_head", "z_head"])
def test_a_tie_of_which_the_checkpoint_has_one_name_is_taken(
    trainer: TensorBridge, checkpoint: Path, other: str
) -> None:
    """A manifest stores a tie under the name that comes first in the alphabet."""
    llm, weight = LLM(checkpoint), torch.ones(4)
    with executor_of(llm, checkpoint) as executor:
        executor.update_weights(trainer.publish({"w": weight, other: weight}, weight_version=1))
    assert llm.loaded == [1]
