"""Whether an update's layout fits an engine's tensors: names, shapes, dtypes, plain memory."""

from collections.abc import Mapping, Sequence

import torch

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.packing import dtype_name
from rl_bridge.memory.places import Place

__all__ = ["check_fit", "names_differ"]

_SHOWN = 5
_COMPILED = "_orig_mod."


def check_fit(
    table: TensorTable, tensors: Mapping[str, torch.Tensor], place: Place, *, strict: bool
) -> list[str]:
    """Compare a layout with the engine's tensors (name -> tensor).

    Args:
        table: the layout.
        tensors: the engine's.
        place: where they must lie.
        strict: whether the layout has to cover every engine tensor.

    Returns:
        Names of the engine that the layout does not hold; empty where that is allowed. They are
        covered if the layout holds their tensor under another name.

    Raises:
        IncompatibleUpdate: it does not fit.

    """
    unknown = [name for name in table.rows if name not in tensors]
    missing = [name for name in tensors if name not in table.rows] if strict else []
    if unknown:
        raise IncompatibleUpdate(names_differ(unknown, missing))
    rows, shapes, dtypes = table.rows, table.shapes, table.dtypes
    for name, row in rows.items():
        tensor = tensors[name]
        reason = place.not_plain(tensor)
        if reason is not None:
            msg = (
                f"tensor {name!r} of the engine {reason}. This installer writes plain memory of "
                "one device. "
                "Write an adapter of its own, with install and release, for any other engine."
            )
            raise IncompatibleUpdate(msg)
        if tensor.shape != shapes[row] or dtype_name(tensor) != dtypes[row]:
            msg = (
                f"tensor {name!r}: the engine has {dtype_name(tensor)}{list(tensor.shape)}, the "
                f"update {dtypes[row]}{list(shapes[row])}. Publish in the engine's shape and dtype."
            )
            raise IncompatibleUpdate(msg)
        if not tensor.is_contiguous() and any(
            step == 0 < dim - 1 for step, dim in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            msg = (
                f"tensor {name!r} of the engine is expanded: several of its elements are one in "
                "memory. Give the engine a contiguous() copy."
            )
            raise IncompatibleUpdate(msg)
    return missing


def names_differ(unknown: Sequence[str], missing: Sequence[str]) -> str:
    """Say which names only the update has, and which only the engine, with the remedy."""
    parts = []
    if unknown:
        parts.append(f"it holds {len(unknown)} tensors that the engine has not {unknown[:_SHOWN]}")
    if missing:
        parts.append(f"the engine has {len(missing)} that it does not hold {missing[:_SHOWN]}")
    remedy = "Publish what the engine's own state dict names"
    if any(_COMPILED in name for name in (*unknown, *missing)):
        remedy = (
            "torch.compile puts '_orig_mod.' before the names: hand over the module that was "
            "compiled (compiled._orig_mod) on both sides"
        )
    elif not unknown:
        remedy += ", or say strict=False if the rest never changes"
    return f"the update does not fit the engine: {', and '.join(parts)}. {remedy}."
