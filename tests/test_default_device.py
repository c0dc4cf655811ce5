"""Where torch makes tensors by default is the user's choice: nothing here depends on it."""

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

from rl_bridge import ModuleInstallAdapter, RolloutExecutor
from rl_bridge.cuda.digest import DevicePass
from rl_bridge.testing.faults import HostIPC, HostVMM
from rl_bridge.testing.peer import BridgeOver, sample_weights
from rl_bridge.testing.tensors import contents_of
from rl_bridge.transports.base import Transport
from rl_bridge.transports.local import LocalClone
from rl_bridge.transports.shared_memory import SharedMemory
from tests.cuda.digest.rig import Laid

ROOT = Path(__file__).parents[1] / "rl_bridge"
# Whose tensors are the user's, or made on purpose where torch makes them.
OUTSIDE = {"cli", "demo", "testing"}
FACTORIES = {function.__name__ for function in _device_constructors()}


def factories_without_a_device(path: Path) -> list[str]:
    """Calls of torch's functions that make tensors on the default device."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    paths = [p for p in ROOT.rglob("*.py") if p.relative_to(ROOT).parts[0] not in OUTSIDE]
    assert len(paths) > 100
    assert [place for path in paths for place in factories_without_a_device(path)] == []


@pytest.mark.parametrize("kind", [LocalClone, SharedMemory, HostVMM, HostIPC])
def test_updates_arrive_whatever_the_default_device_is(kind: type[Transport]) -> None:
    sources = {version: sample_weights(version) for version in (1, 2, 3)}
    with torch.device("meta"), BridgeOver(kind()) as trainer, BridgeOver(kind()) as rollout:
        for version, source in sources.items():
            manifest = trainer.publish(source, weight_version=version)
            assert contents_of(rollout.import_update(manifest.to_json())) == contents_of(source)
            rollout.acknowledge(manifest.update_id)
            rollout.release(manifest.update_id)
            trainer.release(manifest.update_id)


@pytest.mark.parametrize("mode", ["copy", "alias", "flip"])
def test_updates_are_installed_whatever_the_default_device_is(mode: str) -> None:
    engine, sources = torch.nn.Linear(30, 20), [torch.nn.Linear(30, 20) for _ in range(3)]
    adapter = ModuleInstallAdapter(engine, mode=mode)  # type: ignore[arg-type]  # parametrised
    with torch.device("meta"), BridgeOver(HostVMM()) as trainer, BridgeOver(HostVMM()) as rollout:
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        for version, source in enumerate(sources, 1):
            executor.update_weights(trainer.publish(source, weight_version=version))
            assert contents_of(engine.state_dict()) == contents_of(source.state_dict())


def test_a_pass_on_a_device_is_planned_whatever_the_default_device_is() -> None:
    laid = Laid([5, 300_000])
    with torch.device("meta"):
        plan = DevicePass(laid.sizes, "cpu", engine="torch")
        assert plan.copy_digest(laid.sources, laid.targets) == laid.digests()
