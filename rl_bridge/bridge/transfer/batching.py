"""How an update is cut into batches: whole modules, together up to a threshold. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rl_bridge.extractors.chunks import WeightChunk, batches, module_of
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["BatchPlan", "Layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns of some tensors of an update, as requests tell them."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, manifest: WeightUpdateManifest, names: Iterable[str]) -> "Layout":
        """What the manifest says about the tensors of these names."""
        table, names = manifest.table, tuple(names)
        rows = [table.rows[name] for name in names]
        shapes = tuple(tuple(table.shapes[row]) for row in rows)
        return cls(
            names=names,
            dtypes=tuple(table.dtypes[row] for row in rows),
            shapes=shapes,
            sizes=tuple(_numel(shape) for shape in shapes),
            offsets=tuple(table.offsets[row] for row in rows),
        )


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count


class BatchPlan:
    """Notes an update's tensors as their chunks pass, and cuts them into batches.

    Modules stay whole, whichever chunks they came in; one that is larger than the threshold is a
    batch of its own. A further name of a tensor goes with its first one and costs nothing.
    """

    def __init__(self, threshold_nbytes: int) -> None:
        """Cut at `threshold_nbytes`."""
        self._threshold_nbytes = threshold_nbytes
        self._items: list[tuple[str, tuple[str, int]]] = []

    def noting(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """Pass chunks on, and note what is in them."""
        # By their memory: whoever takes the chunks keeps their tensors until all have passed.
        module_by_tensor: dict[object, str] = {}
        for chunk in chunks:
            for name, tensor in zip(chunk.names, chunk.tensors, strict=True):
                key = (tensor.data_ptr(), tensor.dtype, tensor.shape)
                is_new = tensor.nbytes == 0 or key not in module_by_tensor
                own = chunk.module_name or module_of(name)
                module = own if tensor.nbytes == 0 else module_by_tensor.setdefault(key, own)
                self._items.append((module, (name, tensor.nbytes if is_new else 0)))
            yield chunk

    def cut(self) -> list[tuple[str, ...]]:
        """Names of each batch; at least one batch, also of an update without tensors."""
        found = batches(self._items, size_of=lambda item: item[1], limit=self._threshold_nbytes)
        return [tuple(name for name, _ in batch) for _, batch in found] or [()]
