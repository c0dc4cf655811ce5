"""Stands in for SGLang's CUDA kernels, which it imports on the CPU too, and does not call there.

Its LoRA layers pin memory whatever the device is, which torch refuses without a GPU: here memory
stays as it is.
"""

from collections.abc import Callable
from typing import Any

import torch


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*given: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        del pin_memory
        return make(*given, **options)

    return made


if not torch.cuda.is_available():
    for _name in ("tensor", "zeros", "empty", "full", "ones"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]  # as above

__version__ = "0.4.10"  # SGLang compares it when it starts


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"the CUDA kernel {name} was called on the CPU")

    return kernel
