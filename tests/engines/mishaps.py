"""What goes wrong between updates, where an engine must stay what it was."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from rl_bridge import WeightUpdateManifest
from tests.engines.trainer import Trainer

# In the trainer, while staging, in the exchange.
FAILURES = {
    "nan": "are NaN or Inf",
    "process": "planted at call 3",
    "exchange": "planted at call",
    "corrupt": "does not hold",
    "missing": "Publish the fused parts together",
}


def fail(
    failure: str,
    llm: Any,
    update: Callable[[WeightUpdateManifest], object],
    weights: Mapping[str, torch.Tensor],
    trainer: Trainer,
) -> None:
    """Let one update fail; `llm` is whatever has ``collective_rpc``."""
    sent = dict(weights)
    name = max(name for name in sent if "q_proj" in name)
    if failure == "nan":
        sent[name] = sent[name].clone()
        sent[name].view(-1)[5] = float("nan")
    elif failure == "missing":
        del sent[name]
    else:
        llm.collective_rpc("plant_fault", args=(failure, 3))
    try:
        # (vLLM's own calls raise what they like, around our text.)
        with pytest.raises(Exception, match=FAILURES[failure]):
            update(trainer.publish(sent))
    finally:
        llm.collective_rpc("uproot_fault")
