"""An engine in a process of its own: what it gets is text, what it answers is text."""

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor
from rl_bridge.strategies.receiver import ExecutorWeightLoader
from rl_bridge.strategies.requests import WeightUpdateRequest, init_info_from_json
from rl_bridge.strategies.strategy import WeightTransferConfig, make_transfer_strategy
from rl_bridge.testing.processes import Child
from tests.strategies.rig import run

__all__ = ["EngineProcess", "ProcessClient", "make_model"]


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16, bias=False)
    )


class EngineProcess:
    """Receiver, loader and engine, as a worker process makes them."""

    def __init__(self, config: dict[str, Any], init_info: str, rank_offset: int) -> None:
        strategy = make_transfer_strategy(WeightTransferConfig(**config))
        self.module = make_model(99)
        self.receiver = run(
            strategy.create_receiver(init_info_from_json(init_info), rank_offset=rank_offset)
        )
        executor = RolloutExecutor(
            weight_bridge=self.receiver.bridge,
            weight_install_adapter=ModuleInstallAdapter(self.module, mode="copy"),
        )
        self.loader = ExecutorWeightLoader(executor)
        self.dies_at: int | None = None

    def load(self, request: str) -> None:
        read = WeightUpdateRequest.from_json(request)
        if read.batch == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        run(self.loader.load_weights(self.receiver, read))

    def die_at(self, batch: int) -> None:
        self.dies_at = batch

    def servable(self) -> str:
        try:
            self.loader.check_servable()
        except Exception as error:  # noqa: BLE001 - told to the parent
            return type(error).__name__
        return ""

    def version(self) -> int | None:
        return self.loader.executor.active_weight_version

    def weights(self) -> dict[str, list[Any]]:
        return {name: one.tolist() for name, one in self.module.state_dict().items()}

    def close(self) -> None:
        self.loader.executor.close()
        self.receiver.close()


class ProcessClient:
    """Reaches engines in child processes: all of them get a request at once."""

    def __init__(self, engines: list[Child]) -> None:
        self.engines = engines
        self.num_requests = 0

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        self.num_requests += 1
        failures: list[Exception] = []
        text = request.to_json()
        told = [
            one for one in self.engines if _tried(failures, partial(one.tell, "load", request=text))
        ]
        for engine in told:  # each one's answer is taken, whatever another one said
            _tried(failures, engine.answer)
        if failures:
            raise failures[0]


def _tried(failures: list[Exception], what: Callable[[], object]) -> bool:
    try:
        what()
    except Exception as error:  # noqa: BLE001 - the caller raises the first one
        failures.append(error)
        return False
    return True
