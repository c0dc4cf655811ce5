"""The next version of a model's parameters, made beside the serving ones.

Everything that takes time or may fail happens here, on memory that no request reads: parameters
are assembled, and processed by vLLM's own code on a stand-in of each layer. What is left for the
install is a list of exchanges.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rl_bridge.engines.canary import Canary
from rl_bridge.engines.load_plan import LoadPlan, Route
from rl_bridge.engines.skeleton import Target, User
from rl_bridge.engines.vllm.compat import RELOAD, config_context, repacks
from rl_bridge.engines.vllm.expert_canary import check_experts
from rl_bridge.errors import IncompatibleUpdate, ProofFailed

__all__ = [
    "LEARNING",
    "STAGING",
    "Assembled",
    "AttributeChange",
    "Given",
    "Spares",
    "Staged",
    "TensorChange",
    "available_nbytes",
    "check_budget",
    "checked_budget",
    "processed",
    "stage",
]

# ---- Memory that updates pass on to each other, so that staging the next one touches no page
# anew.
#
# What the version before the active one had is what the next one gets: parameters, packed
# products, and one buffer for what is assembled only to be packed.


class Spares:
    """Memory of the version before the active one, for the next: no page is touched anew."""

    def __init__(self) -> None:
        """Begin with none."""
        self._tensors: dict[int, torch.Tensor] = {}
        self._packs: dict[int, list[object]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, index: int, target: Target) -> torch.Tensor:
        """Memory for a parameter that stays."""
        spare = self._tensors.pop(index, None)
        return target.empty() if spare is None else spare

    def keep(self, index: int, tensor: torch.Tensor) -> None:
        """Keep what a parameter no longer needs."""
        self._tensors[index] = tensor

    def drop(self, is_looked_at: Callable[[torch.Tensor], bool]) -> None:
        """Leave to others what they look at: views of a version that was undone keep its bytes."""
        self._tensors = {i: kept for i, kept in self._tensors.items() if not is_looked_at(kept)}

    def keep_packs(self, packs: Iterable[tuple[torch.nn.Module, object]]) -> None:
        """Keep what layers computed with, until each gets its next: then the allocator has room.

        All of them freed at once would go back to the system, and be touched anew page by page.
        """
        self._packs = {}
        for module, value in packs:
            self._packs.setdefault(id(module), []).append(value)

    def make_room(self, module: torch.nn.Module) -> None:
        """A layer gets its next pack now."""
        self._packs.pop(id(module), None)

    def scratch(self, target: Target) -> torch.Tensor:
        """Memory for a parameter that is packed at once and not kept; valid until the next call."""
        meta = target.meta
        nbytes = meta.numel() * meta.element_size()
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        flat = self._scratch[:nbytes].view(meta.dtype)
        return torch.as_strided(flat, tuple(meta.shape), meta.stride())

    def _has_pack(self, target: Target) -> bool:
        """Whether a parameter needs no room for a pack: there is some, or it gets none."""
        # (Heads and embeddings keep their weight beside the pack.)
        packing = [
            user.module
            for user in target.users
            if target.is_consumed or (user.leaf == "weight" and "cpu_linear" in vars(user.module))
        ]
        return all(id(layer) in self._packs for layer in packing)

    def missing_nbytes(self, plan: LoadPlan) -> int:
        """Bytes that the next update takes beyond what is here: parameters, packs, scratch."""
        kept = packed = scratch = 0
        experts: dict[int, int] = {}
        for index in plan.steps:
            target = plan.targets[index]
            nbytes = target.meta.numel() * target.meta.element_size()
            packed += 0 if self._has_pack(target) else nbytes
            if target.is_consumed:
                scratch = max(scratch, nbytes)
            elif repacks(layer := target.users[0].module):
                # Assembled, and packed twice to be compared; what stays is one of the packs.
                kept += nbytes
                experts[id(layer)] = experts.get(id(layer), 0) + 2 * nbytes
            elif index not in self._tensors:
                kept += nbytes
        scratch = max(0, scratch - self._scratch.numel())
        return kept + packed + scratch + max(experts.values(), default=0)


# ---- the rest builds on the parts above

# What a stand-in has of its own, so that processing it cannot reach the serving layer.
_OWN = frozenset(
    {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "quant_method"}
)


@dataclass(slots=True, eq=False)
class TensorChange:
    """A serving parameter, and the memory that it gets.

    Attributes:
        name: full name.
        live: the parameter object, which stays.
        fresh: its next content.
        index: position of the target that it is; None where processing made it.

    """

    name: str
    live: torch.Tensor
    fresh: torch.Tensor
    index: int | None


@dataclass(slots=True, eq=False)
class AttributeChange:
    """What a layer computes with instead of a parameter: a packed product, for instance."""

    path: str
    module: torch.nn.Module
    key: str
    value: object


@dataclass(slots=True, eq=False)
class Assembled:
    """One parameter as its loader would have filled it.

    Attributes:
        index: position of the target.
        tensor: the memory.
        borrowed: whether that is the imported tensor itself: nothing was copied.
        replaced: whether processing made something else of it, and this memory goes.

    """

    index: int
    tensor: torch.Tensor
    borrowed: bool
    replaced: bool = False


@dataclass(slots=True)
class Staged:
    """Everything that an install exchanges, and what proves it.

    Attributes:
        tensors: parameters and their next content.
        attributes: what layers compute with.
        canaries: one for each packed product.
        compared: layers of which all that was derived is compared elsewhere.

    """

    tensors: list[TensorChange] = field(default_factory=list)
    attributes: list[AttributeChange] = field(default_factory=list)
    canaries: list[Canary] = field(default_factory=list)
    compared: list[torch.nn.Module] = field(default_factory=list)


def stage(
    plan: LoadPlan,
    tensors: Mapping[str, torch.Tensor],
    spares: Spares,
    vllm_config: Any,
    staged: Staged,
) -> Iterator[Assembled]:
    """Make the next version, one parameter after another; the serving model is only read.

    Yields:
        Each parameter when it is assembled and before it is processed: the one moment at which the
        bytes of a packed parameter can be read. Once more what processing replaced by tensors of
        its own (the weights of packed experts): what was read to make them.

    Raises:
        IncompatibleUpdate: vLLM's processing makes something else of it than the engine has.

    """
    layers: dict[int, list[int]] = {}
    for index in plan.steps:
        for user in plan.targets[index].users:
            layers.setdefault(id(user.module), []).append(index)
    done: set[int] = set()
    fresh: dict[int, torch.Tensor] = {}
    for index in plan.steps:
        if index in done:
            continue
        # Together: all parameters of one layer (weight and bias, experts) are processed at once.
        group = _closure(plan, index, layers)
        done.update(group)
        consumed = [i for i in group if plan.targets[i].is_consumed]
        for i in group:
            assembled = _assemble(plan, i, tensors, spares, alone=len(consumed) == 1)
            fresh[i] = assembled.tensor
            yield assembled
        _process_group(plan, {i: fresh[i] for i in group}, spares, vllm_config, staged)
        for i in consumed:
            del fresh[i]
        kept = {change.index for change in staged.tensors}
        for i in (i for i in group if i in fresh and i not in kept):
            yield Assembled(i, fresh.pop(i), borrowed=False, replaced=True)


def _process_group(
    plan: LoadPlan,
    fresh: Mapping[int, torch.Tensor],
    spares: Spares,
    vllm_config: Any,
    staged: Staged,
) -> None:
    users = {id(user.module): user for i in fresh for user in plan.targets[i].users}
    made: dict[object, _Made] = {}
    for user in users.values():
        given = _given(plan, user.module, fresh)
        # Tied layers compute with the same weight: one pack serves them all.
        kind = type(getattr(user.module, "quant_method", None))
        key = (kind, frozenset((leaf, i) for leaf, (i, _, _) in given.items()))
        if key in made:
            _share(made[key], user, staged)
            continue
        attributes, canaries = len(staged.attributes), len(staged.canaries)
        for other in users.values():
            spares.make_room(other.module)
        with config_context(vllm_config), torch.no_grad():
            _process(user, given, staged)
        made[key] = (staged.attributes[attributes:], staged.canaries[canaries:])


Given = Mapping[str, tuple[int, torch.Tensor, Target]]
"""What a layer's parameters are made of: leaf -> position of the target, memory, target."""

