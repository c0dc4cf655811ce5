"""Facts about where the program runs: its version, the machine's memory."""

from importlib import metadata
from pathlib import Path

__all__ = ["memory_nbytes", "version"]

_MEMINFO = Path("/proc/meminfo")


def version() -> str:
    """Version of the installed library; a source tree that was never installed has none."""
    try:
        return metadata.version("rl_bridge")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def memory_nbytes() -> tuple[int, int] | None:
    """Bytes of memory that are available, and that there are; None where the kernel hides it."""
    try:
        lines = _MEMINFO.read_text("ascii").splitlines()
    except OSError:
        return None
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    return kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
