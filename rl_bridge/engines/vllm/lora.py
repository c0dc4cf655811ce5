"""LoRA adapters in a vLLM worker: written into a slot of its stacked matrices, and read back.

vLLM's LoRA layers hold the matrices of all adapters stacked, one slot for each: A as (slot, 1,
rank, in) and B as (slot, 1, out, rank), one such pair for each module that is fused into the layer,
and B multiplied by its scaling. vLLM's own books say which slot has which id: a version is
registered without tensors, and pinned, so that vLLM neither loads it from a file nor gives its slot
away. The rest is `rl_bridge.engines.lora_slots`.

What vLLM 0.32 does that this has to mind: `LoRARequest`s of one name are equal, whatever their id;
cached prefixes are kept apart by name and path (below 0.31 by the name alone); `load_inplace` loads
at every step; loading scales B in place; a request whose id is not registered is loaded from its
path within a step, and its failure ends the engine (`rl_bridge.engines.vllm.endpoint`); and on a
CPU, tokens without an adapter get the last slot's where their batch has tokens with one (its kernel
takes index -1 for the last), so that slot stays empty there.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from rl_bridge.engines.adapters import Resident
from rl_bridge.engines.lora_slots import Place, Places, SlotInstaller
from rl_bridge.engines.vllm import require
from rl_bridge.errors import IncompatibleUpdate, SlotsExhausted, WeightBridgeUnavailableError
from rl_bridge.manifest.adapter import AdapterSpec, LoRAPair

# Layers whose slots are understood here, by their classes' names.
_QKV = "MergedQKVParallelLinearWithLoRA"
_MERGED = "MergedColumnParallelLinearWithLoRA"
_COLUMNS = "ColumnParallelLinearWithLoRA"
_ROWS = "RowParallelLinearWithLoRA"
_REPLICATED = "ReplicatedLinearWithLoRA"
_LOGITS = "LogitsProcessorWithLoRA"
_KINDS = frozenset({_QKV, _MERGED, _COLUMNS, _ROWS, _REPLICATED, _LOGITS})


def _stacked(layer: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each module that is fused into a layer."""
    a, b = layer.lora_a_stacked, layer.lora_b_stacked
    pairs = [(a, b)] if isinstance(a, torch.Tensor) else zip(a, b, strict=True)
    return [(one[:, 0], other[:, 0]) for one, other in pairs]


def _placed(
    name: str, layer: Any, index: int, a: torch.Tensor, b: torch.Tensor
) -> tuple[Place, Place]:
    """Where A and B of the module go that is fused into a layer as number `index`."""
    kind, base = type(layer).__name__, layer.base_layer
    width, height = a.shape[2], b.shape[1]
    if kind == _LOGITS:
        return Place(name, a, width), Place(name, b, base.org_vocab_size)
    place_a, place_b = Place(name, a, base.input_size), Place(name, b, base.output_size)
    if kind == _ROWS:
        own = slice(layer.tp_rank * width, (layer.tp_rank + 1) * width)
        return replace(place_a, columns=own), place_b
    if kind == _REPLICATED:
        return place_a, place_b
    share, size = layer.tp_rank, base.output_size
    if kind == _QKV:
        heads = base.total_num_kv_heads if index else base.total_num_heads
        size = heads * base.head_size
        share //= base.num_kv_head_replicas if index else 1
    elif kind == _MERGED:
        size = base.output_sizes[index]
    own = slice(share * height, (share + 1) * height)
    return place_a, replace(place_b, size=size, rows=own)


