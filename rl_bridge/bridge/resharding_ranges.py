"""Which numbers a slice, an index or a rank's even block stands for: arithmetic, no tensors."""

import operator
import re

from rl_bridge.errors import IncompatibleUpdate

__all__ = ["block_of", "checked_pattern", "number_in", "range_of"]


def range_of(one: object, size: int) -> range:
    """What a slice or an index covers of a dimension; a slice may reach beyond it, as Python's do.

    Raises:
        TypeError: it is neither.
        ValueError: a slice with a step, an index outside of the dimension.

    """
    if one is None:
        return range(size)
    if isinstance(one, slice):
        start, stop, step = one.indices(size)
        if step != 1:
            raise ValueError(f"{one} has a step: give one without.")
        return range(start, max(start, stop))
    if isinstance(one, bool):
        raise TypeError(f"{one} is a bool: give a slice or an index.")
    index = operator.index(one)  # type: ignore[arg-type]  # that is what is tried
    if not -size <= index < size:
        raise ValueError(f"no index {index} in {size}: give one that is there.")
    return range(index % size, index % size + 1)


def block_of(number: int, total: int, degree: int) -> int:
    """In which of `degree` even blocks a number lies; the first ones are larger by one."""
    size, more = divmod(total, degree)
    large = more * (size + 1)
    return number // (size + 1) if number < large else more + (number - large) // max(size, 1)


def checked_pattern(pattern: str) -> None:
    """Check a pattern that finds numbers in names.

    Raises:
        ValueError: it is no regular expression, or has no group.

    """
    try:
        has_group = re.compile(pattern).groups > 0
    except re.error as error:
        raise ValueError(f"pattern={pattern!r}: expected a regular expression; {error}.") from error
    if not has_group:
        msg = rf"pattern={pattern!r}: expected one with a group, such as '\blayers\.(\d+)\.'."
        raise ValueError(msg)


def number_in(name: str, pattern: str, total: int, what: str) -> int | None:
    """The number in a tensor's name; None where it has none.

    Raises:
        IncompatibleUpdate: one that no rank has: its tensor would be nobody's, and not be missed.

    """
    found = re.search(pattern, name)
    if found is None:
        return None
    if not (found[1] or "").isdecimal() or int(found[1]) >= total:
        msg = (
            f"tensor {name!r} has number {found[1]}, and {what}={total} leaves it to no rank. Give "
            f"the model's {what}, and a pattern that finds the number."
        )
        raise IncompatibleUpdate(msg)
    return int(found[1])
