"""Weights of a Megatron-Core model: cut by tensor, pipeline and expert parallelism.

Megatron marks each parameter with the dimension along which ranks share it, and keeps its process
groups in globals; `grid_now` is the only function that reads these. `shard_of` says which part of
the whole tensor this rank holds, and `naming_in` what the tensor is called in the whole model.

A bridge (mbridge, or Megatron-Bridge) exports whole tensors under Hugging Face's names. Where a
part of a rank lies in those, `hf_pieces` says without a gather, from mbridge's own table of names.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_bridge.errors import IncompatibleUpdate, WeightBridgeUnavailableError
from rl_bridge.manifest.parallel import Piece
from rl_bridge.trainers.base import RankTensor, WeightExtractor
from rl_bridge.trainers.chunks import (
    DEFAULT_CHUNK_NBYTES,
    WeightChunk,
    checked_dtype,
    module_of,
    wire_dtype,
)
from rl_bridge.trainers.gather import Shared, Split, box_piece, gather, window_nbytes
from rl_bridge.trainers.modules import ModuleSlots, Naming, Slot, clean_name

# ---- names of Hugging Face --------------------------------------------------------------------

Block = tuple[int, int, str, int, int]
"""First row in a fused tensor, number of rows, name of the tensor that they belong to, their first
row there, and how many rows that one has."""

_NUM_QKV = 3
_NUM_GATE_AND_UP = 2
_USE_RAW = (
    "Make the extractor without bridge= for local parts under Megatron's names, or use full()."
)


def is_mbridge(bridge: Any) -> bool:
    """Whether this is a bridge of mbridge."""
    return hasattr(bridge, "export_weights")


def is_megatron_bridge(bridge: Any) -> bool:
    """Whether this is a bridge of Megatron-Bridge."""
    return hasattr(bridge, "export_hf_weights")


def hf_pieces(bridge: Any, config: Any, name: str, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same elements as pieces of Hugging Face's tensors; padding of the vocabulary is left out.

    Raises:
        WeightBridgeUnavailableError: the bridge converts this tensor in a way of its own.

    """
    names = _hf_names(bridge, name)
    rows = pieces[0].global_shape[0] if pieces[0].global_shape else 0
    if len(names) == 1:
        kept = rows
        is_padded = getattr(bridge, "make_vocab_size_divisible_by", None) is not None
        if is_padded and name.endswith(("word_embeddings.weight", "output_layer.weight")):
            kept = bridge.vocab_size
        if not pieces[0].global_shape:
            return tuple(box_piece(names[0], (), (), (), replica=piece.replica) for piece in pieces)
        return row_blocks(pieces, [(0, kept, names[0], 0, kept)])
    if len(names) == _NUM_GATE_AND_UP and ".linear_fc1." in name:
        half = rows // 2
        blocks = [(0, half, names[0], 0, half), (half, half, names[1], 0, half)]
        return row_blocks(pieces, blocks)
    if len(names) == _NUM_QKV and ".linear_qkv." in name:
        return row_blocks(pieces, _qkv_blocks(names, config, name, rows))
    msg = f"tensor {name!r} becomes {names}, and how is not known here. {_USE_RAW}"
    raise WeightBridgeUnavailableError(msg)


def _hf_names(bridge: Any, name: str) -> list[str]:
    convert = getattr(type(bridge), "_weight_to_hf_format", None)
    # A subclass that converts in a way of its own overrides this method.
    if convert is None or convert.__qualname__ != "Bridge._weight_to_hf_format":
        msg = (
            f"{type(bridge).__name__} converts weights in a way of its own, so where tensor "
            f"{name!r} goes is not known before it is exported. {_USE_RAW}"
        )
        raise WeightBridgeUnavailableError(msg)
    return list(bridge._weight_name_mapping_mcore_to_hf(name))  # noqa: SLF001 - it has no public one


