"""The tensors that a consumer wants of a group: whole ones, slices, or several joined into one.

A `WantedLayout` is plain data. The functions here make the usual ones: tensor, pipeline and expert
parallelism by degree and rank, and fused tensors as lists of sources. `rl_bridge.assembly.plan`
says how a group's parts fill it.
"""

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.coverage import WholeTensor
from rl_bridge.manifest.digest import text_digest
from rl_bridge.memory.parts import PartNeeds, Scope

Wholes = Mapping[str, WholeTensor]


@dataclass(frozen=True, slots=True)
class WholeSlice:
    """A box of a whole tensor, and where it goes.

    Attributes:
        name: of the whole tensor.
        offset: first index in each dimension of it.
        shape: of the box.
        at: first index in each dimension of the wanted tensor.

    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """One tensor of the consumer: its shape, and the boxes that fill it, each element once."""

    shape: tuple[int, ...]
    sources: tuple[WholeSlice, ...]


@dataclass(frozen=True)
class WantedLayout:
    """Everything that a consumer wants, by the names that its engine has for it."""

    tensors: Mapping[str, WantedTensor]

    @cached_property
    def digest(self) -> str:
        """Names the layout: plans are kept by it."""
        document = {
            name: [one.shape, [[s.name, s.offset, s.shape, s.at] for s in one.sources]]
            for name, one in self.tensors.items()
        }
        return text_digest(canonical_json(document))


Wanted = Callable[[Wholes], WantedLayout]
"""From the whole tensors of a group to the layout that is wanted of them."""

ReadScope = Scope | PartNeeds | WantedLayout
"""What is read of an update: all or nothing, ranges of it, or of a group what is assembled."""


def everything() -> Wanted:
    """Every tensor, whole."""
    return parallel()


def slices(wanted: Mapping[str, Sequence[slice | int | None] | None]) -> Wanted:
    """Boxes of single tensors.

    Args:
        wanted: name -> a slice or an index for each of the first dimensions (None: all of it);
            None: whole. An index stands for the one row, and its dimension stays.

    """

    def layout(wholes: Wholes) -> WantedLayout:
        return WantedLayout({name: _sliced(_find(wholes, name), at) for name, at in wanted.items()})

    return layout


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank's even share of tensors.

    Attributes:
        degree: how many ranks share them.
        rank: which of them.
        dims: pattern of names (as of a shell: ``*.q_proj.weight``) -> dimension that is cut; the
            first that fits holds, and what none fits stays whole.

    """

    degree: int
    rank: int
    dims: Mapping[str, int]

    def dim_of(self, name: str) -> int | None:
        """The dimension in which a tensor is cut."""
        fits = (dim for pattern, dim in self.dims.items() if fnmatchcase(name, pattern))
        return next(fits, None)


@dataclass(frozen=True, slots=True)
class PipelineParallel:
    """One stage's layers, in even blocks.

    Attributes:
        degree: how many stages.
        rank: which of them.
        num_layers: of the model.
        pattern: regular expression whose group is the layer's number.
        first: patterns of names that only the first stage has.
        last: patterns of names that only the last stage has.

    """

    degree: int
    rank: int
    num_layers: int
    pattern: str = r"\blayers\.(\d+)\."
    first: tuple[str, ...] = ("*embed_tokens*",)
    last: tuple[str, ...] = ("lm_head*", "model.norm.*")

    def has(self, name: str) -> bool:
        """Whether this stage has a tensor."""
        number = number_in(name, self.pattern, self.num_layers, "num_layers")
        if number is not None:
            return block_of(number, self.num_layers, self.degree) == self.rank
        if any(fnmatchcase(name, pattern) for pattern in self.first):
            return self.rank == 0
        if any(fnmatchcase(name, pattern) for pattern in self.last):
            return self.rank == self.degree - 1
        return True


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """One rank's experts, in even blocks.

    Attributes:
        degree: how many ranks share them.
        rank: which of them.
        num_experts: of a layer.
        pattern: regular expression whose group is the expert's number.
        stacked: patterns of names of tensors that hold all experts -> the dimension that counts
            them.

    """

    degree: int
    rank: int
    num_experts: int
    pattern: str = r"\bexperts\.(\d+)\."
    stacked: Mapping[str, int] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether this rank has a tensor."""
        number = number_in(name, self.pattern, self.num_experts, "num_experts")
        return number is None or block_of(number, self.num_experts, self.degree) == self.rank


@dataclass(frozen=True, slots=True)
class Fused:
    """Several tensors joined into one.

    Attributes:
        name: of the fused tensor; ``{}`` stands for the text that the sources have in its place.
        sources: names, in order, with the same ``{}``.
        dim: along which they are joined; each is cut before, where tensor parallelism cuts it.

    """

    name: str
    sources: tuple[str, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        is_rule = "{}" in self.name
        if not self.sources or any(one.count("{}") != int(is_rule) for one in self.sources):
            raise ValueError(
                f"Fused({self.name!r}, {self.sources!r}): expected one {{}} in each source where "
                "the name has it, and none where it has none."
            )

    def found(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Fused name -> sources, for each filling of ``{}`` that some source has."""
        if "{}" not in self.name:
            return {self.name: self.sources} if set(self.sources) & set(names) else {}
        fillings: dict[str, None] = {}
        for source in self.sources:
            head, _, tail = source.partition("{}")
            for name in names:
                if name.startswith(head) and name.endswith(tail) and len(name) >= len(head + tail):
                    fillings[name[len(head) : len(name) - len(tail)]] = None
        return {
            self.name.replace("{}", filling): tuple(s.replace("{}", filling) for s in self.sources)
            for filling in fillings
        }


