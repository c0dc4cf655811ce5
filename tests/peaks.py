"""The most memory that torch had at one time."""

from collections.abc import Callable

import torch

__all__ = ["peak_nbytes"]


def peak_nbytes(action: Callable[[], object]) -> int:
    """The most that torch had allocated on the host at any time, beyond what there was."""
    with torch.autograd.profiler.profile(profile_memory=True) as seen:
        action()
    size = peak = 0
    for event in sorted(seen.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            size += event.nbytes()
            peak = max(peak, size)
    return peak
