"""Weights of a Megatron-Core model: cut by tensor, pipeline and expert parallelism.

Megatron marks each parameter with the dimension along which ranks share it, and keeps its process
groups in globals; `grid_now` is the only function that reads these. `shard_of` says which part of
the whole tensor this rank holds, and `naming_in` what the tensor is called in the whole model.

A bridge (mbridge, or Megatron-Bridge) exports whole tensors under Hugging Face's names. Where a
part of a rank lies in those, `hf_pieces` says without a gather, from mbridge's own table of names.

Of a LoRA that peft put into such a model, one of the two matrices is cut where its layer is: B's
rows in a column-parallel layer, A's columns in a row-parallel one. Megatron marks them as it marks
weights: what a rank holds of the two gives what it holds of the merged weight. A fused layer has
one pair: A is published once for each of Hugging Face's modules in it, and B's rows go where the
rows of the fused weight go.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch

from rl_bridge.errors import IncompatibleUpdate, WeightBridgeUnavailableError
from rl_bridge.manifest.adapter import PEFT_ROOT, AdapterSpec
from rl_bridge.manifest.parallel import Piece
from rl_bridge.memory.packing import checked_dtype, wire_dtype
from rl_bridge.trainers.base import ExtractorOptions, RankTensor, WeightExtractor, tied_refusal
from rl_bridge.trainers.chunks import (
    WeightChunk,
    module_of,
    wire_name,
)
from rl_bridge.trainers.gather import (
    Split,
    box_piece,
    broadcast_json,
    narrowed,
    whole_piece,
)
from rl_bridge.trainers.modules import (
    AdapterNames,
    Adapters,
    ModelNames,
    ModuleSlots,
    Naming,
    Slot,
    clean_name,
    is_adapted,
    is_saved_copy,
    naming_of,
    without_adapters,
)

# ---- names of Hugging Face --------------------------------------------------------------------

Block = tuple[int, int, str, int, int]
"""First row in a fused tensor, number of rows, name of the tensor that they belong to, their first
row there, and how many rows that one has."""

_NUM_QKV = 3
_NUM_GATE_AND_UP = 2
_USE_RAW = (
    "Make the extractor without bridge= for parts under Megatron's names; for weights, full() is "
    "another way."
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
    raise WeightBridgeUnavailableError(
        f"tensor {name!r} becomes {names}, and how is not known here. {_USE_RAW}"
    )


def _hf_names(bridge: Any, name: str) -> list[str]:
    convert = getattr(type(bridge), "_weight_to_hf_format", None)
    # A subclass that converts in a way of its own overrides this method.
    if convert is None or convert.__qualname__ != "Bridge._weight_to_hf_format":
        raise WeightBridgeUnavailableError(
            f"{type(bridge).__name__} converts weights in a way of its own, so where tensor "
            f"{name!r} goes is not known before it is exported. {_USE_RAW}"
        )
    return list(bridge._weight_name_mapping_mcore_to_hf(name))  # noqa: SLF001 - it has no public one


def _qkv_blocks(names: Sequence[str], config: Any, name: str, rows: int) -> list[Block]:
    """Rows of the fused tensor, in which each query group has its queries, keys and values."""
    groups, head = config.num_query_groups, config.kv_channels
    queries = head * config.num_attention_heads // groups
    each = queries + 2 * head
    if groups * each != rows:
        raise WeightBridgeUnavailableError(
            f"tensor {name!r} has {rows} rows, expected {groups} groups of {each}: a fused layout "
            f"that is not known here. {_USE_RAW}"
        )
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
    """One dimension of Megatron's grid of ranks, through this rank."""

    number: int  # of this rank along it
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
    pipeline: Axis


