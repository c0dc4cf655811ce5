"""Plain copies: the baselines that a verified update is measured against."""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["CacheFlusher", "MemcpyPool", "copy_tensors", "torch_threads"]

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = ctypes.c_void_p

Job = tuple[int, int, int]


class torch_threads:  # noqa: N801 - reads as a verb at the call: with torch_threads(1)
    """Run a block with a given number of torch threads."""

    def __init__(self, num_threads: int) -> None:
        """Remember the number; nothing changes before the block starts."""
        self._wanted = num_threads
        self._before = num_threads

    def __enter__(self) -> None:
        """Set the number of threads."""
        self._before = torch.get_num_threads()
        if self._before != self._wanted:
            torch.set_num_threads(self._wanted)

    def __exit__(self, *_: object) -> None:
        """Put the number of threads back."""
        if self._before != self._wanted:
            torch.set_num_threads(self._before)


def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor, as an engine's ``load_weights`` does, with torch's current threads."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _run(jobs: Sequence[Job]) -> None:
    for target, source, nbytes in jobs:
        _memcpy(target, source, nbytes)


class MemcpyPool:
    """libc's ``memcpy`` over a list of tensors on one thread or on two halves of the list."""

    def __init__(self) -> None:
        """Start the two workers, so that no timed copy pays for it."""
        self._pool = ThreadPoolExecutor(2)
        list(self._pool.map(lambda _: None, range(2)))

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], num_threads: int
    ) -> None:
        """Copy ``sources`` into ``targets``; the tensors must be contiguous and of equal size."""
        jobs = [
            (target.data_ptr(), source.data_ptr(), source.nbytes)
            for target, source in zip(targets, sources, strict=True)
        ]
        if num_threads == 1:
            _run(jobs)
            return
        half = len(jobs) // 2
        list(self._pool.map(_run, (jobs[:half], jobs[half:])))

    def close(self) -> None:
        """End the workers."""
        self._pool.shutdown()


class CacheFlusher:
    """Pushes what was just used out of the processor's caches."""

    def __init__(self, nbytes: int = 128 << 20) -> None:
        """Allocate the memory that takes the cache's place."""
        self._scratch = torch.zeros(nbytes, dtype=torch.uint8)

    def flush(self) -> None:
        """Write more than any cache holds."""
        self._scratch.add_(1)
