"""The next version of a model's parameters, made beside the serving ones and exchanged for them.

Everything that takes time or may fail happens before the install, on memory that no request reads.
What is left for the install is a list of exchanges, in microseconds a parameter, whatever the
model's size; undone, the model has the very memory again that it had. Two versions take turns in
two sets of memory: what the version before the active one had is what the next one gets.
"""

import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch

from rl_bridge.engines.load_plan import LoadPlan
from rl_bridge.engines.skeleton import Target
from rl_bridge.errors import IncompatibleUpdate, WeightBridgeUnavailableError
from rl_bridge.memory import vm
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.tensors import not_plain
from rl_bridge.memory.views import ImportedTensors, anonymous_pin, tensor_in

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class TensorChange:
    """A serving parameter, and the memory that it gets."""

    name: str  # full name
    live: torch.Tensor  # the parameter object, which stays
    fresh: torch.Tensor  # its next content
    # Position of the target that it is; None where the engine made it of something else.
    index: int | None


@dataclass(slots=True, eq=False)
class AttributeChange:
    """What a layer computes with instead of a parameter: a packed product, for instance."""

    path: str
    module: torch.nn.Module
    key: str
    value: object


class Canary(Protocol):
    """Something that a layer computes with and nobody can read: it is asked, and must answer."""

    @property
    def module(self) -> torch.nn.Module:
        """The layer."""

    def check(self, known: set[tuple[int, int]], /) -> None:
        """Ask it; `known` are those that answered in this proof."""


@dataclass(slots=True, eq=False)
class Assembled:
    """One parameter as its loader would have filled it."""

    index: int  # position of the target
    tensor: torch.Tensor
    borrowed: bool  # it is the imported tensor itself: nothing was copied
    replaced: bool = False  # the engine makes something else of it, and this memory goes


@dataclass(slots=True)
class Staged:
    """Everything that an install exchanges, and what proves it."""

    tensors: list[TensorChange] = field(default_factory=list)  # parameters and their next content
    attributes: list[AttributeChange] = field(default_factory=list)  # what layers compute with
    canaries: list[Canary] = field(default_factory=list)  # one for each packed product
    # Layers of which all that was derived is compared elsewhere.
    compared: list[torch.nn.Module] = field(default_factory=list)
    # Position of a target -> the memory that was taken for it.
    memory: dict[int, torch.Tensor] = field(default_factory=dict)

    def extend(self, other: "Staged") -> None:
        """Take what was staged of other layers, but for its memory."""
        self.tensors += other.tensors
        self.attributes += other.attributes
        self.canaries += other.canaries
        self.compared += other.compared


# ---- memory -------------------------------------------------------------------------------------


class SpareMemory:
    """Memory of versions that do not serve, for those that will; the kernel may take it meanwhile.

    Each parameter's begins with a page, so that giving up one touches no other. What an engine
    allocated itself for its first version goes back to the system.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._free: dict[int, torch.Tensor] = {}
        # Weak: a range is unmapped with its last view, and its addresses may belong to others then.
        self._made: list[tuple[weakref.ref[object], int, int]] = []

    def take(self, targets: Mapping[int, Target]) -> dict[int, torch.Tensor]:
        """Memory for parameters, by position: of what was kept, nobody else has a view."""
        missing = {i: one for i, one in targets.items() if not _fits(self._free.get(i), one)}
        self._free |= self._make(missing)
        return {i: self._free.pop(i) for i in targets}

    def _make(self, targets: Mapping[int, Target]) -> Iterator[tuple[int, torch.Tensor]]:
        here = {}
        for index, target in targets.items():
            if target.device.type == "cpu" and target.nbytes:
                here[index] = target.nbytes
            else:
                yield index, target.empty()
        if not here:
            return
        pin = anonymous_pin(sum(map(vm.round_up, here.values())))
        vm.huge_pages(pin.address, pin.nbytes)
        self._made = [made for made in self._made if made[0]() is not None]
        self._made.append((weakref.ref(pin.buffer), pin.address, pin.nbytes))
        offset = 0
        for index, nbytes in here.items():
            meta = targets[index].meta
            flat = tensor_in(pin, offset, nbytes, "uint8", (nbytes,)).view(meta.dtype)
            # `data` cuts the view off its base, which torch would count as a user of the memory.
            yield index, torch.as_strided(flat, tuple(meta.shape), meta.stride()).data
            offset += vm.round_up(nbytes)

    def keep(self, given: Iterable[tuple[int | None, torch.Tensor]]) -> None:
        """Take memory back, by position of its target; None for what is no target's.

        A view that somebody took of a version between its install and its undo keeps its bytes.
        """
        ranges: list[tuple[int, int]] = []
        for index, memory in given:
            if index is None or _is_looked_at(memory):
                continue
            if memory.device.type != "cpu":
                self._free[index] = memory
            elif self._is_made_here(memory.data_ptr()):
                self._free[index] = memory
                ranges.append((memory.data_ptr(), vm.round_up(memory.untyped_storage().nbytes())))
        for start, nbytes in _merged(ranges):
            vm.spare_pages(start, nbytes)

    def clear(self) -> None:
        """Keep none."""
        self._free = {}

    def _is_made_here(self, address: int) -> bool:
        for buffer, start, nbytes in self._made:  # one or two: a generator takes longer
            if start <= address < start + nbytes and buffer() is not None:
                return True
        return False


def _fits(spare: torch.Tensor | None, target: Target) -> bool:
    meta = target.meta
    return spare is not None and (spare.shape, spare.stride(), spare.dtype, spare.device) == (
        meta.shape,
        meta.stride(),
        meta.dtype,
        target.device,
    )


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


def is_alone(live: torch.Tensor) -> bool:
    """Whether nobody but this parameter looks at its memory, as far as torch counts.

    On an accelerator a captured graph knows the address, which nobody counts; nor does anybody
    count the processes that map shared memory.
    """
    storage = live.untyped_storage()
    if storage.device.type != "cpu" or storage.is_shared():
        return False
    del storage  # which would count
    return not _is_looked_at(live)


def _is_looked_at(tensor: torch.Tensor) -> bool:
    """Whether torch knows of anybody who looks at a tensor's memory beside that tensor."""
    return _looking_at(tensor) > _ALONE


