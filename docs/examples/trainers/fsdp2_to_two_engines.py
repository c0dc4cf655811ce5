"""FSDP2 on two ranks, two engines: each version arrives to the byte, from the initial sync on."""

import asyncio
import sys
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import TIMEOUT_S, Engines, run, sums
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rl_bridge import FSDPWeightExtractor
from rl_bridge.groups import ProcessGroupExchange
from rl_bridge.strategies import WeightTransferConfig, make_transfer_strategy

STEPS = 3


class Model(torch.nn.Module):
    """Sizes that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(3))
        self.head = torch.nn.Linear(7, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def gathered(model: torch.nn.Module) -> dict[str, str]:
    """The whole weights, gathered by torch itself; every rank takes part."""
    whole = {}
    for name, tensor in model.state_dict().items():
        whole[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return sums(whole.items())


async def train(rank: int, lines: list[Connection], config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    strategy = make_transfer_strategy(WeightTransferConfig(**config))
    info = await strategy.create_init_info() if rank == 0 else None
    engines = Engines(lines)
    if info is not None:
        engines.start(info.to_json())
    sender = await strategy.create_sender(info, rank=rank, exchange=ProcessGroupExchange())
    extractor = FSDPWeightExtractor(model)

    for step in range(STEPS + 1):  # version 0 is the initial sync, before the first rollout
        if step:
            optimizer.zero_grad()
            model(torch.randn(4, 7)).square().sum().backward()
            optimizer.step()
        await sender.send_chunks(extractor.extract_weights(torch.float32), engines)
        expected = gathered(model)
        if rank == 0:
            engines.check(step, expected)
    if rank == 0:
        engines.stop()
    sender.close()


def trainer(
    rank: int, ranks: int, lines: list[Connection], config: dict[str, Any], meet: str
) -> None:
    torch.set_num_threads(1)
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
    config = {
        # Colocated: shared memory; else a broadcast group.
        "is_colocated": "--colocated" in sys.argv,
        "num_engines": 2,
        "threshold_nbytes": 400,  # small, so that there are several batches
        "timeout_s": float(TIMEOUT_S),
    }
    shapes = {name: tuple(one.shape) for name, one in Model().state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        meet = str(Path(folder) / "meet")
        run(trainer, ranks=2, num_engines=2, config=config, shapes=shapes, meet=meet)
    print(f"{STEPS + 1} versions from 2 FSDP2 ranks in 2 engines, equal to the byte")


if __name__ == "__main__":
    main()
