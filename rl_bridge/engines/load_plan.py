"""Where each tensor of an update goes in a model: learned once from the engine's own loader.

The loader runs on the model's `Skeleton` with tensors that have no memory, and every copy that it
makes is noted: from which part of which tensor to which part of which parameter. What was noted is
then checked once: the loader runs again, into memory, with a different number in every element, and
every part must hold the numbers that the notes say. Nothing is learned from names.

The check takes memory for one parameter at a time, or for some that are small; how much is known
before, and asked for. Where there are few elements, each has its number in four bytes. Where there
are many, their numbers are copied one digit after another, in one byte: source and copy then take
no more than the weights in two bytes do, however large a vocabulary is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_bridge.engines.skeleton import EngineCompat, Skeleton, Target
from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.installers.engine_memory import prefix_hint
from rl_bridge.manifest.coverage import Box, box_of
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import row_major_stride

_SHOWN = 5
# A tensor without memory has no number for `item()`. It answers with this and its own position, so
# that a loader that fills a parameter with that number shows which tensor it took: _ITEM + 3.0 is
# the tensor at position 3.
_ITEM = float(1 << 52)
_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)

SMALL_NBYTES = 16 << 20
"""Memory that nobody is asked for: numbers of four bytes stay below it."""
# Marks: no digit is negative.
_NEVER, _SEEN = -128, -127
# Elements that are looked at in one go: what that takes stays in the processor's cache.
_SLICE = 1 << 17
# Elements that are numbered in one go, a power of two: their numbers differ in these low bits.
_TILE = 1 << 14
# Until each digit depends on all bits.
_ROUNDS = 3

Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name -> dtype, shape, of an update's tensors."""


def kinds_of(manifest: WeightUpdateManifest) -> Kinds:
    """Dtype and shape of each tensor of an update."""
    table = manifest.table
    return {
        name: (getattr(torch, table.dtypes[row]), table.shapes[row])
        for name, row in table.rows.items()
    }


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

    def is_all_of(self, tensor: torch.Tensor) -> bool:
        """Whether that part is the tensor as it lies."""
        return not self.offset and (self.shape, self.stride) == (tensor.shape, tensor.stride())

    def once(self) -> "View":
        """The same part, without the dimensions in which it repeats itself."""
        shape = (1 if step == 0 else dim for dim, step in zip(self.shape, self.stride, strict=True))
        return View(tuple(shape), self.stride, self.offset)

    def box(self, shape: Sequence[int]) -> Box:
        """The smallest box that holds this part of a tensor of `shape`.

        All of the tensor, if the part goes on in the next row where a row ends.
        """
        strides = row_major_stride(shape)
        low = _digits(self.offset, strides)
        last = list(low)
        for size, step in zip(self.shape, self.stride, strict=True):
            for dim, digit in enumerate(_digits(step, strides)):
                last[dim] += (size - 1) * digit
        if any(index >= size for index, size in zip(last, shape, strict=True)):
            return box_of((0,) * len(shape), shape)
        return tuple(low), tuple(index + 1 for index in last)

    def within(self, box: Box, shape: Sequence[int]) -> "View":
        """The same elements as a part of what `box`, which holds them, cuts out of the tensor."""
        strides = row_major_stride(shape)
        inner = row_major_stride([b - a for a, b in zip(*box, strict=True)])

        def moved(offset: int, low: Sequence[int]) -> int:
            digits = _digits(offset, strides)
            return sum((d - a) * s for d, a, s in zip(digits, low, inner, strict=True))

        steps = tuple(moved(step, (0,) * len(shape)) for step in self.stride)
        return View(self.shape, steps, moved(self.offset, box[0]))

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


def _digits(offset: int, strides: Sequence[int]) -> list[int]:
    """How far an offset in elements leads in each dimension of a tensor that lies in rows."""
    digits = []
    for stride in strides:
        digit, offset = divmod(offset, stride)
        digits.append(digit)
    return digits


@dataclass(frozen=True, slots=True, eq=False)
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
    source: str = ""
    """The tensor that was loaded when it was written: without it, it is not."""


class Copy(NamedTuple):
    """Bytes of a tensor of the update that lie in a parameter as they lie there."""

    source: str
    source_offset: int
    target_offset: int
    nbytes: int


