"""How Megatron's ranks share a tensor, and what it is called in the whole model.

Megatron keeps its process groups in globals of its own; `grid_now` reads them, nothing else does.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.extractors.layouts import box_piece
from rl_bridge.extractors.names import Naming, clean_name
from rl_bridge.manifest.placement import Piece

__all__ = ["EMBEDDING", "Grid", "Line", "Share", "grid_now", "naming_in", "share_of", "unwrapped"]

EMBEDDING = "embedding.word_embeddings.weight"
"""What Megatron calls the embedding, of which the last pipeline stage may have a copy."""

# Cut by attention heads, which Megatron marks nowhere.
_UNMARKED = {"softmax_offset": 0}
# The older kind of grouped experts: all of a rank's are one matrix under one name.
_FUSED_EXPERTS = (".experts.weight1", ".experts.weight2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where this rank stands. Experts have tensor and data dimensions of their own."""

    tensor: Line
    data: Line
    expert: Line
    expert_tensor: Line
    expert_data: Line


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
    groups = (
        state.get_tensor_model_parallel_group(),
        # Ranks that only share a sequence hold the same weights.
        state.get_data_parallel_group(with_context_parallel=True),
        state.get_expert_model_parallel_group(),
        state.get_expert_tensor_parallel_group(),
        state.get_expert_data_parallel_group(),
    )
    me = torch.distributed.get_rank()
    lines = []
    for group in groups:
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        lines.append(Line(number=ranks.index(me), ranks=ranks, group=group))
    tensor, data, expert, expert_tensor, expert_data = lines
    return Grid(
        tensor=tensor,
        data=data,
        expert=expert,
        expert_tensor=expert_tensor,
        expert_data=expert_data,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What this rank holds of one tensor.

    Attributes:
        shape: of the whole.
        line: the ranks that share it; it is whole on each where there is only one.
        parts: what each rank of the line holds, in the line's order.
        replica: number of this rank's copy.
        owners: ranks that hold a part or a copy, as far as this rank knows.

    """

    shape: tuple[int, ...]
    line: Line
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
        return self.parts[self.line.number if self.is_cut else 0]


def share_of(
    name: str,
    parameter: torch.Tensor,
    grid: Grid,
    *,
    is_gated: bool = False,
    is_further_copy: bool = False,
) -> Share:
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
    line, copies = grid.tensor, grid.data
    if is_expert:
        line, copies = grid.expert_tensor, grid.expert_data
    dim = _cut_dim(name, parameter, line, grid)
    local = tuple(parameter.shape)
    owners = tuple(sorted({*line.ranks, *copies.ranks}))
    first_copy = copies.size if is_further_copy else 0
    if dim is None:
        replica = (copies.number + first_copy) * line.size + line.number
        piece = box_piece(name, local, (0,) * len(local), local, replica=replica)
        return Share(shape=local, line=line, parts=((piece,),), replica=replica, owners=owners)
    whole = (*local[:dim], local[dim] * line.size, *local[dim + 1 :])
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
    for number in range(line.size):
        blocks = []
        for block in range(strides):
            begin, there = [0] * len(local), [0] * len(local)
            begin[dim] = (block * line.size + number) * length
            there[dim] = block * length
            shape = (*local[:dim], length, *local[dim + 1 :])
            blocks.append(box_piece(name, whole, begin, shape, replica=replica, local_offset=there))
        parts.append(tuple(blocks))
    return Share(shape=whole, line=line, parts=tuple(parts), replica=replica, owners=owners)


def _cut_dim(name: str, parameter: torch.Tensor, line: Line, grid: Grid) -> int | None:
    """The dimension along which a line of ranks shares a parameter; None where each has all."""
    if name.endswith(_FUSED_EXPERTS) and max(line.size, grid.expert.size) > 1:
        msg = (
            f"tensor {name!r} is all experts of a rank in one matrix, and ranks have different "
            "ones under that name. Use the grouped experts of Transformer Engine, or "
            "moe_grouped_gemm=False."
        )
        raise WeightBridgeUnavailableError(msg)
    if line.size == 1:
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
            f"Megatron marks tensor {name!r} as cut over {line.size} ranks, and not along which "
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
