"""LoRA adapters in slots of an engine's stacked matrices: laid out, written, and read back.

Engines hold the matrices of all adapters stacked, one slot for each adapter, padded to the largest
rank that they were started for, and cut for each rank of tensor parallelism. What a slot must hold
is laid out once per layout (`SlotPlan`), in memory of the host for each version, the rest zeros; it
is copied into the slot, and the whole slot is read for the proof. An engine supplies where the
matrices of its modules lie (`Place`), and keeps its own books of which adapter has which slot.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.engines.adapters import AdapterInstaller, Resident, Tensors
from rl_bridge.engines.load_checks import are_finite, check_finite
from rl_bridge.errors import IncompatibleUpdate, ProofFailed
from rl_bridge.manifest.adapter import AdapterSpec, LoRAPair
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.views import ImportedTensors, Pin, anonymous_pin, tensor_in

_SHOWN = 3
_PLANS = 2
_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where one matrix of an adapter lies in a rank of an engine.

    Attributes:
        layer: the engine's name of the layer.
        slots: all slots' matrices of this kind, as (slot, row, column).
        size: of the whole matrix: columns of A, rows of B.
        rows: of the whole matrix that this rank has; for B.
        columns: the same for A.
        first: row of the slot's matrix at which it begins there.

    """

    layer: str
    slots: torch.Tensor
    size: int
    rows: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))
    first: int = 0


Places = Mapping[str, tuple[Place, Place]]
"""Module -> where its A and its B lie."""


