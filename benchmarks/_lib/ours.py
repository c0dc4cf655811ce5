"""Ours: published with digest, verified, installed by flip or by copy, acknowledged with proof."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from _lib.baselines import Clock, CopyBaseline, HashBaseline
from _lib.lanes import BaseConsumer, BasePublisher, LaneContext
from _lib.payload import PayloadSpec
from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    WeightUpdateManifest,
    make_weight_bridge,
)

__all__ = ["ImportConsumer", "InstallConsumer", "OursPublisher"]


class OursPublisher(BasePublisher):
    """``bridge.publish`` and the manifest's JSON; the layout travels with the first update only."""

    def __init__(self, context: LaneContext) -> None:
        """Open the bridge."""
        super().__init__(context)
        self._bridge = make_weight_bridge(
            "shared-memory",
            source_worker="trainer",
            source_rank=0,
            nonfinite="warn",  # every pattern of 16 bits is sent
        )
        self._update_ids: list[str] = []
        self._baseline = CopyBaseline() if context.options.get("time_memcpy") else None
        self._targets: list[torch.Tensor] = []

    def publish(self, version: int) -> bytes:
        """Publish a version and return its manifest's text."""
        manifest = self._bridge.publish(self.payload.tensors, weight_version=version)
        first = not self._update_ids
        self._update_ids.append(manifest.update_id)
        return manifest.to_json(layout=first).encode()

    def after(self) -> dict[str, float]:
        """Release what an acknowledged update has replaced, and time plain copies."""
        for update_id in self._update_ids[:-1]:
            self._bridge.release(update_id)
        extras = {
            f"publish_{phase}_ms": value
            for phase, value in self._bridge.timings(self._update_ids[-1]).items()
        }
        del self._update_ids[:-1]
        if self._baseline is not None:
            sources = list(self.payload.tensors.values())
            if not self._targets:
                self._targets = [torch.zeros_like(tensor) for tensor in sources]
            extras |= self._baseline.time("memcpy", self._targets, sources)
        return extras

    def close(self) -> None:
        """Close the bridge."""
        self._bridge.close()
        if self._baseline is not None:
            self._baseline.close()


class ImportConsumer(BaseConsumer):
    """``bridge.import_update``: verified views of the publisher's memory, each of them made."""

    def __init__(self, context: LaneContext, hello: bytes) -> None:
        """Open the bridge."""
        super().__init__(context, hello)
        self._bridge = make_weight_bridge("shared-memory", source_worker="rollout", source_rank=0)
        self.loads_itself = bool(context.options.get("import_only"))
        self._update_ids: list[str] = []
        self._last: Mapping[str, torch.Tensor] = {}
        self._hasher = HashBaseline() if context.options.get("time_xxh3") else None

    def receive(self, message: bytes) -> Mapping[str, torch.Tensor]:
        """Parse, import and verify; then make every view, as the peers do."""
        with Clock() as clock:
            manifest = WeightUpdateManifest.from_json(message.decode())
            imported = self._bridge.import_update(manifest)
        self._import_s = clock.seconds
        self._update_ids.append(manifest.update_id)
        self._last = dict(imported)
        return self._last

    def after(self) -> dict[str, float]:
        """Acknowledge and release; time the plain hash over the same mapping."""
        extras = {"import_s": self._import_s}
        if self._hasher is not None:
            extras |= self._hasher.time(self._last)
        self._last = {}
        timings = self._bridge.timings(self._update_ids[-1])
        extras |= {f"import_{phase}_ms": value for phase, value in timings.items()}
        for update_id in self._update_ids:
            self._bridge.acknowledge(update_id)
            self._bridge.release(update_id)
        self._update_ids.clear()
        return extras

    def close(self) -> None:
        """Close the bridge."""
        self._bridge.close()
        if self._hasher is not None:
            self._hasher.close()


def _build_model(spec: PayloadSpec) -> torch.nn.Module:
    """Return a module whose parameters have the payload's names and shapes."""
    root = torch.nn.Module()
    for name in spec.names():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            child = module._modules.get(part)  # noqa: SLF001 - get_submodule would walk from the root
            if child is None:
                child = torch.nn.Module()
                module.add_module(part, child)
            module = child
        weight = torch.zeros(spec.rows, spec.cols, dtype=torch.bfloat16)
        module.register_parameter(leaf, torch.nn.Parameter(weight, requires_grad=False))
    return root


class _Parameters(Mapping[str, torch.Tensor]):
    """What the engine's parameters hold now, whatever storage they have by now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = dict(model.named_parameters())

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one parameter's present tensor."""
        return self._parameters[name].detach()

    def __iter__(self) -> Iterator[str]:
        """Go over the names."""
        return iter(self._parameters)

    def __len__(self) -> int:
        """Count the parameters."""
        return len(self._parameters)


class _TimedInstall(ModuleInstallAdapter):
    """The library's adapter with a clock of ours around the installation itself."""

    install_s = 0.0

    def install(self, manifest: Any, tensors: Any) -> Any:
        """Install, timed."""
        with Clock() as clock:
            result = super().install(manifest, tensors)
        self.install_s = clock.seconds
        return result


class InstallConsumer(BaseConsumer):
    """``RolloutExecutor.update_weights``: verified, installed, proven, acknowledged."""

    loads_itself = True

    def __init__(self, context: LaneContext, hello: bytes) -> None:
        """Make the engine's model and the executor."""
        super().__init__(context, hello)
        self._model = _build_model(context.spec)
        self._parameters = _Parameters(self._model)
        self._bridge = make_weight_bridge("shared-memory", source_worker="rollout", source_rank=0)
        self._adapter = _TimedInstall(self._model, mode=context.options["mode"])
        self._executor = RolloutExecutor(
            weight_bridge=self._bridge, weight_install_adapter=self._adapter
        )
        self._baseline = CopyBaseline() if context.options.get("time_copy") else None
        self._imported: Mapping[str, torch.Tensor] = {}

    def receive(self, message: bytes) -> Mapping[str, torch.Tensor]:
        """Update the engine's weights and return its parameters."""
        manifest = WeightUpdateManifest.from_json(message.decode())
        self._imported = self._executor.update_weights(manifest)
        return self._parameters

    def after(self) -> dict[str, float]:
        """Take the acknowledgement's timings; time plain copies into the same parameters."""
        extras = {"install_s": self._adapter.install_s}
        ack = self._executor.last_ack
        timings_ms = {} if ack is None else ack.timings_ms
        extras |= {f"ack_{phase}_ms": value for phase, value in timings_ms.items()}
        if self._baseline is not None:
            names = list(self._parameters)
            targets = [self._parameters[name] for name in names]
            sources = [self._imported[name] for name in names]
            extras |= self._baseline.time("copy", targets, sources)
        self._imported = {}
        return extras

    def close(self) -> None:
        """Release the weights and close the bridge."""
        self._executor.release_weights()
        self._bridge.close()
        if self._baseline is not None:
            self._baseline.close()
