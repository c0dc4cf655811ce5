"""LoRA adapters in a vLLM worker: written into a slot of its stacked matrices, and read back.

vLLM's LoRA layers hold the matrices of all adapters stacked, one slot for each: A as (slot, 1,
rank, in) and B as (slot, 1, out, rank), with the largest rank that the engine was started for, cut
for this rank of tensor parallelism, and one such pair for each module that is fused into the layer.
What a slot must hold is laid out once per layout (`_Plan`), in memory of the host for each version,
B multiplied by its scaling, the rest zeros; it is copied into the slot, and the whole slot is read
for the proof. vLLM's own books say which slot has which id: a version is registered without
tensors, and pinned, so that vLLM neither loads it from a file nor gives its slot away.

What vLLM 0.32 does that this has to mind: `LoRARequest`s of one name are equal, whatever their id;
cached prefixes are kept apart by name and path; `load_inplace` loads at every step; loading scales
B in place; a request whose id is not registered is loaded from its path within a step, and its
failure ends the engine; and on a CPU, tokens without an adapter get the last slot's where their
batch has tokens with one (its kernel takes index -1 for the last), so that slot stays empty there.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.engines.adapters import AdapterInstaller, Resident, Tensors
from rl_bridge.engines.load_checks import are_finite
from rl_bridge.engines.vllm import require
from rl_bridge.errors import (
    IncompatibleUpdate,
    ProofFailed,
    SlotsExhausted,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest.adapter import AdapterSpec, LoRAPair
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.views import ImportedTensors, Pin, anonymous_pin, tensor_in

_LOG = logging.getLogger(__name__)

# Layers whose slots are understood here, by their classes' names.
_QKV = "MergedQKVParallelLinearWithLoRA"
_MERGED = "MergedColumnParallelLinearWithLoRA"
_COLUMNS = "ColumnParallelLinearWithLoRA"
_ROWS = "RowParallelLinearWithLoRA"
_REPLICATED = "ReplicatedLinearWithLoRA"
_LOGITS = "LogitsProcessorWithLoRA"
_KINDS = frozenset({_QKV, _MERGED, _COLUMNS, _ROWS, _REPLICATED, _LOGITS})
_SHOWN = 3
_PLANS = 2
_ALIGNMENT = 64  # bytes
_MERGE = "Train the adapter without it, or merge it: publish with merged=True."


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one matrix of an adapter lies in this worker.

    Attributes:
        layer: vLLM's name of the layer.
        stacked: all slots' matrices of this kind.
        size: of the whole matrix: columns of A, rows of B.
        rows: of the whole matrix that this worker has; for B.
        columns: the same for A.

    """

    layer: str
    stacked: torch.Tensor
    size: int
    rows: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))


