"""LoRA adapters in an SGLang rank: written into a slot of its memory pool, and read back.

SGLang's pool holds for each layer A as (slot, modules x rank, in) and B as (slot, out, rank), with
the modules that are fused into the layer below one another: A's at the adapter's own rank, so that
where a module's A begins depends on it. B is kept as it was trained; the backend multiplies by the
adapter's scaling. Which rows and columns a rank has is asked of SGLang's own slicing. A version is
entered into the books of the manager and of the pool, pinned, so that SGLang neither loads it from
a file nor gives its slot away; one slot stays for requests without an adapter, which SGLang wants.
The rest is `rl_bridge.engines.lora_slots`.
"""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from rl_bridge.engines.adapters import Resident
from rl_bridge.engines.lora_slots import Place, Places, SlotInstaller
from rl_bridge.engines.sglang import require
from rl_bridge.errors import (
    SlotsExhausted,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.manifest.adapter import LoRAPair

# Layers whose slots are understood here, by their classes' names: with the modules of each.
_FUSED = {
    ("QKVParallelLinearWithLoRA", "qkv_proj"): ("q_proj", "k_proj", "v_proj"),
    ("MergedColumnParallelLinearWithLoRA", "gate_up_proj"): ("gate_proj", "up_proj"),
}
_SINGLE = frozenset(
    {"ColumnParallelLinearWithLoRA", "RowParallelLinearWithLoRA", "ReplicatedLinearWithLoRA"}
)


def _sizes(layer: Any) -> list[int]:
    """Rows of each module that is fused into a layer, on all ranks together."""
    base, kind = layer.base_layer, type(layer).__name__
    if kind.startswith("QKV"):
        heads = (base.total_num_heads, base.total_num_kv_heads, base.total_num_kv_heads)
        return [count * base.head_size for count in heads]
    return list(base.output_sizes) if kind.startswith("Merged") else [base.output_size]


def _as_slice(indices: torch.Tensor) -> slice | None:
    """A range of indices that follow one another; None if they do not."""
    if not indices.numel():
        return None
    found = slice(int(indices[0]), int(indices[-1]) + 1)
    return found if indices.equal(torch.arange(found.start, found.stop, device="cpu")) else None


def _parts(name: str, layer: Any, rank: int) -> Iterator[tuple[str, tuple[Place, Place]]]:
    """Each module of a layer, and where its A and B lie; nothing if that is not understood."""
    kind, (before, _, last) = type(layer).__name__, name.rpartition(".")
    modules = _FUSED.get((kind, last), (last,) if kind in _SINGLE else ())
    # (Of a latent attention's first layer SGLang applies two Bs to one A.)
    if not modules or getattr(layer, "first_output_dim", None):
        return
    a, b, sizes = layer.lora_a, layer.lora_b, _sizes(layer)
    width = layer.base_layer.input_size
    columns = _as_slice(layer.slice_lora_a_weights(torch.arange(width, device="cpu")[None])[0])
    rows = layer.slice_lora_b_weights(torch.arange(sum(sizes), device="cpu")[:, None])[:, 0]
    if columns is None or len(sizes) != len(modules) or len(rows) != b.shape[1]:
        return
    begin = first = 0
    for index, (module, size) in enumerate(zip(modules, sizes, strict=True)):
        own = _as_slice(rows[(rows >= begin) & (rows < begin + size)] - begin)
        if own is None:
            return
        place_a = Place(name, a, width, columns=columns, first=index * rank)
        yield f"{before}.{module}", (place_a, Place(name, b, size, rows=own, first=first))
        begin, first = begin + size, first + own.stop - own.start


class SGLangAdapterInstaller(SlotInstaller):
    """Brings versions of one LoRA adapter into one rank of an SGLang engine."""

    def __init__(self, manager: Any, base: Callable[[], str]) -> None:
        """Look at a rank's manager of adapters; `base` gives the root of the engine's weights.

        Raises:
            WeightBridgeUnavailableError: the engine was started without LoRA.

        """
        super().__init__(base)
        if manager is None:
            raise WeightBridgeUnavailableError(
                "the engine was started without LoRA, expected enable_lora=True. Start it with "
                "enable_lora=True, max_loras_per_batch=4, max_lora_rank of at least the adapter's "
                "and lora_target_modules, such as ['all']."
            )
        self._manager: Any = manager
        self._pool: Any = manager.memory_pool
        # What the pool has beside the places of a version: it must be zero in its slot.
        self._others: list[torch.Tensor] | None = None

    @property
    def max_rank(self) -> int:
        """The largest rank that the engine was started for."""
        return int(self._pool.max_lora_rank)

    def factor_of(self, pairs: Sequence[LoRAPair]) -> float:
        """The scaling by which SGLang multiplies: one for the whole adapter."""
        return pairs[0].scaling

    def places_of(self, rank: int) -> Places:
        """Where an adapter of this rank lies. See `SlotInstaller`."""
        layers = [each for one in self._manager.lora_modules for each in one.items()]
        return dict(part for name, layer in layers for part in _parts(name, layer, rank))

    def slot_of(self, version: Resident) -> int | None:
        """The slot of a version that SGLang's books have."""
        slot: int | None = self._pool.uid_to_buffer_id.get(version.update_id)
        return slot if version.update_id in self._manager.loras else None

    def take_slot(self, version: Resident, pairs: Sequence[LoRAPair]) -> int:
        """Enter a version into SGLang's books, pinned. See `SlotInstaller`."""
        manager, pool, uid = self._manager, self._pool, version.update_id
        if not self.free_places():
            held = [ref.lora_name for ref in manager.lora_refs.values()]
            raise SlotsExhausted(
                f"adapter {version.label}: the engine has {pool.max_loras_per_batch} slots, of "
                f"which one is for requests without an adapter, expected a free one beside {held}: "
                "versions that requests ask for, or that are kept. Try again when requests have "
                "ended, or start the engine with a larger max_loras_per_batch: 3 for each adapter, "
                "and one more."
            )
        slot = int(self._empty()[0])
        for buffer in self._unwritten():
            buffer[slot].zero_()
        kind = require("sglang.srt.lora.lora_registry").LoRARef
        rank, scaling = max(pair.rank for pair in pairs), self.factor_of(pairs)
        manager.configs[uid] = config = SimpleNamespace(r=rank)
        manager.loras[uid] = SimpleNamespace(uid=uid, config=config, scaling=scaling)
        manager.lora_refs[uid] = kind(uid, version.label, version.path, True)  # noqa: FBT003 - pinned
        manager.num_pinned_loras += 1
        pool.uid_to_buffer_id[uid], pool.buffer_id_to_uid[slot] = slot, uid
        return slot

    def free_slot(self, version: Resident) -> None:
        """Take a version out of SGLang's books. See `SlotInstaller`."""
        ref = self._manager.lora_refs.get(version.update_id)
        if ref is not None:
            done = self._manager.unload_lora_adapter(ref)
            if not done.success:
                raise WeightUpdateRejectedError(
                    f"SGLang did not unload adapter {version.label} ({done.error_message}), so its "
                    "slot is lost. See the engine's log; start it anew."
                )

    def free_places(self) -> int:
        """Slots that are free, less the one that SGLang wants for requests without an adapter."""
        unpinned = int(self._pool.max_loras_per_batch) - 1 - self._manager.num_pinned_loras
        return max(min(len(self._empty()), int(unpinned)), 0)

    # ---- inside ---------------------------------------------------------------------------------

    def _empty(self) -> list[int]:
        empty = require("sglang.srt.lora.mem_pool").EMPTY_SLOT
        return [slot for slot, held in enumerate(self._pool.buffer_id_to_uid) if held is empty]

    def _unwritten(self) -> list[torch.Tensor]:
        if self._others is None:
            pool = self._pool
            layered = (*pool.A_buffer.values(), *pool.B_buffer.values())
            single = (
                *(pool.embedding_A_buffer, pool.embedding_B_buffer, pool.lm_head_A_buffer),
                *(pool.lm_head_B_buffer, pool.new_embeddings_buffer),
            )
            buffers = [one for of_layers in layered for one in of_layers]
            buffers += [one for named in single for one in named.values()]
            both = self.places_of(1).values()
            written = {place.slots.data_ptr() for pair in both for place in pair}
            self._others = [one for one in buffers if one.data_ptr() not in written]
        return self._others