@dataclass
class LoadPlan:
    """The steps that a loader takes with the tensors of one layout.

    The plan's properties are computed once, when the first update asks for them: later updates of
    the layout, which may have tens of thousands of tensors, use them again.
    """

    targets: Sequence[Target]  # the parameters that it writes and those that it does not
    # Position of a target -> what is written into it, in the loader's order.
    steps: dict[int, list[Route | Fill]] = field(default_factory=dict)
    # Names of the tensors that go anywhere, if only to other ranks.
    taken: frozenset[str] = frozenset()
    # Positions of the targets that the loader computes; they have no steps.
    computed: frozenset[int] = frozenset()
    buffers: frozenset[str] = frozenset()  # full names of the buffers that it loads
    # Names of the tensors of which computed targets and buffers are made.
    mixed: frozenset[str] = frozenset()
    is_followed: bool = True  # else nothing is known of what the loader does
    # Dtypes of the update's tensors, by name.
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    @cached_property
    def routes(self) -> Sequence[Route]:
        """All copies, in the loader's order within each target."""
        return [route for routes in self.routes_to.values() for route in routes]

    @cached_property
    def routes_to(self) -> dict[int, list[Route]]:
        """Position of a target -> the copies into it."""
        return {
            index: [step for step in steps if isinstance(step, Route)]
            for index, steps in self.steps.items()
        }

    @cached_property
    def fills(self) -> list[Fill]:
        """All numbers that are written as padding."""
        return [step for steps in self.steps.values() for step in steps if isinstance(step, Fill)]

    @cached_property
    def _views(self) -> dict[str, dict[View | None, None]]:
        """Name -> what is read of that tensor; None: all of it."""
        views: dict[str, dict[View | None, None]] = {}
        for route in self.routes:
            read = None if route.is_whole else route.source_view.once()
            views.setdefault(route.source, {})[read] = None
        return views

    def parts(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a tensor of the update that the plan reads: `tensor` itself, or views."""
        if name in self.mixed or not self.is_followed:
            return [tensor]
        views = self._views.get(name, ())
        return [tensor if view is None else view.of(tensor) for view in views]

    @cached_property
    def rivals(self) -> list[tuple[Route, str]]:
        """Copies to the very place of another tensor's, and the name of that one."""
        first: dict[tuple[int, View], str] = {}
        for route in self.routes:
            first.setdefault((route.target, route.target_view), route.source)
        others = ((route, first[route.target, route.target_view]) for route in self.routes)
        return [(route, other) for route, other in others if route.source != other]

    @cached_property
    def lost(self) -> list[str]:
        """Tensors of the update that the loader puts nowhere."""
        return sorted(self.dtypes.keys() - self.taken)

    @cached_property
    def tied(self) -> list[str]:
        """Tensors that go only to parameters which have several places in the model."""
        routes = self.routes  # (of ranks, each has only its part)
        alone = {route.source for route in routes if not self.targets[route.target].is_tied}
        return sorted({route.source for route in routes} - alone)

    @cached_property
    def casts(self) -> dict[tuple[str, torch.dtype], None]:
        """Tensors that are loaded in another dtype, and that dtype."""
        pairs = ((route.source, self.targets[route.target].meta.dtype) for route in self.routes)
        return dict.fromkeys(pair for pair in pairs if self.dtypes[pair[0]] != pair[1])

    @cached_property
    def untold(self) -> list[tuple[Route, set[torch.dtype]]]:
        """Copies of which the update's digests say nothing, in the dtypes in which they are read.

        A parameter is read as it is assembled, and as it serves.
        """
        untold = []
        for route in self.routes:
            target = self.targets[route.target]
            dtypes = {target.meta.dtype, target.kept_dtype or target.meta.dtype}
            if not route.is_whole or dtypes != {self.dtypes[route.source]}:
                untold.append((route, dtypes))
        return untold

    @cached_property
    def copies(self) -> dict[int, list[Copy]]:
        """Position of a target -> its copies, if it takes nothing but bytes as they lie."""
        found = {index: self._copies_of(index) for index in self.steps}
        return {index: copies for index, copies in found.items() if copies is not None}

    def _copies_of(self, index: int) -> list[Copy] | None:
        copies, meta = [], self.targets[index].meta
        item = meta.element_size()
        for step in self.steps[index]:
            if not isinstance(step, Route) or self.dtypes[step.source] != meta.dtype:
                return None
            of, to = step.source_view, step.target_view
            if not (of.is_contiguous and to.is_contiguous):
                return None
            copies.append(Copy(step.source, of.offset * item, to.offset * item, to.numel * item))
        copies.sort(key=lambda copy: copy.target_offset)
        for copy, following in pairwise(copies):
            if copy.target_offset + copy.nbytes > following.target_offset:
                return None  # what comes last counts
        return copies

    def unfollowed(self) -> frozenset[str]:
        """Full names of the parameters and buffers whose content the steps do not tell."""
        users = (user for index in self.computed for user in self.targets[index].users)
        return self.buffers.union(user.name for user in users)

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
    kinds: Kinds,
    compat: EngineCompat,
    *,
    admit: Callable[[LoadPlan, int], None],
    is_optional: Callable[[Target], bool] = lambda _: False,
    allows_computed: bool = False,
) -> LoadPlan:
    """Learn what the engine's loader does with tensors of these dtypes and shapes.

    Args:
        model: the serving model; only read.
        kinds: name -> dtype, shape, of an update's tensors.
        compat: what is to be known of the engine.
        admit: asked once, when the plan is noted and no memory was taken yet: with the plan, and
            the bytes that checking it takes. It refuses by raising.
        is_optional: whether checkpoints may come without a parameter.
        allows_computed: whether parameters may be computed, and buffers loaded: they are noted as
            such, and all else is learned.

    Raises:
        IncompatibleUpdate: the loader refuses a tensor, computes with one, leaves a parameter
            unwritten, or does not do twice the same.

    """
    skeleton = Skeleton(model, compat)
    sources = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (dtype, shape) in kinds.items()
    }
    with compat.context(), torch.no_grad():
        recorder = _Recorder(skeleton, sources, allows_computed=allows_computed)
        with recorder:
            _load(skeleton, recorder.given())
        plan = recorder.plan()
        _check_complete(plan, is_optional)
        admit(plan, _checking_nbytes(plan, kinds))
        for chunk in _chunks(plan, kinds):
            _check(skeleton, plan, kinds, chunk)  # (its memory is gone before the next one's)
    return plan


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Notes what is written into the targets."""

    def __init__(
        self, skeleton: Skeleton, sources: Mapping[str, torch.Tensor], *, allows_computed: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        targets = self._targets = skeleton.targets
        self._buffers = {storage_of(b): name for name, b in skeleton.model.named_buffers()}
        self._sources = sources
        self._elsewhere = skeleton.elsewhere
        self._index = {storage_of(target.meta): i for i, target in enumerate(targets)}
        self._names = {storage_of(tensor): name for name, tensor in sources.items()}
        self._steps: dict[int, list[Route | Fill]] = {}
        self._allows_computed = allows_computed
        self._computed: dict[int, set[View]] = {}
        # Storage -> the tensors of the update that it was made of. (Kept: none is used again.)
        self._made_of = {storage: {name} for storage, name in self._names.items()}
        self._kept: list[torch.Tensor] = []
        # Tensors of which this rank's part is nothing but padding.
        self._given = ""
        self._padded: set[str] = set()

    def given(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the update, as the loader takes them."""
        for self._given, tensor in self._sources.items():  # noqa: B020 - told as it goes
            yield self._given, tensor

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 - its name
            return self._item(args[0])
        written = list(_written(function, args, kwargs or {}))
        for tensor in written:
            storage = storage_of(tensor)
            if storage in self._index:
                self._note(function, self._index[storage], args, tensor)
            elif storage in self._names:
                # Whoever reads it after that, or shares its memory, does not get the update's.
                raise IncompatibleUpdate(
                    f"tensor {self._names[storage]!r} is changed by the loader ({function}), "
                    "expected copies of it. Start a fresh engine from a checkpoint instead."
                )
        made = function(*args, **(kwargs or {}))
        self._follow((args, kwargs), (written, made))
        return made

    def _follow(self, given: Any, made: Any) -> None:
        """Note of which tensors of the update something was made."""
        names: set[str] = set()
        for value in tree_leaves(given):
            if isinstance(value, torch.Tensor):
                names |= self._made_of.get(storage_of(value), set())
            elif self._is_item(value):
                names.add(list(self._sources)[int(value - _ITEM)])
        for tensor in tree_leaves(made) if names else ():
            if isinstance(tensor, torch.Tensor):
                self._made_of.setdefault(storage_of(tensor), set()).update(names)
                self._kept.append(tensor)

    def _is_item(self, value: object) -> bool:
        return isinstance(value, float) and 0 <= value - _ITEM < len(self._sources)

    def _item(self, tensor: torch.Tensor) -> float:
        """Tensors of one element are often handed over as a number."""
        name = self._names.get(storage_of(tensor))
        if name is None:
            raise IncompatibleUpdate(
                "the loader reads a number that it computed from the checkpoint. "
                f"Install it by {self._elsewhere}."
            )
        return _ITEM + list(self._sources).index(name)

    def _note(self, function: Any, index: int, args: Any, written: torch.Tensor) -> None:
        target = self._targets[index]
        if function is _COPY and not written.numel():
            # Where a rank's part of a tensor is all padding, SGLang copies nothing of nothing.
            self._padded.add(self._given)
            return
        step = self._step(function, index, args) if function in (_COPY, *_FILLS) else None
        if step is not None:
            self._steps.setdefault(index, []).append(step)
        elif self._allows_computed:
            self._computed.setdefault(index, set()).add(_view(written))
        else:
            raise IncompatibleUpdate(
                f"parameter {target.name!r} is computed from the checkpoint ({function}), not "
                f"copied. Install it by {self._elsewhere}."
            )

    def _step(self, function: Any, index: int, args: Any) -> Route | Fill | None:
        """What is written into a target; None if it is no copy."""
        view = _view(args[0])
        if args[0].dtype != self._targets[index].meta.dtype:
            return None  # a view of its bytes as other numbers
        if function is not _COPY:
            value = args[1] if len(args) > 1 else 0.0
            if not self._is_item(value):
                return Fill(float(value), index, view, self._given)
            name = list(self._sources)[int(value - _ITEM)]
            number = View(view.shape, (0,) * len(view.shape), 0)
            return Route(name, number, index, view, is_whole=view.numel == 1)
        source = self._names.get(storage_of(args[1]))
        if source is None or args[1].dtype != self._sources[source].dtype:
            return None
        given = args[1].expand(args[0].shape)
        source_view = _view(given)
        is_whole = source_view.is_contiguous and given.numel() == self._sources[source].numel()
        return Route(source, source_view, index, view, is_whole)

    def plan(self) -> LoadPlan:
        """What was noted."""
        buffers = {
            storage: name for storage, name in self._buffers.items() if storage in self._made_of
        }
        if buffers and not self._allows_computed:
            raise IncompatibleUpdate(
                f"buffer {min(buffers.values())!r} is loaded from the checkpoint; buffers cannot "
                f"be made beside the serving layer. Install it by {self._elsewhere}."
            )
        for index, views in self._computed.items():
            views.update(step.target_view for step in self._steps.pop(index, ()))
            target = self._targets[index]
            written = sum(view.numel for view in views)
            if written < target.meta.numel():
                raise IncompatibleUpdate(
                    f"parameter {target.name!r}: the update writes {written} of its "
                    f"{target.meta.numel()} elements. Publish the fused parts together (q, k and "
                    "v; gate and up; all experts)."
                )
        made = [*buffers, *(storage_of(self._targets[index].meta) for index in self._computed)]
        taken = {name for storage in made for name in self._made_of.get(storage, ())}
        plan = LoadPlan(
            self._targets,
            self._steps,
            computed=frozenset(self._computed),
            buffers=frozenset(buffers.values()),
            mixed=frozenset(taken),
            dtypes={name: tensor.dtype for name, tensor in self._sources.items()},
        )
        sources = {route.source for route in plan.routes}
        plan.taken = frozenset(taken | sources | self._padded)
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
        raise IncompatibleUpdate(
            f"the update leaves {len(missing)} parameters of the engine as they are: "
            f"{missing[:_SHOWN]}. Publish the whole model."
        )


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


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the memory that a tensor and its views look at."""
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - meta tensors have no address
    return identity


def _view(tensor: torch.Tensor) -> View:
    return View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


# ---- the check ----------------------------------------------------------------------------------


def _load(skeleton: Skeleton, sources: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Run the engine's loader on the skeleton."""
    method: Any = getattr(skeleton.model, "load_weights", None)
    if method is None:
        kind = type(skeleton.model).__name__
        raise IncompatibleUpdate(f"{kind} has no load_weights. Install it by {skeleton.elsewhere}.")
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
        if hint := prefix_hint([last[0]]):
            msg += f" {hint}"
        raise IncompatibleUpdate(msg) from error


