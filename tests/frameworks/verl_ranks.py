"""verl's processes for a sync of weights on the CPU: all but the trainer's steps is verl's own."""

import os
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.rollout import BaseRollout, RolloutReplica

from rl_bridge import ModuleInstallAdapter
from rl_bridge.testing import BridgeOver, FaultInjecting


class TrainerRank(Worker):  # type: ignore[misc]  # verl has no types here
    """A rank whose weights a test sets, in the place of verl's ``ActorRolloutRefWorker``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        import_external_libs(config.custom_backend_module)
        options = config.engine_kwargs.get(config.backend, {})
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend, is_master=self.rank == 0, bucket_size=1 << 20, **options
        )
        self.faults = FaultInjecting.over("shared-memory")
        if self.rank == 0:
            self.checkpoint_engine.bridge = BridgeOver(self.faults, source_worker="trainer")
        self.weights: dict[str, torch.Tensor] = {}
        self.fault = ""
        self.given = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]  # as above
    def set_weights(self, weights: dict[str, torch.Tensor], fault: str = "") -> None:
        """What is sent next, and what goes wrong then."""
        self.weights, self.fault, self.given = weights, fault, 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]  # as above
    def read_to_end(self) -> bool:
        """Whether each tensor was asked for, as gathers of several ranks need it."""
        return self.given == len(self.weights)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]  # as above
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Send, as verl's worker does."""
        del mode
        self.faults.corrupt_next = self.fault == "damaged"
        return await self.checkpoint_engine.send_weights(self._pairs(), global_steps=global_steps)

    def _pairs(self) -> Any:
        for name, tensor in self.weights.items():
            if self.fault == "killed" and self.given == 1 and self.rank == 0:
                os._exit(9)
            if self.fault == "raises" and self.given == 1 and self.rank == 0:
                raise OSError("a shard is missing")
            self.given += 1
            yield name, tensor

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]  # as above
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine, as verl's worker does."""
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Kept(BaseRollout):  # type: ignore[misc]  # as above
    """A rollout that is no vLLM: it loads what it is given, as verl's other adapters do."""

    def __init__(self, config: Any, model_config: Any) -> None:
        super().__init__(config, model_config, device_mesh=None)
        self.loaded: dict[str, torch.Tensor] = {}
        self.replica_rank = 0

    async def resume(self, tags: list[str]) -> None:
        """Nothing to resume."""

    async def release(self) -> None:
        """Nothing to release."""

    async def update_weights(self, weights: Any, **_: Any) -> None:
        """Load, one tensor after the other."""
        async for name, tensor in weights:
            self.loaded[name] = tensor.clone()


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]  # as above
    """verl's worker with that rollout."""

    def __init__(self, rollout_config: Any, model_config: Any) -> None:
        super().__init__(rollout_config, model_config, Kept(rollout_config, model_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]  # as above
    def loaded(self) -> dict[str, torch.Tensor]:
        """What it has."""
        return dict(self.server_adapter.loaded)


class Engine(ModuleInstallAdapter):
    """An engine of a vLLM server's kind: a module, which may fail at a step."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(4, 4)
        self.fails = ""
        super().__init__(self.module, mode="copy")

    def prepare(self, *given: Any) -> Any:
        self._fail("prepare")
        return super().prepare(*given)

    def install(self, *given: Any) -> Any:
        self._fail("install")
        return super().install(*given)

    def _fail(self, step: str) -> None:
        if step == self.fails:
            raise RuntimeError(f"planted in {step}")


class Updating(CheckpointEngineWorker):  # type: ignore[misc]  # as above
    """verl's worker with its adapter of a vLLM server, whose engine is that module."""

    def __init__(self, rollout_config: Any, model_config: Any, replica_rank: int) -> None:
        from rl_bridge.compat import verl

        self.engine = Engine()
        vars(verl)["VLLMEngineAdapter"] = lambda *_, **__: self.engine
        super().__init__(rollout_config, model_config, replica_rank=replica_rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]  # as above
    def fail(self, step: str) -> None:
        """Fail at this step from now on."""
        self.engine.fails = step

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]  # as above
    def held(self) -> float:
        """What its engine has."""
        return float(self.engine.module.weight[0, 0])


class Server:
    """A named actor in the place of verl's ``vLLMHttpServer``: it has the URL of a real server."""

    def __init__(self, address: str, port: int) -> None:
        self._at = (address, port)
        self.global_steps: int | None = None

    def get_server_address(self) -> tuple[str, int]:
        """As verl's tells it."""
        return self._at

    def set_global_steps(self, global_steps: int) -> None:
        """As verl's adapter tells it."""
        self.global_steps = global_steps

    def get_global_steps(self) -> int | None:
        """Which it was told last."""
        return self.global_steps


class Replica(RolloutReplica):  # type: ignore[misc]  # as above
    """Workers that a test made; nothing generates, so nothing is aborted."""

    async def launch_servers(self) -> None:
        """They run already."""


def group(kind: type, size: int, **facts: Any) -> RayWorkerGroup:
    """Start workers of this kind, one for each rank, without a GPU."""
    made = RayClassWithInitArgs(cls=ray.remote(kind), **facts)
    made.update_options({"num_cpus": 0.1})
    pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


def replica(workers: list[Any], config: Any, model_config: Any, number: int = 0) -> Replica:
    """One rollout of these workers."""
    made = Replica(replica_rank=number, config=config, model_config=model_config)
    made.workers = workers
    return made
