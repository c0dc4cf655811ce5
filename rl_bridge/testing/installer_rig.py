"""What the installer suite sets up: a trainer, an engine behind an adapter, an executor between."""

from collections.abc import Callable, Mapping

import torch

from rl_bridge.bridge.bridges import TensorBridge, make_weight_bridge
from rl_bridge.bridge.rollout import RolloutExecutor
from rl_bridge.installers.base import TransactionalAdapter, WeightInstallAdapter
from rl_bridge.installers.engine_memory import Engine, named_engine_tensors
from rl_bridge.testing.installer_faults import Sabotage
from rl_bridge.testing.strategies import bytes_of, random_tensor

__all__ = ["Adapter", "Rig", "engine_state", "sample_engine", "tied_like"]

Adapter = WeightInstallAdapter | TransactionalAdapter


def engine_state(engine: Engine) -> dict[str, tuple[int, str, tuple[int, ...], bytes]]:
    """All that an undo must bring back: tensor object, dtype, strides and bytes, by name."""
    return {
        name: (id(tensor), str(tensor.dtype), tensor.stride(), bytes_of(tensor))
        for name, tensor in named_engine_tensors(engine).items()
    }


class Rig:
    """A trainer, an engine behind the adapter under test, and an executor between them."""

    def __init__(
        self,
        engine: Engine,
        adapter: Adapter,
        transport: str,
        *,
        initial_weights: Mapping[str, torch.Tensor] | None,
        rebinds: bool,
        published: Callable[[Engine], Mapping[str, torch.Tensor]] = named_engine_tensors,
    ) -> None:
        """Put them together; `sabotage` stands between executor and adapter.

        `published` tells what an engine holds, under the names and in the shapes of updates.
        """
        self.engine = engine
        self._published = published
        self.adapter = adapter
        self.trainer: TensorBridge = make_weight_bridge(transport, suspicious="off")
        self.consumer: TensorBridge = make_weight_bridge(transport, suspicious="off")
        self.sabotage = Sabotage(adapter, engine, rebinds=rebinds)
        self.executor = RolloutExecutor(
            weight_bridge=self.consumer,
            weight_install_adapter=self.sabotage.wrapped(),
            initial_weights=initial_weights,
            suspicious="off",
        )
        self._version = 0

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        """Random weights of the published names, shapes, dtypes and ties; contiguous."""
        made: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        found = {}
        for index, (name, tensor) in enumerate(self._published(self.engine).items()):
            key = (tensor.data_ptr() if tensor.numel() else -index, tuple(tensor.shape))
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[name] = made.setdefault(
                key, random_tensor(dtype, tuple(tensor.shape), 100 * seed + index)
            )
        return found

    def install(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Publish and update; the update is released by the trainer whatever happens."""
        self._version += 1
        manifest = self.trainer.publish(weights, weight_version=self._version)
        try:
            return self.executor.update_weights(manifest.to_json())
        finally:
            self.trainer.release(manifest.update_id)

    @property
    def version(self) -> int | None:
        """The version that the executor says the engine holds."""
        return self.executor.active_weight_version

    def holds(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether the engine holds these bytes, under all published names."""
        return {name: bytes_of(t) for name, t in self._published(self.engine).items()} == {
            name: bytes_of(t) for name, t in weights.items()
        }

    def close(self) -> None:
        """Close both bridges."""
        self.consumer.close()
        self.trainer.close()


def sample_engine() -> torch.nn.Module:
    """A small module with a tie, buffers, a channels-last weight, an empty and a 0-dim tensor."""
    torch.manual_seed(5)
    module = torch.nn.Module()
    module.embed = torch.nn.Embedding(7, 6)
    module.head = torch.nn.Linear(6, 7, bias=False)
    module.head.weight = module.embed.weight
    module.conv = torch.nn.Conv2d(3, 4, 2)
    weight = module.conv.weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    module.norm = torch.nn.BatchNorm1d(5)
    module.square = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    module.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
    module.register_buffer("nothing", torch.empty(0, 3))
    module.register_buffer("mask", torch.tensor([True, False, True]))
    return module


def tied_like(
    tensors: Mapping[str, torch.Tensor], copies: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tie the copies of an engine's tensors as the engine ties its own."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            same = first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
            copies[name] = copies[same]
    return copies
