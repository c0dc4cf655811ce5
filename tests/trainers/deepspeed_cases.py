"""What the ranks of the DeepSpeed tests run: they train a model a little and report."""

import os
import types
from collections.abc import Callable
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from torch import nn

from rl_bridge.errors import WeightBridgeError
from rl_bridge.trainers.deepspeed import DeepSpeedWeightExtractor
from tests.trainers_torch.counting import peak_nbytes
from tests.trainers_torch.publishing import peak_of_publications
from tests.trainers_torch.worlds import as_lists, filled, full_report

WIDTH = 7

# DeepSpeed would compile an extension for shared memory when it begins, which needs ninja and a
# compiler; the backend alone does.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
os.environ["PATH"] = "/nonexistent"  # so that it would be noticed


class Model(nn.Module):
    """Sizes that ranks cannot share evenly, a tied weight, a frozen one, a buffer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.up = nn.Linear(width, 3)
        self.down = nn.Linear(3, width, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.down.weight.requires_grad = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.embed(ids))) * self.gain)  # type: ignore[no-any-return]


def plain() -> Model:
    model = Model()
    filled(model)
    return model


def engine(
    stage: int,
    *,
    dtype: str = "float32",
    model: nn.Module | None = None,
    lr: float = 0.0,
    zero: dict[str, Any] | None = None,
) -> Any:
    """An engine whose optimizer moves nothing by default: what comes out is what went in."""
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 4,
            **(zero or {}),
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    model = model or plain()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    made, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return made


def step(made: Any) -> None:
    loss = made(torch.tensor([[0, 1, 2]])).float().square().mean()
    made.backward(loss)
    made.step()


def report(stage: int, dtype: str | None = None, kind: str = "float32") -> Any:
    made = engine(stage, dtype=kind)
    step(made)
    found = full_report(DeepSpeedWeightExtractor(made, chunk_nbytes=100), dtype)
    step(made)  # it still trains
    return found


def wide(stage: int) -> Any:
    return engine(
        stage,
        model=nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(64))),  # 64 MiB
    )


def peak(stage: int, chunk_nbytes: int) -> Any:
    made = wide(stage)
    extractor = DeepSpeedWeightExtractor(made, chunk_nbytes=chunk_nbytes)
    for _ in extractor.full(torch.bfloat16):
        pass
    return peak_nbytes(extractor.full(torch.bfloat16))


def peak_of_publishing(port: int) -> Any:
    return peak_of_publications(
        DeepSpeedWeightExtractor(engine(3)), DeepSpeedWeightExtractor(wide(3)), port
    )


def has_no_ninja() -> bool:
    """Whether this process, whose engines work, could not have compiled anything."""
    from torch.utils.cpp_extension import is_ninja_available

    return not is_ninja_available() and deepspeed.comm.is_initialized()


def refusals() -> Any:
    made = engine(1)
    asked = {"module": told(plain())}
    parts = {"module": made.module, "seq_data_parallel_group": made.seq_data_parallel_group}
    one = types.SimpleNamespace(**parts, mp_world_size=1, has_moe_layers=True)
    two = types.SimpleNamespace(**parts, mp_world_size=2, has_moe_layers=False)
    three = types.SimpleNamespace(**parts, mp_world_size=1, mics_shard_size=lambda: 1)
    asked |= {"experts": told(one), "tensor_parallel": told(two), "mics": told(three)}
    # As where a rank's experts are cut over other ranks than all the rest.
    cut = engine(3)
    alone, _ = torch.distributed.new_subgroups(1)  # type: ignore[no-untyped-call]  # torch's own
    cut.module.up.weight.ds_process_group = alone
    return asked | {"own_group": told(cut, lambda made: made.placements())}


def told(given: Any, then: Callable[[DeepSpeedWeightExtractor], object] = lambda _: None) -> str:
    try:
        then(DeepSpeedWeightExtractor(given))
    except WeightBridgeError as error:
        return str(error)
    return "nothing"


def trained(stage: int, zero: dict[str, Any] | None = None) -> Any:
    """After real steps: this rank's part, and the whole, ours and as DeepSpeed itself tells it."""
    model = plain()
    # The rate is of gradients that DeepSpeed cut to a norm of 1.
    made = engine(stage, model=model, lr=1e4, zero=zero)
    extractor = DeepSpeedWeightExtractor(made, chunk_nbytes=100)
    for _ in range(2):
        list(extractor.local())
        step(made)
    told_by_deepspeed = {}
    for name, parameter in made.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            told_by_deepspeed[name] = as_lists(parameter)
    return {**full_report(extractor), "whole": told_by_deepspeed}