def _checking_nbytes(plan: LoadPlan, kinds: Kinds) -> int:
    """Bytes that `_check` holds at one time. Little is not counted, nor is it by staging."""
    most = 0
    for chunk in _chunks(plan, kinds):
        numels, held = _held(plan, chunk, kinds)
        most = max(most, held * Numbering.of(sum(numels.values()), held).dtype.itemsize)
    return most if most > SMALL_NBYTES else 0


def _check(skeleton: Skeleton, plan: LoadPlan, kinds: Kinds, chunk: Sequence[int]) -> None:
    """Run the loader into memory, a different number in every element; compare with the plan."""
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
            found.fill_(_NEVER)
        with skeleton.holding(memory):
            _load(skeleton, numbered.items())
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
        if not _is_same(part, wanted):
            what = "padding" if isinstance(step, Fill) else f"tensor {step.source!r}"
            raise IncompatibleUpdate(
                f"parameter {target.name!r}: the loader did not put {what} twice into the same "
                f"place. Install it by {elsewhere}."
            )
        part.fill_(_SEEN)
    unwritten = other_than(_SEEN, found)
    if unwritten:
        sent = sorted({step.source for step in plan.steps[index] if isinstance(step, Route)})
        raise IncompatibleUpdate(
            f"parameter {target.name!r}: {unwritten} of its {found.numel()} elements are in none "
            f"of the update's tensors; it gets {sent[:_SHOWN]}. Publish the fused parts together "
            "(q, k and v; gate and up; all experts)."
        )


