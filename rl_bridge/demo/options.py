"""What the demo can be asked for: said once, for the library, the command line and its help."""

from enum import StrEnum

__all__ = ["DEFAULT_STEPS", "MIN_STEPS", "Engine"]

DEFAULT_STEPS = 80
MIN_STEPS = 6
"""Fewer leave no room for three faults after the two versions that a replay needs."""


class Engine(StrEnum):
    """What the rollout samples with."""

    MODULE = "module"
    """A torch module, updated in place."""
    VLLM = "vllm"
    """A vLLM engine that serves a small Qwen3."""
    SGLANG = "sglang"
    """An SGLang engine that does."""
    VLLM_HTTP = "vllm-http"
    """A vLLM server that does, with a side-car beside it, each a process of its own."""
