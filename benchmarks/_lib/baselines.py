"""What ours is measured against in the same breath: plain copies and a plain hash."""

import ctypes
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import torch
import xxhash

from _lib.copying import CacheFlusher, MemcpyPool, copy_tensors, torch_threads

__all__ = ["Clock", "CopyBaseline", "HashBaseline"]

_MAX_THREADS = 2


class Clock:
    """Times a block in seconds."""

    def __enter__(self) -> Self:
        self._started = time.monotonic_ns()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = (time.monotonic_ns() - self._started) / 1e9


class CopyBaseline:
    """The same bytes by libc and by torch, on one thread and on two."""

    def __init__(self) -> None:
        self._pool = MemcpyPool()

    def time(
        self, name: str, targets: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> dict[str, float]:
        """Return the seconds of each way."""
        seconds = {}
        for threads in range(1, _MAX_THREADS + 1):
            with Clock() as clock:
                self._pool.copy(targets, sources, threads)
            seconds[f"{name}_libc_{threads}t_s"] = clock.seconds
            with torch_threads(threads), Clock() as clock:
                copy_tensors(targets, sources)
            seconds[f"{name}_torch_{threads}t_s"] = clock.seconds
        return seconds

    def close(self) -> None:
        """End its threads."""
        self._pool.close()


class HashBaseline:
    """One-shot XXH3-128 over an address range, cut into as many parts as there are threads."""

    def __init__(self, num_threads: int = _MAX_THREADS) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads)
        self._flusher = CacheFlusher()

    def time(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Hash everything from the first to the last byte, after emptying the cache."""
        begin = min(tensor.data_ptr() for tensor in tensors.values())
        end = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors.values())
        part = -(-(end - begin) // self._num_threads)
        views = [
            memoryview((ctypes.c_char * (min(start + part, end) - start)).from_address(start))
            for start in range(begin, end, part)
        ]
        self._flusher.flush()
        with Clock() as clock:
            list(self._pool.map(xxhash.xxh3_128_digest, views))
        return {"xxh3_s": clock.seconds, "xxh3_nbytes": float(end - begin)}

    def close(self) -> None:
        """End its threads."""
        self._pool.shutdown()
