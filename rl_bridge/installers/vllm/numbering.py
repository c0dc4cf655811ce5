"""Numbers for the elements of tensors: copied along, they tell where each element went.

Where there are few elements, each has its number in four bytes. Where there are many, their numbers
are copied one digit after another, in one byte: source and copy then take no more than the weights
in two bytes do, however large a vocabulary is. All digits together are the number.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["NEVER", "SEEN", "SMALL_NBYTES", "Numbering", "is_same", "other_than", "slices"]

SMALL_NBYTES = 16 << 20
"""Memory that nobody is asked for: numbers of four bytes stay below it."""
NEVER, SEEN = -128, -127
"""Marks: no digit is negative."""

# Elements that are looked at in one go: what that takes stays in the processor's cache.
_SLICE = 1 << 17
# Elements that are numbered in one go, a power of two: their numbers differ in these low bits.
_TILE = 1 << 14
# Until each digit depends on all bits.
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Numbering:
    """How the elements of some tensors are numbered.

    Attributes:
        dtype: what holds a digit.
        bits: of a digit.
        digits: of a number.

    """

    dtype: torch.dtype
    bits: int
    digits: int

    @classmethod
    def of(cls, numbered: int, held: int) -> "Numbering":
        """For so many elements with a number, and so many places in memory, copies included."""
        if held * torch.int32.itemsize <= SMALL_NBYTES:
            return cls(torch.int32, 24, 1)  # what float32 holds: loaders cast to their own dtype
        last = _TILE + numbered
        return cls(torch.int8, 7, -(-last.bit_length() // 7))

    def write(self, memory: torch.Tensor, digit: int) -> None:
        """Write one digit of each element's number. `memory` is flat.

        The first number is not 0, which is what padding has in all digits.
        """
        low = self._digits(torch.arange(_TILE, device="cpu"), digit).to(self.dtype)
        starts = range(0, memory.numel(), _TILE)
        high = self._digits(torch.tensor(starts, dtype=torch.int64, device="cpu") + _TILE, digit)
        for start, bits in zip(starts, high.tolist(), strict=True):
            part = memory[start : start + _TILE]
            torch.bitwise_xor(low[: part.numel()], bits, out=part)

    def _digits(self, number: torch.Tensor, digit: int) -> torch.Tensor:
        """One digit of numbers that are mixed, one to one: rows that changed places differ in it.

        Shifts and exclusive or: what is made of two numbers without a common bit is that of the one
        and that of the other together, so `write` makes a tile once.
        """
        mask = (1 << self.bits * self.digits) - 1
        for _ in range(_ROUNDS):
            number = number ^ number << 13 & mask
            number = number ^ number >> 17
            number = number ^ number << 5 & mask
        return number >> self.bits * digit & (1 << self.bits) - 1


def slices(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same parts of tensors of one shape, one after another, each of bounded size."""
    numel = tensors[0].numel()
    if numel <= _SLICE:
        yield tensors
        return
    rows = _SLICE * len(tensors[0]) // numel
    for start in range(0, len(tensors[0]), max(1, rows)):
        if rows:
            yield tuple(tensor[start : start + rows] for tensor in tensors)
        else:
            yield from slices(*(tensor[start] for tensor in tensors))


def is_same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether `found` has what is wanted, wherever it was not seen yet."""
    for part, expected in slices(found, wanted.expand(found.shape)):
        if not torch.equal(part, expected) and not ((part == expected) | (part == SEEN)).all():
            return False
    return True


def other_than(mark: int, found: torch.Tensor) -> int:
    """Count the elements without a mark."""
    # (torch counts a mask's sum in a copy of 8 bytes an element.)
    return sum(int(torch.count_nonzero(part != mark)) for (part,) in slices(found))