def _looking_at(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001 - torch has no public name
    # Tensors, and whoever keeps the storage itself: they share one object of Python's.
    return count + sys.getrefcount(storage)


_ALONE = _looking_at(torch.nn.Parameter(torch.empty(1, device="cpu"), requires_grad=False))

BESIDE = "staging it beside the serving one"
THROUGH = "writing it through into the serving one"
COPYING = "a copy of the serving one, which the undo needs,"
LEARNING = "trying the engine's loader on numbers, before its first update"


Staging = Literal["beside", "through"]
"""Where the next version is made: beside the serving one, or right in its memory."""


def checked_staging(staging: Staging | None) -> Staging | None:
    """The choice as it was given; None lets the memory choose."""
    if staging is not None and staging not in get_args(Staging):
        raise ValueError(f"staging={staging!r}: expected one of {get_args(Staging)}, or None.")
    return staging


def checked_budget(memory_budget_nbytes: int | None) -> int | None:
    """The budget as it was given; None stands for what the machine has to give."""
    if not isinstance(memory_budget_nbytes, int | None):
        raise TypeError(f"memory_budget_nbytes={memory_budget_nbytes!r}: expected an int or None.")
    if memory_budget_nbytes is not None and memory_budget_nbytes < 0:
        raise ValueError(f"memory_budget_nbytes={memory_budget_nbytes}: expected 0 or more.")
    return memory_budget_nbytes


class Need(NamedTuple):
    """Memory that something takes more."""

    nbytes: int
    device: torch.device = torch.device("cpu")


def check_budget(
    needs: Iterable[tuple[str, Need]], budget: int | None, version: int
) -> tuple[str, int]:
    """Choose the first that fits of what would do, by the memory that each takes.

    Returns:
        What it is, and the bytes that it takes.

    Raises:
        WeightBridgeUnavailableError: the machine has not enough for any of them just now.
        IncompatibleUpdate: the budget does not allow any of them.

    """
    told = []
    for what, need in needs:
        given = _available(need.device) if budget is None else budget
        if given is None or need.nbytes <= given:
            return what, need.nbytes
        whose = "the machine has" if budget is None else "memory_budget_nbytes allows"
        told.append(f"{what} takes {need.nbytes} bytes more, {whose} {given}")
    msg = f"version {version}: {'; '.join(told)}. Free memory, or give the engine's caches less."
    # The machine may have more memory the next time; a budget stays as it is.
    raise WeightBridgeUnavailableError(msg) if budget is None else IncompatibleUpdate(msg)


def _available(device: torch.device) -> int | None:
    """Memory that the machine has to give; None where nobody knows."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return vm.available_memory()


# ---- making the next version --------------------------------------------------------------------


def assemble(
    plan: LoadPlan,
    tensors: Mapping[str, torch.Tensor],
    memory: Mapping[int, torch.Tensor],
    *,
    num_threads: int | None,
) -> None:
    """Write parameters into memory, by position: what is copied as it lies in one pass."""
    copies: list[tuple[int, int, int]] = []
    addresses = _addresses_of(plan, tensors, memory)
    with torch.no_grad():
        for index, room in memory.items():
            found = _plain_copies(plan, index, addresses, room)
            if found is None:
                plan.assemble(index, tensors, room)
            else:
                copies += found
    if copies:
        sources, targets, sizes = np.array(copies, np.uint64).T
        BytePlan(sizes).copy(sources, targets, num_threads=num_threads)


def _addresses_of(
    plan: LoadPlan, tensors: Mapping[str, torch.Tensor], targets: Iterable[int]
) -> Mapping[str, int]:
    """Name -> first byte of each tensor that is copied as it lies, and can be."""
    if isinstance(tensors, ImportedTensors) and tensors.device.type == "cpu":
        found, table = tensors.addresses.tolist(), tensors.table
        return {name: found[row] for name, row in table.rows.items()}
    names = {copy.source for index in targets for copy in plan.copies.get(index, ())}
    given = ((name, tensors[name]) for name in names)
    return {
        name: tensor.data_ptr()
        for name, tensor in given
        if tensor.is_contiguous()
        and tensor.dtype == plan.dtypes[name]
        and not_plain(tensor) is None
    }


def _plain_copies(
    plan: LoadPlan, index: int, addresses: Mapping[str, int], memory: torch.Tensor
) -> list[tuple[int, int, int]] | None:
    """Source, target and size of each copy; None where a parameter takes more than such copies."""
    copies = plan.copies.get(index)
    if copies is None or not_plain(memory) is not None:
        return None
    if memory.dtype != plan.targets[index].meta.dtype:
        return None
    start = memory.data_ptr()
    try:
        return [(addresses[name] + at, start + to, nbytes) for name, at, to, nbytes in copies]
    except KeyError:
        return None


# ---- the exchange -------------------------------------------------------------------------------

_ABSENT = object()


class Exchange:
    """Exchanges a staged version for the serving one; remembers the oldest state since `forget`.

    A parameter gets other memory where only it looks at its own; else it is written in place, so
    that views, captured graphs and whoever else knows its address follow. Each step is noted before
    it is taken: what fails in the middle can be undone.
    """

    def __init__(self) -> None:
        """Begin with nothing exchanged."""
        self._tensors: list[tuple[TensorChange, torch.Tensor, bool]] = []
        self._attributes: list[tuple[AttributeChange, object]] = []

    @property
    def is_begun(self) -> bool:
        """Whether a parameter may have been exchanged since the last `undo` or `forget`."""
        return bool(self._tensors)

    def apply(self, staged: Staged) -> None:
        """Exchange everything that was staged."""
        for change in staged.tensors:
            if is_alone(change.live):
                self._tensors.append((change, change.live.data, True))
                change.live.data = change.fresh
            else:
                self._tensors.append((change, change.live.detach().clone(), False))
                change.live.data.copy_(change.fresh)
        self.replace(staged.attributes)

    def replace(self, attributes: Iterable[AttributeChange]) -> None:
        """Exchange only what layers compute with."""
        for attribute in attributes:
            state = vars(attribute.module)
            self._attributes.append((attribute, state.get(attribute.key, _ABSENT)))
            state[attribute.key] = attribute.value

    def undo(self) -> None:
        """Exchange back, the last step first; called again, it goes on where it failed.

        Whoever took a view of what was exchanged meanwhile looks at the refused version from then
        on: nobody can turn it, so its memory stays as it is, and the log names the parameter.
        """
        while self._attributes:
            attribute, before = self._attributes[-1]
            if before is _ABSENT:
                vars(attribute.module).pop(attribute.key, None)
            else:
                vars(attribute.module)[attribute.key] = before
            self._attributes.pop()
        while self._tensors:
            change, memory, rebound = self._tensors[-1]
            if rebound:
                change.live.data = memory
            else:
                change.live.data.copy_(memory)
            self._tensors.pop()
            if rebound and not is_alone(change.fresh):
                _LOG.warning(
                    "parameter %r: somebody took a view of it between an install and its undo. "
                    "The view shows the version that was undone: take it again.",
                    change.name,
                )

    def forget(
        self,
    ) -> tuple[list[tuple[int | None, torch.Tensor]], list[tuple[torch.nn.Module, object]]]:
        """The exchange stands: no undo leads back to before it.

        Returned is the memory that it freed (of what was written in place, what was staged for it),
        each with its target's position; and what each layer computed with.
        """
        tensors, self._tensors = self._tensors, []
        attributes, self._attributes = self._attributes, []
        freed = [
            (change.index, memory if rebound else change.fresh)
            for change, memory, rebound in tensors
        ]
        return freed, [(attribute.module, value) for attribute, value in attributes]
