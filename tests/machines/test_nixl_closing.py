"""Ends of `nixl` whose close is cut off by an interrupt: the next call gives back what is left."""

import sys
from typing import Any

import pytest
import torch

from rl_bridge import TensorBridge, make_weight_bridge
from tests.interrupts import cut_closes_off

WEIGHTS = {"w": torch.arange(1000)}


@pytest.mark.parametrize(
    ("options", "stride"),
    [({"serve": "inline"}, 17), ({"in_place": True}, 17), ({"serve": "process"}, 61)],
    ids=["inline", "in place", "process"],
)
def test_a_close_that_was_cut_off_before_any_line_is_made_up_for_by_the_next(
    options: dict[str, Any], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What Python swallows inside a finalizer would be kept by the test runner, with all frames.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def pair() -> tuple[TensorBridge, TensorBridge]:
        """A reader that has read, and its trainer."""
        trainer = make_weight_bridge("nixl", suspicious="off", **options)
        reader = make_weight_bridge("nixl")
        reader.import_update(trainer.publish(WEIGHTS, weight_version=1))
        return reader, trainer

    assert cut_closes_off(pair, stride=stride) > 400
