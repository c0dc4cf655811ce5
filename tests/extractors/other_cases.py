"""What ranks run as well: data parallelism without shards, weights without elements."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rl_bridge.extractors.fsdp import FSDPExtractor
from rl_bridge.extractors.state_dict import StateDictExtractor
from tests.extractors.worlds import described, filled, local_report

__all__ = ["data_parallel", "layers", "narrow", "without_elements"]


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
    extractor = FSDPExtractor(model)
    return {**local_report(extractor), "full": described(list(extractor.full()))}
