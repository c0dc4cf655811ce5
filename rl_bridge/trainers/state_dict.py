"""Named tensors of a source: a module, a state dict, or chunks of one.

`named_tensors` reads any source once, for one publication. `StateDictExtractor` describes a module
or a mapping that this process holds as a whole, and reads it in every update.
"""

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rl_bridge.errors import DuplicateTensorName, IncompatibleUpdate
from rl_bridge.manifest.adapter import AdapterSpec
from rl_bridge.memory.tensors import plain_state
from rl_bridge.trainers.base import ExtractorOptions, RankTensor, WeightExtractor
from rl_bridge.trainers.chunks import WeightChunk, require_dense
from rl_bridge.trainers.gather import whole_piece
from rl_bridge.trainers.modules import ModelNames

_LOG = logging.getLogger(__name__)

Source = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[object] | WeightExtractor
"""What `publish` takes: a module, a state dict, chunks, pairs of name and tensor, an extractor."""

# torch's key for what a module saves beside its tensors (Module.get_extra_state).
_EXTRA = "_extra_state"


def named_tensors(source: Source) -> dict[str, torch.Tensor]:
    """Name -> tensor, the live tensors themselves, in the source's order.

    Args:
        source: an ``nn.Module`` (its state dict: parameters and persistent buffers), a mapping, a
            `WeightChunk`, or an iterable of chunks (such as ``extractor.local()``) or of ``(name,
            tensor)`` pairs; an extractor stands for its ``local()``. An iterable must not write to
            a tensor again that it gave before: all tensors are read at the end.

    Raises:
        IncompatibleUpdate: something that is no tensor under a string name, or a tensor that was
            written to after the iterable gave it.
        DuplicateTensorName: a name came twice.

    """
    if isinstance(source, WeightExtractor):
        source = source.local()
    elif isinstance(source, torch.nn.Module):
        plain = plain_state(source)
        if plain is not None:
            return plain
    elif isinstance(source, Mapping) and _is_plain(source):
        return dict(source)
    return _checked(source)


def _checked(source: Source) -> dict[str, torch.Tensor]:
    """The names and tensors of a source that may hold other things, looked at one by one."""
    if isinstance(source, torch.nn.Module):
        # keep_vars: the parameters themselves instead of a new detached tensor for each, so that
        # the next step's publish recognises them.
        items: Iterable[tuple[object, object]] = source.state_dict(keep_vars=True).items()
    elif isinstance(source, Mapping | WeightChunk):
        items = source.items()
    elif isinstance(source, str | os.PathLike):
        raise IncompatibleUpdate(
            f"cannot publish the path {os.fspath(source)!r}, expected a module or a state dict. "
            "Load it first, such as by safetensors.torch.load_file(path)."
        )
    elif isinstance(source, torch.Tensor) or not isinstance(source, Iterable):
        raise IncompatibleUpdate(
            f"cannot publish a {type(source).__name__}, expected a module, a state dict or chunks "
            "of one."
        )
    else:
        items = _kept(_pairs(source))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in items:
        if not isinstance(name, str):
            raise IncompatibleUpdate(
                f"tensor name {name!r} is a {type(name).__name__}, expected str."
            )
        if not isinstance(tensor, torch.Tensor):
            if name == _EXTRA or name.endswith("." + _EXTRA):
                _LOG.warning("%s is not published: extra state is no tensor", name)
                continue
            raise IncompatibleUpdate(_no_tensor(name, tensor))
        if name in found:
            raise DuplicateTensorName(
                f"tensor {name!r} appears twice in what is to be published. Names must be unique."
            )
        found[name] = tensor
    return found


def _no_tensor(name: str, item: object) -> str:
    what = f"{name!r} is a {type(item).__name__}, expected a tensor."
    if isinstance(item, Mapping):
        return f"{what} Publish the inner state dict alone, such as checkpoint[{name!r}]."
    if hasattr(item, "__array_interface__"):
        return f"{what} Make it one without a copy: torch.from_numpy(array)."
    return f"{what} Leave it out of the state dict."


def _is_plain(source: Mapping[str, torch.Tensor]) -> bool:
    """Whether there is nothing to check one by one: only strings, only tensors."""
    kinds = set(map(type, source.values()))
    return kinds <= {torch.Tensor, torch.nn.Parameter} and set(map(type, source)) <= {str}


