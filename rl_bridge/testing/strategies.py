"""Hypothesis strategies for what travels: dtypes, shapes, names, tensors in odd memory layouts.

`bytes_of` is the oracle: the logical, row-major bytes of a tensor, found by walking its storage as
bytes. It uses neither the library nor torch's arithmetic on the dtype, so NaNs with a payload,
bools that are neither 0 nor 1 and signalling values count like any others.
"""

import ctypes
from collections.abc import Callable, Mapping
from math import prod

import torch
from hypothesis import strategies as st

from rl_bridge.manifest.dtypes import DTYPE_NBYTES

ODD_NAMES = (
    "",
    " ",
    ".",
    "..",
    "/",
    "../../etc/passwd",
    "a\nb",
    "a\tb",
    "a\0b",
    '"',
    "\\",
    "é",
    "e\u0301",
    "重み",
    "🦊",
    "\u202eabc",
    "\u2028",
    "\uffff",
    "__class__",
    "%s",
    "{}",
    "x" * 300,
)

_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "offset": lambda tensor: tensor[min(1, tensor.shape[0]) :],
    "stepped": lambda tensor: tensor[::2],
    "expanded": lambda tensor: tensor[:1].expand(min(3, 3 * tensor.shape[0]), *tensor.shape[1:]),
    "windows": lambda tensor: tensor.unfold(0, min(2, tensor.shape[0]), 1),
    "transposed": lambda tensor: tensor.transpose(0, -1),
    "narrowed": lambda tensor: tensor[..., : max(1, tensor.shape[-1] - 1)],
    "channels last": lambda tensor: tensor.permute(0, 3, 1, 2),
}
_DIMS_NEEDED = dict(zip(_VIEWS, (0, 1, 1, 1, 1, 2, 2, 4), strict=True))
LAYOUTS = tuple(_VIEWS)
"""Memory layouts of a source tensor, by name."""


def dtypes() -> st.SearchStrategy[str]:
    """Every wire dtype."""
    return st.sampled_from(sorted(DTYPE_NBYTES))


def shapes(*, max_dims: int = 4, max_side: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes, those with no dimensions and with a 0 among them too."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


def names() -> st.SearchStrategy[str]:
    """Tensor names, most of them ugly."""
    return st.sampled_from(ODD_NAMES) | st.text(max_size=12) | st.from_regex(r"[a-z]\.[0-9]\.w")


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A contiguous tensor of random bytes: every bit pattern that the dtype's size allows.

    It lies on torch's default device, and its bytes are the same on each.
    """
    nbytes = prod(shape) * DTYPE_NBYTES[dtype]
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator("cpu").manual_seed(seed)
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator, device="cpu")
    return raw.to(torch.get_default_device()).view(kind).view(shape)


def _lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Another view with odd strides; the tensor itself where it has too few dimensions."""
    if tensor.dim() < _DIMS_NEEDED[layout]:
        return tensor
    return _VIEWS[layout](tensor)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """One tensor: any dtype, shape, bytes and memory layout."""
    tensor = random_tensor(draw(dtypes()), draw(shapes()), draw(st.integers(0, 2**32 - 1)))
    return _lay_out(tensor, draw(st.sampled_from(LAYOUTS)))


@st.composite
def state_dicts(draw: st.DrawFn, *, max_tensors: int = 8) -> dict[str, torch.Tensor]:
    """Some tensors by name, among them tied ones and views that overlap."""
    found: dict[str, torch.Tensor] = {}
    for name in draw(st.lists(names(), unique=True, min_size=1, max_size=max_tensors)):
        earlier = list(found.values())
        kind = draw(st.sampled_from(("fresh", "fresh", "tied", "view", "overlapping")))
        if not earlier or kind == "fresh":
            found[name] = draw(tensors())
            continue
        base = draw(st.sampled_from(earlier))
        if kind == "tied":
            found[name] = base
        elif kind == "view":
            found[name] = base.view(base.shape)
        else:
            found[name] = base[: base.shape[0] // 2 + 1] if base.dim() else base
    return found


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's logical bytes, row-major."""
    size = tensor.element_size()
    if tensor.numel() == 0:
        return b""
    tensor = tensor.detach()
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage = storage.set_(tensor.untyped_storage())
    dense = storage.as_strided(
        (*tensor.shape, size),
        (*(step * size for step in tensor.stride()), 1),
        tensor.storage_offset() * size,
    )
    dense = dense.contiguous().cpu()
    return ctypes.string_at(dense.data_ptr(), dense.numel())


def contents_of(
    named: Mapping[str, torch.Tensor],
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything about some tensors that must survive a journey: dtype, shape and bytes."""
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), bytes_of(tensor))
        for name, tensor in named.items()
    }
