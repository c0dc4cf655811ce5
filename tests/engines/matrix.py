"""Matrices of which the ordinary run tries a few members that tell."""

from collections.abc import Iterable
from typing import Any

import pytest


def few_of(every: Iterable[Any], *ordinary: Any) -> list[Any]:
    """Parameters for each of `every`; all but the `ordinary` ones are marked `full`."""
    cases = [one if isinstance(one, tuple) else (one,) for one in every]
    chosen = [one if isinstance(one, tuple) else (one,) for one in ordinary]
    assert all(one in cases for one in chosen)
    return [pytest.param(*one, marks=() if one in chosen else pytest.mark.full) for one in cases]
