"""The slices of an update's tensors that one rank takes, and the digests that they must have.

An engine's loader cuts tensors up: a rank of several takes a slice of most of them. A manifest has
no digest of a slice. It is made of the tensor's verified bytes by whoever has them: the rank itself
where it imports the update, else its driver. And whoever knows the slices of all ranks checks that
together they take every element.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from rl_bridge.assembly.wanted import WantedLayout, WantedTensor, WholeSlice
from rl_bridge.bridge.consumer import ImportedShare
from rl_bridge.engines.load_plan import LoadPlan, Route, View, other_than
from rl_bridge.errors import (
    ChecksumMismatch,
    IncompatibleUpdate,
    ProofFailed,
    WeightUpdateRejectedError,
)
from rl_bridge.manifest.coverage import box_of, hull
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.parts import PartNeeds, Scope, leaves_of
from rl_bridge.memory.passes import BytePlan

# What one pass reads: what must be copied to be read (a slice, a device's memory) stays small.
_PASS_NBYTES = 64 << 20


class Shard(NamedTuple):
    """A slice of a tensor that goes into one parameter."""

    row: int  # the tensor's in the manifest's table
    view: View  # which slice
    is_all: bool  # another parameter takes the tensor, so the slices need not cover it

    def to_json(self) -> list[Any]:
        """As a reply carries it."""
        view = self.view
        return [self.row, list(view.shape), list(view.stride), view.offset, self.is_all]


def shard_routes(plan: LoadPlan) -> list[Route]:
    """The copies of slices, in the order of the plan."""
    return [route for route in plan.routes if not route.is_whole]


def shards_of(plan: LoadPlan, manifest: WeightUpdateManifest) -> list[Shard]:
    """The slices of `shard_routes`."""
    whole = {route.source for route in plan.routes if route.is_whole} | plan.mixed
    rows = manifest.table.rows
    return [
        Shard(rows[route.source], route.source_view, route.source in whole)
        for route in shard_routes(plan)
    ]


def needs_of(plan: LoadPlan, manifest: WeightUpdateManifest) -> Scope | PartNeeds:
    """The ranges of an update that a rank reads; `Scope.ALL` where it has to verify all of it."""
    table = manifest.table
    if not (table.leaves and plan.is_followed):
        return Scope.ALL
    whole = [table.rows[name] for name in plan.mixed]
    leaves = [(row, 0, int(table.leaf_counts[row]), 0, _last_dim(table, row)) for row in whole]
    for route in plan.routes:
        row, view = table.rows[route.source], route.source_view
        if not view.numel:
            continue
        item = DTYPE_NBYTES[table.dtypes[row]]
        steps = zip(view.shape, view.stride, strict=True)
        dims = sorted(((n, s * item) for n, s in steps if n > 1 and s), key=_stride, reverse=True)
        found = leaves_of(dims, view.offset * item, item, _last_dim(table, row))
        leaves += [(row, *leaf_range) for leaf_range in found]
    needs = PartNeeds.of(table, leaves) if leaves else None
    if needs is None or needs.verified_nbytes == table.total_nbytes:
        return Scope.ALL
    return needs


def _stride(dim: tuple[int, int]) -> int:
    return dim[1]


def _last_dim(table: TensorTable, row: int) -> int:
    """Bytes of a tensor's last dimension."""
    return (1, *table.shapes[row])[-1] * DTYPE_NBYTES[table.dtypes[row]]


class GroupShare(NamedTuple):
    """The share of a group's whole tensors that a rank takes."""

    wanted: WantedLayout
    """The smallest box of each tensor that holds what the rank reads of it."""
    table: TensorTable
    """The boxes, as they are assembled."""
    plan: LoadPlan
    """What the engine's loader does, in terms of these boxes."""


def share_of(plan: LoadPlan, group: GroupManifest) -> GroupShare:
    """The share that a rank takes of a group, by the plan for its whole tensors."""
    wholes = group.layout.wholes
    shapes = {name: whole.shape for name, whole in wholes.items()}
    everything = shapes if not plan.is_followed else plan.mixed
    boxes = {name: box_of((0,) * len(shapes[name]), shapes[name]) for name in everything}
    for route in plan.routes:
        box = route.source_view.box(shapes[route.source])
        boxes[route.source] = hull(box, boxes.get(route.source, box))
    sizes = {name: tuple(b - a for a, b in zip(*box, strict=True)) for name, box in boxes.items()}
    wanted = {
        name: WantedTensor(size, (WholeSlice(name, boxes[name][0], size, (0,) * len(size)),))
        for name, size in sizes.items()
    }

    def in_box(route: Route) -> Route:
        name = route.source
        view = route.source_view.within(boxes[name], shapes[name])
        is_whole = view.is_contiguous and view.numel == torch.Size(sizes[name]).numel()
        return replace(route, source_view=view, is_whole=is_whole)

    steps = {
        index: [in_box(step) if isinstance(step, Route) else step for step in found]
        for index, found in plan.steps.items()
    }
    dtypes = {name: plan.dtypes[name] for name in boxes}
    boxed = replace(plan, steps=steps, taken=frozenset(boxes), dtypes=dtypes)
    table = TensorTable.pack({name: (wholes[name].dtype, size) for name, size in sizes.items()})
    return GroupShare(WantedLayout(wanted), table, boxed)


