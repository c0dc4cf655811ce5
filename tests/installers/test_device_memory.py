"""Installs of versions that lie in device memory: copy, alias and flip, on host memory here."""

from typing import ClassVar

import pytest

from rl_bridge.installers.engine_memory import Engine
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.testing import InstallerSuite
from rl_bridge.testing.host_vmm import HostVMM
from rl_bridge.transports import registry


@pytest.fixture(autouse=True)
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the transport known by its name, for as long as a test runs."""
    monkeypatch.setitem(registry._KINDS, HostVMM.name, HostVMM)


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
