"""The two ways in which a `DevicePass` gets its digests: a Triton kernel, or torch's operations."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.errors import SegmentError
from rl_bridge.memory import vm
from rl_bridge.memory.device import leaves
from rl_bridge.memory.device.leaves import ALIGNMENT, CASTS, LeafTable
from rl_bridge.memory.device.streams import table_on
from rl_bridge.memory.device.torch_digest import TorchDigest

__all__ = ["Engine", "KernelEngine", "TorchEngine", "bytes_at"]

Places = npt.NDArray[np.int64]
_NOWHERE = 0
# Sets of addresses whose rows are kept: a trainer has one, an engine as many as it has slots.
_NUM_KEPT = 4


class Engine(Protocol):
    """What a pass asks for: work on the current stream, leaf digests into `out`."""

    def __init__(self, table: LeafTable, offsets: Places, device: torch.device) -> None:
        """Plan for the leaves of `table`, of tensors that lie at `offsets` of an arena."""

    def digest(self, arena: int, out: torch.Tensor) -> None:
        """Digest the tensors in the arena at an address."""

    def digest_at(self, sources: Places, out: torch.Tensor) -> None:
        """Digest the tensors at addresses of their own."""

    def pack(
        self, sources: Places, arena: int, casts: npt.NDArray[np.uint8], out: torch.Tensor
    ) -> None:
        """Copy, or cast, into the arena, clear the padding, and digest."""


class _Memory:
    """Some bytes of a GPU, as other array libraries describe them to torch.

    torch keeps this object for as long as the storage that it makes of it, and this object keeps
    `owner`. https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3.
    """

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner = owner
        # torch refuses memory that is marked as read-only; what keeps writers out is its mapping.
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def bytes_at(address: int, nbytes: int, device: torch.device, *, owner: Any = None) -> torch.Tensor:
    """Make a uint8 tensor over raw memory of `device`.

    Args:
        address: of the first byte.
        nbytes: how many.
        device: whose memory.
        owner: of a GPU's memory, what the tensor's storage keeps alive; without one, the caller
            keeps the memory mapped meanwhile.

    Raises:
        SegmentError: it is another device's.

    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type != "cuda":
        return vm.tensor_at(address, nbytes)
    # torch asks the driver whose memory it is, under whichever GPU is the current one.
    with torch.cuda.device(device):
        found = torch.as_tensor(_Memory(owner, address, nbytes), device=device)
    if found.data_ptr() != address or found.device != device:
        # torch copies, without a word, where it takes the memory for another device's.
        msg = (
            f"memory at {address:#x} is not on {device}: torch took it for {found.device}, or made "
            "a copy of it. Publish and import on one GPU."
        )
        raise SegmentError(msg)
    return found


# ---- the kernel ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Launch:
    """Leaves of one kind: what the kernel is compiled for, and its rows."""

    rows: torch.Tensor
    width: int
    cast: int
    is_in_arena: bool
    """The rows' sources are offsets in the arena, not addresses."""


class _Kept:
    """The launches for the addresses that came last: as a rule, the same few come again."""

    def __init__(self) -> None:
        self._launches: OrderedDict[bytes, list[_Launch]] = OrderedDict()

    def get(self, make: Callable[..., list[_Launch]], *places: Places) -> list[_Launch]:
        """The launches for some addresses; made if they are new here."""
        key = b"".join(place.tobytes() for place in places)
        if key not in self._launches:
            self._launches[key] = make(*places)
        self._launches.move_to_end(key)
        while len(self._launches) > _NUM_KEPT:
            self._launches.popitem(last=False)
        return self._launches[key]


