"""The two ways in which a `DevicePass` gets its digests: a Triton kernel, or torch's operations.

Torch's operations are for devices without Triton, and are tested on CPU tensors. They are many
times slower than the kernel and equal to the bit. Words are int64: torch has no arithmetic on
unsigned words, and in two's complement sums, products, exclusive ors and masked shifts are the
same.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.cuda import leaves
from rl_bridge.cuda.leaves import LeafTable
from rl_bridge.cuda.streams import table_on
from rl_bridge.errors import SegmentError
from rl_bridge.manifest.digest import PAD_NBYTES
from rl_bridge.manifest.dtypes import NON_FINITE, NonFinite
from rl_bridge.manifest.table import ALIGNMENT
from rl_bridge.memory import vm

# ---- X3T-128K in torch's operations --------------------------------------------------------------

CHUNK_NBYTES = 64 << 20
"""Bytes of weights that are worked on at a time; about five times as much is allocated for it."""

_LOW32 = 0xFFFFFFFF
_LANE_NBYTES = 8 * leaves.LANES


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some leaves that are brought together side by side, each in as many blocks as the first."""

    blocks: int
    num_leaves: int
    last_block: torch.Tensor
    """Which block of each leaf is its last, int64 [leaves]."""
    copies: tuple[tuple[int, int, int, int], ...]
    """Tensor, first byte there, first byte here, number of bytes."""
    is_full: bool
    """Every byte is copied: nothing of it need be cleared before."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks whose blocks' sums are scrambled together, leaves of many blocks first."""

    chunks: tuple[_Chunk, ...]
    places: torch.Tensor
    """The place of each digest, int64 [leaves]."""
    active: tuple[int, ...]
    """How many of the leaves have a block of that number, and by one more: the last is 0."""


