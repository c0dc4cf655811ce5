"""Trainer, engines and what lies between them, in one process; requests travel as JSON."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.strategies.receiver import (
    BatchedLoadAdapter,
    BridgeTransferReceiver,
    ExecutorWeightLoader,
)
from rl_bridge.strategies.requests import (
    SharedMemoryWeightUpdateRequest,
    WeightUpdateRequest,
)
from rl_bridge.strategies.sender import BridgeTransferSender
from rl_bridge.trainers.chunks import WeightChunk

__all__ = ["Client", "Engine", "Rig", "chunks_of", "rig", "run", "weights"]

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

    def __init__(self, stack: ExitStack, *, threshold_nbytes: int = 1 << 30) -> None:
        self.sender = stack.enter_context(
            BridgeTransferSender(
                make_weight_bridge("shared-memory", source_worker="trainer"),
                SharedMemoryWeightUpdateRequest,
                threshold_nbytes=threshold_nbytes,
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
