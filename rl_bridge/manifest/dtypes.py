"""The dtype table: wire name and item size in bytes. No torch here.

Names are torch's own without the ``torch.`` prefix, so ``getattr(torch, name)`` is the inverse; a
test compares the table with the torch that is installed. Quantized dtypes (``qint8`` ...) are left
out on purpose: their scale and zero point live outside the bytes, so the bytes alone are no weight.
"""

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
