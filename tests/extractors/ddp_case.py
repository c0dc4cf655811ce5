"""What the ranks of the test of data parallelism without shards run."""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from rl_bridge.extractors.state_dict import StateDictExtractor
from tests.extractors.worlds import filled, local_report

__all__ = ["data_parallel", "layers"]


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
