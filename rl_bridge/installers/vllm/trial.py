"""Whether an engine's loader does what was noted of it: tried in memory, on numbers for weights.

One parameter at a time, or some that are small; so what it takes depends on the largest of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.installers.vllm.load_plan import Fill, Kinds, LoadPlan, Route
from rl_bridge.installers.vllm.numbering import (
    NEVER,
    SEEN,
    SMALL_NBYTES,
    Numbering,
    is_same,
    other_than,
)
from rl_bridge.installers.vllm.skeleton import Skeleton

__all__ = ["check", "checking_nbytes", "load"]

_SHOWN = 5


def load(skeleton: Skeleton, sources: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Run the engine's loader on the skeleton.

    Raises:
        IncompatibleUpdate: there is none, or it refuses a tensor.

    """
    method: Any = getattr(skeleton.model, "load_weights", None)
    if method is None:
        kind = type(skeleton.model).__name__
        msg = f"{kind} has no load_weights. Install it by {skeleton.elsewhere}."
        raise IncompatibleUpdate(msg)
    last: tuple[str, list[int]] = ("", [])

    def watched() -> Iterable[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, tensor in sources:
            last = name, list(tensor.shape)
            yield name, tensor

    try:
        method(watched())
    except IncompatibleUpdate:
        raise  # our own: it says what to do
    except Exception as error:
        msg = (
            f"tensor {last[0]!r}, shape {last[1]}, does not fit {type(skeleton.model).__name__}: "
            f"its loader says {type(error).__name__}: {str(error).rstrip('.')}. Publish the model "
            "that the engine serves, under its checkpoint's names."
        )
        raise IncompatibleUpdate(msg) from error


def checking_nbytes(plan: LoadPlan, kinds: Kinds) -> int:
    """Bytes that `check` holds at one time. Little is not counted, nor is it by staging."""
    most = 0
    for chunk in _chunks(plan, kinds):
        numels, held = _held(plan, chunk, kinds)
        most = max(most, held * Numbering.of(sum(numels.values()), held).dtype.itemsize)
    return most if most > SMALL_NBYTES else 0


def check(skeleton: Skeleton, plan: LoadPlan, kinds: Kinds) -> None:
    """Run the loader into memory, a different number in every element; compare with the plan.

    Raises:
        IncompatibleUpdate: an element is not where the plan says, or is in no tensor.

    """
    for chunk in _chunks(plan, kinds):
        _check_chunk(skeleton, plan, kinds, chunk)  # (its memory is gone before the next one's)


def _check_chunk(skeleton: Skeleton, plan: LoadPlan, kinds: Kinds, chunk: Sequence[int]) -> None:
    numels, held = _held(plan, chunk, kinds)
    numbering = Numbering.of(sum(numels.values()), held)
    dtype = numbering.dtype
    memory = {
        i: torch.empty(tuple(plan.targets[i].meta.shape), dtype=dtype, device="cpu") for i in chunk
    }
    every = torch.empty(sum(numels.values()), dtype=dtype, device="cpu")
    numbered = {
        name: part.view(kinds[name][1])
        for name, part in zip(numels, torch.split(every, list(numels.values())), strict=True)
    }
    for digit in range(numbering.digits):
        numbering.write(every, digit)
        for found in memory.values():
            found.fill_(NEVER)
        with skeleton.holding(memory):
            load(skeleton, numbered.items())
        # Compared is with what was handed over, whatever became of it.
        numbering.write(every, digit=digit)
        for index, found in memory.items():
            _compare(plan, index, found, numbered, skeleton.elsewhere)


def _compare(
    plan: LoadPlan,
    index: int,
    found: torch.Tensor,
    numbered: Mapping[str, torch.Tensor],
    elsewhere: str,
) -> None:
    target = plan.targets[index]
    for step in reversed(plan.steps[index]):  # what was written last stands
        part = step.target_view.of(found)
        wanted = (
            torch.tensor(int(step.value), device="cpu")
            if isinstance(step, Fill)
            else step.source_view.of(numbered[step.source])
        )
        if not is_same(part, wanted):
            what = "padding" if isinstance(step, Fill) else f"tensor {step.source!r}"
            msg = (
                f"parameter {target.name!r}: the loader did not put {what} twice into the same "
                f"place. Install it by {elsewhere}."
            )
            raise IncompatibleUpdate(msg)
        part.fill_(SEEN)
    unwritten = other_than(SEEN, found)
    if unwritten:
        sent = sorted({step.source for step in plan.steps[index] if isinstance(step, Route)})
        msg = (
            f"parameter {target.name!r}: {unwritten} of its {found.numel()} elements are in none "
            f"of the update's tensors; it gets {sent[:_SHOWN]}. Publish the fused parts together "
            "(q, k and v; gate and up; all experts)."
        )
        raise IncompatibleUpdate(msg)


def _held(plan: LoadPlan, chunk: Iterable[int], kinds: Kinds) -> tuple[dict[str, int], int]:
    """Elements of each tensor that goes into some targets; with the targets', all there are."""
    used = {
        step.source: torch.Size(kinds[step.source][1]).numel()
        for index in chunk
        for step in plan.steps[index]
        if isinstance(step, Route)
    }
    return used, sum(used.values()) + sum(plan.targets[i].meta.numel() for i in chunk)


def _chunks(plan: LoadPlan, kinds: Kinds) -> Iterator[list[int]]:
    """Positions of targets: as many at a time as take little memory, or one."""
    chunk: list[int] = []
    size = 0
    for index in plan.steps:
        _, held = _held(plan, [index], kinds)
        nbytes = held * torch.int32.itemsize
        if chunk and size + nbytes > SMALL_NBYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(index)
        size += nbytes
    if chunk:
        yield chunk