def _pairs(source: Iterable[object]) -> Iterable[tuple[object, object]]:
    for item in source:
        names, tensors = getattr(item, "names", None), getattr(item, "tensors", None)
        # Other objects may have attributes of these names, too: a chunk's are lists.
        if isinstance(names, list | tuple) and isinstance(tensors, list | tuple):
            if len(names) != len(tensors):
                raise IncompatibleUpdate(
                    f"a chunk has {len(names)} names for {len(tensors)} tensors."
                )
            yield from zip(names, tensors, strict=True)
        elif isinstance(item, tuple) and len(item) == 2:  # noqa: PLR2004 - a pair
            yield item
        else:
            raise IncompatibleUpdate(
                f"cannot publish a {type(item).__name__}, expected (name, tensor) pairs or "
                "chunks. Pass the model itself, or its state dict."
            )


def _kept(pairs: Iterable[tuple[object, object]]) -> Iterator[tuple[object, object]]:
    """Refuse tensors that are written to after they were given, as a reused buffer is."""
    noted = []
    for name, tensor in pairs:
        # Inference tensors have no version counter.
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
            noted.append((name, tensor, tensor._version))  # noqa: SLF001 - torch has no public name
        yield name, tensor
    for name, tensor, version in noted:
        if tensor._version != version:  # noqa: SLF001 - torch has no public name
            raise IncompatibleUpdate(
                f"tensor {name!r} was written to after the iterable gave it, such as a buffer that "
                "is used for several: all would have its last content. Give each a tensor of its "
                "own, such as buffer.clone()."
            )


def trainable_names(
    source: Source, tensors: Mapping[str, torch.Tensor], declared: Iterable[str] | None
) -> frozenset[str] | None:
    """Names that training is expected to change: as declared, or those that require gradients.

    None if nothing is known: a plain state dict does not tell.

    Raises:
        IncompatibleUpdate: one name instead of several, or no names at all.

    """
    if isinstance(declared, str):
        raise IncompatibleUpdate(
            f"trainable={declared!r} is one str, expected names. Write trainable=[{declared!r}]."
        )
    if declared is not None:
        try:
            return frozenset(declared)
        except TypeError as error:
            raise IncompatibleUpdate(
                f"trainable={declared!r} holds no names: {error}. Pass a list of names."
            ) from error
    if isinstance(source, WeightExtractor):
        return source.trainable_names()
    if isinstance(source, torch.nn.Module):
        return frozenset(name for name, tensor in tensors.items() if tensor.requires_grad)
    return None


