"""Whether there is memory to stage an update, asked before a byte of it is."""

from pathlib import Path

from rl_bridge.errors import IncompatibleUpdate

__all__ = ["LEARNING", "STAGING", "available_nbytes", "check_budget", "checked_budget"]

STAGING = "staging it beside the serving one"
LEARNING = "trying the engine's loader on numbers, before its first update"


def available_nbytes() -> int | None:
    """Bytes that this process can still get on the host: the machine's, or its control group's."""
    found = [
        int(line.split()[1]) * 1024
        for line in _lines(Path("/proc/meminfo"))
        if line.startswith("MemAvailable:")
    ]
    limit, used = (_lines(Path("/sys/fs/cgroup") / f"memory.{name}") for name in ("max", "current"))
    if limit and used and limit[0].strip() != "max":
        # What files left in the cache counts as used, and is given back when it is needed.
        cached = sum(
            int(line.split()[1])
            for line in _lines(Path("/sys/fs/cgroup/memory.stat"))
            if line.split()[0] in {"inactive_file", "active_file"}
        )
        found.append(int(limit[0]) - int(used[0]) + cached)
    return min(found, default=None)


def checked_budget(memory_budget_nbytes: int | None) -> int | None:
    """The budget as it was given; None stands for what the machine has to give.

    Raises:
        TypeError: it is no int.
        ValueError: it is negative.

    """
    if not isinstance(memory_budget_nbytes, int | None):
        raise TypeError(f"memory_budget_nbytes={memory_budget_nbytes!r}: expected an int or None.")
    if memory_budget_nbytes is not None and memory_budget_nbytes < 0:
        raise ValueError(f"memory_budget_nbytes={memory_budget_nbytes}: expected 0 or more.")
    return memory_budget_nbytes


def check_budget(needed: int, budget: int | None, version: int, what: str = STAGING) -> None:
    """Refuse what does not fit.

    Raises:
        IncompatibleUpdate: `what` takes more than `budget`, or than there is.

    """
    given = available_nbytes() if budget is None else budget
    if given is not None and needed > given:
        whose = "the machine has" if budget is None else "memory_budget_nbytes allows"
        msg = (
            f"version {version}: {what} takes {needed} bytes more, "
            f"{whose} {given}. Free memory, or give the engine's caches less."
        )
        raise IncompatibleUpdate(msg)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []  # not Linux, or no control group: then that one does not bound us
