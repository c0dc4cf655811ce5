"""`Peer`: the publisher, consumer and engine that a child process of the suites serves over JSON.

Built from a transport's class and its keyword arguments, as `processes` explains. Weights are made
from a seed on either side, so that expected bytes never travel with the update under test.
"""

import hashlib
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.lifecycle import Observer
from rl_bridge.manifest.compare import Policy
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.testing.faults import Fault, FaultInjecting, Locate, die
from rl_bridge.testing.tensors import bytes_of, random_tensor
from rl_bridge.transports.base import Transport


class BridgeOver(TensorBridge):
    """`TensorBridge` over a transport object: one that no registry knows, or a wrapped one.

    The no-op detector and the look for NaN are off unless asked for: suites publish the same bytes
    again and again, and bytes of every pattern.
    """

    transport: ClassVar[str] = "given"

    def __init__(self, given: Transport, **options: Any) -> None:
        """Configure, with options of `TensorBridge`; nothing is opened yet."""
        self.given = given
        usual: dict[str, Any] = {"suspicious": Policy.OFF, "nonfinite": Policy.OFF}
        super().__init__(**{"source_worker": "test", **usual, **options})

    def _make_transport(self, options: Mapping[str, object]) -> Transport:
        if options:
            raise TypeError(
                f"the transport is made already, so it takes no options: {sorted(options)}"
            )
        return self.given


_SPEC: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed": ("bfloat16", (64, 48)),
    "layer.0.weight": ("float32", (40, 33)),
    "layer.0.bias": ("float32", (40,)),
    "scale": ("float64", ()),
    "empty": ("int32", (0, 3)),
    "mask": ("bool", (77,)),
}


def sample_weights(seed: int, *, num_more: int = 0, rows: int = 64) -> dict[str, torch.Tensor]:
    """A small state dict whose bytes all follow from `seed`, with one tied and one strided tensor.

    Its numbers are finite: `publish` takes them by default.

    Args:
        seed: another seed, other bytes.
        num_more: that many further tensors of a few bytes.
        rows: of the largest tensor, to make it larger.

    """
    spec = {**_SPEC, "embed": ("bfloat16", (rows, 48))}
    spec |= {f"more.{index}": ("float16", (3,)) for index in range(num_more)}
    found = {
        name: random_tensor(dtype, shape, 1000 * seed + index)
        for index, (name, (dtype, shape)) in enumerate(spec.items())
    }
    for tensor in found.values():
        if tensor.is_floating_point():
            tensor.masked_fill_(~tensor.isfinite(), 0.5)
    found["head"] = found["embed"]
    found["layer.0.transposed"] = found["layer.0.weight"].t()
    return found


def id_of(manifest: str) -> str:
    """The update id in a manifest's JSON."""
    return WeightUpdateManifest.from_json(manifest).update_id