def _qkv_blocks(names: Sequence[str], config: Any, name: str, rows: int) -> list[Block]:
    """Rows of the fused tensor, in which each query group has its queries, keys and values."""
    groups, head = config.num_query_groups, config.kv_channels
    queries = head * config.num_attention_heads // groups
    each = queries + 2 * head
    if groups * each != rows:
        msg = (
            f"tensor {name!r} has {rows} rows, expected {groups} groups of {each}: a fused layout "
            f"that is not known here. {_USE_RAW}"
        )
        raise WeightBridgeUnavailableError(msg)
    blocks = []
    for group in range(groups):
        begin = group * each
        blocks.append((begin, queries, names[0], group * queries, groups * queries))
        for at, which in ((begin + queries, names[1]), (begin + queries + head, names[2])):
            blocks.append((at, head, which, group * head, groups * head))
    return blocks


def row_blocks(pieces: Sequence[Piece], blocks: Sequence[Block]) -> tuple[Piece, ...]:
    """Name the rows of fused tensors anew."""
    found = []
    for piece in pieces:
        first, last = piece.offset[0], piece.offset[0] + piece.shape[0]
        for begin, length, name, there, total in blocks:
            low, high = max(first, begin), min(last, begin + length)
            if low < high:
                found.append(
                    box_piece(
                        name,
                        (total, *piece.global_shape[1:]),
                        (there + low - begin, *piece.offset[1:]),
                        (high - low, *piece.shape[1:]),
                        replica=piece.replica,
                        local_offset=(piece.local_offset[0] + low - first, *piece.local_offset[1:]),
                    )
                )
    return tuple(found)


# ---- the grid of ranks -----------------------------------------------------------------------

EMBEDDING = "embedding.word_embeddings.weight"
"""What Megatron calls the embedding, of which the last pipeline stage may have a copy."""