_Made = tuple[list[AttributeChange], list[Canary]]


def _given(plan: LoadPlan, module: torch.nn.Module, fresh: Mapping[int, torch.Tensor]) -> Given:
    return {
        user.leaf: (index, memory, plan.targets[index])
        for index, memory in fresh.items()
        for user in plan.targets[index].users
        if user.module is module
    }


def _share(made: _Made, user: User, staged: Staged) -> None:
    attributes, canaries = made
    path, module = user.path, user.module
    staged.attributes += [replace(change, path=path, module=module) for change in attributes]
    staged.canaries += [replace(canary, path=path, module=module) for canary in canaries]


def _closure(plan: LoadPlan, index: int, layers: Mapping[int, list[int]]) -> list[int]:
    group = [index]
    for i in group:
        for user in plan.targets[i].users:
            group += [other for other in layers[id(user.module)] if other not in group]
    return group


def _assemble(
    plan: LoadPlan,
    index: int,
    tensors: Mapping[str, torch.Tensor],
    spares: Spares,
    *,
    alone: bool,
) -> Assembled:
    target, steps = plan.targets[index], plan.steps[index]
    if target.is_consumed and len(steps) == 1:
        step = steps[0]
        if isinstance(step, Route) and step.is_whole:
            tensor = tensors[step.source]
            if tensor.dtype == target.meta.dtype and tensor.shape == target.meta.shape:
                return Assembled(index, tensor, borrowed=True)
    if target.is_consumed:
        memory = spares.scratch(target) if alone else target.empty()
    else:
        memory = spares.take(index, target)
    plan.assemble(index, tensors, memory)
    return Assembled(index, memory, borrowed=False)


