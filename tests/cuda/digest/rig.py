"""Tensors laid out in memory, and what a pass makes of them with one engine or the other."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from rl_bridge.cuda.digest import DevicePass, EngineName
from rl_bridge.manifest.digest import LEAF_NBYTES, digest_bytes
from rl_bridge.manifest.dtypes import DTYPE_NBYTES, NON_FINITE
from rl_bridge.memory import vm
from rl_bridge.testing.tensors import bytes_of
from tests.test_docs_format import PATTERNS, VECTORS

__all__ = [
    "BORDERS",
    "NO_TRITON",
    "SMALL",
    "Laid",
    "casted",
    "far_away",
    "flipped",
    "guarded",
    "half_in_an_arena",
    "not_finite",
    "of_sizes",
    "of_the_page",
    "packed_tensors",
]

NO_TRITON = None if importlib.util.find_spec("triton") else "Triton is not installed"

SMALL = [0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 255, 256, 257, 1023, 1024, 1025, 4095, 4096]
SMALL += [4097, 5120, 5121, 9000, 5]
BORDERS = [LEAF_NBYTES - 1, 2 * LEAF_NBYTES + 1025]
GUARD = 0xA5
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
    def sources(self) -> np.ndarray:
        return self.offsets + np.uint64(self._source.data_ptr() + self._shift)

    def plan(self, engine: EngineName | None = None) -> DevicePass:
        return DevicePass(self.offsets, self.sizes, device=self._source.device, engine=engine)

    def tensors(self) -> list[bytes]:
        starts = (self._starts + self._shift).tolist()
        sizes = self.sizes.tolist()
        return [self.data[a : a + n].tobytes() for a, n in zip(starts, sizes, strict=True)]

    def digests(self) -> bytes:
        return b"".join(map(digest_bytes, self.tensors()))

    def packed(self, start: int, nbytes: int) -> np.ndarray:
        """Some bytes of the arena, as they are now."""
        return self._memory[256 + start : 256 + start + nbytes].cpu().numpy().copy()

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
        if plan.digest_at(laid.sources) != expected:
            wrong.append(f"digest of the sources, turn {turn}")
        if plan.pack(laid.sources, laid.arena) != expected:
            wrong.append(f"digest of the pack, turn {turn}")
        if not laid.arena_is_right():
            wrong.append(f"arena, turn {turn}")
        if plan.digest(laid.arena) != expected:
            wrong.append(f"digest of the arena, turn {turn}")
    return wrong


def of_the_page(engine: EngineName, *, device: str = "cpu") -> list[str]:
    """Digests of the normative page's test vectors, all in one call."""
    laid = Laid([int(size) for _, size, _, _ in VECTORS], device=device)
    memory = torch.zeros(laid.total + 256, dtype=torch.uint8, device=device)
    base = -(-memory.data_ptr() // 256) * 256
    for (pattern, size, _, _), offset in zip(VECTORS, laid.offsets.tolist(), strict=True):
        data = torch.frombuffer(
            bytearray(PATTERNS[pattern](int(size))) or bytearray(1), dtype=torch.uint8
        )
        start = base - memory.data_ptr() + offset
        memory[start : start + int(size)].copy_(data[: int(size)])
    found = laid.plan(engine).digest(base).hex()
    return [found[at : at + 32] for at in range(0, len(found), 32)]


def flipped(engine: EngineName, bits: Sequence[int]) -> int:
    """How many different digests 1 KiB has with one of `bits` flipped, and with none."""
    data = np.random.default_rng(3).integers(0, 256, 1024, np.uint8)
    copies = np.tile(data, (len(bits) + 1, 1))
    rows, places = np.arange(len(bits)), np.array(bits)
    copies[rows, places // 8] ^= (1 << places % 8).astype(np.uint8)
    sizes = np.full(len(copies), 1024, np.uint64)
    offsets = np.arange(len(copies), dtype=np.uint64) * np.uint64(1024)
    plan = DevicePass(offsets, sizes, device="cpu", engine=engine)
    found = plan.digest_at(offsets + np.uint64(copies.ctypes.data))
    return len({found[at : at + 16] for at in range(0, len(found), 16)})


def not_finite(engine: EngineName, dtypes: Sequence[str]) -> list[str]:
    """What is wrong with what a plan finds of NaN, in tensors that have some or have none."""
    wrong = []
    numels = [1, 700, 131_072 // 2 + 5]
    for dtype in dtypes:
        kind: torch.dtype = getattr(torch, dtype)
        tensors = [torch.ones(numel).to(kind) for numel in numels for _ in range(2)]
        bad = [dtype in NON_FINITE and row % 2 == 1 for row in range(len(tensors))]
        for tensor in tensors[1::2] if dtype in NON_FINITE else ():
            tensor[-1] = torch.tensor(torch.nan).to(kind)
        laid = Laid([one.nbytes for one in tensors])
        plan = DevicePass(
            laid.offsets, laid.sizes, device="cpu", engine=engine, dtypes=[dtype] * len(tensors)
        )
        sources = np.array([one.data_ptr() for one in tensors], np.uint64)
        expected = b"".join(digest_bytes(bytes_of(one)) for one in tensors)
        for way, call in (
            ("digest_at", partial(plan.digest_at, sources)),
            ("pack", partial(plan.pack, sources, laid.arena)),
            ("digest", partial(plan.digest, laid.arena)),
        ):
            if call() != expected or plan.non_finite.tolist() != bad:
                wrong.append(f"{way} of {dtype}: {plan.non_finite.tolist()}")
        for tensor in tensors:
            tensor.view(torch.uint8).zero_()
        plan.digest_at(sources)
        if plan.non_finite.any():
            wrong.append(f"{dtype}: found once more")
    return wrong


def half_in_an_arena(engine: EngineName) -> bool:
    """Whether tensors of which only some lie where an arena has them get their digests."""
    laid = Laid([300, 77, 5000])
    plan, expected = laid.plan(engine), laid.digests()
    plan.pack(laid.sources, laid.arena)
    sources = laid.offsets + np.uint64(laid.arena)
    sources[1] = laid.sources[1]
    vm.store(laid.arena + int(laid.offsets[1]), bytes(77))
    return plan.digest_at(sources) == expected


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
        offsets, sizes = np.array([0, gap], np.uint64), np.array([700, 5001], np.uint64)
        plan = DevicePass(offsets, sizes, device="cpu", engine=engine)
        sources = np.array([data.ctypes.data, data.ctypes.data + 701], np.uint64)
        wrong = [] if plan.pack(sources, base) == expected else ["digest of the pack"]
        for offset, part in zip((0, gap), parts, strict=True):
            if bytes(vm.tensor_at(base + offset, len(part)).numpy()) != part:
                wrong.append(f"bytes at {offset}")
        if plan.digest(base) != expected:
            wrong.append("digest of the arena")
        if plan.digest_at(offsets + np.uint64(base)) != expected:
            wrong.append("digest at addresses")
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
            digests += [plan.digest_at(sources) == expected]
            digests += [plan.pack(sources, laid.arena) == expected]
        del memory
    return all(digests)


_DTYPES = [getattr(torch, name) for name in DTYPE_NBYTES if hasattr(torch, name)]


def _of_dtype(dtype: torch.dtype, count: int) -> torch.Tensor:
    nbytes = count * dtype.itemsize
    data = np.random.default_rng(count).integers(0, 256, nbytes, np.uint8)
    if dtype == torch.bool:
        data &= 1
    return torch.from_numpy(data).view(dtype)


def packed_tensors(engine: EngineName, *, device: str = "cpu") -> list[str]:
    """Names of dtypes, and of shapes, that are not packed byte by byte as torch sees them."""
    tensors = {str(dtype): _of_dtype(dtype, 37) for dtype in _DTYPES}
    tensors |= {f"odd {dtype}": _of_dtype(dtype, 37)[1:] for dtype in _DTYPES}
    numbers = _of_dtype(torch.bfloat16, 35 * 65).view(35, 65)
    tensors |= {
        "without dimensions": torch.tensor(1.5),
        "empty": torch.empty(0, 3, dtype=torch.int64),
        "transposed": numbers.t(),
        "strided": numbers[::2, ::3],
        "expanded": numbers[:, :1].expand(35, 7),
        "complex, transposed": _of_dtype(torch.complex128, 12).view(3, 4).t(),
    }
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    expected = [tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
    laid = Laid([len(data) for data in expected], device=device)
    found = laid.plan(engine).pack_tensors(list(tensors.values()), laid.arena)
    wrong = []
    for row, (name, data) in enumerate(zip(tensors, expected, strict=True)):
        start = int(laid.offsets[row])
        if not np.array_equal(laid.packed(start, len(data)), data.numpy()):
            wrong.append(name)
        elif found[16 * row : 16 * row + 16] != digest_bytes(data.numpy().tobytes()):
            wrong.append(f"digest of {name}")
    return wrong


def casted(engine: EngineName, name: str, *, device: str = "cpu") -> list[int]:
    """How many numbers differ from torch's own cast to the dtype `name`, and digests that do."""
    dtype = getattr(torch, name)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e38, -3.4e38, float("inf"), float("-inf")])
    # Halfway between two neighbours, just below, just above; subnormal in both.
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x477FF000, 0x33000000])
    bits = torch.cat([bits, torch.tensor([0x33000001, 0x00000001, 0x00008000, 0x387FC000])])
    noise = np.random.default_rng(4).integers(0, 1 << 32, 2603, np.uint32).view(np.float32)
    numbers = torch.cat([special, bits.int().view(torch.float32), torch.from_numpy(noise)])
    numbers = numbers[~numbers.isnan()].to(device)
    parts = [numbers, numbers[:1], numbers[1:6], numbers[3:], numbers[:2051], numbers[:0]]
    expected = [part.to(dtype).view(torch.uint8).cpu().numpy() for part in parts]
    laid = Laid([len(data) for data in expected], device=device)
    plan = laid.plan(engine)
    found = plan.pack_tensors(parts, laid.arena, dtypes=[dtype] * len(parts))
    wrong = [0, 0]
    for row, data in enumerate(expected):
        packed = laid.packed(int(laid.offsets[row]), len(data))
        wrong[0] += int((packed.view(np.int16) != data.view(np.int16)).sum())
        wrong[1] += found[16 * row : 16 * row + 16] != digest_bytes(data.tobytes())
    nan = torch.full((5,), float("nan"), device=device)
    plan = (laid := Laid([10], device=device)).plan(engine)
    plan.pack_tensors([nan], laid.arena, dtypes=[dtype])
    is_nan = torch.from_numpy(laid.packed(0, 10)).view(dtype).isnan()
    wrong[0] += int((~is_nan).sum())
    return wrong
