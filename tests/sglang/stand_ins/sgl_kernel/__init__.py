"""Stands in for SGLang's CUDA kernels, which it imports on the CPU too, and does not call there."""

from collections.abc import Callable
from typing import Any

__version__ = "0.4.10"  # SGLang compares it when it starts


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args: Any, **_kwargs: Any) -> Any:
        msg = f"the CUDA kernel {name} was called on the CPU"
        raise NotImplementedError(msg)

    return kernel
