"""The dtype table: wire name and item size in bytes. No torch here.

Names are torch's own without the ``torch.`` prefix, so ``getattr(torch, name)`` is the inverse; a
test compares the table with the torch that is installed. Quantized dtypes (``qint8`` ...) are left
out on purpose: their scale and zero point live outside the bytes, so the bytes alone are no weight.
"""

from typing import NamedTuple

from rl_bridge.errors import UnknownDtype

DTYPE_NBYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    # Two 4-bit values in one byte; shapes count bytes, as torch's do.
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}


class _Numbers(NamedTuple):
    """Which numbers a dtype has: multiples of a power of two, up to another.

    Attributes:
        parts: 2 for complex numbers.
        sign: the least sign: -1, or 0 where there are no negative ones, or 1 where there is no 0.
        bits: most significant bits of a number.
        lowest: the smallest step is two to this.
        highest: all are below two to this.

    """

    parts: int
    sign: int
    bits: int
    lowest: int
    highest: int


_FLOAT16, _FLOAT32 = _Numbers(1, -1, 11, -24, 16), _Numbers(1, -1, 24, -149, 128)
_FLOAT64 = _Numbers(1, -1, 53, -1074, 1024)
# Without float4_e2m1fn_x2, whose items are pairs of numbers: no other dtype's are.
_NUMBERS: dict[str, _Numbers] = {
    "bool": _Numbers(1, 0, 1, 0, 1),
    **{f"uint{bits}": _Numbers(1, 0, bits, 0, bits) for bits in (8, 16, 32, 64)},
    **{f"int{bits}": _Numbers(1, -1, bits - 1, 0, bits - 1) for bits in (8, 16, 32, 64)},
    "float16": _FLOAT16,
    "bfloat16": _Numbers(1, -1, 8, -133, 128),
    "float32": _FLOAT32,
    "float64": _FLOAT64,
    "float8_e4m3fn": _Numbers(1, -1, 4, -9, 9),
    "float8_e4m3fnuz": _Numbers(1, -1, 4, -10, 8),
    "float8_e5m2": _Numbers(1, -1, 3, -16, 16),
    "float8_e5m2fnuz": _Numbers(1, -1, 3, -17, 16),
    "float8_e8m0fnu": _Numbers(1, 1, 1, -127, 128),
    "complex32": _FLOAT16._replace(parts=2),
    "complex64": _FLOAT32._replace(parts=2),
    "complex128": _FLOAT64._replace(parts=2),
}


def narrows(before: str, after: str) -> bool:
    """Whether some number of one known dtype is none of another's, of whatever width."""
    if before == after:
        return False
    old, new = _NUMBERS.get(before), _NUMBERS.get(after)
    return (
        old is None
        or new is None
        or old.parts > new.parts
        or old.sign < new.sign
        or old.bits > new.bits
        or old.lowest < new.lowest
        or old.highest > new.highest
    )


def dtype_nbytes(dtype: str, *, tensor: str = "?") -> int:
    """Item size in bytes of a wire dtype."""
    try:
        return DTYPE_NBYTES[dtype]
    except (KeyError, TypeError):
        known = ", ".join(sorted(DTYPE_NBYTES))
        msg = (
            f"tensor {tensor!r}: unknown dtype {dtype!r}, expected one of {known}. "
            "Cast the tensor before publishing, or update rl_bridge on this side."
        )
        raise UnknownDtype(msg) from None
