"""`ModuleInstallAdapter` keeps every promise of an installer: copy, alias and flip."""

from typing import ClassVar

from rl_bridge.installers.engine_memory import Engine
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.testing import InstallerSuite


class TestCopy(InstallerSuite):
    def make_adapter(self, engine: Engine) -> ModuleInstallAdapter:
        return ModuleInstallAdapter(engine, mode="copy")


class TestCopyFromLocalClone(TestCopy):
    transport: ClassVar[str] = "local-clone"


class TestAlias(InstallerSuite):
    rebinds = True

    def make_adapter(self, engine: Engine) -> ModuleInstallAdapter:
        return ModuleInstallAdapter(engine, mode="alias")


class TestFlip(InstallerSuite):
    rebinds = True

    def make_adapter(self, engine: Engine) -> ModuleInstallAdapter:
        return ModuleInstallAdapter(engine, mode="flip")