def _stacked(layer: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each module that is fused into a layer."""
    a, b = layer.lora_a_stacked, layer.lora_b_stacked
    return [(a, b)] if isinstance(a, torch.Tensor) else list(zip(a, b, strict=True))


def places_of(manager: Any) -> dict[str, tuple[_Place, _Place]]:
    """Module -> where its A and B go: of all modules whose layers are understood here."""
    found: dict[str, tuple[_Place, _Place]] = {}
    for name, layer in manager.modules.items():
        modules = manager.packed_modules.get(name, [name])
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


def _placed(
    name: str, layer: Any, index: int, a: torch.Tensor, b: torch.Tensor
) -> tuple[_Place, _Place]:
    """Where A and B of the module go that is fused into a layer as number `index`."""
    kind, base = type(layer).__name__, layer.base_layer
    width, height = a.shape[3], b.shape[2]
    if kind == _LOGITS:
        return _Place(name, a, width), _Place(name, b, base.org_vocab_size)
    place_a, place_b = _Place(name, a, base.input_size), _Place(name, b, base.output_size)
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


class _Plan:
    """Where the tensors of one layout go: made once, used for every version.

    All matrices of a slot are covered, those of modules that the adapter leaves alone too: they
    must be zero.

    Attributes:
        spare: memory of a version that was dropped, for the next one.

    """

    def __init__(
        self, places: Mapping[str, tuple[_Place, _Place]], pairs: Sequence[LoRAPair]
    ) -> None:
        """Lay out what a slot holds.

        Raises:
            IncompatibleUpdate: a matrix does not fit.

        """
        self.fills: list[tuple[str, _Place, float, int]] = []  # tensor, place, scaling, offset
        wanted = {pair.module: pair for pair in pairs}
        offsets, self._stacked, at = list[int](), list[torch.Tensor](), 0
        zeros = list[int]()  # places in both lists of what the adapter leaves alone
        for module, both in places.items():
            pair = wanted.get(module)
            for place, is_b in zip(both, (False, True), strict=True):
                nbytes = place.stacked[0].nbytes
                if pair is None:
                    zeros.append(len(offsets))
                else:
                    name, scaling = (pair.b, pair.scaling) if is_b else (pair.a, 1.0)
                    self.fills.append((name, place, scaling, at))
                self._stacked.append(place.stacked)
                offsets.append(at)
                at += 0 if pair is None else -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        most = max((self._stacked[one][0].nbytes for one in zeros), default=0)
        for one in zeros:  # all of them look at the same zeros
            offsets[one] = at
        self.nbytes = at + most
        self._offsets = np.array(offsets, np.uint64)
        self._sizes = np.array([one[0].nbytes for one in self._stacked], np.uint64)
        self._pass = BytePlan(self._sizes)
        self.spare: _Room | None = None
        # The tensors that were filled in last, and the parts that this worker has of them.
        self._parts: tuple[ImportedTensors, list[torch.Tensor]] | None = None
        self.is_on_cpu = all(one.device.type == "cpu" for one in self._stacked)

    def fill(self, tensors: ImportedTensors) -> "_Room":
        """What a slot must hold of a version.

        Raises:
            IncompatibleUpdate: numbers that the engine's dtype cannot hold.

        """
        if self._parts is None or self._parts[0] is not tensors:
            parts = [tensors[name][place.rows, place.columns] for name, place, *_ in self.fills]
            self._parts = tensors, parts
        parts = self._parts[1]
        # Of the same layout, so that what is written now covers all that was written then.
        room, self.spare = self.spare or _Room(self, parts), None
        torch._foreach_copy_(room.targets, parts)
        # As vLLM does it: cast first, then scaled in that dtype.
        for scaling, targets in room.scaled.items():
            torch._foreach_mul_(targets, scaling)
        if not are_finite(room.numbers, num_threads=None):
            msg = (
                f"an adapter has numbers that are finite, and not once they are scaled and in "
                f"{room.targets[0].dtype}, as the engine has them. See which training step made "
                "them."
            )
            raise IncompatibleUpdate(msg)
        return room

    def write(self, pin: Pin, slot: int) -> None:
        """Copy it into a slot."""
        if self.is_on_cpu:
            self._pass.copy(self._addresses(pin), self._slot_addresses(slot))
            return
        for stacked, offset in zip(self._stacked, self._offsets.tolist(), strict=True):
            stacked[slot, 0].copy_(self.view(pin, offset, stacked))

    def differing(self, pin: Pin, slot: int) -> int | None:
        """Read a slot: the number of the first matrix that is not what it must be; None: none."""
        if self.is_on_cpu:
            held = self._pass.digest(self._slot_addresses(slot))
            due = self._pass.digest(self._addresses(pin))
            if held == due:
                return None
            one, other = (np.frombuffer(text, np.uint8).reshape(-1, 16) for text in (held, due))
            return int(np.flatnonzero((one != other).any(axis=1))[0])
        for index, (stacked, offset) in enumerate(
            zip(self._stacked, self._offsets.tolist(), strict=True)
        ):
            due_bytes = self.view(pin, offset, stacked).view(torch.uint8)
            if not stacked[slot, 0].cpu().view(torch.uint8).equal(due_bytes):
                return index
        return None

    @property
    def held_nbytes(self) -> int:
        """Bytes of a slot."""
        return int(self._sizes.sum())

    def view(self, pin: Pin, offset: int, stacked: torch.Tensor) -> torch.Tensor:
        dtype = str(stacked.dtype).removeprefix("torch.")
        return tensor_in(pin, offset, stacked[0].nbytes, dtype, tuple(stacked.shape[2:]))

    def _addresses(self, pin: Pin) -> npt.NDArray[np.uint64]:
        return self._offsets + np.uint64(pin.address)

    def _slot_addresses(self, slot: int) -> npt.NDArray[np.uint64]:
        found = [one.data_ptr() for one in self._stacked]
        return np.array(found, np.uint64) + np.uint64(slot) * self._sizes


class _Room:
    """Memory of the host, laid out as a slot.

    Attributes:
        pin: the memory; zeros where nothing is filled in.
        targets: where each part of the adapter's tensors goes, in the order of the plan's fills.
        scaled: factor -> the targets that are multiplied by it.
        numbers: all of it, as few tensors.

    """

    def __init__(self, plan: _Plan, parts: Sequence[torch.Tensor]) -> None:
        """Take memory for a plan whose parts have these shapes."""
        self.pin = anonymous_pin(plan.nbytes)
        self.targets: list[torch.Tensor] = []
        self.scaled: dict[float, list[torch.Tensor]] = {}
        for (_, place, scaling, offset), part in zip(plan.fills, parts, strict=True):
            target = plan.view(self.pin, offset, place.stacked)[: part.shape[0], : part.shape[1]]
            self.targets.append(target)
            if scaling != 1.0:
                self.scaled.setdefault(scaling, []).append(target)
        dtypes = {str(one.dtype).removeprefix("torch.") for one in self.targets}
        self.numbers = self.targets
        if len(dtypes) == 1:
            count = plan.nbytes // self.targets[0].element_size()
            self.numbers = [tensor_in(self.pin, 0, plan.nbytes, dtypes.pop(), (count,))]


class VLLMAdapterInstaller(AdapterInstaller):
    """Brings versions of one LoRA adapter into one worker of a vLLM engine."""

    def __init__(self, model: torch.nn.Module, base: Callable[[], str]) -> None:
        """Look at a worker's model; `base` gives the root of its weights, empty if unknown.

        Raises:
            WeightBridgeUnavailableError: the engine was started without LoRA.

        """
        super().__init__()
        manager = getattr(model, "lora_manager", None)
        if manager is None:
            msg = (
                "the engine was started without LoRA, expected enable_lora=True. Start it with "
                "enable_lora=True, max_loras=3 and a max_lora_rank of at least the adapter's."
            )
            raise WeightBridgeUnavailableError(msg)
        self._manager: Any = manager
        self._base = base
        self._places: dict[str, tuple[_Place, _Place]] = {}
        # Layers that no version writes to, whose place in a slot must be zero.
        self._others: list[Any] = []
        self._plans: dict[object, _Plan] = {}
        # What the slot of each version must hold.
        self._held: dict[int, tuple[_Plan, _Room]] = {}

    def check(self, spec: AdapterSpec, pairs: Sequence[LoRAPair], others: Sequence[str]) -> None:
        """Refuse what vLLM cannot serve, by name."""
        config = self._manager.lora_config
        if others:
            msg = (
                f"adapter {spec.name!r} has {len(others)} tensors beside its pairs, such as saved "
                f"modules and biases, which vLLM does not apply: {list(others)[:_SHOWN]}. {_MERGE}"
            )
            raise IncompatibleUpdate(msg)
        if config.fully_sharded_loras:
            msg = "the engine has fully_sharded_loras=True, expected False. Start it without."
            raise IncompatibleUpdate(msg)
        base = self._base()
        if spec.base_root and not base:
            _LOG.warning("adapter %s: the root of the engine's base is not known", spec.name)
        if spec.base_root and base and spec.base_root != base:
            msg = (
                f"adapter {spec.name!r} belongs to base weights of root {spec.base_root}, and the "
                f"engine holds root {base}. Install that base first, or publish for this one."
            )
            raise IncompatibleUpdate(msg)
        if not self._places:
            self._places = places_of(self._manager)
            written = {place.layer for both in self._places.values() for place in both}
            layers = self._manager.modules.items()
            self._others = [layer for name, layer in layers if name not in written]
        places = self._places
        unknown = [pair.module for pair in pairs if pair.module not in places]
        if unknown:
            known = sorted({name.rpartition(".")[2] for name in places})
            msg = (
                f"adapter {spec.name!r} adapts {len(unknown)} modules that this engine does not: "
                f"{unknown[:_SHOWN]}; it adapts {known}. Leave them out of target_modules."
            )
            raise IncompatibleUpdate(msg)
        most = max(pair.rank for pair in pairs)
        if most > config.max_lora_rank:
            msg = (
                f"adapter {spec.name!r} has rank {most}, the engine was started for at most "
                f"{config.max_lora_rank}. Start it with max_lora_rank={most}."
            )
            raise IncompatibleUpdate(msg)

    def stage(
        self,
        version: Resident,
        spec: AdapterSpec,
        pairs: Sequence[LoRAPair],
        tensors: ImportedTensors,
    ) -> None:
        """Put a version into a free slot. See `AdapterInstaller`."""
        key = spec.digest, tensors.table.digest
        plan = self._plans.get(key)
        if plan is None:
            self._check_shapes(pairs, tensors)
            plan = self._plans[key] = _Plan(self._places, pairs)
            while len(self._plans) > _PLANS:
                del self._plans[next(iter(self._plans))]
        slot = self._take_slot(version)
        try:
            room = plan.fill(tensors)
            self._held[version.number] = plan, room
            plan.write(room.pin, slot)
        except BaseException:
            self.drop(version)
            raise

    def read(self, version: Resident) -> int:
        """Read all of a version's slot. See `AdapterInstaller`."""
        plan, room = self._held[version.number]
        if not self.holds(version):
            msg = (
                f"adapter {version.label} is in no slot of the engine any more: something else "
                "dropped it, such as a reload of the base weights. Publish it again."
            )
            raise ProofFailed(msg)
        wrong = plan.differing(room.pin, self._manager.lora_index_to_id.index(version.number))
        if wrong is not None:
            layer = [place.layer for both in self._places.values() for place in both][wrong]
            kind = "AB"[wrong % 2]
            msg = (
                f"adapter {version.label}: matrix {kind} of layer {layer!r} is not what was "
                "published. Publish it again."
            )
            raise ProofFailed(msg)
        return plan.held_nbytes

    def holds(self, version: Resident) -> bool:
        """Whether a version is registered, and in a slot: vLLM's own updates drop all."""
        known = version.number in self._manager.list_adapters()
        return known and version.number in self._manager.lora_index_to_id

    def drop(self, version: Resident) -> None:
        """Free a version's slot. See `AdapterInstaller`."""
        self._manager.remove_adapter(version.number)
        plan, room = self._held.pop(version.number, (None, None))
        if plan is not None:
            plan.spare = room

    def free_places(self) -> int:
        """Free slots that versions can be in."""
        usable: list[int | None] = self._manager.lora_index_to_id[: self._slots]
        return usable.count(None)

    # ---- inside ---------------------------------------------------------------------------------

    @property
    def _slots(self) -> int:
        """Slots that may be used: on a CPU all but the last."""
        slots: int = self._manager.lora_slots
        return slots - 1 if torch.device(self._manager.device).type == "cpu" else slots

    def _check_shapes(self, pairs: Sequence[LoRAPair], tensors: Tensors) -> None:
        for pair in pairs:
            a, b = self._places[pair.module]
            for name, place, dim in ((pair.a, a, 1), (pair.b, b, 0)):
                if tensors[name].shape[dim] != place.size:
                    msg = (
                        f"tensor {name!r} has shape {list(tensors[name].shape)}, expected "
                        f"{place.size} in dimension {dim}: the engine's layer {place.layer!r} is "
                        "another one. Publish an adapter of the model that the engine serves."
                    )
                    raise IncompatibleUpdate(msg)

    def _take_slot(self, version: Resident) -> int:
        manager = self._manager
        if version.number in {*manager.list_adapters(), *manager.lora_index_to_id}:
            msg = (
                f"adapter {version.label}: the engine has another adapter under id "
                f"{version.number} already, which it would get. Publish it again: it gets another."
            )
            raise IncompatibleUpdate(msg)
        # (Of no layer: an adapter without any matrix is no adapter for vLLM.)
        none = require("vllm.lora.lora_weights").LoRALayerWeights(
            "rl_bridge", 1, 1, torch.zeros(1, 1, device="cpu"), torch.zeros(1, 1, device="cpu")
        )
        model = require("vllm.lora.lora_model").LoRAModel(version.number, 1, {"rl_bridge": none})
        free = [slot for slot, held in enumerate(manager.lora_index_to_id) if held is None]
        if not free or free[0] >= self._slots:
            held = [one for one in manager.lora_index_to_id if one]
            msg = (
                f"adapter {version.label}: the engine has {self._slots} slots for adapters, "
                f"expected a free one beside the ids {held}: versions that requests ask for, or "
                "that are kept. Try again when requests have ended, or start the engine with a "
                "larger max_loras: 3 for each adapter, on a CPU one more, which stays empty."
            )
            raise SlotsExhausted(msg)
        try:
            manager.add_adapter(model)
            # As `activate_adapter` does it, which also writes zeros into each layer of the slot.
            manager._active_adapters[version.number] = None  # noqa: SLF001 - vLLM offers no more
            manager.lora_index_to_id[free[0]] = version.number
            for layer in self._others:
                layer.reset_lora(free[0])
            manager.pin_adapter(version.number)
        except BaseException:
            manager.remove_adapter(version.number)
            raise
        return free[0]
