"""X3T-128K in torch's own operations, for devices without Triton; on CPU tensors it is tested.

Many times slower than the kernel and equal to the bit. Words are int64: torch has no arithmetic on
unsigned ones, and on two's complement sums, products, exclusive ors and masked shifts are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl_bridge.manifest.digest import PAD_NBYTES
from rl_bridge.memory.device import leaves
from rl_bridge.memory.device.leaves import LeafTable
from rl_bridge.memory.device.streams import table_on

__all__ = ["CHUNK_NBYTES", "TorchDigest"]

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
    """Where each digest goes, int64 [leaves]."""
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
        """What each block adds to the accumulators: int64 [leaves, blocks, 8]."""
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
