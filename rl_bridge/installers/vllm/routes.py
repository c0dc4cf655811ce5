"""Where each tensor of an update goes in a model: learned once from the engine's own loader.

The loader is run on the model's `Skeleton` with tensors that have no memory, and every copy that it
makes is noted: from which part of which tensor to which part of which parameter. What was noted is
then checked once: the loader runs again, into memory, with a different number in every element, and
every part must hold the numbers that the notes say. Nothing is learned from names.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.installers.vllm import parts as vllm_parts
from rl_bridge.installers.vllm.skeleton import EngineParts, Skeleton, Target

__all__ = ["Fill", "LoadPlan", "Route", "View", "learn"]

# Elements that are checked at a time; each takes 8 bytes, where one parameter is not more.
_CHUNK = 32 << 20
_SHOWN = 5
# Marks in the numbered memory: no element of a tensor has these numbers.
_NEVER, _SEEN = -(1 << 30), -(1 << 29)
# What `item()` says of a tensor without memory: the position of the tensor, above this.
_ITEM = float(1 << 52)


@dataclass(frozen=True, slots=True)
class View:
    """A part of a tensor: shape and strides in elements, offset in elements from its start."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Look at that part."""
        return torch.as_strided(
            tensor, self.shape, self.stride, tensor.storage_offset() + self.offset
        )

    def once(self) -> "View":
        """The same part, without the dimensions in which it repeats itself."""
        shape = (1 if step == 0 else dim for dim, step in zip(self.shape, self.stride, strict=True))
        return View(tuple(shape), self.stride, self.offset)

    @property
    def numel(self) -> int:
        """Count its elements."""
        return torch.Size(self.shape).numel()

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in memory as in the row-major order of its shape."""
        expected = 1
        for dim, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if dim != 1 and step != expected:
                return False
            expected *= dim
        return True


@dataclass(frozen=True, slots=True)
class Route:
    """Part of a tensor of the update -> part of a parameter."""

    source: str
    source_view: View
    target: int
    target_view: View
    is_whole: bool
    """Whether the part is the tensor: all of it, in order."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A number -> part of a parameter: padding."""

    value: float
    target: int
    target_view: View


@dataclass(slots=True)
class LoadPlan:
    """What a loader does with the tensors of one layout.

    Attributes:
        targets: the parameters that it writes and those that it does not.
        steps: position of a target -> what is written into it, in the loader's order.
        landed: names of the tensors that go anywhere.

    """

    targets: Sequence[Target]
    steps: dict[int, list[Route | Fill]] = field(default_factory=dict)
    landed: frozenset[str] = frozenset()

    def routes(self) -> Iterator[Route]:
        """Go over all copies."""
        for steps in self.steps.values():
            yield from (step for step in steps if isinstance(step, Route))

    def padding(self, index: int) -> int:
        """Elements of a parameter that its loader fills with a number."""
        steps = self.steps[index]
        return sum(step.target_view.numel for step in steps if isinstance(step, Fill))

    def assemble(
        self, index: int, tensors: Mapping[str, torch.Tensor], memory: torch.Tensor
    ) -> None:
        """Write one parameter into `memory`, which has the target's shape and strides."""
        for step in self.steps[index]:
            part = step.target_view.of(memory)
            if isinstance(step, Fill):
                part.fill_(step.value)
            else:
                part.copy_(step.source_view.of(tensors[step.source]))


