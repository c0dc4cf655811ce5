"""Ray itself: imported when something of it is needed, and what this process is within it."""

from importlib import import_module
from typing import Any

from rl_bridge.errors import WeightBridgeUnavailableError

__all__ = ["INSTALL", "here", "require"]

INSTALL = "pip install 'rl-bridge[ray]'"


def require(module: str = "ray") -> Any:
    """Import a module of Ray.

    Raises:
        WeightBridgeUnavailableError: it is not installed, or has no such part.

    """
    try:
        return import_module(module)
    except ImportError as error:
        raise WeightBridgeUnavailableError(
            f"{module} cannot be imported ({error}). Install Ray in this environment: {INSTALL}"
        ) from error


def here() -> tuple[str, str]:
    """Ray's id of the node that this process runs on, and the address that Ray has for it."""
    node: str = require().get_runtime_context().get_node_id()
    address: str = require("ray.util").get_node_ip_address()
    return node, address
