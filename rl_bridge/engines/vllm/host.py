"""A vLLM worker as a rank: its model, the group of its ranks, and what installs into it."""

from collections.abc import Mapping
from typing import Any

import torch

from rl_bridge.engines.rank import EngineRank, RankHost, rank_of
from rl_bridge.engines.rpc import RankGroup
from rl_bridge.engines.vllm.compat import require
from rl_bridge.engines.vllm.model_installer import VLLMModelInstaller
from rl_bridge.engines.vllm.reload import VLLMReloadAdapter
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.installers.base import TransactionalAdapter

__all__ = ["VLLMHost", "vllm_rank", "worker_group"]


class VLLMHost(RankHost):
    """One worker of a vLLM engine."""

    name = "vllm"

    def __init__(self, model: torch.nn.Module, vllm_config: Any, group: RankGroup) -> None:
        """Look at a worker's model."""
        self.model = model
        self.group = group
        self._config = vllm_config

    def make_installer(self, options: Mapping[str, Any]) -> TransactionalAdapter:
        """What installs beside the serving version; with ``reload``, by vLLM's own reload."""
        options = dict(options)
        kind = VLLMReloadAdapter if options.pop("reload", False) else VLLMModelInstaller
        made: TransactionalAdapter = kind(self.model, self._config, **options)
        return made

    def check(self, given: Mapping[str, Any]) -> None:
        """Refuse replicas and pipeline stages."""
        del given
        parallel = self._config.parallel_config
        index = getattr(parallel, "data_parallel_index", 0)
        if index:
            msg = (
                f"the engine is replica {index} of a data-parallel group (data_parallel_index), "
                "expected one that stands alone: replicas do not decide together. Start it without "
                "data parallelism, and use one executor for each engine."
            )
            raise WeightBridgeUnavailableError(msg)
        for name in ("data_parallel_size", "pipeline_parallel_size"):
            degree = getattr(parallel, name)
            if degree != 1:
                msg = (
                    f"the engine has {name}={degree}, expected 1: its ranks cannot decide together "
                    "here. Use tensor parallelism, and one executor for each engine."
                )
                raise WeightBridgeUnavailableError(msg)


def worker_group() -> RankGroup:
    """The workers of this engine: its tensor and pipeline parallel ranks."""
    state = require("vllm.distributed.parallel_state")
    inner = getattr(state, "_INNER_DP_WORLD", None)
    found = inner if inner is not None else state.get_world_group()
    return RankGroup(int(found.rank_in_group), int(found.world_size), found.cpu_group)


def vllm_rank(model: torch.nn.Module, vllm_config: Any) -> EngineRank:
    """The rank whose model this is; vLLM's backend and drivers' calls share one."""
    return rank_of(model, lambda: VLLMHost(model, vllm_config, worker_group()))
