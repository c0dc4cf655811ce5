"""`WeightChunk`: some tensors that travel together, and how tensors are grouped into chunks.

This module knows names, sizes and dtypes, and nothing about trainers. A chunk holds whole modules,
together at most a threshold (`batches`). Tensors that were cast or gathered lie in one buffer,
which a sender can send as one piece (`BufferPlan`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NoReturn, Self, TypeVar

import torch
from torch._utils import _unflatten_dense_tensors

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.manifest.parallel import Placement

_Item = TypeVar("_Item")

DEFAULT_CHUNK_NBYTES = 1 << 30
"""Default size of a chunk: 1 GiB."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedTensors:
    """Tensors one behind the other in one buffer, which can be sent as one piece.

    Attributes:
        buffer: flat, of ``uint8``.
        offsets: byte at which each tensor begins; tensors of one dtype leave no gap.

    """

    buffer: torch.Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightChunk:
    """Tensors that travel together; `bridge.publish` takes an iterable of chunks, or one chunk.

    `items` goes over its names and tensors.

    Attributes:
        names: of the tensors; tied tensors come as one tensor under several names.
        dtypes: by torch's name, such as ``torch.bfloat16``.
        shapes: of the tensors.
        tensors: contiguous, detached.
        module_name: the module that all of them belong to; None for a batch of several modules.
        placements: where each lies in the whole tensors; None where all of them are whole.
        packing: the tensors in one buffer, where they already lie in one (see `packed`).

    Raises:
        IncompatibleUpdate: lists that do not fit each other, or a tensor that is not contiguous.

    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    tensors: list[torch.Tensor]
    module_name: str | None = None
    placements: list[Placement] | None = None
    packing: PackedTensors | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        counts = {len(self.names), len(self.dtypes), len(self.shapes), len(self.tensors)}
        if len(counts | ({len(self.placements)} if self.placements is not None else set())) != 1:
            raise IncompatibleUpdate(
                f"a chunk has {len(self.names)} names, {len(self.dtypes)} dtypes, "
                f"{len(self.shapes)} shapes and {len(self.tensors)} tensors, expected one of each "
                "per tensor. Make it with WeightChunk.of(pairs)."
            )
        for name, dtype, shape, tensor in zip(
            self.names, self.dtypes, self.shapes, self.tensors, strict=True
        ):
            if str(tensor.dtype) != dtype or list(tensor.shape) != list(shape):
                raise IncompatibleUpdate(
                    f"tensor {name!r} is {tensor.dtype} of shape {list(tensor.shape)}, expected "
                    f"{dtype} of shape {list(shape)}. Make the chunk with WeightChunk.of(pairs)."
                )
            if not tensor.is_contiguous():
                raise IncompatibleUpdate(
                    f"tensor {name!r} is not contiguous, and some backends silently send wrong "
                    "bytes of such tensors. Pass tensor.contiguous()."
                )

    @classmethod
    def of(
        cls, pairs: Iterable[tuple[str, torch.Tensor]], *, module_name: str | None = None
    ) -> Self:
        """Make a chunk of named tensors; a tensor that is not contiguous is copied."""
        names, tensors = [], []
        for name, tensor in pairs:
            names.append(name)
            tensors.append(tensor.detach().contiguous())
        return cls(
            names=names,
            dtypes=[str(tensor.dtype) for tensor in tensors],
            shapes=[list(tensor.shape) for tensor in tensors],
            tensors=tensors,
            module_name=module_name,
        )

    @classmethod
    def checked_before(
        cls,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        tensors: list[torch.Tensor],
        module_name: str | None,
        placements: Sequence[Placement] | None,
        packing: PackedTensors | None,
    ) -> Self:
        """Make a chunk whose fields an extractor's plan checked before: no check per tensor."""
        self = object.__new__(cls)
        self.__dict__.update(
            names=list(names),
            dtypes=list(dtypes),
            shapes=[list(shape) for shape in shapes],
            tensors=tensors,
            module_name=module_name,
            placements=None if placements is None else list(placements),
            packing=packing,
        )
        return self

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Go over the names and tensors."""
        return zip(self.names, self.tensors, strict=True)

    def __iter__(self) -> NoReturn:
        """Refuse: ``for name, tensor in extractor.local()`` would take a chunk for a pair.

        Raises:
            TypeError: always.

        """
        raise TypeError(
            f"a WeightChunk holds {len(self.names)} tensors and is no (name, tensor) pair. Go over "
            "chunk.items(), or give the chunks themselves to bridge.publish."
        )

    @cached_property
    def total_numel(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)

    @cached_property
    def total_size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def packed(self) -> PackedTensors:
        """The tensors in one buffer: the buffer they lie in already, or a new copy."""
        if self.packing is not None:
            return self.packing
        unique = {id(tensor): tensor for tensor in self.tensors}
        plan = BufferPlan([(t.dtype, tuple(t.shape)) for t in unique.values()])
        buffer, views = plan.allocate(next(iter(unique.values())).device if unique else None)
        for view, tensor in zip(views, unique.values(), strict=True):
            view.copy_(tensor)
        offsets = dict(zip(unique, plan.offsets, strict=True))
        return PackedTensors(
            buffer=buffer, offsets=tuple(offsets[id(tensor)] for tensor in self.tensors)
        )


class BufferPlan:
    """How tensors of known dtypes and shapes lie in one buffer; made once, used in every update.

    Tensors of one dtype lie side by side without gaps, the widest items first, so that every tensor
    begins at a multiple of its item size.
    """

    def __init__(self, kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Lay out tensors of `kinds`, each a dtype and a shape."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, (dtype, _) in enumerate(kinds):
            by_dtype.setdefault(dtype, []).append(index)
        offsets = [0] * len(kinds)
        self._runs: list[_Run] = []
        end = 0
        for dtype in sorted(by_dtype, key=lambda dtype: -dtype.itemsize):
            indices = by_dtype[dtype]
            shapes = [kinds[index][1] for index in indices]
            sizes = [math.prod(shape) for shape in shapes]
            begins = accumulate(sizes, initial=0)
            for index, begin in zip(indices, begins, strict=False):
                offsets[index] = end + begin * dtype.itemsize
            nbytes = sum(sizes) * dtype.itemsize
            self._runs.append(_Run(dtype, end, end + nbytes, indices, shapes))
            end += nbytes
        self.offsets = tuple(offsets)
        self.nbytes = end

    def allocate(self, device: torch.device | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Make a new buffer: itself as ``uint8``, and the tensors in it."""
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        views: list[torch.Tensor] = [buffer] * len(self.offsets)
        for run in self._runs:
            for index, view in zip(run.indices, run.views(buffer), strict=True):
                views[index] = view
        return buffer, views


