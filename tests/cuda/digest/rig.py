"""Tensors laid out in memory, and what a pass makes of them with one engine or the other."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from rl_bridge.cuda.digest import DevicePass, EngineName
from rl_bridge.cuda.digest_engines import Engine, KernelEngine, TorchEngine, bytes_at
from rl_bridge.cuda.leaves import LeafTable
from rl_bridge.manifest.digest import LEAF_NBYTES, digest_bytes
from rl_bridge.manifest.dtypes import NON_FINITE
from rl_bridge.memory import vm
from rl_bridge.testing.tensors import bytes_of
from tests.test_docs_format import PATTERNS, VECTORS

__all__ = [
    "BORDERS",
    "NO_TRITON",
    "SMALL",
    "Laid",
    "far_away",
    "flipped",
    "guarded",
    "half_in_an_arena",
    "not_finite",
    "of_sizes",
    "of_the_page",
]

NO_TRITON = None if importlib.util.find_spec("triton") else "Triton is not installed"

SMALL = [0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 255, 256, 257, 1023, 1024, 1025, 4095, 4096]
SMALL += [4097, 5120, 5121, 9000, 5]
BORDERS = [LEAF_NBYTES - 1, 2 * LEAF_NBYTES + 1025]
GUARD = 0xA5
_ENGINES: dict[str, type[Engine]] = {"triton": KernelEngine, "torch": TorchEngine}
# A whole block behind the arena, which a pack could write by mistake.
_BEHIND = 2048


class Laid:
    """Tensors of some sizes in random bytes, some bytes behind multiples of 256, and an arena."""

    def __init__(self, sizes: Sequence[int], *, device: str = "cpu") -> None:
        self.sizes = np.array(sizes, np.uint64)
        rooms = -(-self.sizes.astype(np.int64) // 256) * 256
        self._starts = np.cumsum(rooms) - rooms
        self.offsets = self._starts.astype(np.uint64)
        self.total = int(rooms.sum())
        self.device = torch.device(device)
        self._source = self._aligned(self.total + 512, device)
        self._memory = self._aligned(256 + self.total + _BEHIND, device)
        self.arena = self._memory.data_ptr() + 256
        self.fill(shift=0, seed=0)

    def fill(self, *, shift: int, seed: int) -> None:
        """Put new bytes into the tensors and guard bytes into and around the arena."""
        self._shift = shift
        self.data = np.random.default_rng(seed).integers(0, 256, len(self._source), np.uint8)
        self._source.copy_(torch.from_numpy(self.data))
        self._memory.fill_(GUARD)

    @staticmethod
    def _aligned(nbytes: int, device: str) -> torch.Tensor:
        memory = torch.empty(nbytes + 256, dtype=torch.uint8, device=device)
        skipped = -memory.data_ptr() % 256
        return memory[skipped : skipped + nbytes]

    @property
    def targets(self) -> np.ndarray:
        return self.offsets + np.uint64(self.arena)

    @property
    def sources(self) -> np.ndarray:
        return self.offsets + np.uint64(self._source.data_ptr() + self._shift)

    def plan(self, engine: EngineName | None = None) -> DevicePass:
        return DevicePass(self.sizes, self.device, engine=engine)

    def tensors(self) -> list[bytes]:
        starts = (self._starts + self._shift).tolist()
        sizes = self.sizes.tolist()
        return [self.data[a : a + n].tobytes() for a, n in zip(starts, sizes, strict=True)]

    def digests(self) -> bytes:
        return b"".join(map(digest_bytes, self.tensors()))

    def arena_is_right(self) -> bool:
        """Each tensor in its place, zeros behind it, and nothing written before or after."""
        expected = np.full(256 + self.total + _BEHIND, GUARD, np.uint8)
        expected[256 : 256 + self.total] = 0
        for start, data in zip(self._starts.tolist(), self.tensors(), strict=True):
            expected[256 + start : 256 + start + len(data)] = np.frombuffer(data, np.uint8)
        return np.array_equal(self._memory.cpu().numpy(), expected)


def of_sizes(
    engine: EngineName, sizes: Sequence[int], shifts: Sequence[int], *, device: str = "cpu"
) -> list[str]:
    """What is wrong with digests and arena of one plan, with new bytes for each of `shifts`."""
    laid = Laid(sizes, device=device)
    plan, wrong = laid.plan(engine), []
    for turn, shift in enumerate(shifts):
        laid.fill(shift=shift, seed=turn)
        expected = laid.digests()
        if plan.digest(laid.sources) != expected:
            wrong.append(f"digest of the sources, turn {turn}")
        if plan.copy_digest(laid.sources, laid.targets) != expected:
            wrong.append(f"digest of the pack, turn {turn}")
        if not laid.arena_is_right():
            wrong.append(f"arena, turn {turn}")
        if plan.digest(laid.targets) != expected:
            wrong.append(f"digest of the arena, turn {turn}")
    return wrong


def of_the_page(engine: EngineName, most_nbytes: int, *, device: str = "cpu") -> list[str]:
    """Which of the normative page's test vectors come out otherwise, of those up to a size."""
    vectors = [vector for vector in VECTORS if int(vector[1]) <= most_nbytes]
    laid = Laid([int(size) for _, size, _, _ in vectors], device=device)
    for (pattern, size, _, _), target in zip(vectors, laid.targets.tolist(), strict=True):
        data = bytearray(PATTERNS[pattern](int(size)))
        if data:
            bytes_at(target, len(data), laid.device).copy_(
                torch.frombuffer(data, dtype=torch.uint8)
            )
    found = laid.plan(engine).digest(laid.targets).hex()
    return [
        f"{pattern} {size}"
        for row, (pattern, size, _, digest) in enumerate(vectors)
        if found[32 * row : 32 * row + 32] != digest
    ]


