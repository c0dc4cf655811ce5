"""Engines that fail in the middle of an install, on request."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rl_bridge.engines.staging import Exchange, Staged
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["EngineFault", "HalfWayAdapter", "failing_exchange"]


class EngineFault(RuntimeError):
    """What the engine raises in the middle; of no type that the bridge knows."""


class HalfWayAdapter(ModuleInstallAdapter):
    """Copies updates into a module, and fails half-way while `is_armed`.

    Only `install` differs: checking, proving and above all undoing are the adapter's usual work.
    """

    def __init__(self, engine: nn.Module) -> None:
        """Install into a module of this process."""
        super().__init__(engine, mode="copy", num_threads=1)
        self._engine = engine
        self.is_armed = False

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, Tensor]) -> None:
        """Install; or write half of the tensors, so that the engine is a mixture, and raise."""
        if not self.is_armed:
            super().install(manifest, tensors)
            return
        mine = self._engine.state_dict()
        half = sorted(mine)[: len(mine) // 2]
        with torch.no_grad():
            for name in half:
                mine[name].copy_(tensors[name])
        raise EngineFault(f"the engine failed after {len(half)} of {len(mine)} tensors")


@contextmanager
def failing_exchange() -> Iterator[None]:
    """Within this context, every exchange of a model's weights in this process fails half-way.

    Half of the exchange has really been made when it does: the serving model is a mixture.
    """
    apply = Exchange.apply

    def apply_half(exchange: Exchange, staged: Staged) -> None:
        steps = len(staged.tensors) + len(staged.attributes)
        half = steps // 2
        tensors = staged.tensors[:half]
        apply(exchange, Staged(tensors, staged.attributes[: half - len(tensors)]))
        raise EngineFault(f"the engine failed after {half} of {steps} exchanges")

    Exchange.apply = apply_half  # type: ignore[method-assign,assignment]  # the planted fault
    try:
        yield
    finally:
        Exchange.apply = apply  # type: ignore[method-assign]