class StateDictExtractor(WeightExtractor):
    """Weights of a module, or of a mapping of tensors, that this process holds as a whole.

    Ranks that hold copies of the same model (data parallelism without shards) pass their number, so
    that their tensors are described as copies.
    """

    def __init__(
        self,
        source: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        rank: int = 0,
        world_size: int = 1,
        **options: Unpack[ExtractorOptions],
    ) -> None:
        """Make an extractor; nothing is read yet.

        Args:
            source: a module (parameters and persistent buffers) or a mapping.
            rank: of this copy.
            world_size: how many copies there are.
            options: those of every `WeightExtractor`: ``adapter=``, ``chunk_nbytes=`` and others.

        Raises:
            IncompatibleUpdate: something else, such as an iterator, which can be read only once.
            ValueError: a rank outside the world.

        """
        super().__init__(**options)
        given: object = source
        if not isinstance(given, torch.nn.Module | Mapping):
            raise IncompatibleUpdate(
                f"cannot extract from a {type(source).__name__}, expected a module or a mapping: "
                "they are read in every update. Pass dict(pairs)."
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: expected 0 <= rank < world.")
        if isinstance(given, DataParallel | DistributedDataParallel):
            source = given.module  # engines do not know the wrapper's prefix, 'module.'
        self._source = source
        self._rank = rank
        self._owners = tuple(range(world_size))
        self._paths: list[str] = []
        self._tied: list[tuple[int, int]] = []

    def _tensors_known(self) -> Sequence[RankTensor]:
        tensors = named_tensors(self._source)
        trainable = trainable_names(self._source, tensors, None) or frozenset()
        self._naming, self._count = self._names(), len(tensors)
        named = ((self._naming(path), path, tensor) for path, tensor in tensors.items())
        kept = [
            (name, path, require_dense(name, tensor))
            for name, path, tensor in named
            if name is not None
        ]
        self._paths = [path for _, path, _ in kept]
        first: dict[int, int] = {}
        ties = [first.setdefault(id(tensor), index) for index, (*_, tensor) in enumerate(kept)]
        self._tied = [(index, at) for index, at in enumerate(ties) if at != index]
        return [
            RankTensor(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                local_shape=tuple(tensor.shape),
                pieces=(whole_piece(name, tensor.shape, self._rank),),
                owners=self._owners,
                is_whole=True,
                is_trainable=path in trainable or path in self._naming.trained_paths,
                tied_to=None if ties[index] == index else ties[index],
            )
            for index, (name, path, tensor) in enumerate(kept)
        ]

    def _names(self) -> ModelNames:
        if isinstance(self._source, torch.nn.Module):
            return self._naming_of(self._source)
        return ModelNames(str, {})

    def _tensors_now(self) -> Sequence[torch.Tensor | None] | None:
        tensors = named_tensors(self._source)
        if len(tensors) != self._count or not tensors.keys() >= set(self._paths):
            return None
        found = [tensors[path] for path in self._paths]
        # Else a tensor whose tie was broken since would be published as the other one.
        if any(found[one] is not found[first] for one, first in self._tied):
            return None
        merged = self._naming.merged()
        return [merged.get(path, one) for path, one in zip(self._paths, found, strict=True)]

    def _split(self, source: int) -> Callable[[torch.Tensor], object]:
        return lambda view: view.copy_(named_tensors(self._source)[self._paths[source]])


@dataclass(frozen=True, slots=True)
class Given:
    """What one publication was given: read once, nothing copied."""

    tensors: dict[str, torch.Tensor]  # by name, the live tensors themselves
    trainable: frozenset[str] | None  # what training changes; None if nothing is known
    spec: AdapterSpec | None = None  # of the adapter that they are; None for a model's weights


class SourceReader:
    """Reads what `publish` is given, version after version.

    The extractor that a peft model is read by is kept while the same model comes again.
    """

    def __init__(self) -> None:
        """Know no model yet."""
        self._kept: tuple[weakref.ref[torch.nn.Module], object, WeightExtractor] | None = None

    def read(
        self,
        source: "Source",
        declared: Iterable[str] | None,
        *,
        adapter: str | AdapterSpec | None = None,
        merged: bool = False,
        base_root: str = "",
    ) -> Given:
        """Read a source. See `TensorBridge.publish`.

        Raises:
            IncompatibleUpdate: as `named_tensors` and `trainable_names`; a peft model of which is
                not said what is published, or an adapter that cannot be found in the source.
            DuplicateTensorName: as `named_tensors`.

        """
        if isinstance(adapter, str) or merged:
            source = self._extractor(source, adapter, base_root, merged=merged)
            adapter = None
        elif adapter is None:
            _require_choice(source)
        if adapter is None and isinstance(source, WeightExtractor):
            adapter = source.adapter
        tensors = named_tensors(source)
        return Given(tensors, trainable_names(source, tensors, declared), adapter)

    def _extractor(
        self, source: object, adapter: object, base_root: str, *, merged: bool
    ) -> WeightExtractor:
        if merged and adapter is not None:
            raise IncompatibleUpdate(
                f"publish got adapter={adapter!r} and merged=True, expected one of them: the "
                "adapter alone, or the model's own weights with it merged in. Leave one out."
            )
        if not isinstance(source, torch.nn.Module):
            said = "merged=True" if merged else f"adapter={adapter!r}"
            raise IncompatibleUpdate(
                f"publish got {said} and a {type(source).__name__}, expected the peft model: other "
                "sources do not tell its configuration. Pass the model, an extractor made with "
                "adapter=, or adapter=AdapterSpec.inferred(...) with the tensors."
            )
        options = (adapter, merged, base_root)
        if self._kept is None or self._kept[0]() is not source or self._kept[1] != options:
            name = adapter if isinstance(adapter, str) else None
            made = StateDictExtractor(source, adapter=name, base_root=base_root)
            self._kept = weakref.ref(source), options, made
        return self._kept[2]


def _require_choice(source: object) -> None:
    """Refuse a peft model of which is not said what is published."""
    inner = source.module if isinstance(source, DataParallel | DistributedDataParallel) else source
    adapters = getattr(inner, "peft_config", None)
    if isinstance(inner, torch.nn.Module) and isinstance(adapters, Mapping):
        raise IncompatibleUpdate(
            f"the model has the peft adapters {sorted(adapters)}, and it is not said what of it is "
            "published. Pass adapter='NAME' (the adapter alone, for engines that apply it), "
            "merged=True (the model's own weights with the adapters merged in), or "
            "StateDictExtractor(model, adapters='base') as the source (without them)."
        )