class TorchDigest:
    """Digests the leaves of one layout; the plan is made once, memory is taken for each digest."""

    def __init__(
        self, table: LeafTable, device: torch.device, *, chunk_nbytes: int = CHUNK_NBYTES
    ) -> None:
        """Plan for the leaves of `table`, in chunks of about `chunk_nbytes` bytes on `device`."""
        self._device = device
        self._keys = table_on(device, leaves.key_words())
        blocks = -(-table.size // PAD_NBYTES)
        order = np.argsort(-blocks, kind="stable")
        groups: list[_Group] = []
        chunks: list[_Chunk] = []
        first = begin = 0
        while begin < len(order):
            width = int(blocks[order[begin]])
            end = min(len(order), begin + max(1, chunk_nbytes // (width * PAD_NBYTES)))
            chunks.append(self._chunk(table, order[begin:end], blocks, width))
            begin = end
            sums = (end - first) * int(blocks[order[first]]) * _LANE_NBYTES
            if sums >= chunk_nbytes or end == len(order):
                groups.append(self._group(table, chunks, order[first:end], blocks))
                chunks, first = [], end
        self._groups = tuple(groups)

    def _chunk(self, table: LeafTable, rows: np.ndarray, blocks: np.ndarray, width: int) -> _Chunk:
        copies: list[tuple[int, int, int, int]] = []
        for here, row in enumerate(rows.tolist()):
            tensor, start, size = (
                int(table.tensor[row]),
                int(table.start[row]),
                int(table.size[row]),
            )
            copies.append((tensor, start, here * width * PAD_NBYTES, size))
        last_block = table_on(self._device, blocks[rows] - 1)
        is_full = bool((table.size[rows] == width * PAD_NBYTES).all())
        return _Chunk(width, len(rows), last_block, tuple(_joined(copies)), is_full)

    def _group(
        self, table: LeafTable, chunks: list[_Chunk], rows: np.ndarray, blocks: np.ndarray
    ) -> _Group:
        mine = blocks[rows]
        active = [int((mine > block).sum()) for block in range(int(mine[0]) + 1)]
        places = table_on(self._device, table.place[rows])
        return _Group(tuple(chunks), places, tuple(active))

    def run(self, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Digest all leaves.

        Args:
            tensors: bytes of each tensor of the table, uint8 [nbytes], on the device.
            out: int64 [table.num_words]: gets each leaf's digest at its place.

        """
        for group in self._groups:
            state = self._scrambled(group, [self._sums(chunk, tensors) for chunk in group.chunks])
            length = (_count(group, self._device) * PAD_NBYTES).view(-1)
            low = self._folded(state, leaves.KEY_LOW) + length * _signed(leaves.PRIME64_1)
            high = self._folded(state, leaves.KEY_HIGH) + ~(length * _signed(leaves.PRIME64_2))
            out[group.places] = _canonical(high)
            out[group.places + 1] = _canonical(low)

    def _sums(self, chunk: _Chunk, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sums of each block for the accumulators: int64 [leaves, blocks, 8]."""
        nbytes = chunk.num_leaves * chunk.blocks * PAD_NBYTES
        make = torch.empty if chunk.is_full else torch.zeros
        stage = make(nbytes, dtype=torch.uint8, device=self._device)
        for tensor, there, here, size in chunk.copies:
            stage[here : here + size].copy_(tensors[tensor][there : there + size])
        shape = (chunk.num_leaves, chunk.blocks, leaves.STRIPES, leaves.LANES)
        words = stage.view(torch.int64).view(shape)
        sums = _product(words ^ self._keys[: leaves.STRIPES]).sum(2)
        # Each word also goes, as it is, to its neighbour's accumulator.
        pairs = words.sum(2).view(*shape[:2], leaves.LANES // 2, 2)
        sums += pairs.flip(3).reshape(sums.shape)
        # A leaf's last stripe has another key than the last stripes of the blocks before.
        rows = torch.arange(chunk.num_leaves, device=self._device)
        stripe = words[rows, chunk.last_block, leaves.STRIPES - 1]
        rightly = _product(stripe ^ self._keys[leaves.KEY_END])
        wrongly = _product(stripe ^ self._keys[leaves.STRIPES - 1])
        sums[rows, chunk.last_block] += rightly - wrongly
        return sums

    def _scrambled(self, group: _Group, sums: list[torch.Tensor]) -> torch.Tensor:
        """Every leaf's accumulators behind its last block: int64 [leaves, 8]."""
        state = self._keys[leaves.KEY_FIRST].repeat(len(group.places), 1)
        for block in range(len(group.active) - 1):
            begin = 0
            for some in sums:
                if block < some.shape[1]:
                    # A shorter leaf has zeros behind its end here; they are no blocks of its own.
                    count = max(0, min(len(some), group.active[block] - begin))
                    state[begin : begin + count] += some[:count, block]
                begin += len(some)
            going_on = state[: group.active[block + 1]]
            going_on ^= (going_on >> 47) & 0x1FFFF
            going_on ^= self._keys[leaves.KEY_SCRAMBLE]
            going_on *= leaves.PRIME32_1
        return state

    def _folded(self, state: torch.Tensor, row: int) -> torch.Tensor:
        mixed = state ^ self._keys[row]
        one, other = mixed[:, 0::2], mixed[:, 1::2]
        return ((one * other) ^ _high_product(one, other)).sum(1)


def _joined(copies: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Join copies of leaves that follow each other in a tensor.

    They do so here too: a leaf that another one follows is whole, and nothing lies between.
    """
    joined: list[tuple[int, int, int, int]] = []
    for tensor, there, here, size in copies:
        if joined:
            other, before, place, length = joined[-1]
            if (other, before + length) == (tensor, there):
                joined[-1] = (tensor, before, place, length + size)
                continue
        joined.append((tensor, there, here, size))
    return joined


def _count(group: _Group, device: torch.device) -> torch.Tensor:
    """How many blocks each leaf has, int64 [leaves]."""
    return torch.cat([chunk.last_block for chunk in group.chunks]).to(device) + 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _product(value: torch.Tensor) -> torch.Tensor:
    """Multiply the halves of each word; `value` is used up."""
    low = value & _LOW32
    value >>= 32
    value &= _LOW32
    value *= low
    return value


def _high_product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Upper 64 bits of the unsigned 128-bit products."""
    one_low, one_high = one & _LOW32, (one >> 32) & _LOW32
    low, high = other & _LOW32, (other >> 32) & _LOW32
    crossed = one_high * low
    middle = ((one_low * low >> 32) & _LOW32) + (crossed & _LOW32) + one_low * high
    return one_high * high + ((crossed >> 32) & _LOW32) + ((middle >> 32) & _LOW32)


def _canonical(value: torch.Tensor) -> torch.Tensor:
    """Spread the last differences, and put the highest byte first."""
    value = (value ^ ((value >> 37) & 0x7FFFFFF)) * leaves.AVALANCHE
    value = value ^ ((value >> 32) & _LOW32)
    return value.view(torch.uint8).view(-1, 8).flip(1).contiguous().view(torch.int64).view(-1)


def _has_non_finite(some: torch.Tensor, pattern: Sequence[int]) -> torch.Tensor:
    """Whether some number in these bytes is NaN or Inf, by a pattern as `NonFinite`, signed."""
    mask, one, sign, flip, rest = pattern
    whole = torch.zeros(-(-len(some) // 8) * 8, dtype=torch.uint8, device=some.device)
    whole[: len(some)].copy_(some)
    bits = whole.view(torch.int64) ^ flip
    return ((((bits & mask) + one) & (bits | rest)) & sign).any()


# ---- the engines ---------------------------------------------------------------------------------

Places = npt.NDArray[np.int64]
_NOWHERE = 0
# Sets of addresses whose rows are kept: a trainer has one, an engine as many as it has slots.
_NUM_KEPT = 4


_ANY = NonFinite._fields.index("any")


def _patterns(table: LeafTable, dtypes: Sequence[str]) -> Places:
    """By tensor, int64 [tensors, 6]: the pattern of NaN and Inf, and where a finding is noted.

    A dtype that has neither gets zeros, by which nothing is found.
    """
    words = [(*NON_FINITE[one],) if one in NON_FINITE else (0,) * 5 for one in dtypes]
    found = np.zeros((len(dtypes), 6), np.int64)
    found[:, :5] = np.array(words, np.uint64).reshape(-1, 5).view(np.int64)
    found[:, 5] = table.num_words + np.arange(len(dtypes))
    return found


class Engine(Protocol):
    """Work of a pass on the current stream, which writes leaf digests into `out`.

    Of an engine that looks for NaN and Inf, a word for each tensor follows them, which is 0 before,
    and is set to 1 where the engine finds some.
    """

    def __init__(
        self,
        table: LeafTable,
        device: torch.device,
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Plan for the leaves of `table`.

        Args:
            table: the leaves.
            device: where all lie.
            dtypes: of the tensors, to look for NaN and Inf as well; None does not.

        """

    def digest(self, sources: Places, out: torch.Tensor) -> None:
        """Digest the tensors at addresses of their own."""

    def pack(self, sources: Places, arena: int, out: torch.Tensor) -> None:
        """Copy into the arena, clear the padding, and digest."""


class _Memory:
    """Some bytes of a GPU, as other array libraries describe them to torch.

    torch keeps this object for as long as the storage that it makes of it, and this object keeps
    `owner`. https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3.
    """

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner = owner
        # torch refuses memory that is marked as read-only; its mapping keeps writers out.
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
        raise SegmentError(
            f"memory at {address:#x} is not on {device}: torch took it for {found.device}, or made "
            "a copy of it. Publish and import on one GPU."
        )
    return found


# ---- the kernel ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Launch:
    """Leaves of one kind, which the kernel is compiled for, and its rows."""

    rows: torch.Tensor
    numbers: torch.Tensor | None
    """What the kernel looks for in each leaf; None for nothing."""
    look: int
    """How, as `leaves` has it; 0 for not at all."""
    width: int
    is_in_arena: bool
    """The rows' sources are offsets in the arena, not addresses."""


class _Kept:
    """The launches for the addresses that came last: as a rule, the same few come again."""

    def __init__(self) -> None:
        self._launches: OrderedDict[bytes, list[_Launch]] = OrderedDict()

    def get(self, make: Callable[[Places], list[_Launch]], places: Places) -> list[_Launch]:
        """The launches for some addresses; made if they are new here."""
        key = places.tobytes()
        if key not in self._launches:
            self._launches[key] = make(places)
        self._launches.move_to_end(key)
        while len(self._launches) > _NUM_KEPT:
            self._launches.popitem(last=False)
        return self._launches[key]


class KernelEngine:
    """Digests by the Triton kernel: one launch for all tensors whose addresses are aligned."""

    def __init__(
        self,
        table: LeafTable,
        device: torch.device,
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Plan for the leaves of `table`. See `Engine`."""
        from rl_bridge.cuda._kernel import digest_leaves

        self._kernel: Any = digest_leaves
        self._table, self._device = table, device
        self._patterns = None if dtypes is None else _patterns(table, dtypes)
        self._keys = table_on(device, leaves.key_words())
        everything = np.ones(len(table.offsets), bool)
        self._arena = [self._launch(table.offsets, everything, leaves.WIDEST, in_arena=True)]
        self._sources, self._packed = _Kept(), _Kept()

    def digest(self, sources: Places, out: torch.Tensor) -> None:
        """Digest the tensors at addresses of their own."""
        if arena := self._arena_of(sources):
            self._run(self._arena, arena, out, copy=False)
        else:
            self._run(self._sources.get(self._sorted, sources), _NOWHERE, out, copy=False)

    def pack(self, sources: Places, arena: int, out: torch.Tensor) -> None:
        """Copy into the arena, clear the padding, and digest."""
        # The bytes were gathered into the arena, whichever arena it is.
        sources = np.where(sources == self._table.offsets + arena, _NOWHERE, sources)
        self._run(self._packed.get(self._sorted, sources), arena, out, copy=True)

    def _arena_of(self, sources: Places) -> int | None:
        """Where the arena is, if the tensors lie in one as planned: its rows are there already."""
        starts = (sources - self._table.offsets)[self._table.nbytes != 0]
        if len(starts) and starts[0] % ALIGNMENT == 0 and (starts == starts[0]).all():
            return int(starts[0])
        return None

    def _sorted(self, sources: Places) -> list[_Launch]:
        """One launch for each alignment; as a rule that is one."""
        widths = np.select([sources % n == 0 for n in leaves.WIDTHS], list(leaves.WIDTHS))
        kinds = np.stack([widths, sources == _NOWHERE], 1)
        launches = []
        for width, in_arena in np.unique(kinds, axis=0).tolist():
            chosen = (kinds == (width, in_arena)).all(1)
            places = self._table.offsets if in_arena else sources
            launches.append(self._launch(places, chosen, width, in_arena=bool(in_arena)))
        return launches

    def _launch(
        self, sources: Places, chosen: npt.NDArray[np.bool_], width: int, *, in_arena: bool
    ) -> _Launch:
        rows = self._table.rows(sources, chosen)
        numbers, look = None, 0
        if self._patterns is not None:
            mine = self._patterns[self._table.tensor[chosen[self._table.tensor]]]
            numbers = table_on(self._device, np.ascontiguousarray(mine))
            is_plain = (mine[:, _ANY] == -1) | (mine[:, 0] == 0)
            look = leaves.LOOK_PLAIN if is_plain.all() else leaves.LOOK_ANY
        return _Launch(table_on(self._device, rows), numbers, look, width, in_arena)

    def _run(self, launches: list[_Launch], arena: int, out: torch.Tensor, *, copy: bool) -> None:
        for launch in launches:
            if len(launch.rows):
                self._kernel[(len(launch.rows),)](
                    launch.rows,
                    self._keys,
                    out,
                    arena if launch.is_in_arena else _NOWHERE,
                    arena,
                    launch.numbers,
                    COPY=copy,
                    WIDTH=launch.width,
                    LOOK=launch.look,
                    maxnreg=leaves.most_registers(launch.width, launch.look),
                    num_warps=1,
                )


# ---- torch --------------------------------------------------------------------------------------


class TorchEngine:
    """Digests by torch's own operations: many of them, and a copy of what is digested."""

    def __init__(
        self,
        table: LeafTable,
        device: torch.device,
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Plan for the leaves of `table`. See `Engine`."""
        self._table, self._device = table, device
        self._patterns = None if dtypes is None else _patterns(table, dtypes).tolist()
        self._digest = TorchDigest(table, device)

    def digest(self, sources: Places, out: torch.Tensor) -> None:
        """Digest the tensors at addresses of their own."""
        pairs = zip(sources.tolist(), self._table.nbytes.tolist(), strict=True)
        self._run([bytes_at(*pair, self._device) for pair in pairs], out)

    def pack(self, sources: Places, arena: int, out: torch.Tensor) -> None:
        """Copy into the arena, clear the padding, and digest."""
        offsets, sizes = self._table.offsets, self._table.nbytes
        ends = (offsets + -(-sizes // ALIGNMENT) * ALIGNMENT).tolist()
        whole = bytes_at(arena, max(ends, default=0), self._device)
        targets = []
        rows = zip(sources.tolist(), offsets.tolist(), sizes.tolist(), ends, strict=True)
        for source, start, nbytes, end in rows:
            target = whole[start : start + nbytes]
            whole[start + nbytes : end].zero_()
            if nbytes and source != target.data_ptr():
                target.copy_(bytes_at(source, nbytes, self._device))
            targets.append(target)
        self._run(targets, out)

    def _run(self, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        self._digest.run(tensors, out)
        for tensor, (*pattern, place) in zip(tensors, self._patterns or (), strict=False):
            for begin in range(0, len(tensor) if pattern[0] else 0, CHUNK_NBYTES):
                out[place] |= _has_non_finite(tensor[begin : begin + CHUNK_NBYTES], pattern)
