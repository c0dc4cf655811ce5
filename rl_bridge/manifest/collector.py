"""Python's cyclic garbage collector, out of the way while tens of thousands of objects are made.

Every few hundred new objects the collector looks at all young ones, and now and then at every
object of the process. While a plan for 40,000 tensors is made, nothing of it is garbage: the visits
find nothing, and take longer than the plan.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector, if it is on, until the end of the block; freeing by count goes on."""
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
