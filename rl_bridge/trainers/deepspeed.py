"""Weights of a DeepSpeed engine: whole on every rank under ZeRO-1 and ZeRO-2, cut under ZeRO-3.

ZeRO-3 cuts each parameter into one range of elements per rank, the last ones padded, and marks the
parameter with ``ds_`` attributes. DeepSpeed gathers its parameters itself, one at a time.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

import torch

from rl_bridge.errors import IncompatibleUpdate, WeightBridgeUnavailableError
from rl_bridge.trainers.base import ExtractorOptions, RankTensor, WeightExtractor, require_untied
from rl_bridge.trainers.gather import Split, flat_piece, whole_piece
from rl_bridge.trainers.modules import ModuleSlots, Slot


class DeepSpeedWeightExtractor(WeightExtractor):
    """Weights of a DeepSpeed engine, whatever its ZeRO stage.

    Every rank makes one. It publishes the parameters that the model computes with, without the
    padding of their partitions: in 16 bits if DeepSpeed trains in 16 bits. Under ZeRO-3 `local`
    yields this rank's partitions, and `full` gathers one tensor at a time.
    """

    def __init__(
        self,
        engine: Any,
        **options: Unpack[ExtractorOptions],
    ) -> None:
        """Make an extractor; nothing is read yet, no rank is asked.

        Args:
            engine: what ``deepspeed.initialize`` returned.
            options: those of every `WeightExtractor`: ``adapter=``, ``chunk_nbytes=`` and others.

        Raises:
            IncompatibleUpdate: no engine of DeepSpeed's.
            WeightBridgeUnavailableError: it cuts tensors or layers in a way that is not known here.

        """
        super().__init__(**options)
        if not hasattr(engine, "seq_data_parallel_group") or not hasattr(engine, "module"):
            raise IncompatibleUpdate(
                f"cannot extract from a {type(engine).__name__}, expected a DeepSpeed engine. Pass "
                "what deepspeed.initialize returned."
            )
        _require_plain(engine)
        self._engine = engine
        self._ranks = torch.distributed.get_process_group_ranks(engine.seq_data_parallel_group)
        self._number = self._ranks.index(torch.distributed.get_rank())
        self._merged: set[int] = set()  # partitioned tensors of which merged ones were made

    def _tensors_known(self) -> Sequence[RankTensor]:
        model = self._engine.module
        self._names = self._naming_of(model)
        self._slots = ModuleSlots(model, self._names)
        ties = self._slots.ties()
        return [
            self._described(slot, slot.tensor(), tied_to)
            for slot, tied_to in zip(self._slots.slots, ties, strict=True)
        ]

    def _described(self, slot: Slot, tensor: torch.Tensor, tied_to: int | None) -> RankTensor:
        name = slot.name
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
        owners = tuple(self._ranks)
        is_cut = _is_partitioned(tensor)
        piece = whole_piece(name, shape, self._number)
        local: tuple[int, ...] | None = shape
        if is_cut:
            _require_plain_partition(name, tensor, owners)
            owners = _owners(tensor)
            cut = flat_piece(name, shape, *_own_range(tensor))
            local = None if cut is None else cut.shape
            piece = cut or piece
        return RankTensor(
            name=name,
            shape=shape,
            dtype=tensor.dtype,
            local_shape=local,
            pieces=() if local is None else (piece,),
            owners=owners,
            is_whole=not is_cut,
            is_trainable=tensor.requires_grad or slot.path in self._names.trained_paths,
            tied_to=tied_to,
        )

    def _tensors_now(self) -> Sequence[torch.Tensor | None] | None:
        tensors = self._slots.tensors()
        if tensors is None:
            return None
        now = [_partition(one) if _is_partitioned(one) else one for one in tensors]
        self._merge_into(now, tensors)
        return now

    def _merge_into(self, now: list[torch.Tensor | None], tensors: Sequence[torch.Tensor]) -> None:
        """Put merged weights in the place of frozen ones; under ZeRO-3 a collective.

        What a rank holds of a weight needs the whole matrices A and B: DeepSpeed gathers these,
        one layer after the other, and nothing of the weight.
        """
        self._merged.clear()
        unmerged = self._names.unmerged()
        places = {slot.path: at for at, slot in enumerate(self._slots.slots)} if unmerged else {}
        for one in unmerged:
            at = places[one.path]
            require_untied(self._all_known(), at)
            held, parameter = now[at], tensors[at]
            live = {factor: one.live(factor) for factor in one.factors()}
            with _gathered([factor for factor in live.values() if _is_partitioned(factor)]):
                if not _is_partitioned(parameter):
                    now[at] = one.merged(parameter)
                    continue
                self._merged.add(at)
                if held is not None:
                    now[at] = one.merged(held, begin=_own_range(parameter)[0])

    def _split(self, source: int) -> Split | Callable[[torch.Tensor], object]:
        parameter = self._slots.slots[source].tensor()
        if source in self._merged:  # what DeepSpeed would gather is the frozen weight
            return _split(self._all_known()[source], parameter)

        def gather(view: torch.Tensor) -> None:
            with _gathered([parameter]):
                view.copy_(parameter.detach().view(view.shape))

        return gather

    def _aside_nbytes(self, known: RankTensor, dtype: torch.dtype) -> int:  # noqa: ARG002 - it gathers in its own
        # DeepSpeed gathers into a buffer and then into the parameter, in the parameter's own dtype.
        padded = math.prod(known.shape) + len(self._ranks)
        return 0 if known.is_whole else 2 * padded * known.dtype.itemsize


def _require_plain(engine: Any) -> None:
    """Refuse engines whose ranks share a tensor in other ways than ZeRO's."""
    if engine.mp_world_size > 1:
        raise WeightBridgeUnavailableError(
            f"a DeepSpeed engine with tensor parallelism of {engine.mp_world_size} is not "
            "supported. Train without it, or publish model.state_dict() of gathered weights."
        )
    shard_size = getattr(engine, "mics_shard_size", lambda: 0)()
    if shard_size > 0:
        raise WeightBridgeUnavailableError(
            f"a DeepSpeed engine with MiCS, mics_shard_size={shard_size}, is not supported: groups "
            "of ranks hold the same partitions. Use zero_hpz_partition_size instead."
        )
    if getattr(engine, "has_moe_layers", False):
        raise WeightBridgeUnavailableError(
            "a DeepSpeed engine with expert layers of DeepSpeed's own is not supported: its ranks "
            "have different experts under the same names. Publish a gathered state dict."
        )


