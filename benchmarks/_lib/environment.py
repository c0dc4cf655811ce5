"""What a figure was measured on: enough to compare two runs, nothing about who ran them."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

__all__ = ["collect_environment", "commit_of", "save"]

_ROOT = Path(__file__).resolve().parents[2]
_DISTRIBUTIONS = ("rl-bridge", "torch", "numpy", "xxhash", "pydantic", "safetensors", "ray")


def _git(*arguments: str, tree: Path = _ROOT) -> str | None:
    """Return the output of one git command in a worktree, or None."""
    program = shutil.which("git")
    if program is None:
        return None
    result = subprocess.run(
        [program, "-C", str(tree), *arguments],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    return result.stdout.strip() if result.returncode == 0 else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _chosen(path: str) -> str:
    """Return the bracketed word of a sysfs choice file."""
    text = " ".join(_lines(path))
    return text[text.find("[") + 1 : text.find("]")] if "[" in text else "unknown"


def _cache_nbytes() -> str:
    return " ".join(_lines("/sys/devices/system/cpu/cpu0/cache/index3/size")) or "unknown"


def commit_of(tree: Path) -> str:
    """The commit that a worktree has checked out."""
    return _git("rev-parse", "HEAD", tree=tree) or "unknown"


def collect_environment() -> dict[str, Any]:
    """Return commit, versions, processor, kernel and settings that move the figures."""
    status = _git("status", "--porcelain")
    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "dirty": None if status is None else bool(status),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _DISTRIBUTIONS},
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpu_cores": os.cpu_count(),
        "cpu_cores_usable": len(os.sched_getaffinity(0)),
        "cache_l3": _cache_nbytes(),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "transparent_hugepage": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shmem_hugepage": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "torch_threads": torch.get_num_threads(),
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
    }


def save(document: dict[str, Any], out: Path) -> None:
    """Write the samples and figures of a run."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