def flipped(engine: EngineName, bits: Sequence[int]) -> int:
    """How many different digests 1 KiB has with one of `bits` flipped, and with none."""
    data = np.random.default_rng(3).integers(0, 256, 1024, np.uint8)
    copies = np.tile(data, (len(bits) + 1, 1))
    rows, places = np.arange(len(bits)), np.array(bits)
    copies[rows, places // 8] ^= (1 << places % 8).astype(np.uint8)
    sizes = np.full(len(copies), 1024, np.uint64)
    offsets = np.arange(len(copies), dtype=np.uint64) * np.uint64(1024)
    plan = DevicePass(sizes, "cpu", engine=engine)
    found = plan.digest(offsets + np.uint64(copies.ctypes.data))
    return len({found[at : at + 16] for at in range(0, len(found), 16)})


def not_finite(engine: EngineName, dtypes: Sequence[str]) -> list[str]:
    """What is wrong with what a plan finds of NaN, in tensors that have one or have none."""
    wrong = []
    for dtype in dtypes:
        kind: torch.dtype = getattr(torch, dtype)
        kib = 1024 // kind.itemsize
        # Of six blocks, of which the kernel takes four at once, one alone, and the last; and of one
        # number. A NaN in each of these, in turn.
        tensors = [torch.ones(5 * kib + 9).to(kind) for _ in range(4)]
        tensors += [torch.ones(1).to(kind) for _ in range(2)]
        places = [None, 2 * kib + 5, 4 * kib + 3, 5 * kib + 8, None, 0]
        if dtype == "bfloat16":  # a second leaf as well
            tensors.append(torch.ones(LEAF_NBYTES // 2 + 5).to(kind))
            places.append(-1)
        bad = [dtype in NON_FINITE and place is not None for place in places]
        for tensor, place, is_bad in zip(tensors, places, bad, strict=True):
            if is_bad:
                tensor[place] = torch.tensor(torch.nan).to(kind)
        laid = Laid([one.nbytes for one in tensors])
        plan = DevicePass(laid.sizes, "cpu", engine=engine, dtypes=[dtype] * len(tensors))
        sources = np.array([one.data_ptr() for one in tensors], np.uint64)
        expected = b"".join(digest_bytes(bytes_of(one)) for one in tensors)
        for way, call in (
            ("digest", partial(plan.digest, sources)),
            ("copy_digest", partial(plan.copy_digest, sources, laid.targets)),
        ):
            if call() != expected or plan.non_finite.tolist() != bad:
                wrong.append(f"{way} of {dtype}: {plan.non_finite.tolist()}")
        for tensor in tensors:
            tensor.view(torch.uint8).zero_()
        plan.digest(sources)
        if plan.non_finite.any():
            wrong.append(f"{dtype}: found once more")
    return wrong


def half_in_an_arena(engine: EngineName) -> bool:
    """Whether tensors of which only some lie where an arena has them get their digests."""
    laid = Laid([300, 77, 5000])
    plan, expected = laid.plan(engine), laid.digests()
    plan.copy_digest(laid.sources, laid.targets)
    sources = laid.targets
    sources[1] = laid.sources[1]
    vm.store(laid.arena + int(laid.offsets[1]), bytes(77))
    return plan.digest(sources) == expected


@contextmanager
def islands(nbytes: int, places: Sequence[int]) -> Iterator[int]:
    """`nbytes` of addresses where touching anything faults, but the pages at `places`."""
    base = vm.reserve(nbytes)
    try:
        for place in places:
            fd = os.memfd_create("rl_bridge-test")
            try:
                os.ftruncate(fd, vm.PAGE)
                vm.map_fixed(base + place, vm.PAGE, fd)
            finally:
                os.close(fd)
        yield base
    finally:
        vm.unmap(base, nbytes)


def far_away(engine: EngineName) -> list[str]:
    """What is wrong with two tensors of which one lies more than 4 GiB behind the other."""
    gap = (4 << 30) + vm.PAGE
    places = [0, vm.PAGE, gap, gap + vm.PAGE]
    with islands(gap + 3 * vm.PAGE, places) as base:
        data = np.random.default_rng(1).integers(0, 256, 8000, np.uint8)
        parts = [data[:700].tobytes(), data[701 : 701 + 5001].tobytes()]
        expected = b"".join(map(digest_bytes, parts))
        table = LeafTable(np.array([700, 5001], np.uint64))
        table.offsets = np.array([0, gap])
        made = _ENGINES[engine](table, torch.device("cpu"))
        sources = np.array([data.ctypes.data, data.ctypes.data + 701])
        wrong = []
        for name, act in (
            ("pack", partial(made.pack, sources, base)),
            ("digest", partial(made.digest, table.offsets + base)),
        ):
            out = torch.zeros(table.num_words, dtype=torch.int64)
            act(out)
            if table.combine(out.numpy()) != expected:
                wrong.append(name)
        for offset, part in zip((0, gap), parts, strict=True):
            if bytes(vm.tensor_at(base + offset, len(part)).numpy()) != part:
                wrong.append(f"bytes at {offset}")
    return wrong


def guarded(engine: EngineName, size: int) -> bool:
    """Read a tensor that ends, and one that begins, where touching the next byte faults."""
    room = vm.PAGE * -(-size // vm.PAGE)
    inside = list(range(vm.PAGE, vm.PAGE + room, vm.PAGE))
    with islands(2 * vm.PAGE + room, inside) as base:
        memory = vm.tensor_at(base + vm.PAGE, room).numpy()
        memory[:] = np.random.default_rng(2).integers(0, 256, room, np.uint8)
        laid, digests = Laid([size]), []
        for start in (0, room - size):
            sources = np.array([base + vm.PAGE + start], np.uint64)
            expected = digest_bytes(memory[start : start + size].tobytes())
            plan = laid.plan(engine)
            digests += [plan.digest(sources) == expected]
            digests += [plan.copy_digest(sources, laid.targets) == expected]
        del memory
    return all(digests)
