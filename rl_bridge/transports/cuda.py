"""Whether this machine has CUDA at all, and what it lacks."""

from rl_bridge.memory.vmm.local import cuda_cause

__all__ = ["cuda_cause"]
