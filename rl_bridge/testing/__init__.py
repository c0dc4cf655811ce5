"""For whoever writes a transport, an installer or an engine: suites, faults, leak checks.

A transport's test is a class::

    class TestSharedMemory(TransportSuite):
        transport_class = SharedMemory

        @pytest.fixture
        def transport_kwargs(self):
            return {"max_slots": 3}

`TransportSuite`, `InstallerSuite` and `EngineSuite` are pytest classes and need ``pytest`` and
``hypothesis``, which rl_bridge itself does not; they are imported when they are asked for. Where
pytest runs, it explains their assertions.
"""

import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_bridge.testing.engine_faults import in_rank
    from rl_bridge.testing.engine_suite import EngineSuite, EngineUnderTest
    from rl_bridge.testing.faults import (
        Fault,
        FaultInjecting,
        HostIPC,
        HostVMM,
        KillAt,
        Step,
        die,
    )
    from rl_bridge.testing.installer_faults import EngineFault, Stage, poke
    from rl_bridge.testing.installer_suite import InstallerSuite, Rig, engine_state, sample_engine
    from rl_bridge.testing.leaks import Holdings, assert_nothing_leaks
    from rl_bridge.testing.lifecycle_machine import LifecycleMachine
    from rl_bridge.testing.peer import BridgeOver, Peer, PeerOptions, hashes, sample_weights
    from rl_bridge.testing.processes import (
        Child,
        ChildDied,
        ChildError,
        stop_process,
        until,
        watchdog,
    )
    from rl_bridge.testing.tensors import bytes_of, contents_of, random_tensor
    from rl_bridge.testing.transport_suite import TransportSuite

__all__ = [
    "BridgeOver",
    "Child",
    "ChildDied",
    "ChildError",
    "EngineFault",
    "EngineSuite",
    "EngineUnderTest",
    "Fault",
    "FaultInjecting",
    "Holdings",
    "HostIPC",
    "HostVMM",
    "InstallerSuite",
    "KillAt",
    "LifecycleMachine",
    "Peer",
    "PeerOptions",
    "Rig",
    "Stage",
    "Step",
    "TransportSuite",
    "assert_nothing_leaks",
    "bytes_of",
    "contents_of",
    "die",
    "engine_state",
    "hashes",
    "in_rank",
    "poke",
    "random_tensor",
    "sample_engine",
    "sample_weights",
    "stop_process",
    "until",
    "watchdog",
]

# Where these names are, those first that need neither pytest nor hypothesis.
_HOMES = (
    *("tensors", "processes", "faults", "peer", "leaks", "installer_faults", "engine_faults"),
    *("installer_suite", "transport_suite", "lifecycle_machine", "engine_suite"),
)

# Before any of them is imported, and without importing pytest: a spawned child has none.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(
        *(f"{__name__}.{module.name}" for module in iter_modules(__path__))
    )


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: a spawned child must not pay for pytest."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
    return next(getattr(home, name) for home in homes if hasattr(home, name))
