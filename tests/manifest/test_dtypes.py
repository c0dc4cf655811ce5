"""The dtype table, compared with the torch that is installed."""

import pytest
import torch

from rl_bridge.errors import UnknownDtype
from rl_bridge.manifest.dtypes import DTYPE_NBYTES, dtype_nbytes


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
