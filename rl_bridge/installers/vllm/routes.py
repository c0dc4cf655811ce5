"""Where each tensor of an update goes in a model: learned once from the engine's own loader.

The loader is run on the model's `Skeleton` with tensors that have no memory, and every copy that it
makes is noted: from which part of which tensor to which part of which parameter. What was noted is
then checked once: the loader runs again, into memory, with a different number in every element, and
every part must hold the numbers that the notes say. Nothing is learned from names. What the check
takes is known before, and asked for.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.installers.vllm import parts as vllm_parts
from rl_bridge.installers.vllm.load_plan import Fill, Kinds, LoadPlan, Route, View
from rl_bridge.installers.vllm.skeleton import EngineParts, Skeleton, Target
from rl_bridge.installers.vllm.trial import check, checking_nbytes, load

__all__ = ["Admit", "Fill", "Kinds", "LoadPlan", "Route", "View", "learn"]

_SHOWN = 5
# What `item()` says of a tensor without memory: the position of the tensor, above this.
_ITEM = float(1 << 52)

_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


Admit = Callable[[LoadPlan, int], None]
"""Told what was noted and what bytes its check takes, before they are; refuses by raising."""


def learn(
    model: torch.nn.Module,
    kinds: Kinds,
    config: Any,
    *,
    admit: Admit,
    is_optional: Callable[[Target], bool] = lambda _: False,
    allows_computed: bool = False,
    parts: EngineParts = vllm_parts,
) -> LoadPlan:
    """Learn what the engine's loader does with tensors of these dtypes and shapes.

    Args:
        model: the serving model; only read.
        kinds: name -> dtype, shape, of an update's tensors.
        config: the engine's configuration.
        admit: asked once, when the plan is noted and no memory was taken yet.
        is_optional: whether checkpoints may come without a parameter.
        allows_computed: whether parameters may be computed, and buffers loaded: they are noted as
            such, and all else is learned.
        parts: what is to be known of the engine.

    Raises:
        IncompatibleUpdate: the loader refuses a tensor, computes with one, leaves a parameter
            unwritten, or does not do twice the same.

    """
    skeleton = Skeleton(model, parts)
    sources = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (dtype, shape) in kinds.items()
    }
    with parts.config_context(config), torch.no_grad():
        recorder = _Recorder(skeleton, sources, allows_computed=allows_computed)
        with recorder:
            load(skeleton, sources.items())
        plan = recorder.plan()
        _check_complete(plan, is_optional)
        admit(plan, checking_nbytes(plan, kinds))
        check(skeleton, plan, kinds)
    return plan


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Notes what is written into the targets."""

    def __init__(
        self, skeleton: Skeleton, sources: Mapping[str, torch.Tensor], *, allows_computed: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        targets = self._targets = skeleton.targets
        self._buffers = {_storage(b): name for name, b in skeleton.model.named_buffers()}
        self._sources = sources
        self._elsewhere = skeleton.elsewhere
        self._index = {_storage(target.meta): i for i, target in enumerate(targets)}
        self._names = {_storage(tensor): name for name, tensor in sources.items()}
        self._steps: dict[int, list[Route | Fill]] = {}
        self._allows_computed = allows_computed
        self._computed: dict[int, set[View]] = {}
        # Storage -> the tensors of the update that it was made of. (Kept: none is used again.)
        self._made_of = {storage: {name} for storage, name in self._names.items()}
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 - its name
            return self._item(args[0])
        written = list(_written(function, args, kwargs or {}))
        for tensor in written:
            storage = _storage(tensor)
            if storage in self._index:
                self._note(function, self._index[storage], args, tensor)
            elif storage in self._names:
                # Whoever reads it behind that, or shares its memory, does not get the update's.
                msg = (
                    f"tensor {self._names[storage]!r} is changed by the loader ({function}), "
                    "expected copies of it. Start a fresh engine from a checkpoint instead."
                )
                raise IncompatibleUpdate(msg)
        made = function(*args, **(kwargs or {}))
        self._follow((args, kwargs), (written, made))
        return made

    def _follow(self, given: Any, made: Any) -> None:
        """Note of which tensors of the update something was made."""
        names: set[str] = set()
        for value in tree_leaves(given):
            if isinstance(value, torch.Tensor):
                names |= self._made_of.get(_storage(value), set())
            elif self._is_item(value):
                names.add(list(self._sources)[int(value - _ITEM)])
        for tensor in tree_leaves(made) if names else ():
            if isinstance(tensor, torch.Tensor):
                self._made_of.setdefault(_storage(tensor), set()).update(names)
                self._kept.append(tensor)

    def _is_item(self, value: object) -> bool:
        return isinstance(value, float) and 0 <= value - _ITEM < len(self._sources)

    def _item(self, tensor: torch.Tensor) -> float:
        """Tensors of one element are often handed over as a number."""
        name = self._names.get(_storage(tensor))
        if name is None:
            msg = (
                "the loader reads a number that it computed from the checkpoint. "
                f"Install it by {self._elsewhere}."
            )
            raise IncompatibleUpdate(msg)
        return _ITEM + list(self._sources).index(name)

    def _note(self, function: Any, index: int, args: Any, written: torch.Tensor) -> None:
        target = self._targets[index]
        step = self._step(function, index, args) if function in (_COPY, *_FILLS) else None
        if step is not None:
            self._steps.setdefault(index, []).append(step)
        elif self._allows_computed:
            self._computed.setdefault(index, set()).add(_view(written))
        else:
            msg = (
                f"parameter {target.name!r} is computed from the checkpoint ({function}), not "
                f"copied. Install it by {self._elsewhere}."
            )
            raise IncompatibleUpdate(msg)

    def _step(self, function: Any, index: int, args: Any) -> Route | Fill | None:
        """What is written into a target; None if it is no copy."""
        view = _view(args[0])
        if args[0].dtype != self._targets[index].meta.dtype:
            return None  # a view of its bytes as other numbers
        if function is not _COPY:
            value = args[1] if len(args) > 1 else 0.0
            if not self._is_item(value):
                return Fill(float(value), index, view)
            name = list(self._sources)[int(value - _ITEM)]
            number = View(view.shape, (0,) * len(view.shape), 0)
            return Route(name, number, index, view, is_whole=view.numel == 1)
        source = self._names.get(_storage(args[1]))
        if source is None or args[1].dtype != self._sources[source].dtype:
            return None
        given = args[1].expand(args[0].shape)
        source_view = _view(given)
        is_whole = source_view.is_contiguous and given.numel() == self._sources[source].numel()
        return Route(source, source_view, index, view, is_whole)

    def plan(self) -> LoadPlan:
        """What was noted.

        Raises:
            IncompatibleUpdate: a buffer is loaded, or a part of what is computed is left out.

        """
        buffers = {
            storage: name for storage, name in self._buffers.items() if storage in self._made_of
        }
        if buffers and not self._allows_computed:
            msg = (
                f"buffer {min(buffers.values())!r} is loaded from the checkpoint; buffers cannot "
                f"be made beside the serving layer. Install it by {self._elsewhere}."
            )
            raise IncompatibleUpdate(msg)
        for index, views in self._computed.items():
            views.update(step.target_view for step in self._steps.pop(index, ()))
            target = self._targets[index]
            written = sum(view.numel for view in views)
            if written < target.meta.numel():
                msg = (
                    f"parameter {target.name!r}: the update writes {written} of its "
                    f"{target.meta.numel()} elements. Publish the fused parts together (q, k and "
                    "v; gate and up; all experts)."
                )
                raise IncompatibleUpdate(msg)
        made = [*buffers, *(_storage(self._targets[index].meta) for index in self._computed)]
        landed = {name for storage in made for name in self._made_of.get(storage, ())}
        plan = LoadPlan(
            self._targets,
            self._steps,
            computed=frozenset(self._computed),
            buffers=frozenset(buffers.values()),
            mixed=frozenset(landed),
        )
        plan.landed = frozenset(landed.union(route.source for route in plan.routes()))
        return plan


def _check_complete(plan: LoadPlan, is_optional: Callable[[Target], bool]) -> None:
    missing = [
        target.name
        for index, target in enumerate(plan.targets)
        if not (index in plan.steps or index in plan.computed)
        and target.meta.numel()
        and not is_optional(target)
    ]
    if missing:
        msg = (
            f"the update leaves {len(missing)} parameters of the engine as they are: "
            f"{missing[:_SHOWN]}. Publish the whole model."
        )
        raise IncompatibleUpdate(msg)


def _written(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a function of torch's writes to, also as ``out=`` or in a list."""
    schema = function._schema  # noqa: SLF001 - the documented way to ask
    if not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            several = given if isinstance(given, list | tuple) else [given]
            yield from (one for one in several if isinstance(one, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - meta tensors have no address
    return identity


def _view(tensor: torch.Tensor) -> View:
    return View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
