"""What the ranks of a trainer run that broadcasts by prime-rl's names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from peft import get_peft_model_state_dict

from rl_bridge.compat.prime_rl import LoRAConfig, PrimeRLConfig, setup_weight_broadcast
from tests.trainers_torch.publishing import adapted


@dataclass
class _Running:
    model: Any
    hold: Callable[[int], None]
    broadcast: Any


_running: list[_Running] = []


def begin(paths: Sequence[str], folder: str, port: int, kind: str = "nixl") -> None:
    """Have a model with an adapter, and broadcast it; no run is registered yet."""
    model, hold = adapted(paths)
    section: dict[str, Any] = {"type": kind}
    if kind == "nixl":
        section |= {"port": port, "server_name": "lora_param_server"}
    config = PrimeRLConfig.model_validate(
        {"weight_broadcast": section, "model": {"lora": {"name": "policy", "alpha": 16.0}}}
    )
    lora: LoRAConfig | None = config.model.lora
    broadcast = setup_weight_broadcast(folder, config.weight_broadcast, lora)
    _running.append(_Running(model, hold, broadcast))


def register(run_idx: int, folder: str) -> None:
    """Register a run by its tensors, which are the model's own."""
    (one,) = _running
    one.broadcast.on_run_created(run_idx, folder, get_peft_model_state_dict(one.model))


def broadcast(number: int, steps: Sequence[tuple[int, int]]) -> None:
    """Broadcast a set of weights as these runs' steps."""
    (one,) = _running
    one.hold(number)
    one.broadcast.broadcast_weights(one.model, dict(steps))
    dist.barrier()


def delete(run_idx: int) -> None:
    """End a run."""
    _running[0].broadcast.on_run_deleted(run_idx)


def end() -> None:
    """Shut down."""
    _running.pop().broadcast.shutdown()