def _process(user: User, given: Given, staged: Staged) -> None:
    """Let vLLM process a stand-in that has the fresh parameters, and note what came of it."""
    module = user.module
    live: Mapping[str, torch.Tensor | None] = module._parameters  # noqa: SLF001 - torch has no other way in
    state = processed(module, given)
    _check_derived(user, state)
    repacked = {}
    for leaf, fresh in state["_parameters"].items():
        if fresh is not None and fresh is not live.get(leaf):
            _note_tensor(User(user.path, module, leaf), fresh, given, staged)
            if leaf in given and fresh.numel() and not _is_kept(given[leaf][1], fresh):
                repacked[leaf] = fresh
    if repacked:
        check_experts(user.path, state, {leaf: memory for leaf, (_, memory, _) in given.items()})
        _check_repacked(user, repacked, processed(module, given)["_parameters"])
    for key, value in state.items():
        if key not in _OWN and vars(module).get(key, _OWN) is not value:
            staged.attributes.append(AttributeChange(user.path, module, key, value))
            if key == "cpu_linear" and "weight" in given:
                weight = state["_parameters"]["weight"]
                plain = weight if weight.numel() else given["weight"][1]
                staged.canaries.append(Canary.make(user.path, module, value, plain))


def processed(module: torch.nn.Module, given: Given) -> dict[str, Any]:
    """State of a stand-in for a layer, with fresh parameters, after vLLM's processing."""
    stand_in: torch.nn.Module = object.__new__(type(module))
    state: dict[str, Any] = vars(stand_in)
    state.update(vars(module))
    for own in _OWN - {"quant_method"}:
        state[own] = copy.copy(state[own])
    # Objects of their own: processing may give them other memory.
    state["_parameters"].update(
        {leaf: target.like(memory) for leaf, (_, memory, target) in given.items()}
    )
    method: Any = getattr(module, "quant_method", None)
    if hasattr(method, "process_weights_after_loading"):
        state["quant_method"] = method = copy.copy(method)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # else it takes the packed weights for the unpacked ones
        method.process_weights_after_loading(stand_in)
    return state


def _check_derived(user: User, state: Mapping[str, Any]) -> None:
    """Refuse layers whose processing makes more than parameters and attributes."""
    for kind in ("_buffers", "_modules"):
        live = vars(user.module)[kind]
        derived = [name for name, made in state[kind].items() if live.get(name) is not made]
        if derived:
            msg = (
                f"layer {user.path!r}: vLLM derives {derived} from its weights, which cannot be "
                f"made beside the serving layer. Install it by {RELOAD}."
            )
            raise IncompatibleUpdate(msg)