def hashes(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name -> SHA-256 of dtype, shape and bytes."""
    return {
        name: hashlib.sha256(
            f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + bytes_of(tensor)
        ).hexdigest()
        for name, tensor in named.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """What few peers need to be told."""

    locate: Locate | None = None
    """Finds published bytes; None takes the transport's own way."""
    mode: Any = "copy"
    """How the engine's updates are installed."""
    max_files: int | None = None
    """Limit of open descriptors from here on."""
    device: str = "cpu"
    """Where weights are made."""


_USUAL: Final = PeerOptions()


class Peer:
    """A bridge and, if asked for, an engine behind an executor. Every method speaks JSON."""

    def __init__(
        self,
        transport_class: type[Transport] | str,
        transport_kwargs: dict[str, Any],
        *,
        worker: str = "peer",
        observer: Observer | None = None,
        faults: tuple[Fault, ...] = (),
        engine_seed: int | None = None,
        state_dir: str | None = None,
        options: PeerOptions = _USUAL,
    ) -> None:
        """Build the bridge.

        Args:
            transport_class: made here, in this process; a name will do.
            transport_kwargs: its options.
            worker: name in reports.
            observer: of the lifecycle, such as `KillAt`.
            faults: strike in the transport.
            engine_seed: seed of an engine's initial weights; None means no engine.
            state_dir: of the publisher.
            options: the rest.

        """
        self._is_on_gpu = options.device != "cpu"
        if self._is_on_gpu:
            torch.set_default_device(options.device)
        if options.max_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (options.max_files, options.max_files))
        self._given = FaultInjecting.over(
            transport_class, transport_kwargs, *faults, locate=options.locate
        )
        self._bridge = BridgeOver(
            self._given, source_worker=worker, observer=observer, state_dir=state_dir
        )
        self._source: dict[str, torch.Tensor] = {}
        self._held: dict[str, Mapping[str, torch.Tensor]] = {}
        self._engine = None if engine_seed is None else engine_weights(engine_seed)
        self._executor: RolloutExecutor | None = None
        if self._engine is not None:
            adapter = ModuleInstallAdapter(self._engine, mode=options.mode)
            self._executor = RolloutExecutor(
                weight_bridge=self._bridge, weight_install_adapter=adapter, suspicious="off"
            )

    # ---- publishing -----------------------------------------------------------------------------

    def publish(self, seed: int, weight_version: int, num_more: int = 0, rows: int = 64) -> str:
        """Publish `sample_weights` and return the manifest's JSON."""
        self._source = sample_weights(seed, num_more=num_more, rows=rows)
        return self._bridge.publish(self._source, weight_version=weight_version).to_json()

    def overwrite_source(self) -> None:
        """Overwrite the source, as the next training step does."""
        for tensor in self._source.values():
            tensor.zero_()

    def reports(self, update_id: str) -> list[dict[str, Any]]:
        """The consumers' reports on an update."""
        return [
            {
                "worker": report.worker,
                "pid": report.pid,
                "presence": report.presence,
                "state": report.state,
                "reason": report.reason,
                "tensors_held": report.tensors_held,
            }
            for report in self._bridge.holders(update_id)
        ]

    def published_nbytes(self) -> int:
        """Memory that published updates take."""
        return self._bridge.published_nbytes

    # ---- consuming ------------------------------------------------------------------------------

    def import_update(self, manifest: str) -> dict[str, str]:
        """Import, keep the tensors, and return their hashes."""
        tensors = self._bridge.import_update(manifest)
        self._held[id_of(manifest)] = tensors
        return hashes(tensors)

    def held(self, update_id: str) -> dict[str, str]:
        """Hashes of tensors that are still held."""
        return hashes(self._held[update_id])

    def write(self, update_id: str) -> None:
        """Write into every held tensor of an update; a process that may not write is then gone."""
        try:
            for tensor in self._held[update_id].values():
                if tensor.numel():
                    tensor.view(-1).view(torch.uint8).bitwise_not_()
            if self._is_on_gpu:
                torch.cuda.synchronize()
        except RuntimeError:
            if not self._is_on_gpu:
                raise
            # A GPU reports the fault later and sends no signal: it refuses whatever this process
            # asks of it from then on.
            die()

    def drop(self, update_id: str) -> None:
        """Forget an update's tensors."""
        self._held.pop(update_id, None)

    def acknowledge(self, update_id: str) -> None:
        """Acknowledge an imported update."""
        self._bridge.acknowledge(update_id)

    def reject(self, update_id: str, reason: str) -> None:
        """Reject an update."""
        self._bridge.reject(update_id, reason)

    def release(self, update_id: str) -> None:
        """Release an update on whichever side knows it."""
        self._bridge.release(update_id)

    def state(self, update_id: str) -> str:
        """Fine state of an update."""
        return str(self._bridge.update_state(update_id))

    def close(self) -> None:
        """Close the bridge."""
        self._bridge.close()

    # ---- an engine ------------------------------------------------------------------------------

    def update_weights(self, manifest: str) -> int | None:
        """Install an update in the engine and return the version that it is at."""
        if self._executor is None:
            raise TypeError("this peer has no engine")
        self._executor.update_weights(manifest)
        return self._executor.active_weight_version

    def engine(self) -> dict[str, str]:
        """Hashes of what the engine holds."""
        return hashes(self._engine or {})


def engine_weights(seed: int) -> dict[str, torch.Tensor]:
    """An engine's own weights: `sample_weights` with every tensor contiguous, the tie kept."""
    found = {name: tensor.clone() for name, tensor in sample_weights(seed).items()}
    found["layer.0.transposed"] = found["layer.0.transposed"].contiguous()
    found["head"] = found["embed"]
    return found