def parallel(
    *,
    tensor: TensorParallel | None = None,
    pipeline: PipelineParallel | None = None,
    expert: ExpertParallel | None = None,
    fused: Sequence[Fused] = (),
) -> Wanted:
    """The tensors of one rank of an engine, by its degrees and its rank in each.

    Raises:
        ValueError: a rank that is not below its degree, a pattern without a group.

    """
    for one in (tensor, pipeline, expert):
        if one is not None:
            _check_degree(one)

    def layout(wholes: Wholes) -> WantedLayout:
        mine = [
            name
            for name in wholes
            if (pipeline is None or pipeline.has(name)) and (expert is None or expert.has(name))
        ]
        found: dict[str, WantedTensor] = {}
        taken: set[str] = set()
        for join in fused:
            _require_held(join, wholes)
            for name, sources in join.found(mine).items():
                _require_all(name, sources, wholes)
                _require_free(name, found)
                parts = [_shard(wholes[source], tensor, expert) for source in sources]
                found[name] = _joined(name, parts, join.dim)
                taken.update(sources)
        for name in mine:
            if name not in taken:
                _require_free(name, found)
                found[name] = _alone(_shard(wholes[name], tensor, expert))
        return WantedLayout(found)

    return layout


# ---- checks and shards --------------------------------------------------------------------------


def _find(wholes: Wholes, name: str) -> WholeTensor:
    whole = wholes.get(name)
    if whole is None:
        near = [other for other in wholes if other.rpartition(".")[2] == name.rpartition(".")[2]]
        raise IncompatibleUpdate(
            f"tensor {name!r} is wanted, and the group does not hold it; it holds "
            f"{len(wholes)} others, such as {(near or list(wholes))[:3]}. Publish it, or ask for "
            "what there is."
        )
    return whole


def _check_degree(one: TensorParallel | PipelineParallel | ExpertParallel) -> None:
    if not 0 <= one.rank < one.degree:
        raise ValueError(
            f"{type(one).__name__}: rank {one.rank} of degree {one.degree}: expected 0 <= "
            "rank < degree."
        )
    if not isinstance(one, TensorParallel):
        checked_pattern(one.pattern)


def _require_held(join: Fused, wholes: Wholes) -> None:
    """A fused tensor without ``{}`` must have its sources in the group; a rule may find none."""
    if "{}" not in join.name and not set(join.sources) & wholes.keys():
        _require_all(join.name, join.sources, wholes)


def _require_all(name: str, sources: Sequence[str], wholes: Wholes) -> None:
    missing = [source for source in sources if source not in wholes]
    if missing:
        raise IncompatibleUpdate(
            f"the fused tensor {name!r} is made of {list(sources)}, and the group does not hold "
            f"{missing}. Publish all of them, or ask for the others under their own names."
        )


def _require_free(name: str, found: Mapping[str, WantedTensor]) -> None:
    if name in found:
        raise IncompatibleUpdate(
            f"tensor {name!r} is wanted twice: as a fused one, and as another. Give the fused one "
            "a name of its own."
        )


def _sliced(whole: WholeTensor, at: Sequence[slice | int | None] | None) -> WantedTensor:
    try:
        given = list(at or ())
        given += [None] * (len(whole.shape) - len(given))
        ranges = [range_of(one, size) for one, size in zip(given, whole.shape, strict=True)]
    except (TypeError, ValueError) as error:
        raise IncompatibleUpdate(
            f"tensor {whole.name!r} of shape {list(whole.shape)}: {at} is no box of it. Give a "
            f"list: a slice without a step, or an index, for each dimension at most. ({error})"
        ) from error
    offset = tuple(one.start for one in ranges)
    return _alone(WholeSlice(whole.name, offset, tuple(map(len, ranges)), (0,) * len(offset)))