class SlotPlan:
    """Where the tensors of one layout go: made once, used for every version.

    All matrices of a slot are covered, those of modules that the adapter leaves alone too: they
    must be zero.

    Attributes:
        fills: tensor, its place, what it is multiplied by, offset of the slot's matrix.
        nbytes: of the memory in which a slot is laid out.
        scaled_from: where all B begin in it, behind all A.
        scaled_to: where they end.
        spare: memory of a version that was dropped, for the next one.

    """

    def __init__(self, places: Places, pairs: Sequence[LoRAPair], *, factor: float = 1.0) -> None:
        """Lay out what a slot holds; `factor` is what the engine multiplies by itself."""
        wanted = {pair.module: pair for pair in pairs}
        self.fills: list[tuple[str, Place, float, int]] = []
        # By address: modules that are fused into one layer may share its matrices.
        offsets, at = dict[int, int](), 0
        matrices: dict[int, tuple[torch.Tensor, str]] = {}
        for is_b in (False, True):  # all B together, since mostly one factor scales them
            self.scaled_from = at
            for module, both in places.items():
                pair, place = wanted.get(module), both[is_b]
                address = place.slots.data_ptr()
                matrices[address] = place.slots, f"{'AB'[is_b]} of layer {place.layer!r}"
                if pair is None:
                    continue
                if address not in offsets:
                    offsets[address] = at
                    at += -(-place.slots[0].nbytes // _ALIGNMENT) * _ALIGNMENT
                name, scaling = (pair.b, pair.scaling / factor) if is_b else (pair.a, 1.0)
                self.fills.append((name, place, scaling, offsets[address]))
        self.scaled_to = at
        self._slots = [slots for slots, _ in matrices.values()]
        # (Looked up once: of 18,000 matrices that takes some ms.)
        self._bases = np.array(list(matrices), np.uint64)
        self._names = [name for _, name in matrices.values()]
        zeros = [one[0].nbytes for address, (one, _) in matrices.items() if address not in offsets]
        self.nbytes = at + max(zeros, default=0)  # all of these look at the same zeros
        self._offsets = np.array([offsets.get(address, at) for address in matrices], np.uint64)
        self._sizes = np.array([one[0].nbytes for one in self._slots], np.uint64)
        self._pass = BytePlan(self._sizes)
        self.spare: Room | None = None
        self._parts: _Parts | None = None  # of the tensors that were filled in last
        self.is_on_cpu = all(one.device.type == "cpu" for one in self._slots)

    def fill(self, tensors: ImportedTensors) -> "Room":
        """What a slot must hold of a version.

        Raises:
            IncompatibleUpdate: numbers that are not finite, or that the engine's dtype cannot hold.

        """
        if self._parts is None or self._parts.tensors is not tensors:
            self._parts = _Parts(tensors, self)
        parts = self._parts
        # Of the same layout, so that what is written now covers all that was written then.
        room, self.spare = self.spare or Room(self, parts), None
        parts.plain.copy(parts.addresses, room.addresses)
        if parts.others:
            torch._foreach_copy_(room.others, parts.others)
        # As engines do it: cast first, then scaled in that dtype.
        for scaling, targets in room.scaled.items():
            torch._foreach_mul_(targets, scaling)
        if not are_finite(room.numbers, num_threads=None):
            check_finite(tensors, tensors)  # which names the tensor
            raise IncompatibleUpdate(
                f"an adapter has numbers that are finite, and not once they are scaled and in "
                f"{room.numbers[0].dtype}, as the engine has them. See which training step made "
                "them."
            )
        return room

    def write(self, room: "Room", slot: int) -> None:
        """Copy it into a slot, and note the digests of what it must hold from now on."""
        if self.is_on_cpu:
            places = self._slot_addresses(slot)
            room.due = self._pass.copy_digest(self._addresses(room.pin), places)
            return
        for slots, offset in zip(self._slots, self._offsets.tolist(), strict=True):
            slots[slot].copy_(self.view(room.pin, offset, slots))

    def differing(self, room: "Room", slot: int) -> str | None:
        """Read a slot: which matrix is the first that is not what it must be; None: none is."""
        pin = room.pin
        if self.is_on_cpu:
            held = self._pass.digest(self._slot_addresses(slot))
            if held == room.due:
                return None
            texts = held, room.due
            one, other = (np.frombuffer(text, np.uint8).reshape(-1, 16) for text in texts)
            return self._names[int(np.flatnonzero((one != other).any(axis=1))[0])]
        for slots, offset, name in zip(
            self._slots, self._offsets.tolist(), self._names, strict=True
        ):
            due_bytes = self.view(pin, offset, slots).view(torch.uint8)
            if not slots[slot].cpu().view(torch.uint8).equal(due_bytes):
                return name
        return None

    @property
    def held_nbytes(self) -> int:
        """Bytes of a slot."""
        return int(self._sizes.sum())

    def view(self, pin: Pin, offset: int, slots: torch.Tensor) -> torch.Tensor:
        """One matrix of a slot, in memory of the host."""
        dtype = str(slots.dtype).removeprefix("torch.")
        return tensor_in(pin, offset, slots[0].nbytes, dtype, tuple(slots.shape[1:]))

    def _addresses(self, pin: Pin) -> npt.NDArray[np.uint64]:
        return self._offsets + np.uint64(pin.address)

    def _slot_addresses(self, slot: int) -> npt.NDArray[np.uint64]:
        return self._bases + np.uint64(slot) * self._sizes


class _Parts:
    """What this rank has of an adapter's tensors, in the order of a plan's fills.

    Most of it is copied as bytes, in one pass of native code. The others are cut out of the middle
    of a tensor or of a slot's rows, or cast.

    Attributes:
        tensors: the adapter's.
        all: the parts.
        is_plain: of each part: its bytes are those of its place.
        plain: what copies them.
        addresses: of the plain parts.
        others: the parts that are not.

    """

    def __init__(self, tensors: ImportedTensors, plan: SlotPlan) -> None:
        """Cut the tensors."""
        self.tensors = tensors
        self.all = [tensors[name][place.rows, place.columns] for name, place, *_ in plan.fills]
        self.is_plain = [
            part.is_contiguous()
            and part.dtype == place.slots.dtype
            and part.shape[1] == place.slots.shape[2]
            for part, (_, place, *_) in zip(self.all, plan.fills, strict=True)
        ]
        sizes = [
            one.nbytes for one, is_plain in zip(self.all, self.is_plain, strict=True) if is_plain
        ]
        self.plain = BytePlan(np.array(sizes, np.uint64))
        self.addresses, self.others = self.apart(self.all)

    def apart(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[npt.NDArray[np.uint64], list[torch.Tensor]]:
        """Of as many tensors as there are parts: addresses of the plain ones, and the others."""
        both: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for one, is_plain in zip(tensors, self.is_plain, strict=True):
            both[not is_plain].append(one)
        return np.array([one.data_ptr() for one in both[0]], np.uint64), both[1]


class Room:
    """Memory of the host, laid out as a slot.

    Attributes:
        pin: the memory; zeros where nothing is filled in.
        addresses: where the plain parts of the adapter's tensors go.
        others: where the other parts go.
        scaled: factor -> what is multiplied by it.
        numbers: all of it, as few tensors.
        due: digests of the slot's matrices, as they were copied into it; on a CPU.

    """

    def __init__(self, plan: SlotPlan, parts: _Parts) -> None:
        """Take memory for a plan whose parts have these shapes."""
        self.pin = anonymous_pin(plan.nbytes)
        self.due = b""
        self.numbers: list[torch.Tensor] = []
        self.scaled: dict[float, list[torch.Tensor]] = {}
        factors = set[float]()
        for (_, place, scaling, offset), part in zip(plan.fills, parts.all, strict=True):
            rows = slice(place.first, place.first + part.shape[0])
            target = plan.view(self.pin, offset, place.slots)[rows, : part.shape[1]]
            self.numbers.append(target)
            if offset >= plan.scaled_from:
                factors.add(scaling)
            if scaling != 1.0:
                self.scaled.setdefault(scaling, []).append(target)
        self.addresses, self.others = parts.apart(self.numbers)
        dtypes = {one.dtype for one in self.numbers}
        if len(dtypes) == 1:
            dtype, size = str(dtypes.pop()).removeprefix("torch."), self.numbers[0].element_size()
            flat = tensor_in(self.pin, 0, plan.nbytes, dtype, (plan.nbytes // size,))
            self.numbers = [flat]
            if len(factors) == 1 and min(factors) > 0:  # the zeros between stay zeros
                all_b = flat[plan.scaled_from // size : plan.scaled_to // size]
                self.scaled = {one: [all_b] for one in factors - {1.0}}


class SlotInstaller(AdapterInstaller):
    """Brings versions of one LoRA adapter into slots of one rank of an engine."""

    def __init__(self, base: Callable[[], str]) -> None:
        """Begin; `base` gives the root of the engine's weights, empty if unknown."""
        super().__init__(base)
        self._places: dict[int, Places] = {}  # by the adapter's rank
        self._plans: dict[object, SlotPlan] = {}
        # What the slot of each version must hold.
        self._held: dict[int, tuple[SlotPlan, Room]] = {}

    # ---- what an engine has of its own ----------------------------------------------------------

    @property
    @abstractmethod
    def max_rank(self) -> int:
        """The largest rank that the engine was started for."""

    @abstractmethod
    def places_of(self, rank: int) -> Places:
        """Where an adapter of this rank lies: of all modules whose layers are understood."""

    @abstractmethod
    def take_slot(self, version: Resident, pairs: Sequence[LoRAPair]) -> int:
        """Enter a version into the engine's books, for a free slot; returns the slot.

        Raises:
            SlotsExhausted: there is none.

        """

    @abstractmethod
    def slot_of(self, version: Resident) -> int | None:
        """The slot that the engine's books have for a version; None if something dropped it."""

    @abstractmethod
    def free_slot(self, version: Resident) -> None:
        """Take a version out of the engine's books; one that is not there is ignored."""

    def factor_of(self, pairs: Sequence[LoRAPair]) -> float:  # noqa: ARG002 - of any
        """What the engine multiplies an adapter by itself, when it computes."""
        return 1.0

    # ---- the steps ------------------------------------------------------------------------------

    def check(self, spec: AdapterSpec, pairs: Sequence[LoRAPair]) -> None:
        """Refuse what the engine cannot serve, by name. See `AdapterInstaller`."""
        most = max(pair.rank for pair in pairs)
        places = self._placed(pairs)
        unknown = [pair.module for pair in pairs if pair.module not in places]
        if unknown:
            known = sorted({name.rpartition(".")[2] for name in places})
            raise IncompatibleUpdate(
                f"adapter {spec.name!r} adapts {len(unknown)} modules that this engine does not: "
                f"{unknown[:_SHOWN]}; it adapts {known}. Leave them out of target_modules."
            )
        if most > self.max_rank:
            raise IncompatibleUpdate(
                f"adapter {spec.name!r} has rank {most}, the engine was started for at most "
                f"{self.max_rank}. Start it with max_lora_rank={most}."
            )

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
            places = self._placed(pairs)
            _check_shapes(places, pairs, tensors)
            plan = self._plans[key] = SlotPlan(places, pairs, factor=self.factor_of(pairs))
            while len(self._plans) > _PLANS:
                del self._plans[next(iter(self._plans))]
        slot = self.take_slot(version, pairs)
        try:
            room = plan.fill(tensors)
            self._held[version.number] = plan, room
            plan.write(room, slot)
        except BaseException:
            self.drop(version)
            raise

    def read(self, version: Resident) -> int:
        """Read all of a version's slot. See `AdapterInstaller`."""
        plan, room = self._held[version.number]
        slot = self.slot_of(version)
        if slot is None:
            raise ProofFailed(
                f"adapter {version.label} is in no slot of the engine any more: something else "
                "dropped it, such as a reload of the base weights. Publish it again."
            )
        wrong = plan.differing(room, slot)
        if wrong is not None:
            raise ProofFailed(
                f"adapter {version.label}: matrix {wrong} is not what was published. Publish it "
                "again."
            )
        return plan.held_nbytes

    def holds(self, version: Resident) -> bool:
        """Whether a version is in a slot. See `AdapterInstaller`."""
        return self.slot_of(version) is not None

    def drop(self, version: Resident) -> None:
        """Free a version's slot. See `AdapterInstaller`."""
        self.free_slot(version)
        plan, room = self._held.pop(version.number, (None, None))
        if plan is not None:
            plan.spare = room

    def _placed(self, pairs: Sequence[LoRAPair]) -> Places:
        rank = max(pair.rank for pair in pairs)
        if rank not in self._places:
            self._places = {rank: self.places_of(rank)}
        return self._places[rank]


def _check_shapes(places: Places, pairs: Sequence[LoRAPair], tensors: Tensors) -> None:
    """Refuse an adapter whose matrices are not those of the engine's layers."""
    for pair in pairs:
        for name, place, dim in zip((pair.a, pair.b), places[pair.module], (1, 0), strict=True):
            if tensors[name].shape[dim] != place.size:
                raise IncompatibleUpdate(
                    f"tensor {name!r} has shape {list(tensors[name].shape)}, expected "
                    f"{place.size} in dimension {dim}: the engine's layer {place.layer!r} is "
                    "another one. Publish an adapter of the model that the engine serves."
                )
