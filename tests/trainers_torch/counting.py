"""What extracting costs: collectives that are called, memory that is taken."""

import ctypes
import gc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_M_MMAP_THRESHOLD = -3
_LIBC = ctypes.CDLL(None)
# Large blocks go back to the kernel as soon as they are freed. From the beginning: malloc keeps the
# room of those that it had before, and would take others from there.
_LIBC.mallopt(_M_MMAP_THRESHOLD, 128 << 10)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Counts every operation that talks to other ranks, by whatever function it was called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if "c10d" in func.namespace:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def peak_nbytes(chunks: Iterable[Any]) -> tuple[int, int]:
    """Most bytes of memory by which this process grew while `chunks` were made.

    Asked of the kernel, since torch's profiler sees only what the thread that started it takes and
    gives back, and backends give back on threads of their own. Each chunk is dropped before the
    next one is asked for.

    Returns:
        The peak, which a megabyte may be missing from, and how many chunks there were.

    """
    gc.collect()
    _LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the peak begins again
    before = _status_nbytes("VmRSS")
    count = 0
    for _ in chunks:
        count += 1
        del _
    return _status_nbytes("VmHWM") - before, count


def _status_nbytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise AssertionError(name)
