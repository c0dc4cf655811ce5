"""Runs pytest as on a machine without a C compiler: ``python -m tests.pure_python [arguments]``.

Importing this module hides the compiled module, so it comes before anything of rl_bridge is
imported. Children that are spawned import their parent's main module first, which is this one: they
go without it too. Before the first test both are asked whether that is true.
"""

import importlib
import multiprocessing
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

__all__ = ["HIDDEN", "Hidden", "main", "why_not_compiled"]

HIDDEN = "rl_bridge.memory._native"
_TIMEOUT_S = 60.0


class Hidden:
    """A finder that knows of one module that it cannot be had."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse that one, leave all others to other finders."""
        if name == HIDDEN:
            raise ModuleNotFoundError(f"{name} is hidden from this process", name=name)
        return None


def why_not_compiled() -> str | None:
    """Why this process's pass is the Python one; None if it is the compiled one."""
    return str(importlib.import_module("rl_bridge.memory.passes").native_cause() or "") or None


def pytest_configure() -> None:
    """Refuse to run if the compiled module is in use, here or in a spawned child."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        causes = [why_not_compiled(), pool.apply_async(why_not_compiled).get(_TIMEOUT_S)]
    if not all(cause and "is hidden from this process" in cause for cause in causes):
        pytest.exit(f"the compiled module is in use: {causes}", returncode=3)


def main() -> int:
    """Run pytest with this process's arguments."""
    return int(pytest.main([*sys.argv[1:], "-p", __spec__.name]))


if HIDDEN in sys.modules:
    raise ImportError(f"{HIDDEN} is imported already, so it cannot be hidden any more")
if not any(type(finder).__name__ == Hidden.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, Hidden())

if __name__ == "__main__":
    sys.exit(main())
