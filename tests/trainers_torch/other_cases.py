"""What ranks run as well: data parallelism, weights without elements, syncs by a strategy."""

import asyncio
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rl_bridge.errors import WeightBridgeError
from rl_bridge.groups.exchange import ProcessGroupExchange
from rl_bridge.strategies.requests import WeightUpdateRequest
from rl_bridge.strategies.strategy import WeightTransferConfig, make_transfer_strategy
from rl_bridge.trainers.fsdp import FSDPWeightExtractor
from rl_bridge.trainers.state_dict import StateDictExtractor
from tests.trainers_torch.worlds import described, filled, local_report

__all__ = ["data_parallel", "layers", "narrow", "syncs", "without_elements"]


def layers() -> torch.nn.Module:
    """A model of one layer under a name, and a buffer."""
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(3, 2), "norm": torch.nn.BatchNorm1d(2)})
    filled(model)
    return model


def data_parallel() -> Any:
    """What an extractor makes of such a model inside of torch's wrapper."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    wrapped = DistributedDataParallel(layers())
    return local_report(StateDictExtractor(wrapped, rank=rank, world_size=size))


def narrow() -> torch.nn.Module:
    """A layer with no inputs, one with no outputs, and one weight that is there."""
    model = torch.nn.Module()
    for name, shape in {"up": (3, 0), "down": (0, 3), "gain": (3,)}.items():
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
    return filled(model)


def without_elements() -> Any:
    """What a rank has of it, and gathers."""
    model = narrow()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    extractor = FSDPWeightExtractor(model)
    return {**local_report(extractor), "full": described(list(extractor.full()))}


class _Nobody:
    """Engines that take everything: what is asked here is what becomes of the trainer's ranks."""

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        pass


def syncs(versions: list[int]) -> list[str]:
    """What becomes on this rank of a sync of each version, in one process group."""
    return asyncio.run(_syncs(versions))


async def _syncs(versions: list[int]) -> list[str]:
    rank = torch.distributed.get_rank()
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    filled(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    extractor = FSDPWeightExtractor(model, chunk_nbytes=60)
    options = {"suspicious": "off"}
    config = WeightTransferConfig(is_colocated=True, timeout_s=20.0, trainer_options=options)
    strategy = make_transfer_strategy(config)
    info = await strategy.create_init_info()
    told = []
    with await strategy.create_sender(info, rank=rank, exchange=ProcessGroupExchange()) as sender:
        for version in versions:
            chunks = extractor.extract_weights()
            try:
                await sender.send_chunks(chunks, _Nobody(), weight_version=version)
            except WeightBridgeError as error:
                told.append(f"{type(error).__name__}: {error}")
            else:
                told.append("")
    return told