# Cut by attention heads, which Megatron marks nowhere.
_UNMARKED = {"softmax_offset": 0}
# The older kind of grouped experts: all of a rank's are one matrix under one name.
_FUSED_EXPERTS = (".experts.weight1", ".experts.weight2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One dimension of Megatron's grid of ranks, through this rank.

    Attributes:
        number: of this rank along it.
        ranks: all ranks along it.
        group: their process group.

    """

    number: int
    ranks: tuple[int, ...]
    group: Any

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Grid:
    """Where this rank stands. Experts have tensor and data dimensions of their own."""

    tensor: Axis
    data: Axis
    expert: Axis
    expert_tensor: Axis
    expert_data: Axis


def grid_now() -> Grid:
    """Where this rank stands, as ``megatron.core.parallel_state`` says.

    Raises:
        WeightBridgeUnavailableError: Megatron is not installed, or not initialized.

    """
    try:
        from megatron.core import parallel_state as state
    except ImportError as error:
        msg = "megatron-core is not installed. Install rl_bridge[megatron]."
        raise WeightBridgeUnavailableError(msg) from error
    if not state.model_parallel_is_initialized():
        msg = (
            "Megatron's process groups are not there. Call "
            "parallel_state.initialize_model_parallel before making an extractor."
        )
        raise WeightBridgeUnavailableError(msg)
    groups = (  # in the order of a grid's fields
        state.get_tensor_model_parallel_group(),
        # Ranks that only share a sequence hold the same weights.
        state.get_data_parallel_group(with_context_parallel=True),
        state.get_expert_model_parallel_group(),
        state.get_expert_tensor_parallel_group(),
        state.get_expert_data_parallel_group(),
    )
    me = torch.distributed.get_rank()
    axes = []
    for group in groups:
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        axes.append(Axis(number=ranks.index(me), ranks=ranks, group=group))
    return Grid(*axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """How ranks share one tensor, and what this rank holds of it.

    Attributes:
        shape: of the whole.
        axis: the ranks that share it; it is whole on each where there is only one.
        parts: what each rank of the axis holds, in the axis's order.
        replica: number of this rank's copy.
        owners: ranks that hold a part or a copy, as far as this rank knows.

    """

    shape: tuple[int, ...]
    axis: Axis
    parts: tuple[tuple[Piece, ...], ...]
    replica: int
    owners: tuple[int, ...]

    @property
    def is_cut(self) -> bool:
        """Whether several ranks share it."""
        return len(self.parts) > 1

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What this rank holds."""
        return self.parts[self.axis.number if self.is_cut else 0]


def shard_of(
    name: str,
    parameter: torch.Tensor,
    grid: Grid,
    *,
    is_gated: bool = False,
    is_further_copy: bool = False,
) -> Shard:
    """How the ranks share a parameter, as Megatron marked it.

    Args:
        name: in the whole model.
        parameter: this rank's part.
        grid: where this rank stands.
        is_gated: it is two matrices one above the other, each of which is cut.
        is_further_copy: other ranks hold the same tensor, and count as the first.

    Raises:
        WeightBridgeUnavailableError: rows that cannot be what Megatron says, or a cut of which it
            does not say where it is.

    """
    is_expert = not getattr(parameter, "allreduce", True)
    axis, copies = grid.tensor, grid.data
    if is_expert:
        axis, copies = grid.expert_tensor, grid.expert_data
    dim = _cut_dim(name, parameter, axis, grid)
    local = tuple(parameter.shape)
    owners = tuple(sorted({*axis.ranks, *copies.ranks}))
    first_copy = copies.size if is_further_copy else 0
    if dim is None:
        replica = (copies.number + first_copy) * axis.size + axis.number
        piece = box_piece(name, local, (0,) * len(local), local, replica=replica)
        return Shard(shape=local, axis=axis, parts=((piece,),), replica=replica, owners=owners)
    whole = (*local[:dim], local[dim] * axis.size, *local[dim + 1 :])
    # Megatron cuts the tensor into `strides` blocks and each block into one part per rank.
    strides = max(int(getattr(parameter, "partition_stride", 1)), 2 if is_gated else 1)
    if local[dim] % strides:
        msg = (
            f"tensor {name!r}: {local[dim]} rows on this rank are not {strides} blocks of the same "
            "size. Publish whole tensors instead: full()."
        )
        raise WeightBridgeUnavailableError(msg)
    length = local[dim] // strides
    replica = copies.number + first_copy
    parts = []
    for number in range(axis.size):
        blocks = []
        for block in range(strides):
            begin, there = [0] * len(local), [0] * len(local)
            begin[dim] = (block * axis.size + number) * length
            there[dim] = block * length
            shape = (*local[:dim], length, *local[dim + 1 :])
            blocks.append(box_piece(name, whole, begin, shape, replica=replica, local_offset=there))
        parts.append(tuple(blocks))
    return Shard(shape=whole, axis=axis, parts=tuple(parts), replica=replica, owners=owners)


def _cut_dim(name: str, parameter: torch.Tensor, axis: Axis, grid: Grid) -> int | None:
    """The dimension along which the ranks of an axis share a parameter; None if each has all."""
    if name.endswith(_FUSED_EXPERTS) and max(axis.size, grid.expert.size) > 1:
        msg = (
            f"tensor {name!r} is all experts of a rank in one matrix, and ranks have different "
            "ones under that name. Use the grouped experts of Transformer Engine, or "
            "moe_grouped_gemm=False."
        )
        raise WeightBridgeUnavailableError(msg)
    if axis.size == 1:
        return None
    unmarked = _UNMARKED.get(name.rpartition(".")[2])
    if unmarked is not None:
        return unmarked
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim = int(getattr(parameter, "partition_dim", -1))
    if dim < 0:
        # Layers of state space models: fused parts of several sizes, each of which is cut.
        msg = (
            f"Megatron marks tensor {name!r} as cut over {axis.size} ranks, and not along which "
            "dimension. Train such layers without tensor parallelism, or publish what a bridge "
            "exports: full() with bridge=."
        )
        raise WeightBridgeUnavailableError(msg)
    return dim


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside of Megatron's wrappers (data parallelism, 16 bits)."""
    inner = getattr(model, "module", None)
    return unwrapped(inner) if isinstance(inner, torch.nn.Module) else model


def naming_in(model: torch.nn.Module, grid: Grid) -> Naming:
    """From a path on this rank to the name in the whole model: with other numbers in it."""
    words = dict(_renumbered(model, grid))

    def name_of(path: str) -> str:
        parts, prefix = [], ""
        for part in path.split("."):
            prefix = f"{prefix}.{part}" if prefix else part
            parts.append(words.get(prefix, part))
        return clean_name(".".join(parts))

    return name_of


def _renumbered(model: torch.nn.Module, grid: Grid) -> Iterable[tuple[str, str]]:
    """Path on this rank, and what its last word becomes."""
    for path, module in model.named_modules():
        around, _, last = path.rpartition(".")
        layer = getattr(module, "layer_number", None)
        if layer is not None and last.isdecimal() and around.endswith("layers"):
            yield path, str(int(layer) - 1)  # Megatron counts from 1, over all pipeline stages
        if last == "local_experts":
            count = len(list(module.children()))
            for number in range(count):
                yield f"{path}.{number}", str(number + grid.expert.number * count)
        if around.endswith("experts") and last in {"linear_fc1", "linear_fc2"}:
            yield from _grouped(path, module, grid)


def _grouped(path: str, module: torch.nn.Module, grid: Grid) -> Iterable[tuple[str, str]]:
    """One layer that holds ``weight0``, ``weight1`` ... of all experts of this rank."""
    for word in ("weight", "bias"):
        keys = [key for key, _ in module.named_parameters(recurse=False) if key.startswith(word)]
        numbers = [int(key.removeprefix(word)) for key in keys if key != word]
        for number in numbers:
            moved = number + grid.expert.number * len(numbers)
            yield f"{path}.{word}{number}", f"{word}{moved}"


# ---- the extractor ---------------------------------------------------------------------------


class MegatronWeightExtractor(WeightExtractor):
    """Weights of a Megatron-Core model.

    Every rank makes one. Without a bridge, names are Megatron's in the whole model (layers and
    experts counted over all ranks), and `full` gathers what this rank's pipeline stage and experts
    hold. With a bridge, `full` yields Hugging Face's tensors and names, the whole model on each
    rank, as the bridge exports them. With mbridge, `local` tells where each part lies in Hugging
    Face's tensors as well, without a gather.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        *,
        bridge: Any = None,
        chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
        keep_buffers: bool = False,
    ) -> None:
        """Make an extractor; no rank is asked.

        Args:
            model: the model of this rank, or its parts of a virtual pipeline.
            bridge: of mbridge (``AutoBridge``) or of Megatron-Bridge, which made the model.
            chunk_nbytes: bytes of one chunk.
            keep_buffers: cast into the same memory in every update; see `WeightExtractor`.

        Raises:
            IncompatibleUpdate: no modules, or no bridge.
            WeightBridgeUnavailableError: Megatron is not installed, or not initialized.

        """
        super().__init__(chunk_nbytes=chunk_nbytes, keep_buffers=keep_buffers)
        given: object = model
        self._models = [given] if isinstance(given, torch.nn.Module) else list(model)  # type: ignore[arg-type]
        if not self._models or not all(isinstance(one, torch.nn.Module) for one in self._models):
            msg = (
                f"cannot extract from a {type(given).__name__}, expected a module or a list of "
                "them. Pass what Megatron trains."
            )
            raise IncompatibleUpdate(msg)
        if bridge is not None and not (is_mbridge(bridge) or is_megatron_bridge(bridge)):
            msg = (
                f"bridge is a {type(bridge).__name__}, expected one of mbridge or Megatron-Bridge. "
                "Pass AutoBridge.from_pretrained(...), or leave it out."
            )
            raise IncompatibleUpdate(msg)
        self._bridge = bridge
        self._grid: Grid = grid_now()
        self._walks: list[ModuleSlots] = []
        self._shards: list[Shard] = []

    # ---- this rank's own parts

    def _tensors_known(self) -> Sequence[RankTensor]:
        self._walks, self._shards = [], []
        known: list[RankTensor] = []
        for wrapped in self._models:
            model: Any = unwrapped(wrapped)
            walk, first = ModuleSlots(model, naming_in(model, self._grid)), len(known)
            self._walks.append(walk)
            for slot, tied_to in zip(walk.slots, walk.ties(), strict=True):
                at = None if tied_to is None else first + tied_to
                known.append(self._described(model, slot, at))
        return known

    def _described(self, model: Any, slot: Slot, tied_to: int | None) -> RankTensor:
        tensor = slot.tensor()
        if hasattr(tensor, "device_mesh"):
            msg = (
                f"tensor {slot.name!r} is a DTensor: Megatron-FSDP is not supported. Use "
                "Megatron's distributed optimizer instead."
            )
            raise WeightBridgeUnavailableError(msg)
        # The last pipeline stage's copy of a tied embedding is a copy of the embedding.
        is_copy = bool(getattr(tensor, "shared", False))
        whole = EMBEDDING if is_copy else slot.name
        is_gated = ".linear_fc1." in slot.name and bool(model.config.gated_linear_unit)
        shard = shard_of(whole, tensor, self._grid, is_gated=is_gated, is_further_copy=is_copy)
        self._shards.append(shard)
        pieces = shard.pieces
        if self._bridge is not None:
            pieces = hf_pieces(self._bridge, model.config, whole, pieces)
        return RankTensor(
            name=slot.name,
            shape=shard.shape,
            dtype=tensor.dtype,
            # A part that is nothing but the padding of a vocabulary is not published.
            local_shape=tuple(tensor.shape) if pieces else None,
            pieces=pieces,
            owners=shard.owners,
            is_whole=not shard.is_cut,
            is_trainable=tensor.requires_grad,
            tied_to=tied_to,
        )

    def _tensors_now(self) -> Sequence[torch.Tensor | None] | None:
        found: list[torch.Tensor | None] = []
        for walk in self._walks:
            tensors = walk.tensors()
            if tensors is None:
                return None
            found += tensors
        return found

    # ---- whole tensors

    def full(self, dtype: torch.dtype | None = None) -> Iterator[WeightChunk]:
        """Yield whole tensors, one chunk at a time. Every rank of the model iterates it.

        Without a bridge: those of this rank's pipeline stage and experts. With one: all, by their
        Hugging Face names.

        Args:
            dtype: to which floating-point tensors are cast; None leaves them as they are.

        """
        if self._bridge is None:
            return super().full(dtype)
        return _chunked(self._exported(), checked_dtype(dtype), self._chunk_nbytes)

    def _exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        if is_megatron_bridge(self._bridge):
            exported = self._bridge.export_hf_weights(self._models, show_progress=False)
        else:
            exported = self._bridge.export_weights(self._models)
        for name, tensor in exported:
            yield name, tensor.detach()

    def _fill(
        self,
        views: Sequence[torch.Tensor],
        sources: Sequence[int],
        tensors: Sequence[torch.Tensor | None],
    ) -> None:
        cut: list[Shared] = []
        for view, source in zip(views, sources, strict=True):
            shard, tensor = self._shards[source], tensors[source]
            if shard.is_cut:
                parts = tuple(zip(shard.axis.ranks, shard.parts, strict=True))
                split = Split(group=shard.axis.group, device=view.device, parts=parts)
                cut.append((view, split, tensor))
            else:
                view.copy_(tensor)  # type: ignore[arg-type]  # this rank holds all of it
        gather(cut, window=self._reserve_nbytes())

    def _reserve_nbytes(self) -> int:
        return window_nbytes(self._chunk_nbytes)


def _chunked(
    pairs: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, limit: int
) -> Iterator[WeightChunk]:
    """Chunks of tensors that come one by one; neighbours of one module stay together."""
    done: list[tuple[str, torch.Tensor]] = []
    module: list[tuple[str, torch.Tensor]] = []
    size = more = 0
    for name, tensor in pairs:
        if module and module_of(module[0][0]) != module_of(name):
            done.extend(module)
            module, size, more = [], size + more, 0
        wire = tensor.to(wire_dtype(tensor.dtype, dtype)).contiguous()
        del tensor
        module.append((name, wire))
        more += wire.nbytes
        if done and size + more > limit:
            yield _chunk(done)
            done, size = [], 0
    if done or module:
        yield _chunk([*done, *module])


def _chunk(pairs: Sequence[tuple[str, torch.Tensor]]) -> WeightChunk:
    modules = {module_of(name) for name, _ in pairs}
    return WeightChunk.of(pairs, module_name=modules.pop() if len(modules) == 1 else None)