class _Run:
    """The tensors of one dtype in a buffer."""

    def __init__(
        self,
        dtype: torch.dtype,
        begin: int,
        end: int,
        indices: list[int],
        shapes: list[tuple[int, ...]],
    ) -> None:
        self.indices = indices
        self._dtype = dtype
        self._begin = begin // dtype.itemsize
        self._numel = (end - begin) // dtype.itemsize
        # One call of torch makes all views: thousands of calls would delay each update. It takes
        # the shapes from tensors, and loses the shapes of empty ones.
        self._like = [torch.empty(shape, device="meta") for shape in shapes]
        self._empty = [(at, shape) for at, shape in enumerate(shapes) if 0 in shape]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors, in `buffer`."""
        # A tensor over the buffer's storage instead of a view of the buffer: making views of a view
        # takes twice as long.
        flat = torch.empty(0, dtype=self._dtype, device=buffer.device)
        flat.set_(buffer.untyped_storage(), self._begin, (self._numel,), (1,))
        views = list(_unflatten_dense_tensors(flat, self._like))  # type: ignore[no-untyped-call]
        for at, shape in self._empty:
            views[at] = flat[:0].view(shape)
        return views


def whole_copies(
    chunks: Iterable[WeightChunk],
    device: torch.device | str = "cpu",
    *,
    is_kept: bool = True,
) -> dict[str, torch.Tensor]:
    """Copy the tensors of all chunks, whose memory may be the next chunk's; each rank calls it.

    With ``is_kept=False`` it only takes part in making the chunks, and returns nothing.
    """
    copies: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        if is_kept:
            copies |= {name: one.to(device, copy=True) for name, one in chunk.items()}
    return copies


def require_dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; refused (`IncompatibleUpdate`) if it has no dense memory."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor
    what = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
    raise IncompatibleUpdate(
        f"tensor {name!r} is {what}. Keep it dense, or as a buffer with persistent=False."
    )


def wire_name(dtype: torch.dtype) -> str:
    """Name of a dtype in manifests and placements, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def checked_threshold(chunk_nbytes: object) -> int:
    """A chunk's size, if it is one."""
    if isinstance(chunk_nbytes, bool) or not isinstance(chunk_nbytes, int):
        raise TypeError(f"chunk_nbytes={chunk_nbytes!r}: expected an int, such as 1 << 30.")
    if chunk_nbytes < 1:
        raise ValueError(f"chunk_nbytes={chunk_nbytes}: expected 1 or more bytes.")
    return chunk_nbytes


def module_of(name: str) -> str:
    """Name of the module whose tensors travel together with tensor `name`.

    This is the parent of the layer that owns the tensor, so that the projections of one attention
    stay together. Members of a list (``layers.0``, ``layers.1``) are modules of their own.
    """
    layer, _, _ = name.rpartition(".")
    around, _, last = layer.rpartition(".")
    if not layer:
        return name
    return around if around and not last.isdecimal() else layer


def batches(
    items: Iterable[tuple[str, _Item]],
    *,
    size_of: Callable[[_Item], int],
    limit: int,
    extra_of: Callable[[_Item], int] = lambda _: 0,
) -> Iterator[tuple[str | None, list[_Item]]]:
    """Group items by module, and put whole modules together up to `limit` bytes.

    A module that is larger than `limit` goes alone.

    Args:
        items: module and item; a module travels where its first item stands.
        size_of: bytes of an item.
        limit: bytes of a chunk, including the largest `extra_of` in it.
        extra_of: bytes of temporary memory that putting the item into the chunk takes.

    Yields:
        The module (None for several) and the items of one chunk.

    """
    modules: dict[str, list[_Item]] = {}
    for module, item in items:
        modules.setdefault(module, []).append(item)
    name: str | None = None
    batch: list[_Item] = []
    size = extra = 0
    for module, members in modules.items():
        more = sum(map(size_of, members))
        aside = max(map(extra_of, members))
        if batch and size + more + max(extra, aside) > limit:
            yield name, batch
            batch, size, extra = [], 0, 0
        name = module if not batch else None
        batch.extend(members)
        size, extra = size + more, max(extra, aside)
    if batch:
        yield name, batch