def _held(plan: LoadPlan, chunk: Iterable[int], kinds: Kinds) -> tuple[dict[str, int], int]:
    """Elements of each tensor that goes into some targets; with the targets', all there are."""
    used = {
        step.source: torch.Size(kinds[step.source][1]).numel()
        for index in chunk
        for step in plan.steps[index]
        if step.source
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


# ---- numbers for elements -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Numbering:
    """How the elements of some tensors are numbered."""

    dtype: torch.dtype  # what holds a digit
    bits: int  # of a digit
    digits: int  # of a number

    @classmethod
    def of(cls, numbered: int, held: int) -> "Numbering":
        """For so many elements with a number, and so many places in memory, copies included."""
        if held * torch.int32.itemsize <= SMALL_NBYTES:
            return cls(torch.int32, 24, 1)  # what float32 holds: loaders cast to their own dtype
        last = _TILE + numbered
        return cls(torch.int8, 7, -(-last.bit_length() // 7))

    def write(self, memory: torch.Tensor, digit: int) -> None:
        """Write one digit of each element's number. `memory` is flat.

        The first number is not 0, which is what padding has in all digits.
        """
        low = self._digits(torch.arange(_TILE, device="cpu"), digit).to(self.dtype)
        starts = range(0, memory.numel(), _TILE)
        high = self._digits(torch.tensor(starts, dtype=torch.int64, device="cpu") + _TILE, digit)
        for start, bits in zip(starts, high.tolist(), strict=True):
            part = memory[start : start + _TILE]
            torch.bitwise_xor(low[: part.numel()], bits, out=part)

    def _digits(self, number: torch.Tensor, digit: int) -> torch.Tensor:
        """One digit of numbers that are mixed, one to one: rows that changed places differ in it.

        The mixing is a xorshift, which is linear: of two numbers without a common bit it makes the
        exclusive or of what it makes of each. So `write` mixes the low bits of a tile once.
        """
        mask = (1 << self.bits * self.digits) - 1
        for _ in range(_ROUNDS):
            number = number ^ ((number << 13) & mask)
            number = number ^ (number >> 17)
            number = number ^ ((number << 5) & mask)
        return (number >> (self.bits * digit)) & ((1 << self.bits) - 1)


def _slices(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same parts of tensors of one shape, one after another, each of bounded size."""
    numel = tensors[0].numel()
    if numel <= _SLICE:
        yield tensors
        return
    rows = _SLICE * len(tensors[0]) // numel
    for start in range(0, len(tensors[0]), max(1, rows)):
        if rows:
            yield tuple(tensor[start : start + rows] for tensor in tensors)
        else:
            yield from _slices(*(tensor[start] for tensor in tensors))


def _is_same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether `found` has what is wanted, wherever it was not seen yet."""
    for part, expected in _slices(found, wanted.expand(found.shape)):
        if not torch.equal(part, expected) and not ((part == expected) | (part == _SEEN)).all():
            return False
    return True


def other_than(mark: int, found: torch.Tensor) -> int:
    """Count the elements without a mark."""
    # (torch counts a mask's sum in a copy of 8 bytes an element.)
    return sum(int(torch.count_nonzero(part != mark)) for (part,) in _slices(found))
