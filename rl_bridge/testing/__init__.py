"""For whoever writes a transport or an installer: conformance suites, faults, leak checks.

A transport's test is a class::

    class TestSharedMemory(TransportSuite):
        transport_class = SharedMemory

        @pytest.fixture
        def transport_kwargs(self):
            return {"max_slots": 3}

`TransportSuite` and `InstallerSuite` are pytest classes and need ``pytest`` and ``hypothesis``,
which rl_bridge itself does not; they are imported when they are asked for. Where pytest runs, it
explains their assertions.
"""

import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_bridge.testing.faults import FaultInjecting, KillAt
    from rl_bridge.testing.installer_suite import InstallerSuite
    from rl_bridge.testing.leaks import Holdings, assert_nothing_leaks
    from rl_bridge.testing.lifecycle_machine import LifecycleMachine
    from rl_bridge.testing.transport_suite import TransportSuite

__all__ = [
    "FaultInjecting",
    "Holdings",
    "InstallerSuite",
    "KillAt",
    "LifecycleMachine",
    "TransportSuite",
    "assert_nothing_leaks",
]

_MODULES = {
    "FaultInjecting": "faults",
    "Holdings": "leaks",
    "InstallerSuite": "installer_suite",
    "KillAt": "faults",
    "LifecycleMachine": "lifecycle_machine",
    "TransportSuite": "transport_suite",
    "assert_nothing_leaks": "leaks",
}

# Before any of them is imported, and without importing pytest: a spawned child has none.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(
        *(f"{__name__}.{module.name}" for module in iter_modules(__path__))
    )


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: a spawned child must not pay for pytest."""
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
