"""What the tests of both transports of device memory share, which lies on the host here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_bridge.cuda.driver import driver_error
from rl_bridge.manifest.canonical import thaw
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.testing.peer import BridgeOver

__all__ = ["changed", "publish", "refuse_once", "shown"]


def publish(trainer: BridgeOver, version: int = 1) -> WeightUpdateManifest:
    """Publish a tensor that is full of its version."""
    return trainer.publish({"w": torch.full((300,), float(version))}, weight_version=version)


def shown(rollout: BridgeOver, manifest: WeightUpdateManifest) -> set[float]:
    """Which numbers the update has, once it is imported."""
    return set(rollout.import_update(manifest)["w"].flatten().tolist())


def changed(manifest: WeightUpdateManifest, part: str, **fields: Any) -> WeightUpdateManifest:
    """The manifest with other fields in a part of its handle."""
    handle: dict[str, Any] = thaw(manifest.handle)
    handle[part] = handle[part] | fields
    return manifest.model_copy(update={"handle": handle})


def refuse_once(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, code: str, *, call: str = ""
) -> None:
    """A kind of driver refuses the next call of a method, which is known to it as `call`."""
    inner: Callable[..., Any] = getattr(kind, name)
    refused: list[str] = []

    def refusing(driver: object, *args: Any, **kwargs: Any) -> Any:
        if not refused:
            refused.append(name)
            raise driver_error(call or name, code, "refused, as planned")
        return inner(driver, *args, **kwargs)

    monkeypatch.setattr(kind, name, refusing)
