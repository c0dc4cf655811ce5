"""What the GPU's benchmarks share: why nothing can be measured here, and what was measured on."""

import importlib
from pathlib import Path
from typing import Any

import torch

from _lib.environment import collect_environment
from rl_bridge.cuda.devices import cuda_cause
from rl_bridge.cuda.digest import kernel_cause

__all__ = ["gpu_blocked", "gpu_environment"]


def gpu_blocked(needed_nbytes: int) -> str | None:
    """Why nothing can be measured here, or None.

    Args:
        needed_nbytes: GPU memory that the run takes.

    """
    cause = cuda_cause() or kernel_cause("cuda")
    if cause is not None:
        return cause
    free, _ = torch.cuda.mem_get_info()
    if free < needed_nbytes:
        return (
            f"{free} bytes of GPU memory are free, {needed_nbytes} are needed: --quick, or fewer "
            "--gigabytes"
        )
    return None


def gpu_environment() -> dict[str, Any]:
    """Return what the figures depend on: machine, device, driver, versions, commit."""
    found = collect_environment()
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        driver = Path("/proc/driver/nvidia/version")
        found["device"] = {
            "name": device.name,
            "memory_nbytes": device.total_memory,
            "multiprocessors": device.multi_processor_count,
            "driver": driver.read_text("utf-8").splitlines()[0] if driver.exists() else "unknown",
            "cuda": torch.version.cuda,
            "triton": importlib.import_module("triton").__version__,
        }
    return found