def _shard(
    whole: WholeTensor, tensor: TensorParallel | None, expert: ExpertParallel | None
) -> WholeSlice:
    """One rank's shard of a tensor."""
    offset, shape = [0] * len(whole.shape), list(whole.shape)
    cuts = []
    if tensor is not None:
        cuts.append((tensor.dim_of(whole.name), tensor.degree, tensor.rank))
    if expert is not None:
        dims = (dim for pat, dim in expert.stacked.items() if fnmatchcase(whole.name, pat))
        cuts.append((next(dims, None), expert.degree, expert.rank))
    for dim, degree, rank in cuts:
        if dim is None:
            continue
        if not -len(shape) <= dim < len(shape) or shape[dim] % degree:
            raise IncompatibleUpdate(
                f"tensor {whole.name!r} of shape {list(whole.shape)} cannot be cut in dimension "
                f"{dim} into {degree} even shares. Ask for slices of it instead."
            )
        shape[dim] //= degree
        offset[dim] += rank * shape[dim]
    return WholeSlice(whole.name, tuple(offset), tuple(shape), (0,) * len(shape))


def _alone(source: WholeSlice) -> WantedTensor:
    return WantedTensor(source.shape, (source,))


def _joined(name: str, parts: Sequence[WholeSlice], dim: int) -> WantedTensor:
    first = parts[0].shape
    if not -len(first) <= dim < len(first):
        raise IncompatibleUpdate(
            f"the fused tensor {name!r} has no dimension {dim}. Join it along another one."
        )
    dim %= len(first)
    size, sources = 0, []
    for one in parts:
        rest = (*one.shape[:dim], *one.shape[dim + 1 :])
        if len(one.shape) != len(first) or rest != (*first[:dim], *first[dim + 1 :]):
            raise IncompatibleUpdate(
                f"the fused tensor {name!r}: {parts[0].name!r} of shape {list(first)} and "
                f"{one.name!r} of shape {list(one.shape)} cannot be joined in dimension {dim}. "
                "Give sources that differ in that dimension only."
            )
        at = tuple(size if d == dim else 0 for d in range(len(first)))
        sources.append(WholeSlice(one.name, one.offset, one.shape, at))
        size += one.shape[dim]
    return WantedTensor((*first[:dim], size, *first[dim + 1 :]), tuple(sources))


# ---- numbers ------------------------------------------------------------------------------------


def range_of(one: object, size: int) -> range:
    """The indices of a dimension that a slice or an index covers; a slice may reach beyond it."""
    if one is None:
        return range(size)
    if isinstance(one, slice):
        start, stop, step = one.indices(size)
        if step != 1:
            raise ValueError(f"{one} has a step: give one without.")
        return range(start, max(start, stop))
    if isinstance(one, bool):
        raise TypeError(f"{one} is a bool: give a slice or an index.")
    index = operator.index(one)  # type: ignore[arg-type]  # that is what is tried
    if not -size <= index < size:
        raise ValueError(f"no index {index} in {size}: give one that is there.")
    return range(index % size, index % size + 1)


def block_of(number: int, total: int, degree: int) -> int:
    """Which of `degree` even blocks holds a number; the first blocks are larger by one."""
    size, more = divmod(total, degree)
    large = more * (size + 1)
    return number // (size + 1) if number < large else more + (number - large) // max(size, 1)


def checked_pattern(pattern: str) -> None:
    """Check a pattern that finds numbers in names."""
    try:
        has_group = re.compile(pattern).groups > 0
    except re.error as error:
        raise ValueError(f"pattern={pattern!r}: expected a regular expression; {error}.") from error
    if not has_group:
        raise ValueError(
            rf"pattern={pattern!r}: expected one with a group, such as '\blayers\.(\d+)\.'."
        )


def number_in(name: str, pattern: str, total: int, what: str) -> int | None:
    """The number in a tensor's name; None if there is none."""
    found = re.search(pattern, name)
    if found is None:
        return None
    if not (found[1] or "").isdecimal() or int(found[1]) >= total:
        raise IncompatibleUpdate(
            f"tensor {name!r} has number {found[1]}, and {what}={total} leaves it to no rank. Give "
            f"the model's {what}, and a pattern that finds the number."
        )
    return int(found[1])