def _check_repacked(
    user: User, first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> None:
    """Compare two packs of one weight: what comes out wrong once does not come out so twice.

    A single wrong number may be lost in the rounding of products; but packed experts can be read.
    """
    for leaf, tensor in first.items():
        if not torch.equal(_bytes(tensor), _bytes(second[leaf])):
            msg = (
                f"parameter '{user.path}.{leaf}': vLLM packs the same weight into different bytes. "
                "The engine was not touched; publish again, and look at the machine's memory if it "
                "happens again."
            )
            raise ProofFailed(msg)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.data_ptr() == other.data_ptr() and tensor.dtype == other.dtype


def _is_kept(tensor: torch.Tensor, fresh: torch.Tensor) -> bool:
    """Whether processing left a tensor as it was, or only in another dtype."""
    if tensor.dtype == fresh.dtype or tensor.shape != fresh.shape:
        return _is_same(tensor, fresh)
    return torch.equal(tensor.to(fresh.dtype), fresh)


def _note_tensor(user: User, fresh: torch.Tensor, given: Given, staged: Staged) -> None:
    live: torch.Tensor | None = user.module._parameters.get(user.leaf)  # noqa: SLF001 - as above
    if live is None or (
        live.shape != fresh.shape or live.dtype != fresh.dtype or live.stride() != fresh.stride()
    ):
        had = "none" if live is None else _kind(live)
        msg = (
            f"parameter {user.name}: vLLM makes {_kind(fresh)} of it, the engine has {had}. "
            f"Install it by {RELOAD}."
        )
        raise IncompatibleUpdate(msg)
    if not fresh.numel() or any(change.live is live for change in staged.tensors):
        return  # packed away; or tied, and noted with its other user
    index: int | None = None
    if user.leaf in given and _is_same(given[user.leaf][1], fresh):
        index = given[user.leaf][0]  # else it is what processing made of what was assembled
    staged.tensors.append(TensorChange(user.name, live, fresh.detach(), index))


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# ---- Whether there is memory to stage an update, asked before a byte of it is.

STAGING = "staging it beside the serving one"
LEARNING = "trying the engine's loader on numbers, before its first update"


def available_nbytes() -> int | None:
    """Bytes that this process can still get on the host: the machine's, or its control group's."""
    found = [
        int(line.split()[1]) * 1024
        for line in _lines(Path("/proc/meminfo"))
        if line.startswith("MemAvailable:")
    ]
    limit, used = (_lines(Path("/sys/fs/cgroup") / f"memory.{name}") for name in ("max", "current"))
    if limit and used and limit[0].strip() != "max":
        # What files left in the cache counts as used, and is given back when it is needed.
        cached = sum(
            int(line.split()[1])
            for line in _lines(Path("/sys/fs/cgroup/memory.stat"))
            if line.split()[0] in {"inactive_file", "active_file"}
        )
        found.append(int(limit[0]) - int(used[0]) + cached)
    return min(found, default=None)


def checked_budget(memory_budget_nbytes: int | None) -> int | None:
    """The budget as it was given; None stands for what the machine has to give.

    Raises:
        TypeError: it is no int.
        ValueError: it is negative.

    """
    if not isinstance(memory_budget_nbytes, int | None):
        raise TypeError(f"memory_budget_nbytes={memory_budget_nbytes!r}: expected an int or None.")
    if memory_budget_nbytes is not None and memory_budget_nbytes < 0:
        raise ValueError(f"memory_budget_nbytes={memory_budget_nbytes}: expected 0 or more.")
    return memory_budget_nbytes


def check_budget(needed: int, budget: int | None, version: int, what: str = STAGING) -> None:
    """Refuse what does not fit.

    Raises:
        IncompatibleUpdate: `what` takes more than `budget`, or than there is.

    """
    given = available_nbytes() if budget is None else budget
    if given is not None and needed > given:
        whose = "the machine has" if budget is None else "memory_budget_nbytes allows"
        msg = (
            f"version {version}: {what} takes {needed} bytes more, "
            f"{whose} {given}. Free memory, or give the engine's caches less."
        )
        raise IncompatibleUpdate(msg)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []  # not Linux, or no control group: then that one does not bound us