def parse_shards(given: object, manifest: WeightUpdateManifest) -> list[Shard]:
    """Read what a rank replied."""
    try:
        shards = [
            Shard(int(row), View(tuple(shape), tuple(stride), int(offset)), bool(is_all))
            for row, shape, stride, offset, is_all in given  # type: ignore[attr-defined]  # what else it is, is found out here
        ]
        numels = [torch.Size(shape).numel() for shape in manifest.table.shapes]
        fits = all(_reach(shard.view) <= numels[shard.row] for shard in shards)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        fits, shards = False, []
        said = f"{type(error).__name__}: {error}"
    else:
        said = "a part lies outside of its tensor"
    if not fits:
        raise WeightUpdateRejectedError(
            f"the engine's account of the parts that it takes cannot be read ({said}). Install the "
            "same version of rl_bridge in the engine's environment and here."
        )
    return shards


def _reach(view: View) -> int:
    """How many elements from the tensor's first the part's last one is; nothing may be negative."""
    if min((*view.shape, *view.stride, view.offset), default=0) < 0:
        raise ValueError("a negative number")
    steps = ((dim - 1) * step for dim, step in zip(view.shape, view.stride, strict=True) if dim)
    return view.offset + sum(steps) + 1


def check_covered(manifest: WeightUpdateManifest, ranks: Sequence[Sequence[Shard]]) -> None:
    """Refuse tensors of which no rank takes some elements: loaders cut off what is too long."""
    table = manifest.table
    views: dict[int, list[View]] = {}
    whole = {shard.row for shards in ranks for shard in shards if shard.is_all}
    for shards in ranks:
        for shard in shards:
            views.setdefault(shard.row, []).append(shard.view)
    for row in views.keys() - whole:
        shape = table.shapes[row]
        seen = torch.zeros(shape, dtype=torch.bool, device="cpu")
        for view in views[row]:
            view.once().of(seen).fill_(True)  # noqa: FBT003 - torch's own
        if not seen.all():
            raise IncompatibleUpdate(
                f"tensor {table.names[row]!r} has shape {list(shape)}: the engine takes "
                f"{other_than(0, seen)} of its {seen.numel()} elements, and the rest goes nowhere; "
                "expected all of it. Publish the model that the engine serves."
            )


# ---- digests ------------------------------------------------------------------------------------


def digest_of(manifest: WeightUpdateManifest, name: str) -> bytes:
    """The digest of a whole tensor, as the manifest says it."""
    start = manifest.table.rows[name] * DIGEST_NBYTES
    return manifest.digests[start : start + DIGEST_NBYTES]


def digests_of(parts: Iterable[torch.Tensor], *, num_threads: int | None) -> list[bytes]:
    """X3T-128K digests of tensors' logical bytes, wherever they lie; some at a time."""
    return [
        digest for batch in _batches(parts) for digest in _digests(batch, num_threads=num_threads)
    ]


def _batches(parts: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    held = 0
    for part in parts:
        batch.append(part)
        held += part.numel() * part.element_size()
        if held > _PASS_NBYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _digests(parts: Sequence[torch.Tensor], *, num_threads: int | None) -> Iterator[bytes]:
    plain = [
        part if part.is_cpu and part.is_contiguous() else part.detach().cpu().contiguous()
        for part in parts
    ]
    sizes = np.array([part.nbytes for part in plain], np.uint64)
    addresses = np.array([part.data_ptr() for part in plain], np.uint64)
    found = BytePlan(sizes).digest(addresses, num_threads=num_threads)
    for start in range(0, len(found), DIGEST_NBYTES):
        yield found[start : start + DIGEST_NBYTES]


def part_digests(
    manifest: WeightUpdateManifest,
    tensors: Mapping[str, torch.Tensor],
    shards: Sequence[Shard],
    *,
    num_threads: int | None,
) -> list[bytes]:
    """What each part must hold, made of the update's verified bytes."""
    names = manifest.table.names
    parts = (shard.view.of(tensors[names[shard.row]]) for shard in shards)
    made = digests_of(parts, num_threads=num_threads)
    # The sources are read after that: if they are good now, they were when the digests were made.
    used = sorted({names[shard.row] for shard in shards})
    check_sources(manifest, tensors, used, num_threads=num_threads)
    return made


def check_sources(
    manifest: WeightUpdateManifest,
    tensors: Mapping[str, torch.Tensor],
    names: Sequence[str],
    *,
    num_threads: int | None,
) -> None:
    """Read imported tensors once more."""
    found = digests_of((tensors[name] for name in names), num_threads=num_threads)
    for name, digest in zip(names, found, strict=True):
        expected = digest_of(manifest, name)
        if digest != expected:
            raise ProofFailed(
                f"tensor {name!r} went bad after it was imported: digest {digest.hex()}, expected "
                f"{expected.hex()}. It is not installed; publish again."
            )


def told_digest(share: ImportedShare, route: Route) -> bytes | None:
    """The digest that a part of an imported share must have; None if the leaf list has none."""
    table, view = share.table, route.source_view
    if not view.is_contiguous:
        return None
    item = DTYPE_NBYTES[table.dtypes[table.rows[route.source]]]
    try:
        return share.digest(route.source, view.offset * item, view.numel * item)
    except ChecksumMismatch as error:
        raise _went_bad(error) from error


def verify_again(share: ImportedShare, names: Iterable[str]) -> None:
    """Read what was imported of some tensors once more."""
    try:
        share.verify(names)
    except ChecksumMismatch as error:
        raise _went_bad(error) from error


def _went_bad(error: ChecksumMismatch) -> ProofFailed:
    return ProofFailed(
        f"a share of the update went bad after it was imported: {error} It is not installed; "
        "publish again."
    )
