"""What memory the run uses, and the first touch that virtual machines make expensive."""

import mmap
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np

from _lib.wire import BenchmarkError, recv_json, send_json

__all__ = ["GIB", "MIB", "available_nbytes", "process_nbytes", "shared_nbytes", "warm_up"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
_RESERVE = 2 * GIB
_BLOCK = 256 * MIB
# Slower than this, a first touch was not a page fault but the host finding memory.
_COLD_GB_PER_S = 1.5


def _kib_fields(path: str) -> dict[str, int]:
    """Return the ``Name: number kB`` lines of a /proc file, in bytes."""
    fields: dict[str, int] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if len(parts) == len(("number", "kB")) and parts[1] == "kB":
            fields[name] = int(parts[0]) * KIB
    return fields


def process_nbytes() -> dict[str, int]:
    """Return this process's private and shared resident bytes and their peak."""
    fields = _kib_fields("/proc/self/status")
    return {
        "rss_anon": fields.get("RssAnon", 0),
        "rss_shmem": fields.get("RssShmem", 0),
        "rss_file": fields.get("RssFile", 0),
        "rss_peak": fields.get("VmHWM", 0),
    }


def shared_nbytes() -> int:
    """Return the bytes of shared memory (memfd, tmpfs, POSIX segments) on this machine."""
    return _kib_fields("/proc/meminfo").get("Shmem", 0)


def available_nbytes() -> int:
    """Return how much memory could be used without swapping."""
    return _kib_fields("/proc/meminfo").get("MemAvailable", 0)


def _touch(connection: Any, nbytes: int) -> None:
    """Write every page of ``nbytes`` fresh memory (in its own process); report block by block."""
    held = []
    rates = []
    for _ in range(max(1, nbytes // _BLOCK)):
        block = mmap.mmap(-1, _BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        started = time.monotonic()
        np.frombuffer(block, dtype=np.uint8)[:: mmap.PAGESIZE] = 1
        rates.append(_BLOCK / (time.monotonic() - started) / 1e9)
        held.append(block)
    send_json(connection, {"rates": rates})


def warm_up(nbytes: int, *, timeout_s: float = 120.0) -> dict[str, Any]:
    """Touch ``nbytes`` once, in a process that ends afterwards, and say what that was like.

    A virtual machine may back its memory lazily: a page that no process ever used costs far more
    than a page fault. What is measured later must not pay for that, whichever method comes first.
    """
    wanted = min(nbytes, max(0, available_nbytes() - _RESERVE))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    started = time.monotonic()
    child = context.Process(target=_touch, args=(theirs, wanted), daemon=True)
    child.start()
    theirs.close()
    try:
        rates = recv_json(ours, timeout_s, "the memory warm-up")["rates"]
    finally:
        child.join(5.0)
        if child.is_alive():
            child.kill()
            child.join(5.0)
    if child.exitcode != 0:
        msg = f"the memory warm-up ended with exit code {child.exitcode}"
        raise BenchmarkError(msg)
    return {
        "done": True,
        "requested_nbytes": nbytes,
        "touched_nbytes": len(rates) * _BLOCK,
        "seconds": round(time.monotonic() - started, 3),
        "slowest_block_gb_per_s": round(min(rates), 3),
        "median_block_gb_per_s": round(float(np.median(rates)), 3),
        "blocks_that_were_cold": sum(rate < _COLD_GB_PER_S for rate in rates),
    }
