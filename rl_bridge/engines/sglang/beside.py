"""The next version of a model's parameters, made beside the serving ones and exchanged for them.

SGLang's loader is not asked: where each tensor goes was learned from it. What the install does is
exchange memory, in microseconds a parameter; undone, the model has the very memory again that it
had.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import numpy as np
import torch

from rl_bridge.engines.exchange import Exchange, is_alone
from rl_bridge.engines.load_plan import LoadPlan, Route
from rl_bridge.engines.sglang.proof import live_parameter
from rl_bridge.engines.staging import Staged, TensorChange
from rl_bridge.memory import vm
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.tensors import not_plain
from rl_bridge.memory.views import anonymous_pin, tensor_in
from rl_bridge.memory.vm import huge_pages, spare_pages

__all__ = [
    "Beside",
    "why_not_beside",
]


def why_not_beside(plan: LoadPlan) -> str | None:
    """Why parameters cannot be exchanged for memory of this process, or None if they can.

    Raises:
        ProofFailed: one is not what it was when the plan was learned.

    """
    for index in plan.steps:
        target = plan.targets[index]
        live = live_parameter(target)
        reason = not_plain(live)
        if reason is None and live.is_inference():
            reason = "was made in inference mode: torch lets nobody give it other memory"
        if reason is not None:
            return f"parameter {target.name!r} {reason}"
    return None


class Beside:
    """One version that is staged beside the serving one, and the memory that they take turns in."""

    def __init__(self, *, num_threads: int | None) -> None:
        """Begin with nothing staged."""
        self._num_threads = num_threads
        self._memory = _Memory()
        self._exchange = Exchange()
        self._staged: Staged | None = None

    @property
    def is_begun(self) -> bool:
        """Whether an exchange is neither undone nor committed, wherever it was cut off."""
        return self._exchange.is_begun

    @property
    def is_staged(self) -> bool:
        """Whether `exchange` has something to exchange."""
        return self._staged is not None

    def kept_nbytes(self, plan: LoadPlan) -> int:
        """What parameters that are written in place take beyond the next version's own bytes.

        Each is copied aside twice: before the install by whoever undoes it, and in it.
        """
        lives = (live_parameter(plan.targets[index]) for index in plan.steps)
        return sum(2 * live.nbytes for live in lives if not is_alone(live))

    def stage(self, plan: LoadPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make every parameter that the plan writes; the model is only read.

        Args:
            plan: of a model of which `why_not_beside` says nothing.
            tensors: the imported update.

        """
        fresh = self._memory.take(plan)
        # Noted first: what fails half-way is kept for the next version.
        self._staged = Staged(
            [
                TensorChange(plan.targets[i].name, live_parameter(plan.targets[i]), memory, i)
                for i, memory in fresh.items()
            ]
        )
        _assemble(plan, tensors, fresh, self._num_threads)

    def alone(self) -> set[int]:
        """Identities of the staged parameters that nobody else looks at: these are exchanged.

        The others are written in place.
        """
        staged = [] if self._staged is None else self._staged.tensors
        return {id(change.live) for change in staged if is_alone(change.live)}

    def exchange(self) -> None:
        """Give the model what was staged."""
        assert self._staged is not None
        self._exchange.apply(self._staged)

    def undo(self) -> None:
        """Exchange back. May be called again after it was cut off."""
        self._exchange.undo()

    def abandon(self) -> None:
        """Let go of what was staged; its memory is the next version's, if none of it serves."""
        staged, self._staged = self._staged, None
        if self._exchange.is_begun:
            return
        changes = [] if staged is None else staged.tensors
        self._memory.keep((change, change.fresh) for change in changes)

    def commit(self) -> None:
        """Keep the memory of the version before for the next one."""
        self._staged = None
        self._memory.keep(self._exchange.forget()[0])


