"""An installer of one's own, with undo and proof, for an engine that is no torch module."""

from collections.abc import Mapping

import torch

from rl_bridge import (
    InstallProof,
    RolloutExecutor,
    TornEngine,
    TransactionalAdapter,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.errors import IncompatibleUpdate, ProofFailed
from rl_bridge.manifest import digest_bytes


class Engine:
    """Stores each matrix transposed, where only its own `load` and `read` reach it."""

    def __init__(self, stored: Mapping[str, torch.Tensor]) -> None:
        self._stored = dict(stored)

    def names(self) -> set[str]:
        return set(self._stored)

    def read(self, name: str) -> torch.Tensor:
        """A tensor in the trainer's form."""
        return self._stored[name].t().clone()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor in the trainer's form."""
        self._stored[name].copy_(tensor.t())


def digest(tensor: torch.Tensor) -> str:
    """What a manifest says of a tensor: the digest of its values, row after row."""
    flat = tensor.detach().contiguous().reshape(-1)
    return digest_bytes(flat.view(torch.uint8).numpy().tobytes()).hex()


class EngineAdapter(TransactionalAdapter):
    """Installs through the engine's loader, and reads back what it really holds."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._before: dict[str, torch.Tensor] | None = None
        self._installed: WeightUpdateManifest | None = None

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse whatever does not fit while the engine is untouched, then copy it aside."""
        differing = sorted(tensors.keys() ^ self.engine.names())
        if differing:
            raise IncompatibleUpdate(
                f"version {manifest.weight_version}: names differ: {differing}. Publish what the "
                "engine runs."
            )
        for name, tensor in tensors.items():
            held = self.engine.read(name)
            if (tensor.shape, tensor.dtype) != (held.shape, held.dtype):
                raise IncompatibleUpdate(
                    f"{name!r}: the engine has {held.dtype}{list(held.shape)}, the update "
                    f"{tensor.dtype}{list(tensor.shape)}. Publish what it runs."
                )
        if self._before is None:  # else an undo failed: a mixture is nothing to go back to
            self._before = {name: self.engine.read(name) for name in self.engine.names()}

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load. Whatever is raised here leads to `undo`."""
        self._installed = manifest
        for name, tensor in tensors.items():
            self.engine.load(name, tensor)

    def prove(self) -> InstallProof:
        """Read every byte in the engine and compare it with what was published."""
        manifest, nbytes = self._installed, 0
        assert manifest is not None
        for name, described in manifest.tensors.items():
            held = self.engine.read(name)
            nbytes += held.numel() * held.element_size()
            if digest(held) != described.checksum:
                raise ProofFailed(
                    f"the engine does not hold {name!r} of version {manifest.weight_version}: "
                    f"it has {digest(held)}, expected {described.checksum}."
                )
        # Every tensor is that of the manifest, so the root is the manifest's too.
        return InstallProof(
            method="digest",
            root=manifest.root,
            digested_nbytes=nbytes,
            tensors=len(manifest.tensors),
        )

    def undo(self) -> None:
        """Load what was copied aside, and see that it is back."""
        if self._before is None:
            return
        for name, tensor in self._before.items():
            self.engine.load(name, tensor)
            if digest(self.engine.read(name)) != digest(tensor):
                raise TornEngine(f"{name!r} does not come back. Restart the engine.")
        self._before = self._installed = None

    def commit(self) -> None:
        """Acknowledged: no undo will need the copy."""
        self._before = self._installed = None

    def abandon(self) -> None:
        """Refused after all: the copy may go, unless an earlier install is still to be undone."""
        if self._installed is None:
            self._before = None

    def release(self, update_id: str) -> None:
        """Nothing is kept for single updates."""


class HalfWay(Engine):
    """Fails in the middle of an install when it is told to."""

    loads_left = 1_000

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.loads_left -= 1
        if self.loads_left == 0:
            raise OSError("the device fell off the bus")
        super().load(name, tensor)


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    engine = HalfWay(
        {name: torch.zeros_like(item.t()) for name, item in model.state_dict().items()}
    )
    with (
        make_weight_bridge("shared-memory", source_worker="trainer") as trainer,
        make_weight_bridge("shared-memory", source_worker="rollout") as rollout,
        RolloutExecutor(
            weight_bridge=rollout, weight_install_adapter=EngineAdapter(engine)
        ) as executor,
    ):
        executor.update_weights(trainer.publish(model, weight_version=1))
        assert executor.last_ack is not None
        assert executor.last_ack.proof.method == "digest"

        before = {name: engine.read(name) for name in engine.names()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        engine.loads_left = 3
        try:
            executor.update_weights(trainer.publish(model, weight_version=2))
        except OSError as error:
            print(f"{error}: {error.__notes__[0]}")
        assert executor.active_weight_version == 1
        assert all(torch.equal(engine.read(name), tensor) for name, tensor in before.items())


if __name__ == "__main__":
    main()
