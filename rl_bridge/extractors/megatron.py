"""Weights of a Megatron-Core model: cut by tensor, pipeline and expert parallelism."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from rl_bridge.errors import IncompatibleUpdate, WeightBridgeUnavailableError
from rl_bridge.extractors.base import RankTensor, WeightExtractor
from rl_bridge.extractors.chunks import (
    DEFAULT_CHUNK_NBYTES,
    WeightChunk,
    checked_dtype,
    module_of,
    wire_dtype,
)
from rl_bridge.extractors.gathering import Split, gather, window_nbytes
from rl_bridge.extractors.megatron_bridges import hf_pieces, is_mbridge, is_megatron_bridge
from rl_bridge.extractors.megatron_layout import (
    EMBEDDING,
    Grid,
    Share,
    grid_now,
    naming_in,
    share_of,
    unwrapped,
)
from rl_bridge.extractors.slots import ModuleSlots, Slot

__all__ = ["MegatronExtractor", "MegatronWeightExtractor"]


class MegatronExtractor(WeightExtractor):
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
        self._shares: list[Share] = []

    # ---- this rank's own parts

    def _tensors_known(self) -> Sequence[RankTensor]:
        self._walks, self._shares = [], []
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
        share = share_of(whole, tensor, self._grid, is_gated=is_gated, is_further_copy=is_copy)
        self._shares.append(share)
        pieces = share.pieces
        if self._bridge is not None:
            pieces = hf_pieces(self._bridge, model.config, whole, pieces)
        return RankTensor(
            name=slot.name,
            shape=share.shape,
            dtype=tensor.dtype,
            # A part that is nothing but the padding of a vocabulary is not published.
            local_shape=tuple(tensor.shape) if pieces else None,
            pieces=pieces,
            owners=share.owners,
            is_whole=not share.is_cut,
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
        cut: list[tuple[torch.Tensor, Split, torch.Tensor | None]] = []
        for view, source in zip(views, sources, strict=True):
            share, tensor = self._shares[source], tensors[source]
            if share.is_cut:
                parts = tuple(zip(share.line.ranks, share.parts, strict=True))
                cut.append(
                    (view, Split(group=share.line.group, device=view.device, parts=parts), tensor)
                )
            else:
                view.copy_(tensor)  # type: ignore[arg-type]  # this rank holds all of it
        if cut:
            views, splits, held = zip(*cut, strict=True)
            rank = torch.distributed.get_rank()
            gather(views, splits, held, rank=rank, window=self._reserve_nbytes())

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


MegatronWeightExtractor = MegatronExtractor
"""The same class, by the name that trainers know it under."""
