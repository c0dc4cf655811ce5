"""The one lock that no fork comes in between, and what a forked child does before anything else.

One for the whole library: a thread that forks holds it, and would wait with it for a second one,
whose holder may be collecting garbage that waits for the first.
"""

import os
import threading
from collections.abc import Callable

__all__ = ["FORKS", "in_forked_children"]

FORKS = threading.RLock()
"""Held where a fork must not come in between: the child would keep what is not noted yet.

Under it nothing is waited for but the kernel, and it is taken under any other lock.
"""

_IN_CHILD: list[Callable[[], object]] = []


def in_forked_children(clean_up: Callable[[], object]) -> None:
    """Have `clean_up` called in each forked child, under `FORKS`."""
    _IN_CHILD.append(clean_up)


def _begin_child() -> None:
    try:
        _clean_up(list(_IN_CHILD))
    finally:
        FORKS.release()


def _clean_up(left: list[Callable[[], object]]) -> None:
    # Whatever becomes of one, the next has its turn. (Python prints what a child raises here.)
    if left:
        try:
            left[0]()
        finally:
            _clean_up(left[1:])


os.register_at_fork(
    before=FORKS.acquire, after_in_parent=FORKS.release, after_in_child=_begin_child
)
