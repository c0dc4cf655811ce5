"""Whatever is asked for of a module: a class that can be made, and does nothing."""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

__all__ = ["InterpolationMode", "anything"]


class InterpolationMode(IntEnum):
    """Names that processors of images read when they are imported."""

    NEAREST = 0
    LANCZOS = 1
    BILINEAR = 2
    BICUBIC = 3
    BOX = 4
    HAMMING = 5
    NEAREST_EXACT = 6


class _Anything:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass


def anything(module: str) -> Callable[[str], Any]:
    """A module's ``__getattr__``."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{module} has no {name}")
        return _Anything

    return get