class VLLMAdapterInstaller(SlotInstaller):
    """Brings versions of one LoRA adapter into one worker of a vLLM engine."""

    def __init__(self, model: torch.nn.Module, base: Callable[[], str]) -> None:
        """Look at a worker's model; `base` gives the root of its weights, empty if unknown.

        Raises:
            WeightBridgeUnavailableError: the engine was started without LoRA.

        """
        super().__init__(base)
        manager = getattr(model, "lora_manager", None)
        if manager is None:
            raise WeightBridgeUnavailableError(
                "the engine was started without LoRA, expected enable_lora=True. Start it with "
                "enable_lora=True, max_loras=3 and a max_lora_rank of at least the adapter's."
            )
        self._manager: Any = manager
        # Layers that no version writes to, whose place in a slot must be zero.
        self._others: list[Any] | None = None

    def check(self, spec: AdapterSpec, pairs: Sequence[LoRAPair]) -> None:
        """Refuse what vLLM cannot serve, by name. See `AdapterInstaller`."""
        if self._manager.lora_config.fully_sharded_loras:
            raise IncompatibleUpdate(
                "the engine has fully_sharded_loras=True, expected False. Start it without."
            )
        super().check(spec, pairs)

    @property
    def max_rank(self) -> int:
        """The largest rank that the engine was started for."""
        return int(self._manager.lora_config.max_lora_rank)

    def places_of(self, rank: int) -> Places:
        """Where an adapter lies, whatever its rank. See `SlotInstaller`."""
        del rank
        found: dict[str, tuple[Place, Place]] = {}
        for name, layer in self._manager.modules.items():
            modules = self._manager.packed_modules.get(name, [name])
            kind = type(layer).__name__
            pairs = _stacked(layer) if kind in _KINDS else []
            if len(pairs) != len(modules) or (
                # One matrix for gate and up.
                kind == _COLUMNS and layer.is_merged_col_linear
            ):
                continue
            for index, (module, (a, b)) in enumerate(zip(modules, pairs, strict=True)):
                found[module] = _placed(name, layer, index, a, b)
        return found

    def slot_of(self, version: Resident) -> int | None:
        """The slot of a version that is registered: vLLM's own updates drop all."""
        ids = self._manager.lora_index_to_id
        known = version.number in self._manager.list_adapters() and version.number in ids
        return ids.index(version.number) if known else None

    def free_slot(self, version: Resident) -> None:
        """Take a version out of vLLM's books. See `SlotInstaller`."""
        self._manager.remove_adapter(version.number)

    def free_places(self) -> int:
        """Free slots that versions can be in."""
        usable: list[int | None] = self._manager.lora_index_to_id[: self._slots]
        return usable.count(None)

    def take_slot(self, version: Resident, pairs: Sequence[LoRAPair]) -> int:
        """Register a version without tensors, and pin it. See `SlotInstaller`."""
        del pairs
        manager = self._manager
        if version.number in {*manager.list_adapters(), *manager.lora_index_to_id}:
            raise IncompatibleUpdate(
                f"adapter {version.label}: the engine has another adapter under id "
                f"{version.number} already, which it would get. Publish it again: it gets another."
            )
        # (Of no layer: an adapter without any matrix is no adapter for vLLM.)
        none = require("vllm.lora.lora_weights").LoRALayerWeights(
            "rl_bridge", 1, 1, torch.zeros(1, 1, device="cpu"), torch.zeros(1, 1, device="cpu")
        )
        model = require("vllm.lora.lora_model").LoRAModel(version.number, 1, {"rl_bridge": none})
        free = [slot for slot, held in enumerate(manager.lora_index_to_id) if held is None]
        if not free or free[0] >= self._slots:
            held = [one for one in manager.lora_index_to_id if one]
            raise SlotsExhausted(
                f"adapter {version.label}: the engine has {self._slots} slots for adapters, "
                f"expected a free one beside the ids {held}: versions that requests ask for, or "
                "that are kept. Try again when requests have ended, or start the engine with a "
                "larger max_loras: 3 for each adapter, on a CPU one more, which stays empty."
            )
        try:
            manager.add_adapter(model)
            # As `activate_adapter` does it, which also writes zeros into each layer of the slot.
            manager._active_adapters[version.number] = None  # noqa: SLF001 - vLLM offers no more
            manager.lora_index_to_id[free[0]] = version.number
            for layer in self._unwritten():
                layer.reset_lora(free[0])
            manager.pin_adapter(version.number)
        except BaseException:
            manager.remove_adapter(version.number)
            raise
        return free[0]

    # ---- inside ---------------------------------------------------------------------------------

    @property
    def _slots(self) -> int:
        """Slots that may be used: on a CPU all but the last."""
        slots: int = self._manager.lora_slots
        return slots - 1 if torch.device(self._manager.device).type == "cpu" else slots

    def _unwritten(self) -> list[Any]:
        if self._others is None:
            both = self.places_of(0).values()
            written = {place.layer for pair in both for place in pair}
            layers = self._manager.modules.items()
            self._others = [layer for name, layer in layers if name not in written]
        return self._others
