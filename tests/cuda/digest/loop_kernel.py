"""A kernel that only counts: does Triton's interpreter work at all with the numpy that is here?"""

# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["count"]


@triton.jit
def count(out, limit: "i64"):  # noqa: F821 - Triton's name of a type
    """Store how often a loop ran whose length is only known when it runs."""
    total = limit * 0
    for _ in range(limit // 2):
        total += 1
    tl.store(out, total)