def grid_now() -> Grid:
    """Where this rank stands, as ``megatron.core.parallel_state`` says.

    Raises:
        WeightBridgeUnavailableError: Megatron is not installed, or not initialized.

    """
    try:
        from megatron.core import parallel_state as state
    except ImportError as error:
        raise WeightBridgeUnavailableError(
            "megatron-core is not installed. Install rl_bridge[megatron]."
        ) from error
    if not state.model_parallel_is_initialized():
        raise WeightBridgeUnavailableError(
            "Megatron's process groups are not there. Call "
            "parallel_state.initialize_model_parallel before making an extractor."
        )
    groups = (  # in the order of a grid's fields
        state.get_tensor_model_parallel_group(),
        # Ranks that only share a sequence hold the same weights.
        state.get_data_parallel_group(with_context_parallel=True),
        state.get_expert_model_parallel_group(),
        state.get_expert_tensor_parallel_group(),
        state.get_expert_data_parallel_group(),
        state.get_pipeline_model_parallel_group(),
    )
    me = torch.distributed.get_rank()
    axes = []
    for group in groups:
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        axes.append(Axis(number=ranks.index(me), ranks=ranks, group=group))
    return Grid(*axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """How ranks share one tensor, and what this rank holds of it."""

    shape: tuple[int, ...]  # of the whole
    axis: Axis  # the ranks that share it
    parts: tuple[tuple[Piece, ...], ...]
    """What each rank of the axis holds, in its order; one if each rank has all of it."""
    owners: tuple[int, ...]  # ranks that hold a part or a copy, as far as this rank knows

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
        return Shard(shape=local, axis=axis, parts=((piece,),), owners=owners)
    whole = (*local[:dim], local[dim] * axis.size, *local[dim + 1 :])
    # Megatron cuts the tensor into `strides` blocks and each block into one part per rank.
    strides = max(int(getattr(parameter, "partition_stride", 1)), 2 if is_gated else 1)
    if local[dim] % strides:
        raise WeightBridgeUnavailableError(
            f"tensor {name!r}: {local[dim]} rows on this rank are not {strides} blocks of the same "
            "size. Publish whole tensors instead: full()."
        )
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
    return Shard(shape=whole, axis=axis, parts=tuple(parts), owners=owners)


def _cut_dim(name: str, parameter: torch.Tensor, axis: Axis, grid: Grid) -> int | None:
    """The dimension along which the ranks of an axis share a parameter; None if each has all."""
    if name.endswith(_FUSED_EXPERTS) and max(axis.size, grid.expert.size) > 1:
        raise WeightBridgeUnavailableError(
            f"tensor {name!r} is all experts of a rank in one matrix, and ranks have different "
            "ones under that name. Use the grouped experts of Transformer Engine, or "
            "moe_grouped_gemm=False."
        )
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
        raise WeightBridgeUnavailableError(
            f"Megatron marks tensor {name!r} as cut over {axis.size} ranks, and not along which "
            "dimension. Train such layers without tensor parallelism, or publish what a bridge "
            "exports: full() with bridge=."
        )
    return dim


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside of Megatron's wrappers (data parallelism, 16 bits) and of peft's."""
    # (Attributes would not do: peft's wrappers have those of what they wrap.)
    inside = dict(model.named_children())
    inner = inside.get("module")
    if "base_model" in inside:  # peft has one wrapper inside of another
        inner = dict(inside["base_model"].named_children()).get("model")
    return unwrapped(inner) if inner is not None else model


def naming_in(model: torch.nn.Module, grid: Grid) -> Callable[[str], str]:
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


# ---- an adapter ------------------------------------------------------------------------------

_NO_LINEAR = (
    "Adapt other linear layers, by plain LoRA, or publish the merged weights: the model that "
    "peft's merge_and_unload() gives."
)


class StageAdapter(AdapterNames):
    """The adapter in the models of one rank: its names, and the modules that it is published for.

    Attributes:
        layers: name in the whole model, as Megatron has it -> peft's layer.

    Raises:
        IncompatibleUpdate: the models have no such adapter.
        WeightBridgeUnavailableError: it is one of Megatron-Bridge's own, or of experts.

    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        grid: Grid,
        bridge: Any,
        *,
        name: str,
        base_root: str,
    ) -> None:
        """Find the adapter that is published under `name`; `bridge` is of mbridge, or None."""
        for model in models:
            for path, module in model.named_modules():
                if hasattr(module, "to_wrap") and hasattr(module, "adapter"):
                    raise WeightBridgeUnavailableError(
                        f"adapter={name!r}: layer {clean_name(path)!r} is a "
                        f"{type(module).__name__} of Megatron-Bridge's own, expected layers of "
                        "peft (lora_A, lora_B). Wrap the model with peft.get_peft_model, or "
                        "publish the merged weights with a bridge."
                    )
        super().__init__(torch.nn.ModuleList(models), name, base_root)
        self._grid, self._bridge = grid, bridge
        adapted = set(self._adapted.values())
        self.layers: dict[str, Any] = {}
        for model in map(unwrapped, models):
            name_of = naming_in(model, grid)
            for path, layer in model.named_modules():
                if layer in adapted:
                    self.layers[name_of(path)] = layer
        for module in self.layers:
            if not {"experts", "local_experts"}.isdisjoint(module.split(".")):
                raise WeightBridgeUnavailableError(
                    f"adapter={name!r}: layer {module!r} is of an expert, expected layers that all "
                    f"tokens go through. {_NO_LINEAR}"
                )
            hf = self._published(module)
            if bridge is not None and f"{hf[0]}.weight" in _hf_names(bridge, EMBEDDING):
                raise WeightBridgeUnavailableError(
                    f"adapter={name!r}: layer {module!r} has the weight of the embedding, "
                    f"{hf[0]!r}, expected a layer with a weight of its own. {_NO_LINEAR}"
                )

    def __call__(self, name: str) -> str | None:
        """The name that is published, after Megatron's layer."""
        own = super().__call__(name)
        return None if own is None else PEFT_ROOT + own

    def matrices(
        self, name: str, config: Any, pieces: Sequence[Piece]
    ) -> list[tuple[str, tuple[Piece, ...]]]:
        """Under which names a matrix of the adapter is published, and where its `pieces` lie.

        `name` is after Megatron's layer, and so are the pieces. Matrix A of a fused layer has as
        many names as there are modules in it.

        Raises:
            WeightBridgeUnavailableError: the bridge converts this layer in a way of its own.

        """
        if self._bridge is None:
            return [(name, tuple(pieces))]
        module, word = _module_and_word(name)
        names = [f"{PEFT_ROOT}{one}.{word}.weight" for one in self._published(module)]
        if word == "lora_A":
            return [(one, tuple(replace(piece, name=one) for piece in pieces)) for one in names]
        placed = hf_pieces(self._bridge, config, f"{module}.weight", pieces)
        own = tuple(
            replace(one, name=f"{PEFT_ROOT}{one.name.removesuffix('.weight')}.{word}.weight")
            for one in placed
        )
        return [(names[0] if len(names) == 1 else name, own)]

    def check_matrix(self, name: str, shape: tuple[int, ...], config: Any) -> None:
        """Compare a whole matrix, as Megatron's marks have it, with the whole weight of its layer.

        Raises:
            WeightBridgeUnavailableError: they do not fit, or it is no matrix of a linear layer.

        """
        module, word = _module_and_word(name)
        layer = self.layers.get(module)
        if layer is None or word not in {"lora_A", "lora_B"}:
            raise WeightBridgeUnavailableError(
                f"adapter={self._name!r}: tensor {name!r} is no lora_A.weight or lora_B.weight of "
                "a linear layer, expected nothing else: how ranks share biases, magnitudes (DoRA), "
                f"embeddings and saved modules of peft is not known. {_NO_LINEAR}"
            )
        weight = getattr(layer.get_base_layer(), "weight", None)
        if weight is None:  # the head of a model whose embedding is on the same rank
            return
        is_gated = is_gated_in(module, config)
        whole = shard_of(f"{module}.weight", weight, self._grid, is_gated=is_gated).shape
        expected = (shape[0], *whole[1:]) if word == "lora_A" else (*whole[:1], shape[-1])
        if shape != expected:
            raise WeightBridgeUnavailableError(
                f"adapter={self._name!r}: all ranks' parts of {name!r} are of shape {list(shape)}, "
                f"expected {list(expected)} for a weight of {list(whole)}: Megatron's marks do not "
                "say how the ranks share it. Make the matrix of Megatron's own parallel layers, as "
                "peft's LoraParallelLinear does."
            )

    def _facts(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Peft's configuration in the names that are published, and the modules' scalings.

        Raises:
            WeightBridgeUnavailableError: modules differ, and other pipeline stages have some.

        """
        # Megatron's own configuration is no JSON, and holds methods of the model.
        own = copy.copy(self._config)
        own.megatron_config = None
        # Peft's patterns count the layers of a stage: those of the layers themselves go there.
        config = {
            **own.to_dict(),
            **dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern")),
            "rank_pattern": {},
            "alpha_pattern": {},
        }
        given = self._config.target_modules
        words = {one.rpartition(".")[2] for each in self.layers for one in self._published(each)}
        if not isinstance(given, str) and "output_layer" in given:  # it is on the last stage alone
            words |= {one.rpartition(".")[2] for one in self._published("output_layer")}
        config["target_modules"] = sorted(words)
        scaling = AdapterSpec.of_peft(self._name, config, ()).scaling
        scalings: dict[str, float] = {}
        for module, layer in self.layers.items():
            of_layer = float(layer.scaling[self._own])
            rank, alpha = layer.r[self._own], layer.lora_alpha[self._own]
            if self._grid.pipeline.size > 1 and (rank, of_layer) != (config["r"], scaling):
                raise WeightBridgeUnavailableError(
                    f"adapter={self._name!r}: layer {module!r} has rank {rank} and scaling "
                    f"{of_layer}, expected {config['r']} and {scaling} as all others: a pipeline "
                    "stage does not know those of other stages. Leave out rank_pattern and "
                    "alpha_pattern, or train without pipeline parallelism."
                )
            for one in self._published(module):
                scalings[one] = of_layer
                if rank != config["r"]:
                    config["rank_pattern"][f"^{re.escape(one)}"] = rank
                if alpha != config["lora_alpha"]:
                    config["alpha_pattern"][f"^{re.escape(one)}"] = alpha
        return config, scalings

    def _published(self, module: str) -> list[str]:
        """The modules that a layer of Megatron's is published as."""
        if self._bridge is None:
            return [module]
        return [one.removesuffix(".weight") for one in _hf_names(self._bridge, f"{module}.weight")]


def _module_and_word(name: str) -> tuple[str, str]:
    """The layer of an adapter's tensor, and the last word of its name but for ``weight``."""
    module, _, word = name.removeprefix(PEFT_ROOT).removesuffix(".weight").rpartition(".")
    return module, word


def is_gated_in(name: str, config: Any) -> bool:
    """Whether this layer, or tensor of one, is two matrices one above the other."""
    return ".linear_fc1." in f"{name}." and bool(config.gated_linear_unit)


# ---- the extractor ---------------------------------------------------------------------------


class MegatronWeightExtractor(WeightExtractor):
    """Weights of a Megatron-Core model.

    Every rank makes one. Without a bridge, names are Megatron's in the whole model (layers and
    experts counted over all ranks), and `full` gathers what this rank's pipeline stage and experts
    hold. With a bridge, `full` yields Hugging Face's tensors and names, the whole model on each
    rank, as the bridge exports them. With mbridge, `local` tells where each part lies in Hugging
    Face's tensors as well, without a gather.

    Of a model with peft's layers it is the weights with the adapters merged in: a rank merges what
    it holds, and asks no other one. With `adapter` it is one LoRA, under the same names.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        *,
        bridge: Any = None,
        **options: Unpack[ExtractorOptions],
    ) -> None:
        """Make an extractor; no rank is asked.

        Args:
            model: the model of this rank, or its parts of a virtual pipeline.
            bridge: of mbridge (``AutoBridge``) or of Megatron-Bridge, which made the model.
            options: those of every `WeightExtractor`: ``adapter=``, ``chunk_nbytes=`` and others.

        Raises:
            IncompatibleUpdate: no modules, or no bridge; adapters without a name.
            WeightBridgeUnavailableError: Megatron is not installed, or not initialized; an adapter
                with a bridge that does not tell names.

        """
        super().__init__(**options)
        adapter, adapters = self._adapter, self._adapters
        if adapter is None and adapters == Adapters.ONLY:
            raise IncompatibleUpdate(
                f"adapters={str(adapters)!r}: expected 'merged' or 'base' under Megatron, where an "
                "adapter is published under a name. Pass adapter='NAME'."
            )
        given: object = model
        self._models = [given] if isinstance(given, torch.nn.Module) else list(model)  # type: ignore[arg-type]
        if not self._models or not all(isinstance(one, torch.nn.Module) for one in self._models):
            raise IncompatibleUpdate(
                f"cannot extract from a {type(given).__name__}, expected a module or a list of "
                "them. Pass what Megatron trains."
            )
        if bridge is not None and not (is_mbridge(bridge) or is_megatron_bridge(bridge)):
            raise IncompatibleUpdate(
                f"bridge is a {type(bridge).__name__}, expected one of mbridge or Megatron-Bridge. "
                "Pass AutoBridge.from_pretrained(...), or leave it out."
            )
        if adapter is not None and bridge is not None and not is_mbridge(bridge):
            raise WeightBridgeUnavailableError(
                f"adapter={adapter!r}: bridge is a {type(bridge).__name__} of Megatron-Bridge, "
                "expected one of mbridge, whose table of names is known. Leave it out for "
                "Megatron's names."
            )
        self._bridge = bridge
        self._grid: Grid = grid_now()
        self._walks: list[ModuleSlots] = []
        self._weights: list[ModelNames] = []  # of each walk, unless it is of an adapter
        self._repeats: list[list[int]] = []  # of each walk: known tensors of each slot
        self._shards: list[Shard] = []
        self._wholes: dict[str, tuple[Piece, ...]] = {}  # of an adapter's matrices: what each is

    # ---- this rank's own parts

    def _tensors_known(self) -> Sequence[RankTensor]:
        self._walks, self._repeats, self._shards, self._wholes = [], [], [], {}
        self._weights = []
        adapter = None
        if self._adapter is not None:
            options: Any = {"name": self._adapter, "base_root": self._base_root}
            adapter = StageAdapter(self._models, self._grid, self._bridge, **options)
        self._named = adapter
        known: list[RankTensor] = []
        for wrapped in self._models:
            model: Any = unwrapped(wrapped)
            naming = naming_in(model, self._grid)
            if adapter is None:
                self._weights.append(self._names_of_weights(model))
                if self._weights[-1].is_merging:
                    self._named = self._weights[-1]
            walk = ModuleSlots(model, _numbered(naming, adapter or self._weights[-1]))
            firsts: list[int] = []
            for slot, tied_to in zip(walk.slots, walk.ties(), strict=True):
                at = None if tied_to is None else firsts[tied_to]
                firsts.append(len(known))
                if adapter is None:
                    known.append(self._described(model, slot, at))
                else:
                    known += self._matrices(adapter, model, slot, len(known) if at is None else at)
            ends = [*firsts[1:], len(known)]
            self._walks.append(walk)
            self._repeats.append([end - first for first, end in zip(firsts, ends, strict=False)])
        return known

    def _names_of_weights(self, model: torch.nn.Module) -> ModelNames:
        """How a model's own weights are called, with its adapters merged in or without them."""
        for path, module in model.named_modules():
            if is_saved_copy(module):
                # (A copy that peft makes has lost Megatron's marks: which part of the module a
                # rank's copy is cannot be read from it.)
                raise WeightBridgeUnavailableError(
                    f"module {clean_name(path)!r} is one of which peft trains a copy, expected "
                    "adapters only: how the ranks share the copy is not known. Leave it out of "
                    "modules_to_save."
                )
            if hasattr(getattr(module, "base_layer", None), "weight0"):
                raise WeightBridgeUnavailableError(
                    f"layer {clean_name(path)!r} has an adapter and holds all experts of this "
                    "rank, expected adapters of layers with one weight: how the experts share the "
                    "adapter is not known. Leave it out of target_modules."
                )
        return naming_of(model, self._adapters)

    def _matrices(
        self, adapter: StageAdapter, model: Any, slot: Slot, first: int
    ) -> list[RankTensor]:
        """A matrix of an adapter, under each of its names; all are the tensor of the `first`."""
        tensor, config = slot.tensor(), model.config
        is_gated = is_gated_in(slot.name, config)
        shard = shard_of(slot.name, tensor, self._grid, is_gated=is_gated)
        adapter.check_matrix(slot.name, shard.shape, config)
        held = adapter.matrices(slot.name, config, shard.pieces)
        wholes = adapter.matrices(slot.name, config, [whole_piece(slot.name, shard.shape)])
        self._wholes.update(wholes)
        found = []
        for name, pieces in held:
            number = len(self._shards)
            self._shards.append(shard)
            found.append(
                RankTensor(
                    name=name,
                    shape=shard.shape,
                    dtype=tensor.dtype,
                    local_shape=tuple(tensor.shape) if pieces else None,
                    pieces=pieces,
                    owners=shard.owners,
                    is_whole=not shard.is_cut,
                    is_trainable=tensor.requires_grad,
                    tied_to=None if number == first else first,
                )
            )
        return found

    def _described(self, model: Any, slot: Slot, tied_to: int | None) -> RankTensor:
        tensor = slot.tensor()
        if hasattr(tensor, "device_mesh"):
            raise WeightBridgeUnavailableError(
                f"tensor {slot.name!r} is a DTensor: Megatron-FSDP is not supported. Use "
                "Megatron's distributed optimizer instead."
            )
        # The last pipeline stage's copy of a tied embedding is a copy of the embedding.
        is_copy = bool(getattr(tensor, "shared", False))
        whole = EMBEDDING if is_copy else slot.name
        is_gated = is_gated_in(slot.name, model.config)
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
            is_trainable=tensor.requires_grad or slot.path in self._weights[-1].trained_paths,
            tied_to=tied_to,
        )

    def _tensors_now(self) -> Sequence[torch.Tensor | None] | None:
        found: list[torch.Tensor | None] = []
        for number, (walk, repeats) in enumerate(zip(self._walks, self._repeats, strict=True)):
            tensors = walk.tensors()
            if tensors is None:
                return None
            model = unwrapped(self._models[number])
            merged = _merged_in(model, self._weights[number]) if self._weights else {}
            for slot, tensor, times in zip(walk.slots, tensors, repeats, strict=True):
                found += [merged.get(slot.path, tensor)] * times
        return found

    # ---- whole tensors

    def full(self, dtype: torch.dtype | None = None) -> Iterator[WeightChunk]:
        """Yield whole tensors, one chunk at a time. Every rank of the model iterates it.

        Without a bridge: those of this rank's pipeline stage and experts. With one: all, by their
        Hugging Face names.
        """
        if self._bridge is None:
            return super().full(dtype)
        if self._adapter is not None:
            own = self._named_anew(super().full(dtype))
            return _chunked(self._of_all_stages(own), None, self._chunk_nbytes)
        return _chunked(self._exported(), checked_dtype(dtype), self._chunk_nbytes)

    def _exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Bridges know the names of models without peft.
        models = [self._without_peft(model) for model in self._models]
        if is_megatron_bridge(self._bridge):
            exported = self._bridge.export_hf_weights(models, show_progress=False)
        else:
            exported = self._bridge.export_weights(models)
        for name, tensor in exported:
            yield name, tensor.detach()

    def _without_peft(self, wrapped: torch.nn.Module) -> torch.nn.Module:
        """A model as it was before peft, with the same tensors but for merged weights."""
        if not any(is_adapted(module) for module in wrapped.modules()):
            return wrapped
        model = unwrapped(wrapped)
        return without_adapters(model, _merged_in(model, self._names_of_weights(model)))

    def _named_anew(self, chunks: Iterable[WeightChunk]) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole matrices of an adapter as Hugging Face's: rows of fused layers apart."""
        for chunk in chunks:
            for name, tensor in chunk.items():
                found: dict[str, torch.Tensor] = {}
                for piece in self._wholes[name]:
                    if piece.name not in found:
                        found[piece.name] = tensor.new_empty(piece.global_shape)
                    target = narrowed(found[piece.name], piece.offset, piece.shape)
                    target.copy_(narrowed(tensor, piece.local_offset, piece.shape))
                yield from found.items()

    def _of_all_stages(
        self, own: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of each pipeline stage in turn; a collective of the pipeline."""
        axis = self._grid.pipeline
        if axis.size == 1:
            yield from own
            return
        device = self._device
        for number, source in enumerate(axis.ranks):
            # All of a stage's, one after the other: the list of them goes first.
            held = list(own) if number == axis.number else []
            mine = [[name, list(one.shape), wire_name(one.dtype)] for name, one in held]
            told = broadcast_json(mine, source=source, group=axis.group, device=device)
            for at, (name, shape, dtype) in enumerate(told):
                kind = getattr(torch, dtype)
                tensor = held[at][1] if held else torch.empty(shape, dtype=kind, device=device)
                torch.distributed.broadcast(tensor, src=source, group=axis.group)
                yield name, tensor

    def _split(self, source: int) -> Split:
        shard = self._shards[source]
        parts = tuple(zip(shard.axis.ranks, shard.parts, strict=True))
        return Split(group=shard.axis.group, device=self._device, parts=parts)

    @property
    def _device(self) -> torch.device:
        return next(self._models[0].parameters()).device


def _merged_in(model: torch.nn.Module, names: ModelNames) -> dict[str, torch.Tensor]:
    """Weights with their adapters merged in, by path; no collective.

    What a rank holds of a layer's two matrices gives what it holds of the layer's weight. A weight
    that has another name, here or on the first pipeline stage, is refused.
    """
    merged = names.merged()
    firsts: dict[int, str] = {}
    for path, tensor in model.named_parameters(remove_duplicate=False) if merged else ():
        first = firsts.setdefault(id(tensor), path)
        if first != path and (first in merged or path in merged):
            raise IncompatibleUpdate(tied_refusal(str(names(path)), str(names(first))))
        if path in merged and getattr(tensor, "shared", False):
            raise IncompatibleUpdate(tied_refusal(str(names(path)), EMBEDDING))
    return merged


def _numbered(number: Callable[[str], str], names: ModelNames) -> Naming:
    """Names of tensors by their paths on this rank."""
    return lambda path: names(number(path))


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