class _Memory:
    """Memory of versions that do not serve, for those that will; the kernel may take it meanwhile.

    Each parameter's begins with a page, so that giving up one touches no other.
    """

    def __init__(self) -> None:
        self._free: dict[int, torch.Tensor] = {}
        # Whoever looks at a range keeps it mapped; what is gone may be somebody else's by now.
        self._made: list[tuple[weakref.ref[object], int, int]] = []

    def take(self, plan: LoadPlan) -> dict[int, torch.Tensor]:
        """Memory for each parameter of a plan: position of its target -> tensor."""
        metas = {i: plan.targets[i].meta for i in plan.steps if plan.targets[i].meta.numel()}
        missing = {i: meta for i, meta in metas.items() if not _fits(self._free.get(i), meta)}
        self._free |= self._make(missing)
        return {i: self._free.pop(i) for i in metas}

    def _make(self, metas: Mapping[int, torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        if not metas:
            return
        sizes = [meta.numel() * meta.element_size() for meta in metas.values()]
        pin = anonymous_pin(sum(map(vm.round_up, sizes)))
        huge_pages(pin.address, pin.nbytes)
        self._made = [made for made in self._made if made[0]() is not None]
        self._made.append((weakref.ref(pin.buffer), pin.address, pin.nbytes))
        offset = 0
        for (index, meta), nbytes in zip(metas.items(), sizes, strict=True):
            dtype = str(meta.dtype).removeprefix("torch.")
            # (A view's base would be one more that looks at its memory.)
            yield index, tensor_in(pin, offset, nbytes, dtype, tuple(meta.shape)).data
            offset += vm.round_up(nbytes)

    def keep(self, given: Iterable[tuple[TensorChange, torch.Tensor]]) -> None:
        """Take memory back; the engine's first, which it made itself, goes back to the system.

        So does what somebody still looks at, when he is done: a view that was taken of a version
        between its install and its undo.
        """
        ranges: list[tuple[int, int]] = []
        for change, memory in given:
            # What serves is never spare, whatever was cut off where: its parameter looks at it.
            if change.index is None or not is_alone(memory):
                continue
            if self._is_made_here(memory.data_ptr()):
                self._free[change.index] = memory
                ranges.append((memory.data_ptr(), vm.round_up(memory.nbytes)))
        for start, nbytes in _merged(ranges):
            spare_pages(start, nbytes)

    def _is_made_here(self, address: int) -> bool:
        return any(
            buffer() is not None and start <= address < start + nbytes
            for buffer, start, nbytes in self._made
        )


def _fits(spare: torch.Tensor | None, meta: torch.Tensor) -> bool:
    return spare is not None and spare.shape == meta.shape and spare.dtype == meta.dtype


def _merged(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges that touch each other as one: the kernel splits no huge page for the whole."""
    begin = end = 0
    for start, nbytes in sorted(ranges):
        if start != end:
            if end > begin:
                yield begin, end - begin
            begin = start
        end = start + nbytes
    if end > begin:
        yield begin, end - begin


def _assemble(
    plan: LoadPlan,
    tensors: Mapping[str, torch.Tensor],
    fresh: Mapping[int, torch.Tensor],
    num_threads: int | None,
) -> None:
    """Write all parameters: in one pass what is copied as it lies, the rest by torch."""
    copies: list[tuple[int, int, int]] = []
    for index, memory in fresh.items():
        found = _plain_copies(plan, index, tensors, memory)
        if found is None:
            with torch.no_grad():
                plan.assemble(index, tensors, memory)
        else:
            copies += found
    if copies:
        sources, targets, sizes = np.array(copies, np.uint64).T
        BytePlan(sizes).copy(sources, targets, num_threads=num_threads)


def _plain_copies(
    plan: LoadPlan, index: int, tensors: Mapping[str, torch.Tensor], memory: torch.Tensor
) -> list[tuple[int, int, int]] | None:
    """Source, target and size of each copy; None where a parameter takes more than such copies."""
    copies, itemsize = [], memory.element_size()
    for step in plan.steps[index]:
        if not isinstance(step, Route):
            return None
        source, (of, to) = tensors[step.source], (step.source_view, step.target_view)
        if not (of.is_contiguous and to.is_contiguous and source.is_contiguous()):
            return None
        if source.dtype != memory.dtype or not_plain(source) is not None:
            return None
        start = memory.data_ptr() + to.offset * itemsize
        copies.append((source.data_ptr() + of.offset * itemsize, start, to.numel * itemsize))
    copies.sort(key=lambda copy: copy[1])
    for (_, start, nbytes), (_, following, _) in pairwise(copies):
        if start + nbytes > following:
            return None  # what comes last counts
    return copies