def learn(
    model: torch.nn.Module,
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    config: Any,
    *,
    is_optional: Callable[[Target], bool] = lambda _: False,
    parts: EngineParts = vllm_parts,
) -> LoadPlan:
    """Learn what the engine's loader does with tensors of these dtypes and shapes.

    Args:
        model: the serving model; only read.
        kinds: name -> dtype, shape, of an update's tensors.
        config: the engine's configuration.
        is_optional: whether checkpoints may come without a parameter.
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
        recorder = _Recorder(skeleton, sources)
        with recorder:
            _load(skeleton, sources.items())
        plan = recorder.plan()
        _check_complete(plan, is_optional)
        _check(skeleton, plan, kinds)
    return plan


def _load(skeleton: Skeleton, sources: Iterable[tuple[str, torch.Tensor]]) -> None:
    load: Any = getattr(skeleton.model, "load_weights", None)
    if load is None:
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
        load(watched())
    except IncompatibleUpdate:
        raise  # our own: it says what to do
    except Exception as error:
        msg = (
            f"tensor {last[0]!r}, shape {last[1]}, does not fit {type(skeleton.model).__name__}: "
            f"its loader says {type(error).__name__}: {str(error).rstrip('.')}. Publish the model "
            "that the engine serves, under its checkpoint's names."
        )
        raise IncompatibleUpdate(msg) from error


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Notes what is written into the targets."""

    def __init__(self, skeleton: Skeleton, sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        targets = self._targets = skeleton.targets
        self._buffers = {_storage(b): name for name, b in skeleton.model.named_buffers()}
        self._sources = sources
        self._elsewhere = skeleton.elsewhere
        self._index = {_storage(target.meta): i for i, target in enumerate(targets)}
        self._names = {_storage(tensor): name for name, tensor in sources.items()}
        self._steps: dict[int, list[Route | Fill]] = {}

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 - its name
            return self._item(args[0])
        if function._schema.is_mutable:  # noqa: SLF001 - the documented way to ask
            written = args[0]
            index = self._index.get(_storage(written)) if _is_tensor(written) else None
            if index is not None:
                self._note(function, index, args)
            elif _is_tensor(written) and self._is_given(args[1:]):
                self._refuse_buffer(_storage(written))
        return function(*args, **(kwargs or {}))

    def _is_given(self, values: Sequence[Any]) -> bool:
        """Whether what is written comes from the update."""
        return any(
            _storage(value) in self._names
            if _is_tensor(value)
            else isinstance(value, float) and value >= _ITEM
            for value in values
        )

    def _refuse_buffer(self, storage: int) -> None:
        if storage not in self._buffers:
            return  # the loader's own memory, on the way
        msg = (
            f"buffer {self._buffers[storage]!r} is loaded from the checkpoint; buffers cannot be "
            f"made beside the serving layer. Install it by {self._elsewhere}."
        )
        raise IncompatibleUpdate(msg)

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

    def _note(self, function: Any, index: int, args: Any) -> None:
        aten = torch.ops.aten
        target = self._targets[index]
        view = _view(args[0])
        step: Route | Fill
        if function is aten.copy_.default and _storage(args[1]) in self._names:
            name, given = self._names[_storage(args[1])], args[1].expand(args[0].shape)
            whole = self._sources[name]
            source_view = _view(given)
            is_whole = source_view.is_contiguous and given.numel() == whole.numel()
            step = Route(name, source_view, index, view, is_whole)
        elif function is aten.fill_.Scalar and args[1] >= _ITEM:
            name = list(self._sources)[int(args[1] - _ITEM)]
            number = View(view.shape, (0,) * len(view.shape), 0)
            step = Route(name, number, index, view, is_whole=view.numel == 1)
        elif function is aten.fill_.Scalar:
            step = Fill(float(args[1]), index, view)
        elif function is aten.zero_.default:
            step = Fill(0.0, index, view)
        else:
            msg = (
                f"parameter {target.name!r} is computed from the checkpoint ({function}), not "
                f"copied. Install it by {self._elsewhere}."
            )
            raise IncompatibleUpdate(msg)
        self._steps.setdefault(index, []).append(step)

    def plan(self) -> LoadPlan:
        """What was noted."""
        landed = {s.source for steps in self._steps.values() for s in steps if type(s) is Route}
        return LoadPlan(self._targets, self._steps, frozenset(landed))


def _check(
    skeleton: Skeleton,
    plan: LoadPlan,
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> None:
    """Run the loader into memory, a different number in every element; compare with the plan."""
    for chunk in _chunks(plan):
        used = dict.fromkeys(
            step.source for i in chunk for step in plan.steps[i] if isinstance(step, Route)
        )
        shapes = {name: torch.Size(kinds[name][1]) for name in used}
        total = sum(shape.numel() for shape in shapes.values())
        dtype = torch.int32 if total < -_NEVER else torch.int64
        memory = {
            i: torch.full(tuple(plan.targets[i].meta.shape), _NEVER, dtype=dtype, device="cpu")
            for i in chunk
        }
        every = torch.arange(1, total + 1, dtype=dtype, device="cpu")
        parts = torch.split(every, [shape.numel() for shape in shapes.values()])
        numbered = {
            name: part.view(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        with skeleton.holding(memory):
            _load(skeleton, numbered.items())
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
        wanted: Any = (
            int(step.value)
            if isinstance(step, Fill)
            else step.source_view.of(numbered[step.source])
        )
        if not ((part == wanted) | (part == _SEEN)).all():
            what = "padding" if isinstance(step, Fill) else f"tensor {step.source!r}"
            msg = (
                f"parameter {target.name!r}: the loader did not put {what} twice into the same "
                f"place. Install it by {elsewhere}."
            )
            raise IncompatibleUpdate(msg)
        part.fill_(_SEEN)
    unwritten = int((found != _SEEN).sum())
    if unwritten:
        sent = sorted({step.source for step in plan.steps[index] if isinstance(step, Route)})
        msg = (
            f"parameter {target.name!r}: {unwritten} of its {found.numel()} elements are in none "
            f"of the update's tensors; it gets {sent[:_SHOWN]}. Publish the fused parts together "
            "(q, k and v; gate and up; all experts)."
        )
        raise IncompatibleUpdate(msg)


def _check_complete(plan: LoadPlan, is_optional: Callable[[Target], bool]) -> None:
    missing = [
        target.name
        for index, target in enumerate(plan.targets)
        if index not in plan.steps and target.meta.numel() and not is_optional(target)
    ]
    if missing:
        msg = (
            f"the update leaves {len(missing)} parameters of the engine as they are: "
            f"{missing[:_SHOWN]}. Publish the whole model."
        )
        raise IncompatibleUpdate(msg)


def _chunks(plan: LoadPlan) -> Iterable[list[int]]:
    """Positions of targets, some at a time: the check takes memory for each element."""
    chunk: list[int] = []
    size = 0
    for index in plan.steps:
        numel = plan.targets[index].meta.numel()
        if chunk and size + numel > _CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(index)
        size += numel
    if chunk:
        yield chunk


def _is_tensor(item: object) -> bool:
    return isinstance(item, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - meta tensors have no address
    return identity


def _view(tensor: torch.Tensor) -> View:
    return View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