class KernelEngine:
    """Digests by the Triton kernel: one launch for all tensors whose addresses are aligned."""

    def __init__(self, table: LeafTable, offsets: Places, device: torch.device) -> None:
        """Plan for the leaves of `table`, of tensors that lie at `offsets` of an arena."""
        from rl_bridge.memory.device._kernel import digest_leaves

        self._kernel: Any = digest_leaves
        self._table, self._offsets, self._device = table, offsets, device
        self._keys = table_on(device, leaves.key_words())
        everything = np.zeros(len(offsets), np.int64)
        self._arena = [self._launch(offsets, everything == 0, leaves.WIDEST, 0, in_arena=True)]
        self._sources, self._packed = _Kept(), _Kept()

    def digest(self, arena: int, out: torch.Tensor) -> None:
        """Digest the tensors in the arena at an address."""
        self._run(self._arena, arena, out, copy=False)

    def digest_at(self, sources: Places, out: torch.Tensor) -> None:
        """Digest the tensors at addresses of their own."""
        if arena := self._arena_of(sources):
            self._run(self._arena, arena, out, copy=False)
            return
        casts = np.zeros(len(sources), np.int64)
        launches = self._sources.get(self._sorted, sources, casts)
        self._run(launches, _NOWHERE, out, copy=False)

    def pack(
        self, sources: Places, arena: int, casts: npt.NDArray[np.uint8], out: torch.Tensor
    ) -> None:
        """Copy, or cast, into the arena, clear the padding, and digest."""
        # What was gathered into the arena is there, whichever arena it is.
        sources = np.where(sources == self._offsets + arena, _NOWHERE, sources)
        launches = self._packed.get(self._sorted, sources, casts.astype(np.int64))
        self._run(launches, arena, out, copy=True)

    def _arena_of(self, sources: Places) -> int | None:
        """Where the arena is, if the tensors lie in one as planned: its rows are there already."""
        starts = (sources - self._offsets)[self._table.nbytes != 0]
        if len(starts) and starts[0] % ALIGNMENT == 0 and (starts == starts[0]).all():
            return int(starts[0])
        return None

    def _sorted(self, sources: Places, casts: Places) -> list[_Launch]:
        """One launch for each alignment and cast; as a rule that is one."""
        widths = np.select([sources % n == 0 for n in leaves.WIDTHS], list(leaves.WIDTHS))
        widths[casts != 0] = leaves.CAST_WIDTH
        kinds = np.stack([widths, casts, sources == _NOWHERE], 1)
        launches = []
        for width, cast, in_arena in np.unique(kinds, axis=0).tolist():
            chosen = (kinds == (width, cast, in_arena)).all(1)
            places = self._offsets if in_arena else sources
            launches.append(self._launch(places, chosen, width, cast, in_arena=bool(in_arena)))
        return launches

    def _launch(
        self,
        sources: Places,
        chosen: npt.NDArray[np.bool_],
        width: int,
        cast: int,
        *,
        in_arena: bool,
    ) -> _Launch:
        rows = self._table.rows(sources, self._offsets, chosen, scale=2 if cast else 1)
        return _Launch(table_on(self._device, rows), width, cast, in_arena)

    def _run(self, launches: list[_Launch], arena: int, out: torch.Tensor, *, copy: bool) -> None:
        for launch in launches:
            if len(launch.rows):
                self._kernel[(len(launch.rows),)](
                    launch.rows,
                    self._keys,
                    out,
                    arena if launch.is_in_arena else _NOWHERE,
                    arena,
                    COPY=copy,
                    WIDTH=launch.width,
                    CAST=launch.cast,
                    num_warps=1,
                )


# ---- torch --------------------------------------------------------------------------------------

_CAST_DTYPES = {cast: getattr(torch, name) for name, cast in CASTS.items()}


class TorchEngine:
    """Digests by torch's own operations: many of them, and a copy of what is digested."""

    def __init__(self, table: LeafTable, offsets: Places, device: torch.device) -> None:
        """Plan for the leaves of `table`, of tensors that lie at `offsets` of an arena."""
        self._table, self._offsets, self._device = table, offsets, device
        self._digest = TorchDigest(table, device)

    def digest(self, arena: int, out: torch.Tensor) -> None:
        """Digest the tensors in the arena at an address."""
        self._digest.run(self._in_arena(arena), out)

    def digest_at(self, sources: Places, out: torch.Tensor) -> None:
        """Digest the tensors at addresses of their own."""
        pairs = zip(sources.tolist(), self._table.nbytes.tolist(), strict=True)
        self._digest.run([bytes_at(*pair, self._device) for pair in pairs], out)

    def pack(
        self, sources: Places, arena: int, casts: npt.NDArray[np.uint8], out: torch.Tensor
    ) -> None:
        """Copy, or cast, into the arena, clear the padding, and digest."""
        packed = self._in_arena(arena, padded=True)
        nbytes = self._table.nbytes.tolist()
        targets = [room[:size] for room, size in zip(packed, nbytes, strict=True)]
        for row, (source, cast) in enumerate(zip(sources.tolist(), casts.tolist(), strict=True)):
            target = targets[row]
            packed[row][nbytes[row] :].zero_()
            if cast:
                numbers = bytes_at(source, 2 * nbytes[row], self._device).view(torch.float32)
                target.view(_CAST_DTYPES[cast]).copy_(numbers)
            elif nbytes[row] and source != target.data_ptr():
                target.copy_(bytes_at(source, nbytes[row], self._device))
        self._digest.run(targets, out)

    def _in_arena(self, arena: int, *, padded: bool = False) -> Sequence[torch.Tensor]:
        sizes = self._table.nbytes
        if padded:
            sizes = -(-sizes // ALIGNMENT) * ALIGNMENT
        ends = (self._offsets + sizes).tolist()
        whole = bytes_at(arena, max(ends, default=0), self._device)
        return [whole[a:b] for a, b in zip(self._offsets.tolist(), ends, strict=True)]
