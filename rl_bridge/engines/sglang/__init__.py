"""SGLang: its plugin, what runs in its scheduler, and the executor's adapter around an engine."""

from rl_bridge.engines.probe import EnginePackage

__all__ = ["MINIMUM", "SGLANG", "require", "version"]

MINIMUM = "0.5.23"
"""The oldest SGLang whose plugins and control routes are the ones used here."""
SGLANG = EnginePackage("SGLang", "sglang", MINIMUM, ("sglang",))
require = SGLANG.require
version = SGLANG.version