def _require_plain_partition(name: str, tensor: Any, ranks: tuple[int, ...]) -> None:
    """Refuse partitions whose bytes are not those of the weight, or that other ranks have too."""
    if hasattr(tensor.ds_tensor, "ds_quant_scale"):
        raise WeightBridgeUnavailableError(
            f"tensor {name!r} is kept quantized by ZeRO-3. Set "
            "zero_quantized_nontrainable_weights to false in its configuration."
        )
    own = torch.distributed.get_process_group_ranks(tensor.ds_process_group)
    if sorted(own) != sorted(ranks):
        raise WeightBridgeUnavailableError(
            f"tensor {name!r} is cut over ranks {own}, the engine's other tensors over "
            f"{list(ranks)}: where its copies are is not known here. Publish a gathered state dict."
        )


def _is_partitioned(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "ds_tensor", None) is not None


def _gathered(parameters: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """Have partitioned parameters whole for a while; a collective."""
    if not parameters:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parameters))  # type: ignore[no-any-return]


def _split(known: RankTensor, parameter: Any) -> Split:
    """How the ranks share a partitioned tensor."""
    group, share = parameter.ds_process_group, parameter.ds_tensor.ds_numel
    parts = []
    for at, rank in enumerate(torch.distributed.get_process_group_ranks(group)):
        piece = flat_piece(known.name, known.shape, at * share, (at + 1) * share)
        if piece is not None:
            parts.append((rank, (piece,)))
    return Split(group=group, device=parameter.device, parts=tuple(parts))


def _owners(tensor: Any) -> tuple[int, ...]:
    """The ranks that hold elements of a partitioned tensor."""
    ranks = torch.distributed.get_process_group_ranks(tensor.ds_process_group)
    share, numel = tensor.ds_tensor.ds_numel, math.prod(tensor.ds_shape)
    return tuple(rank for at, rank in enumerate(ranks) if at * share < numel)


def _own_range(tensor: Any) -> tuple[int, int]:
    """This rank's elements of a partitioned tensor; the last ones may be padding."""
    number = torch.distributed.get_rank(tensor.ds_process_group)
    share = tensor.ds_tensor.ds_numel
    return number * share, (number + 1) * share


def _partition(tensor: Any) -> torch.Tensor | None:
    """This rank's elements of a partitioned tensor, without padding; None where there are none."""
    begin, end = _own_range(tensor)
    length = min(end, math.prod(tensor.ds_shape)) - begin
    if length <= 0:
        return None
    partition: torch.Tensor = tensor.ds_tensor
    if partition.numel() < length:
        raise WeightBridgeUnavailableError(
            f"a partition of {length} elements is not in memory: ZeRO-3 put it on a disk. "
            'Set offload_param.device to "cpu" or "none".'
        )
    return partition.detach()[:length]
