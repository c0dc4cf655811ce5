"""Packages that only the remote part needs."""

import importlib
from typing import Any

from rl_bridge.errors import WeightBridgeUnavailableError

__all__ = ["needed"]


def needed(name: str) -> Any:
    """Import a package of the extra.

    Raises:
        WeightBridgeUnavailableError: it is missing.

    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        msg = f"rl_bridge.remote needs {name}. Install it: pip install 'rl-bridge[remote]'."
        raise WeightBridgeUnavailableError(msg) from error
