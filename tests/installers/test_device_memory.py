"""Installs of versions that lie in device memory: copy, alias and flip, on host memory here."""

from typing import ClassVar

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.installers.base import Engine
from rl_bridge.testing import InstallerSuite
from rl_bridge.testing.faults import HostIPC, HostVMM
from rl_bridge.transports import registry


@pytest.fixture(autouse=True)
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the transports known by their names, for as long as a test runs."""
    for kind in (HostVMM, HostIPC):
        monkeypatch.setitem(registry._KINDS, kind.name, kind)


class TestCopyFromDeviceMemory(InstallerSuite):
    transport: ClassVar[str] = HostVMM.name

    def make_adapter(self, engine: Engine) -> ModuleInstallAdapter:
        return ModuleInstallAdapter(engine, mode="copy")


class TestAliasOfDeviceMemory(InstallerSuite):
    transport: ClassVar[str] = HostVMM.name
    rebinds = True
    is_read_only = True

    def make_adapter(self, engine: Engine) -> ModuleInstallAdapter:
        return ModuleInstallAdapter(engine, mode="alias")


class TestFlipInDeviceMemory(InstallerSuite):
    transport: ClassVar[str] = HostVMM.name
    rebinds = True
    is_read_only = True

    def make_adapter(self, engine: Engine) -> ModuleInstallAdapter:
        return ModuleInstallAdapter(engine, mode="flip")


class TestAliasOfOpenedMemory(InstallerSuite):
    transport: ClassVar[str] = HostIPC.name
    rebinds = True

    def make_adapter(self, engine: Engine) -> ModuleInstallAdapter:
        return ModuleInstallAdapter(engine, mode="alias")


def test_opened_memory_is_not_flipped() -> None:
    engine = torch.nn.Linear(3, 2)
    with make_weight_bridge(HostIPC.name) as trainer, make_weight_bridge(HostIPC.name) as rollout:
        executor = RolloutExecutor(
            weight_bridge=rollout,
            weight_install_adapter=ModuleInstallAdapter(engine, mode="flip"),
        )
        manifest = trainer.publish(torch.nn.Linear(3, 2), weight_version=1)
        with pytest.raises(IncompatibleUpdate, match="Use mode='copy' or 'alias'"):
            executor.update_weights(manifest)
