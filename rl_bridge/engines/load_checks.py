"""What an engine's loader would do to an update without a word, refused before it is loaded.

Loaders skip what they do not know, cut off what is too long, take the last of two tensors for one
place, and cast. Each check names the tensor. Numbers that are not finite are looked for, too: what
one request leaves of them in an engine's caches outlives the update.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import torch

from rl_bridge.bridge.consumer import ImportedShare
from rl_bridge.engines.load_plan import Kinds, LoadPlan
from rl_bridge.engines.shards import digest_of
from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.installers.engine_memory import prefix_hint
from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.passes import default_threads
from rl_bridge.memory.views import ImportedTensors, tensor_in

_SHOWN = 5
# Pairs of numbers, all finite; torch reads none of them. (Before torch 2.8 it has no such dtype.)
_PAIRS = getattr(torch, "float4_e2m1fn_x2", None)

# Elements that one thread looks at in a call: large beside the cost of the call.
_PIECE = 4 << 20
# Tensors of so few elements are looked at together: the calls would cost more than the look.
_SMALL = 1 << 10
_TOGETHER = 64


def check_same(plan: LoadPlan, manifest: WeightUpdateManifest) -> None:
    """Refuse tensors that go to one place and differ: the engine would have the last one only.

    As where an engine ties its head to its embeddings, and the trainer does not.
    """
    for route, name in plan.rivals:
        if digest_of(manifest, name) != digest_of(manifest, route.source):
            raise IncompatibleUpdate(
                f"tensors {name!r} and {route.source!r} both go to the engine's parameter "
                f"{plan.targets[route.target].name!r}, expected the same bytes in both, got "
                "different ones. Publish the model that the engine serves: tied as it ties them."
            )


def check_taken(plan: LoadPlan, manifest: WeightUpdateManifest) -> None:
    """Refuse tensors that the loader puts nowhere, except those whose bytes are there already."""
    found = equal_copies(plan, manifest)
    lost = [name for name in plan.lost if name not in found]
    if not lost:
        return
    kinds = {_kind(manifest, name) for name in lost}
    tied = [name for name in plan.tied if _kind(manifest, name) in kinds]
    hint = f"(What the engine ties to {tied} must have the same bytes.)" if tied else ""
    hints = " ".join(("", prefix_hint(lost) or hint)).rstrip()
    raise IncompatibleUpdate(
        f"the engine's loader puts {len(lost)} tensors of the update nowhere: {lost[:_SHOWN]}. "
        f"Publish the model that the engine serves, and no others.{hints}"
    )


def asks_for_bytes(plan: LoadPlan, group: GroupManifest) -> bool:
    """Whether only a group's bytes tell if the engine has some tensors already: see `equal_copies`.

    The digests of tensors that are cut in different ways cannot be compared.
    """
    if group.is_unsharded_root:
        return False
    tied = {_kind(group, name) for name in plan.tied}
    return any(_kind(group, name) in tied for name in plan.lost)


def equal_copies(plan: LoadPlan, manifest: WeightUpdateManifest) -> dict[str, str]:
    """Tensors that go nowhere because the engine has their bytes already -> the tensor that goes.

    Loaders pass over the second name of what they tie: the update may hold an equal copy under it.
    Some engines have no layer for a head that they tie, but compute with their embedding: under
    the head's name the update may hold the embedding's tensor itself.
    """
    rows = manifest.table.rows
    if not plan.lost:  # as in nearly every update
        return {}
    alike: dict[object, str] = {
        (_kind(manifest, name), digest_of(manifest, name)): name for name in plan.tied
    }
    alike |= {
        rows[route.source]: route.source
        for route in plan.routes
        if any(hasattr(user.module, "num_embeddings") for user in plan.targets[route.target].users)
    }
    found = {}
    for name in plan.lost:
        other = alike.get((_kind(manifest, name), digest_of(manifest, name)))
        found[name] = alike.get(rows[name]) if other is None else other
    return {name: other for name, other in found.items() if other is not None}


def _kind(manifest: WeightUpdateManifest, name: str) -> tuple[str, tuple[int, ...]]:
    row = manifest.table.rows[name]
    return manifest.table.dtypes[row], tuple(manifest.table.shapes[row])


def check_dtypes(plan: LoadPlan, kinds: Kinds, remedy: str = "") -> None:
    """Refuse tensors that a loader would cast."""
    for route in plan.routes:
        target, dtype = plan.targets[route.target], kinds[route.source][0]
        if dtype != target.meta.dtype:
            raise IncompatibleUpdate(
                f"tensor {route.source!r} is {_name(dtype)}, parameter {target.name!r} is "
                f"{_name(target.meta.dtype)}. Publish in the engine's dtype{remedy}."
            )


def check_casts(plan: LoadPlan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse numbers that are finite in an update and not in the engine's dtype."""
    for name, dtype in plan.casts:
        parts = [part for part in plan.parts(name, tensors[name]) if part.numel()]
        is_rounded = plan.dtypes[name].is_floating_point and dtype.is_floating_point
        if not (parts and is_rounded):
            continue
        # (torch cannot compare float8. Rounding keeps the order: the ends tell for all.)
        found = [torch.stack(torch.aminmax(_comparable(part))) for part in parts]
        ends = torch.stack(torch.aminmax(torch.stack(found)))
        if not ends.to(dtype).double().isfinite().all():
            raise IncompatibleUpdate(
                f"tensor {name!r} has numbers from {ends[0]:g} to {ends[1]:g}, and {_name(dtype)} "
                "cannot hold all of them: the engine would load NaN or Inf. Publish in the "
                "engine's dtype, and see which training step made them."
            )


