"""Trainer, engines and what lies between them, in one process; requests travel as JSON."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.strategies.receiver import (
    BatchedLoadAdapter,
    BridgeTransferReceiver,
    ExecutorWeightLoader,
)
from rl_bridge.strategies.requests import (
    SharedMemoryWeightUpdateRequest,
    WeightUpdateRequest,
    init_info_from_json,
)
from rl_bridge.strategies.sender import BridgeTransferSender
from rl_bridge.strategies.strategy import WeightTransferConfig, make_transfer_strategy
from rl_bridge.testing.processes import Child
from rl_bridge.trainers.chunks import WeightChunk

T = TypeVar("T")

NUM_LAYERS = 6


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def weights(version: int) -> dict[str, torch.Tensor]:
    """Six layers of 32 + 8 floats each, all different in each version."""
    made = {}
    for layer in range(NUM_LAYERS):
        base = 1000.0 * version + layer
        made[f"layers.{layer}.weight"] = torch.arange(32.0).reshape(4, 8) + base
        made[f"layers.{layer}.bias"] = torch.arange(8.0) - base
    return made


def chunks_of(tensors: dict[str, torch.Tensor], *, size: int = 1) -> Iterator[WeightChunk]:
    """Chunks of `size` tensors each, in order."""
    pairs = list(tensors.items())
    for at in range(0, len(pairs), size):
        yield WeightChunk.of(pairs[at : at + size])


class Engine:
    """An engine with a loader of its own, which may be told to fail.

    Attributes:
        weights: what it serves.
        calls: names of each load call.

    """

    def __init__(self) -> None:
        self.weights = {name: torch.zeros_like(one) for name, one in weights(0).items()}
        self.calls: list[list[str]] = []
        self.fails_at: int | None = None

    def load(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        if self.fails_at == len(self.calls):
            # Half of the batch is loaded: what is left behind must be undone.
            for name, tensor in pairs[: len(pairs) // 2 + 1]:
                self.weights[name].copy_(tensor)
            raise RuntimeError("the engine's loader failed")
        self.calls.append([name for name, _ in pairs])
        for name, tensor in pairs:
            self.weights[name].copy_(tensor)

    def holds(self, version: int) -> bool:
        expected = weights(version)
        if version == 0:
            expected = {name: torch.zeros_like(one) for name, one in expected.items()}
        return all(torch.equal(self.weights[name], one) for name, one in expected.items())


class Client:
    """Hands each request to all engines, as text; it may be told to lose one."""

    def __init__(self, engines: Iterable[Callable[[WeightUpdateRequest], Any]]) -> None:
        self.engines = list(engines)
        self.requests: list[WeightUpdateRequest] = []
        self.change: Callable[[WeightUpdateRequest], WeightUpdateRequest | None] = lambda one: one

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        self.requests.append(request)
        changed = self.change(request)
        for engine in self.engines if changed is not None else []:
            assert changed is not None
            await engine(WeightUpdateRequest.from_json(changed.to_json()))


class Rig:
    """One trainer and one engine over shared memory."""

    def __init__(
        self, stack: ExitStack, *, threshold_nbytes: int = 1 << 30, **clean_up: Any
    ) -> None:
        self.sender = stack.enter_context(
            BridgeTransferSender(
                make_weight_bridge("shared-memory", source_worker="trainer"),
                SharedMemoryWeightUpdateRequest,
                threshold_nbytes=threshold_nbytes,
                **clean_up,
            )
        )
        self.engine, self.receiver, self.loader = self._make_engine(stack)
        self.client = Client([lambda request: self.loader.load_weights(self.receiver, request)])

    @staticmethod
    def _make_engine(
        stack: ExitStack,
    ) -> tuple[Engine, BridgeTransferReceiver, ExecutorWeightLoader]:
        engine = Engine()
        receiver = stack.enter_context(
            BridgeTransferReceiver(make_weight_bridge("shared-memory", source_worker="engine"))
        )
        executor = stack.enter_context(
            RolloutExecutor(
                weight_bridge=receiver.bridge,
                weight_install_adapter=BatchedLoadAdapter(engine.weights, engine.load),
            )
        )
        return engine, receiver, ExecutorWeightLoader(executor)

    def sync(self, version: int, *, size: int = 1, **options: Any) -> Any:
        chunks = chunks_of(weights(version), size=size)
        return run(self.sender.send_chunks(chunks, self.client, **options))


@contextmanager
def rig(**options: Any) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(stack, **options)


# ---- an engine in a process of its own: what it gets is text, what it answers is text ------------


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
