"""What extracting costs: collectives that are called, memory that is taken."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collectives", "peak_nbytes"]


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
    """Most bytes that torch's CPU allocator had handed out at once while `chunks` were made.

    Counted are all its allocations, those inside backends too; each chunk is dropped before the
    next one is asked for.

    Returns:
        The peak, and how many chunks there were.

    """
    count = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for _ in chunks:
            count += 1
            del _
    results: Any = profiled.profiler
    sizes = [
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == "[memory]"
    ]
    now = peak = 0
    for _, nbytes in sorted(sizes, key=lambda pair: pair[0]):
        now += nbytes
        peak = max(peak, now)
    return peak, count
