"""What miles and SkyRL do around a sync of weights, as far as their contracts go.

Neither is on a package index. Names, signatures and the order of calls are those of miles in
September 2026, and of SkyRL at a956457; the words are ours.
"""

import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]
_MILES = "miles.backends.training_utils.weight_update"


@dataclass(frozen=True)
class WeightUpdatePlacement:
    """miles': which of the trainer's dimensions are gathered."""

    gather_pp: bool
    gather_tp: bool = True
    gather_ep: bool = True


class WeightTransferProtocol(ABC):
    """miles': what it drives in each sync."""

    required_placement = WeightUpdatePlacement(gather_pp=False)
    use_weight_update_session = True
    supports_lora = False

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.rollout_engines: Sequence[Any] | None = None
        self.is_sender: bool | None = None
        self.group_name = "miles"
        self.update_weight_metrics: dict[str, float] = {}

    @abstractmethod
    def connect(  # noqa: PLR0917 - miles' own signature
        self,
        rollout_engines: Any,
        engine_gpu_counts: Any,
        engine_gpu_offsets: Any,
        parallel_state: Any,
        placement: Any,
        selector: str,
    ) -> None: ...

    def begin_sync(self, weight_version: int, iter_buckets: Any) -> bool:
        return True

    @abstractmethod
    def send_bucket(self, bucket: Any) -> None: ...

    def after_base_weights(self) -> None: ...  # noqa: B027 - need not be there

    def finalize(self, weight_version: int) -> None: ...  # noqa: B027 - need not be there

    def after_engines_resumed(self) -> None: ...  # noqa: B027 - need not be there


def miles_modules() -> dict[str, ModuleType]:
    """miles' modules that a protocol imports, for ``sys.modules``."""
    names = ("protocol", "hf_weight_iterator")
    made = {f"{_MILES}.{name}": ModuleType(f"{_MILES}.{name}") for name in names}
    made["miles.utils.distributed_utils"] = ModuleType("miles.utils.distributed_utils")
    for name in list(made):
        while name := name.rpartition(".")[0]:
            made.setdefault(name, ModuleType(name))
    made[f"{_MILES}.protocol"].__dict__["WeightTransferProtocol"] = WeightTransferProtocol
    made[f"{_MILES}.hf_weight_iterator"].__dict__["WeightUpdatePlacement"] = WeightUpdatePlacement
    made["miles.utils.distributed_utils"].__dict__["get_gloo_group"] = lambda: None
    return made


def use_miles() -> None:
    """Let this process import what stands in for miles."""
    sys.modules.update(miles_modules())


class MilesUpdater:
    """miles' ``WeightUpdater`` around a protocol, on each of the trainer's ranks."""

    def __init__(self, protocol: Any, engines: Sequence[Any]) -> None:
        assert isinstance(protocol, WeightTransferProtocol)
        assert protocol.required_placement.gather_pp
        self.protocol = protocol
        self.version = 0
        counts = [1] * len(engines)
        placement = protocol.required_placement
        self.protocol.connect(engines, counts, counts, SimpleNamespace(), placement, "all")

    def update_weights(self, weights: Tensors) -> None:
        """Sync; an error of one rank alone would leave the others in a barrier."""
        protocol = self.protocol
        assert not protocol.use_weight_update_session  # else miles pauses and labels as well
        assert protocol.begin_sync(self.version + 1, None)
        self.version += 1
        torch.distributed.barrier()
        for bucket in _buckets(weights, materialize=protocol.is_sender):
            if protocol.is_sender:
                protocol.send_bucket(bucket)
        protocol.after_base_weights()
        torch.distributed.barrier()
        protocol.finalize(self.version)
        torch.distributed.barrier()
        protocol.after_engines_resumed()


def _buckets(
    weights: Tensors, *, materialize: bool | None
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """One tensor each, in memory that the next bucket uses again."""
    for name, one in weights.items():
        torch.distributed.barrier()  # the gather
        if materialize:
            passing = one.clone()
            yield [(name, passing)]
            passing.zero_()


@dataclass
class WeightChunk:
    """SkyRL's: some parameters, gathered."""

    names: list[str]
    tensors: list[torch.Tensor]


class Worker:
    """SkyRL's: what all workers have."""

    def __init__(self, *, colocate_all: bool = False) -> None:
        self.cfg = SimpleNamespace(placement=SimpleNamespace(colocate_all=colocate_all))

    async def init_weight_sync_state(
        self, inference_engine_client: Any, inference_engine_cfg: Any
    ) -> None:
        raise AssertionError("SkyRL's own sender would be connected")


class FSDPPolicyWorkerBase(Worker):
    """SkyRL's: what makes the extractor, and syncs."""

    _weight_transfer_sender: Any

    async def init_weight_sync_state(
        self, inference_engine_client: Any, inference_engine_cfg: Any
    ) -> None:
        await super().init_weight_sync_state(inference_engine_client, inference_engine_cfg)
        self.weights: Tensors = {}

    async def broadcast_to_inference_engines(self) -> None:
        """Sync what `weights` has."""
        sender = self._weight_transfer_sender
        assert sender.handles_prefix_cache_reset
        await sender.send_chunks(self._extracted(), weight_metadata={}, reset_prefix_cache=True)
        torch.distributed.barrier()

    def _extracted(self) -> Iterator[WeightChunk]:
        for name, one in self.weights.items():
            torch.distributed.barrier()  # the gather
            yield WeightChunk([name], [one])


def sky_client(*urls: str, data_parallel_size: int = 1) -> Any:
    """SkyRL's ``RemoteInferenceClient``, as far as it names its servers."""
    return SimpleNamespace(server_urls=list(urls), data_parallel_size=data_parallel_size)
