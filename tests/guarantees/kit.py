"""What the guarantees are tried on: every transport, every way to install, and real engines.

Most promises are held by `TransportSuite`, `InstallerSuite` and `EngineSuite`, which whoever writes
a transport, an installer or an engine runs as well: a guarantee's file names their scenarios, and
has what they do not.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, SimpleAdapter, WeightUpdateManifest
from rl_bridge.testing import EngineSuite, HostIPC, HostVMM, InstallerSuite, TransportSuite
from rl_bridge.testing.faults import Locate, locate_in_files
from rl_bridge.transports import TRANSPORTS as REGISTERED
from rl_bridge.transports.files.transport import Files
from tests.transports.exclusive_files import ExclusiveFiles

__all__ = [
    "ADAPTERS",
    "TRANSPORTS",
    "OverEachAdapter",
    "OverEachTransport",
    "Tensors",
    "TwoVerbAdapter",
    "engine_tensors",
    "on_engines",
    "scenarios",
]

Tensors = Mapping[str, torch.Tensor]
Suite = TypeVar("Suite", bound=type)


def scenarios(*names: str) -> Callable[[Suite], Suite]:
    """Keep these of a suite's tests, beside those that the class has of its own."""

    def chosen(kind: Suite) -> Suite:
        inherited = {name for base in kind.__mro__[1:] for name in vars(base)}
        assert set(names) <= inherited, f"no such scenario: {set(names) - inherited}"
        tests = {name for name in inherited if name.startswith("test_")}
        for name in tests - set(names) - vars(kind).keys():
            setattr(kind, name, None)
        return kind

    return chosen


def on_engines(*names: str) -> tuple[str, ...]:
    """Name what holds a guarantee where an engine has ranks: scenarios of `EngineSuite`.

    They run where the engine is installed: vLLM in `tests/engines/test_ranks.py`, SGLang in
    `tests/sglang/test_ranks.py`, and a small engine in `tests/engine_protocol`.
    """
    assert set(names) <= set(vars(EngineSuite)), set(names) - set(vars(EngineSuite))
    return names


# ---- transports ---------------------------------------------------------------------------------


class LocatedFiles(Files):
    """With what finds the bytes behind a manifest."""

    locate: ClassVar[Locate] = staticmethod(locate_in_files)


def _files(url: object) -> dict[str, Any]:
    return {"url": url, "keep_last": 0, "fenced": False, "timeout_s": 0.05}


TRANSPORTS: Mapping[str, Callable[[Path], tuple[Any, dict[str, Any]]]] = {
    "local-clone": lambda _: (REGISTERED["local-clone"], {}),
    "shared-memory": lambda _: (REGISTERED["shared-memory"], {}),
    "shared-memory-in-files": lambda path: (REGISTERED["shared-memory"], {"directory": path}),
    "cuda-vmm-on-host": lambda _: (HostVMM, {}),
    "cuda-ipc-on-host": lambda _: (HostIPC, {}),
    "broadcast": lambda _: (REGISTERED["broadcast"], {"timeout_s": 20.0}),
    "files": lambda path: (LocatedFiles, _files(path / "run")),
    "files-in-objects": lambda path: (
        LocatedFiles,
        {
            **_files(f"{ExclusiveFiles.protocol}://{path}/run"),
            "storage_options": {"auto_mkdir": True},
            "lease_s": 1.0,
        },
    ),
}
"""Every transport that runs on a CPU, with its options; those of GPUs with a driver that stands on
host memory."""


class OverEachTransport(TransportSuite):
    """The suite, over each transport in turn."""

    num_cycles = 20

    @pytest.fixture(autouse=True, params=TRANSPORTS)
    def transport(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        """Its name."""
        kind, self.options = TRANSPORTS[request.param](tmp_path)
        # Of this test alone: other suites say these of the class.
        vars(self).update(transport_class=kind, locate=getattr(kind, "locate", self._finder))
        return str(request.param)

    @pytest.fixture
    def transport_kwargs(self, transport: str) -> dict[str, Any]:
        return self.options


# ---- engines ------------------------------------------------------------------------------------


class TwoVerbAdapter:
    """An adapter as users write their first one: it installs, it releases, it shows its engine."""

    def __init__(self, engine: torch.nn.Module) -> None:
        self.engine = engine

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        for name, live in engine_tensors(self.engine).items():
            as_stored(live).copy_(as_stored(tensors[name]))

    def release(self, update_id: str) -> None:
        """Nothing is kept here."""


def simple_adapter(engine: torch.nn.Module) -> SimpleAdapter:
    """One that knows its engine by two functions only."""
    homes = {name: live.data for name, live in engine.state_dict(keep_vars=True).items()}

    def read(name: str) -> torch.Tensor:
        found: torch.Tensor = engine.state_dict(keep_vars=True)[name]
        return found

    def load(name: str, tensor: torch.Tensor) -> None:
        live, home = read(name), homes[name]
        if (live.dtype, live.stride()) != (home.dtype, home.stride()):
            live.data = home
        as_stored(home).copy_(as_stored(tensor))

    return SimpleAdapter(read, load)


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that torch copies bit by bit: random bools are neither True nor False."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


ADAPTERS: Mapping[str, Callable[[torch.nn.Module], Any]] = {
    "copy": lambda engine: ModuleInstallAdapter(engine, mode="copy"),
    "alias": lambda engine: ModuleInstallAdapter(engine, mode="alias"),
    "flip": lambda engine: ModuleInstallAdapter(engine, mode="flip"),
    "two-verbs": TwoVerbAdapter,
    "simple": simple_adapter,
}
"""Every adapter that runs without an engine of somebody else's."""


def engine_tensors(engine: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name -> the very tensor that the engine computes with, detached."""
    return engine.state_dict()


class OverEachAdapter(InstallerSuite):
    """The suite, over each way to install."""

    @pytest.fixture(autouse=True, params=ADAPTERS)
    def adapter(self, request: pytest.FixtureRequest) -> str:
        """Its name."""
        vars(self)["rebinds"] = request.param in {"alias", "flip"}
        self.kind = ADAPTERS[request.param]
        return str(request.param)

    def make_adapter(self, engine: Any) -> Any:
        return self.kind(engine)
