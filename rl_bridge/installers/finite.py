"""Numbers that no engine may compute with: what one request leaves of them outlives the update."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.memory.passes import default_threads

__all__ = ["check_finite"]

# Pairs of numbers, all finite; torch reads none of them. (Before torch 2.8 it has no such dtype.)
_PAIRS = getattr(torch, "float4_e2m1fn_x2", None)

# Elements that one thread looks at in a call: large beside the cost of the call.
_PIECE = 4 << 20


def check_finite(
    tensors: Mapping[str, torch.Tensor],
    names: Iterable[str],
    *,
    num_threads: int | None = None,
) -> None:
    """Refuse NaN and Inf: a request that ran once with them leaves them in its cached blocks.

    Args:
        tensors: the update's.
        names: those that are looked at.
        num_threads: threads that look; None takes the usable cores.

    Raises:
        IncompatibleUpdate: a tensor has some.

    """
    pieces = [(name, piece) for name in names for piece in _pieces(tensors[name])]
    for name in dict.fromkeys(_suspects(pieces, num_threads or default_threads())):
        tensor = _comparable(tensors[name])
        if bad := int((~torch.isfinite(tensor)).sum()):
            msg = (
                f"tensor {name!r}: {bad} of its {tensor.numel()} numbers are NaN or Inf; the "
                "engine keeps its version. See which training step made them."
            )
            raise IncompatibleUpdate(msg)


_Piece = tuple[str, torch.Tensor]


def _pieces(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    if not tensor.numel() or not tensor.is_floating_point() or tensor.dtype is _PAIRS:
        return ()
    return torch.split(tensor.view(-1), _PIECE) if tensor.is_contiguous() else (tensor,)


def _suspects(pieces: list[_Piece], num_threads: int) -> Iterator[str]:
    """Names of tensors whose sums are not finite.

    NaN and Inf stay in a sum, which takes half as long as a look at each number; but a sum of
    finite numbers may be too large for its dtype.
    """
    # Where torch has threads of its own it uses them within each sum.
    if len(pieces) == 1 or num_threads == 1 or torch.get_num_threads() > 1:
        yield from (name for name, piece in pieces if not _is_finite(piece))
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="rl_bridge-finite") as pool:
        found = list(pool.map(_is_finite, [piece for _, piece in pieces]))
    yield from (name for (name, _), fine in zip(pieces, found, strict=True) if not fine)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(_comparable(tensor).sum().isfinite())


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    # torch cannot compare float8.
    return tensor.to(torch.float32) if tensor.element_size() == 1 else tensor
