"""Tensors of which an engine would keep less than was published: as one, cut, or not at all."""

import torch

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.installers.vllm.load_plan import Kinds, LoadPlan, Route, View
from rl_bridge.installers.vllm.numbering import other_than
from rl_bridge.installers.vllm.parts import num_same
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["check_landed", "check_same", "check_whole", "doubles"]

_SHOWN = 5


def check_same(plan: LoadPlan, manifest: WeightUpdateManifest) -> None:
    """Refuse tensors that go to one place and differ: the engine would have the last one only.

    As where an engine ties its head to its embeddings, and the trainer does not.

    Raises:
        IncompatibleUpdate: there are such.

    """
    for index, steps in plan.steps.items():
        first: dict[View, str] = {}
        for step in steps:
            if not isinstance(step, Route):
                continue
            name = first.setdefault(step.target_view, step.source)
            if _digest(manifest, name) != _digest(manifest, step.source):
                msg = (
                    f"tensors {name!r} and {step.source!r} both go to the engine's parameter "
                    f"{plan.targets[index].name!r}, expected the same bytes in both, got different "
                    "ones. Publish the model that the engine serves: tied as it ties them."
                )
                raise IncompatibleUpdate(msg)


def check_landed(plan: LoadPlan, manifest: WeightUpdateManifest) -> None:
    """Refuse tensors that the loader puts nowhere, except those whose bytes are there already.

    Raises:
        IncompatibleUpdate: there are such.

    """
    rows = manifest.table.rows
    known = {rows[name] for name in plan.landed} | doubles(plan, manifest).keys()
    lost = [name for name, row in rows.items() if row not in known]
    if not lost:
        return
    kinds = {_kind(manifest, rows[name]) for name in lost}
    tied = [name for name in _tied(plan) if _kind(manifest, rows[name]) in kinds]
    hint = f" (What the engine ties to {tied} must have the same bytes.)" if tied else ""
    msg = (
        f"the engine's loader puts {len(lost)} tensors of the update nowhere: {lost[:_SHOWN]}. "
        f"Publish the model that the engine serves, and no others.{hint}"
    )
    raise IncompatibleUpdate(msg)


def doubles(plan: LoadPlan, manifest: WeightUpdateManifest) -> dict[int, int]:
    """Rows that go nowhere and are, byte by byte, a row that goes to a tied parameter -> that row.

    Loaders pass over the second name of what they tie.
    """
    rows = manifest.table.rows
    landed = {rows[name] for name in plan.landed}
    lost = {name: row for name, row in rows.items() if row not in landed}
    if not lost:  # as in nearly every update
        return {}
    tied = {
        (_kind(manifest, rows[name]), _digest(manifest, name)): rows[name] for name in _tied(plan)
    }
    found = {
        row: tied.get((_kind(manifest, row), _digest(manifest, name))) for name, row in lost.items()
    }
    return {row: other for row, other in found.items() if other is not None}


def _tied(plan: LoadPlan) -> list[str]:
    """Tensors that go to parameters which several layers hold, and nowhere else."""
    routes = list(plan.routes())  # (of ranks, each has only its part)
    alone = {route.source for route in routes if len(plan.targets[route.target].users) == 1}
    return sorted({route.source for route in routes} - alone)


def _kind(manifest: WeightUpdateManifest, row: int) -> tuple[str, tuple[int, ...]]:
    return manifest.table.dtypes[row], tuple(manifest.table.shapes[row])


def _digest(manifest: WeightUpdateManifest, name: str) -> bytes:
    start = manifest.table.rows[name] * DIGEST_NBYTES
    return manifest.digests[start : start + DIGEST_NBYTES]


def check_whole(plan: LoadPlan, kinds: Kinds, ranks: int) -> None:
    """Refuse tensors of which all ranks together do not take all.

    Loaders cut each rank's part out of a tensor, and do not see that it is too long.

    Args:
        plan: of one rank.
        kinds: of the update's tensors.
        ranks: how many take parts.

    Raises:
        IncompatibleUpdate: there are such.

    """
    routes: dict[str, list[Route]] = {}
    for route in plan.routes():
        routes.setdefault(route.source, []).append(route)
    for name, parts in routes.items():
        if name in plan.mixed or any(part.is_whole for part in parts):
            continue
        shape = kinds[name][1]
        # How many ranks take the same part -> which elements. (A byte an element, as the learning
        # took for it, and for its targets besides.)
        seen: dict[int, torch.Tensor] = {}
        for part in parts:
            same = _num_same(plan, part)
            if same not in seen:  # (experts in one tensor have hundreds of parts)
                seen[same] = torch.zeros(shape, dtype=torch.bool, device="cpu")
            part.source_view.once().of(seen[same]).fill_(True)  # noqa: FBT003 - torch's own
        taken = sum(other_than(0, mask) * (ranks // same) for same, mask in seen.items())
        padded = sum(plan.padding(index) for index in {part.target for part in parts})
        numel = torch.Size(shape).numel()
        if taken + padded * ranks < numel:
            targets = sorted({plan.targets[part.target].name for part in parts})
            msg = (
                f"tensor {name!r} has shape {list(shape)}: all {ranks} ranks together take "
                f"{taken} of its {numel} elements, for {targets}, and the rest goes nowhere; "
                "expected all of it. Publish the model that the engine serves."
            )
            raise IncompatibleUpdate(msg)


def _num_same(plan: LoadPlan, part: Route) -> int:
    """How many ranks take the same part of a tensor."""
    target = plan.targets[part.target]
    a_row = next(iter(target.meta.stride()), 1)
    return num_same(target.users[0].module, part.target_view.offset // a_row)
