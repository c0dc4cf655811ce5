"""The dtype table, compared with the torch that is installed."""

import pytest
import torch

from rl_bridge.errors import UnknownDtype
from rl_bridge.manifest.dtypes import DTYPE_NBYTES, dtype_nbytes, narrows


def torch_dtypes() -> dict[str, torch.dtype]:
    """Torch's dtypes under their own names (torch.float is float32)."""
    found = {item for item in vars(torch).values() if isinstance(item, torch.dtype)}
    return {str(dtype).removeprefix("torch."): dtype for dtype in found}


def is_left_out(name: str) -> bool:
    # Quantized: scale and zero point lie outside the bytes. Bits and sub-byte integers are shells
    # of torch's without storage semantics: no operation makes such a tensor hold values.
    quantized = name.startswith(("qint", "quint"))
    shells = name.startswith("bits") or name == "bit"
    sub_byte = name in {f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)}
    return quantized or shells or sub_byte


# torch calls half-precision complex numbers experimental, once per process.
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", sorted(DTYPE_NBYTES))
def test_item_sizes_are_torchs(name: str) -> None:
    dtype = torch_dtypes().get(name)
    if dtype is None:  # pragma: no cover - only with a torch from before this dtype
        pytest.skip(f"torch {torch.__version__} does not know {name} yet")
    assert dtype.itemsize == dtype_nbytes(name)
    assert torch.empty(3, dtype=dtype).element_size() == DTYPE_NBYTES[name]


def test_every_dtype_of_torch_is_in_the_table_or_left_out_for_a_reason() -> None:
    ours = set(DTYPE_NBYTES)
    theirs = {name for name in torch_dtypes() if not is_left_out(name)}
    assert theirs <= ours, f"torch knows {sorted(theirs - ours)}"


@pytest.mark.parametrize("name", ["float", "torch.float32", "", "FLOAT32", "qint8", None, 3, ["a"]])
def test_an_unknown_dtype_names_the_tensor_and_the_known_ones(name: object) -> None:
    with pytest.raises(UnknownDtype, match=r"tensor 'w': unknown dtype .*bfloat16.*Cast") as caught:
        dtype_nbytes(name, tensor="w")  # type: ignore[arg-type]  # what a peer may send
    assert repr(name) in str(caught.value)


def every_number(name: str) -> torch.Tensor:
    """All finite numbers of a dtype of one or two bytes, as float64, or as complex128."""
    dtype = torch_dtypes()[name]
    if name == "bool":
        return torch.tensor([0.0, 1.0], dtype=torch.float64)
    if dtype.itemsize == 1:
        bits = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    else:
        bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int64).to(torch.int16)
    # (By way of float32, which has all of them: torch converts some to no other.)
    numbers = bits.view(dtype).to(torch.float32).to(torch.float64)
    return numbers[numbers.isfinite()]


def holds(dtype: torch.dtype, numbers: torch.Tensor) -> bool:
    """Whether torch gives each number back, having made it one of `dtype`."""
    if dtype in {torch.uint16, torch.uint32, torch.uint64} or not dtype.is_floating_point:
        if dtype.is_complex:
            return holds(dtype.to_real(), numbers)
        if not torch.equal(numbers, numbers.floor()):
            return False
        limits = torch.iinfo(dtype) if dtype is not torch.bool else None
        least, most = (0, 1) if limits is None else (limits.min, limits.max)
        return least <= numbers.min().item() and numbers.max().item() <= most
    there = numbers.to(torch.float32).to(dtype) if dtype.itemsize == 1 else numbers.to(dtype)
    back = there.to(torch.float32).to(torch.float64) if dtype.itemsize == 1 else there.double()
    return torch.equal(back, numbers)


SMALL = [n for n, nbytes in DTYPE_NBYTES.items() if nbytes <= 2 and n != "float4_e2m1fn_x2"]


@pytest.mark.parametrize("before", SMALL)
def test_a_dtype_is_narrower_where_torch_loses_a_number(before: str) -> None:
    numbers = every_number(before)
    for after in sorted(DTYPE_NBYTES.keys() - {"float4_e2m1fn_x2"}):
        kept = holds(torch_dtypes()[after], numbers)
        assert narrows(before, after) is not kept, (before, after)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("float32", "int32", True),
        ("float32", "int64", True),
        ("int32", "float32", True),
        ("int64", "float64", True),
        ("int32", "float64", False),
        ("int64", "uint64", True),
        ("uint32", "int64", False),
        ("float64", "float32", True),
        ("float32", "float64", False),
        ("complex64", "float64", True),
        ("float64", "complex64", True),
        ("float32", "complex64", False),
        ("complex64", "complex128", False),
        ("float4_e2m1fn_x2", "float4_e2m1fn_x2", False),
        ("float4_e2m1fn_x2", "float32", True),
        ("uint8", "float4_e2m1fn_x2", True),
    ],
)
def test_wider_dtypes_are_told_apart_as_well(before: str, after: str, expected: bool) -> None:
    assert narrows(before, after) is expected
