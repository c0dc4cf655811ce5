"""DeepSpeed ZeRO-3 on two ranks, one engine: each version arrives to the byte."""

import asyncio
import os
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import TIMEOUT_S, Engines, run, sums

from rl_bridge import DeepSpeedWeightExtractor
from rl_bridge.groups import ProcessGroupExchange
from rl_bridge.strategies import WeightTransferConfig, make_transfer_strategy

STEPS = 3


class Model(torch.nn.Module):
    """Sizes that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(7, 9)
        self.down = torch.nn.Linear(9, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def make_engine() -> Any:
    """ZeRO-3, on the CPU where there is no GPU."""
    import deepspeed
    import deepspeed.ops

    # On a CPU it would compile an extension when it begins; the backend alone does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    model = Model()
    made, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        },
    )
    return made


def gathered(model: torch.nn.Module) -> dict[str, str]:
    """The whole weights, gathered by DeepSpeed itself; every rank takes part."""
    import deepspeed

    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found |= sums([(name, parameter.data)])
    return found


async def train(rank: int, lines: list[Connection], config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    made = make_engine()
    strategy = make_transfer_strategy(WeightTransferConfig(**config))
    info = await strategy.create_init_info() if rank == 0 else None
    engines = Engines(lines)
    if info is not None:
        engines.start(info.to_json())
    sender = await strategy.create_sender(info, rank=rank, exchange=ProcessGroupExchange())
    extractor = DeepSpeedWeightExtractor(made)

    for step in range(STEPS + 1):  # version 0 is the initial sync, before the first rollout
        if step:
            made.backward(made(torch.randn(4, 7)).square().sum())
            made.step()
        await sender.send_chunks(extractor.extract_weights(torch.float32), engines)
        expected = gathered(made.module)
        if rank == 0:
            engines.check(step, expected)
    if rank == 0:
        engines.stop()
    sender.close()


def trainer(
    rank: int, ranks: int, lines: list[Connection], config: dict[str, Any], meet: str
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    asyncio.run(train(rank, lines, config))
    dist.destroy_process_group()


def main() -> None:
    config = {"is_colocated": True, "threshold_nbytes": 200, "timeout_s": float(TIMEOUT_S)}
    shapes = {name: tuple(one.shape) for name, one in Model().state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        meet = str(Path(folder) / "meet")
        run(trainer, ranks=2, num_engines=1, config=config, shapes=shapes, meet=meet)
    print(f"{STEPS + 1} versions from 2 ranks of ZeRO-3 in 1 engine, equal to the byte")


if __name__ == "__main__":
    main()
