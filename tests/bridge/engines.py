"""Updates, engines and adapters for the tests of bridges: each step can be watched, or fails."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rl_bridge import (
    InstallProof,
    RolloutExecutor,
    TensorBridge,
    TransactionalAdapter,
    WeightUpdateManifest,
)
from rl_bridge.testing.tensors import bytes_of
from tests.helpers import weights

TRANSPORTS = ["local-clone", "shared-memory"]


def publish(publisher: TensorBridge, version: int) -> WeightUpdateManifest:
    """Publish the weights that the version is the seed of."""
    return publisher.publish(weights(version), weight_version=version)


def bridge_of(executor: RolloutExecutor) -> TensorBridge:
    """The executor's bridge, which is one of ours."""
    assert isinstance(executor.bridge, TensorBridge)
    return executor.bridge


def content(engine: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """An engine's weights, byte for byte."""
    return {name: bytes_of(tensor) for name, tensor in engine.items()}


class Recording(TransactionalAdapter):
    """A whole adapter over a dict of tensors, which notes its calls and fails where it is told to.

    ``fails`` maps a step to what it raises; ``install`` fails after half of the tensors.
    """

    def __init__(self, engine: dict[str, torch.Tensor]) -> None:
        self.engine = engine
        self.calls: list[str] = []
        self.fails: dict[str, BaseException] = {}
        self.proof: InstallProof | None = None
        self._manifest: WeightUpdateManifest | None = None
        self._saved: dict[str, torch.Tensor] = {}

    def _step(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self._step("prepare")
        if not self._saved:
            self._saved = {name: tensor.clone() for name, tensor in self.engine.items()}
        self._manifest = manifest

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        names = sorted(tensors)
        for name in names[: len(names) // 2]:
            self.engine[name].copy_(tensors[name])
        self._step("install")
        for name in names[len(names) // 2 :]:
            self.engine[name].copy_(tensors[name])

    def prove(self) -> InstallProof:
        self._step("prove")
        assert self._manifest is not None
        return self.proof or InstallProof(method="digest", root=self._manifest.root, tensors=3)

    def undo(self) -> None:
        self._step("undo")
        for name, tensor in self._saved.items():
            self.engine[name].copy_(tensor)
        self._saved = {}

    def commit(self) -> None:
        self._step("commit")
        self._saved = {}

    def release(self, update_id: str) -> None:
        self._step(f"release {update_id[:4]}")


class Verifying(Recording):
    """An engine with a bridge of its own, as a process of its own would have."""

    imports_itself = True

    def __init__(self, engine: dict[str, torch.Tensor], bridge: TensorBridge) -> None:
        super().__init__(engine)
        self.bridge = bridge
        self.root = ""
        self.claims: str | None = None
        self.told_ms: dict[str, float] = {}

    @property
    def verified_root(self) -> str:
        return self.root

    @property
    def phases_ms(self) -> Mapping[str, float]:
        return self.told_ms

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        del tensors
        self.root = ""
        if self.claims is None:
            self._own = self.bridge.import_update(manifest)
            self.told_ms = {"verify": self.bridge.timings(manifest.update_id)["verify"]}
            self.root = manifest.root
        else:
            self.root = self.claims
        super().prepare(manifest, self.engine)

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        super().install(manifest, tensors if self.claims is not None else self._own)


class TwoVerbs:
    """The least that an adapter is; its engine can be seen."""

    def __init__(self, engine: dict[str, torch.Tensor]) -> None:
        self.engine = engine
        self.fails_after: int | None = None

    def install(
        self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]
    ) -> object:
        for number, name in enumerate(sorted(tensors)):
            if number == self.fails_after:
                raise LookupError("the engine said no")
            self.engine[name].copy_(tensors[name])
        return None

    def release(self, update_id: str) -> None:
        """Nothing is kept."""


class Unseen(TwoVerbs):
    """The same, behind a closure: nothing of its engine can be read."""

    def __init__(self, engine: dict[str, torch.Tensor]) -> None:
        self._engine: Callable[[], dict[str, torch.Tensor]] = lambda: engine
        self.fails_after = None

    def __getattr__(self, name: str) -> dict[str, torch.Tensor]:
        if name != "engine":
            raise AttributeError(name)
        return self._engine()


class OwnConsumer:
    """A consumer's bridge of a user's own: the four verbs, and which of them were called."""

    def __init__(self, inner: TensorBridge) -> None:
        self._inner = inner
        self.calls: list[str] = []

    def import_update(self, manifest: WeightUpdateManifest) -> Mapping[str, torch.Tensor]:
        self.calls.append("import")
        return self._inner.import_update(manifest)

    def acknowledge(self, update_id: str) -> None:
        self.calls.append("acknowledge")

    def reject(self, update_id: str, reason: str) -> None:
        self.calls.append(f"reject: {reason}")

    def release(self, update_id: str) -> None:
        self.calls.append("release")


def failing_at_first(
    error: Exception, then: Callable[..., Any], *, times: int = 1
) -> Callable[..., Any]:
    """What fails so many times, and is another function from then on."""
    left = [error] * times

    def failing(*args: Any, **kwargs: Any) -> Any:
        if left:
            raise left.pop()
        return then(*args, **kwargs)

    return failing


def fours(value: float) -> dict[str, torch.Tensor]:
    """One small weight."""
    return {"weight": torch.full((4,), float(value))}


def linear_weights(value: float) -> dict[str, torch.Tensor]:
    """What a `torch.nn.Linear` of three by three has."""
    return {"weight": torch.full((3, 3), value), "bias": torch.full((3,), value)}
