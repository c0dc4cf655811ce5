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


class NonFinite(NamedTuple):
    """How the bits of a dtype's NaN and Inf look, in a word of 64 bits with some numbers.

    With ``y = bits ^ flip``, a number is NaN or Inf if ``((y & mask) + one) & (y | any)`` has its
    sign bit: no sum goes over into the next number, and no number needs a comparison.
    """

    mask: int
    one: int
    sign: int
    flip: int
    any: int


def _non_finite(
    bits: int, mask: int, one: int, *, flip: int = 0, is_exact: bool = False
) -> NonFinite:
    """Of numbers of so many bits; with `is_exact` the sign bit has to be set as well."""

    def word(value: int) -> int:
        return sum(value << at for at in range(0, 64, bits))

    return NonFinite(
        *(word(mask), word(one), word(1 << (bits - 1)), word(flip)),
        any=0 if is_exact else word((1 << bits) - 1),
    )


_OF_FLOAT16 = _non_finite(16, 0x7C00, 0x0400)
_OF_FLOAT32 = _non_finite(32, 0x7F800000, 0x00800000)
_OF_FLOAT64 = _non_finite(64, 0x7FF0 << 48, 0x0010 << 48)
# The only NaN is -0, and there is no Inf.
_OF_FNUZ = _non_finite(8, 0x7F, 0x01, flip=0x7F, is_exact=True)

NON_FINITE: dict[str, NonFinite] = {
    "float16": _OF_FLOAT16,
    "bfloat16": _non_finite(16, 0x7F80, 0x0080),
    "float32": _OF_FLOAT32,
    "float64": _OF_FLOAT64,
    "float8_e4m3fn": _non_finite(8, 0x7F, 0x01),
    "float8_e4m3fnuz": _OF_FNUZ,
    "float8_e5m2": _non_finite(8, 0x7C, 0x04),
    "float8_e5m2fnuz": _OF_FNUZ,
    "float8_e8m0fnu": _non_finite(8, 0x7F, 0x01, is_exact=True),
    "complex32": _OF_FLOAT16,
    "complex64": _OF_FLOAT32,
    "complex128": _OF_FLOAT64,
}
"""Of the dtypes that have NaN or Inf; the others have neither."""


def dtype_nbytes(dtype: str, *, tensor: str = "?") -> int:
    """Item size in bytes of a wire dtype."""
    try:
        return DTYPE_NBYTES[dtype]
    except (KeyError, TypeError):
        known = ", ".join(sorted(DTYPE_NBYTES))
        raise UnknownDtype(
            f"tensor {tensor!r}: unknown dtype {dtype!r}, expected one of {known}. "
            "Cast the tensor before publishing, or update rl_bridge on this side."
        ) from None