def check_finite(
    tensors: Mapping[str, torch.Tensor],
    names: Iterable[str],
    *,
    plan: LoadPlan | None = None,
    num_threads: int | None = None,
) -> None:
    """Refuse NaN and Inf: a request that ran once with them leaves them in its cached blocks.

    With a `plan`, only what that reads of the tensors is looked at.
    """
    parts = {
        name: [tensors[name]] if plan is None else plan.parts(name, tensors[name]) for name in names
    }
    pieces = [(name, piece) for name, found in parts.items() for x in found for piece in _pieces(x)]
    for name in dict.fromkeys(_suspects(pieces, num_threads or default_threads())):
        bad = sum(int((~torch.isfinite(_comparable(part))).sum()) for part in parts[name])
        if bad:
            raise IncompatibleUpdate(
                f"tensor {name!r}: {bad} of its {tensors[name].numel()} numbers are NaN or Inf; "
                "the engine keeps its version. See which training step made them."
            )


def are_finite(tensors: Iterable[torch.Tensor], *, num_threads: int | None) -> bool:
    """Whether no number is NaN or Inf; False also if only each tensor by itself would tell."""
    pieces = [("", piece) for tensor in tensors for piece in _pieces(tensor)]
    return all(_found(list(_batches(pieces)), num_threads or default_threads()))


def as_it_lies(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
    """All of an imported update, neighbours of one dtype as one tensor; None if it is not whole.

    Between its tensors an arena has zeros, and what else stood there could only be taken for NaN.
    """
    if not isinstance(tensors, ImportedTensors) or isinstance(tensors, ImportedShare):
        return None
    if tensors.device.type != "cpu":
        return None
    found, first, table = [], 0, tensors.table
    for dtype, rows in groupby(table.dtypes):
        last = first + sum(1 for _ in rows) - 1
        start, end = table.offsets[first], table.offsets[last] + table.nbytes[last]
        shape = ((end - start) // DTYPE_NBYTES[dtype],)
        found.append(tensor_in(tensors.pin, start, end - start, dtype, shape))
        first = last + 1
    return found


def _pieces(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    if not tensor.is_floating_point() or tensor.dtype is _PAIRS:
        return ()
    if tensor.numel() <= _PIECE or not tensor.is_contiguous():
        return (tensor,) if tensor.numel() else ()
    return torch.split(tensor.view(-1), _PIECE)


_Pieces = list[tuple[str, torch.Tensor]]


def _suspects(pieces: _Pieces, num_threads: int) -> Iterator[str]:
    """Names of tensors whose sums are not finite.

    NaN and Inf stay in a sum, which takes half as long as a look at each number; but a sum of
    finite numbers may be too large for its dtype.
    """
    batches = list(_batches(pieces))
    for batch, fine in zip(batches, _found(batches, num_threads), strict=True):
        if not fine:
            yield from (one[0] for one in batch if len(batch) == 1 or not _is_finite([one]))


def _found(batches: list[_Pieces], num_threads: int) -> list[bool]:
    # Where torch has threads of its own it uses them within each sum.
    if len(batches) == 1 or num_threads == 1 or torch.get_num_threads() > 1:
        return list(map(_is_finite, batches))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="rl_bridge-finite") as pool:
        return list(pool.map(_is_finite, batches))


def _batches(pieces: _Pieces) -> Iterator[_Pieces]:
    """Group pieces that are summed in one go: each large one alone, small ones by kind."""
    small: dict[object, _Pieces] = {}
    for name, piece in pieces:
        if piece.numel() > _SMALL:
            yield [(name, piece)]
            continue
        batch = small.setdefault((piece.dtype, piece.device), [])
        batch.append((name, piece))
        if len(batch) == _TOGETHER:
            yield batch.copy()
            batch.clear()
    yield from filter(None, small.values())


def _is_finite(batch: _Pieces) -> bool:
    flat = [_comparable(piece).reshape(-1) for _, piece in batch]
    joined = flat[0] if len(flat) == 1 else torch.cat(flat)
    return bool(joined.sum().isfinite())


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    # torch cannot compare float8.
    return tensor.to(torch.float32) if tensor.element_size() == 1 else tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
