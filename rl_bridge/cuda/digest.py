"""One pass over tensors in a GPU's memory: digest them, or pack them into an arena and digest them.

The counterpart of `rl_bridge.memory.passes` for memory that the CPU cannot read. The plan is made
once per layout; an update is one launch, and 16 bytes per 128 KiB that come back.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.cuda.digest_engines import Engine, KernelEngine, TorchEngine, bytes_at
from rl_bridge.cuda.leaves import CASTS, LeafTable
from rl_bridge.cuda.streams import has_come, refuse_capture
from rl_bridge.errors import DeadlineExceeded, WeightBridgeUnavailableError
from rl_bridge.manifest.digest import LEAF_NBYTES, digest_bytes
from rl_bridge.manifest.table import ALIGNMENT
from rl_bridge.memory.packing import raw_elements
from rl_bridge.memory.passes import Addresses
from rl_bridge.memory.tensors import is_lazy_view

# ---- the engine of a device: the Triton kernel if it works and is right, else torch --------------

_LOG = logging.getLogger(__name__)

EngineName = Literal["triton", "torch"]

_CAUSES: dict[torch.device, str | None] = {}
_LOCK = threading.Lock()


def full_device(device: torch.device | str | int) -> torch.device:
    """Return a device with its number: "cuda" is the current one."""
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found


def kernel_cause(device: torch.device | str | int) -> str | None:
    """Why the Triton kernel is not in use on `device`, or None if it is.

    The first question for a device compiles the kernel, which takes seconds, and compares it with
    the reference: a wrong digest must never leave this package. What is found is logged, once.
    """
    device = full_device(device)
    with _LOCK:
        if device not in _CAUSES:
            _CAUSES[device] = cause = _try_kernel(device)
            if cause is not None:
                level = logging.WARNING if device.type == "cuda" else logging.INFO
                _LOG.log(level, "digests on %s run in torch: %s", device, cause)
        return _CAUSES[device]


def choose_engine(engine: EngineName | None, device: torch.device) -> EngineName:
    """Take the engine that is asked for; for None the kernel where it works, else torch.

    Raises:
        WeightBridgeUnavailableError: the kernel is asked for and does not work on `device`.
        ValueError: no such engine.

    """
    if engine not in {None, "triton", "torch"}:
        raise ValueError(f"engine {engine!r}, expected 'triton', 'torch' or None")
    cause = "it was not asked for" if engine == "torch" else kernel_cause(device)
    if engine == "triton" and cause is not None:
        raise WeightBridgeUnavailableError(
            f"the Triton kernel does not work on {device}: {cause}. Install what is missing, or "
            "choose engine='torch', which is slower and equal to the bit."
        )
    return "triton" if cause is None else "torch"


def _try_kernel(device: torch.device) -> str | None:
    try:
        from rl_bridge.cuda._kernel import INTERPRETED
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    if device.type != "cuda" and not INTERPRETED:
        return f"Triton compiles for GPUs, not for a {device.type} device"
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            is_right = _is_right(device)
    except Exception as error:  # noqa: BLE001 - whatever a compiler may raise is the cause
        return f"the kernel cannot be compiled or launched ({type(error).__name__}: {error})"
    return None if is_right else "the kernel disagrees with xxhash on this device"


def _is_right(device: torch.device) -> bool:
    """Compare the kernel with the reference: digest and copy, from aligned and odd addresses."""
    sizes = np.array([0, 1, 1024, 5003, LEAF_NBYTES + 77], np.uint64)
    table, rooms = LeafTable(sizes), -(-sizes.astype(np.int64) // ALIGNMENT) * ALIGNMENT
    offsets, total = np.cumsum(rooms) - rooms, int(rooms.sum())
    data = (np.arange(total + 1, dtype=np.uint64) * 2_654_435_761 >> 7).astype(np.uint8)
    source = torch.from_numpy(data).to(device)
    memory = torch.zeros(total + ALIGNMENT, dtype=torch.uint8, device=device)
    arena = -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
    engine = KernelEngine(table, offsets, device)
    for shift in (0, 1):
        found = []
        out = torch.zeros(table.num_words, dtype=torch.int64, device=device)
        engine.pack(offsets + source.data_ptr() + shift, arena, np.zeros(len(sizes), np.uint8), out)
        found.append(table.combine(out.cpu().numpy()))
        out.zero_()
        engine.digest(arena, out)
        found.append(table.combine(out.cpu().numpy()))
        places = zip((offsets + shift).tolist(), sizes.tolist(), strict=True)
        expected = b"".join(digest_bytes(data[at : at + n].tobytes()) for at, n in places)
        if found != [expected, expected]:
            return False
    return True


# ---- the pass ------------------------------------------------------------------------------------

_CAST_TO = {getattr(torch, name): cast for name, cast in CASTS.items()}


class DevicePass:
    """Digests and packs the tensors of one layout in the memory of one device.

    **Streams.** All work is put on one stream: the one that is passed, else torch's current stream
    of the device. Whoever wrote what is read here has to be on that stream, or that stream has to
    wait for it. There is no device-wide synchronisation: a call returns when an event on that
    stream says that the digests have arrived; everything before it on that stream is done then.

    **Memory.** Row tables, digests and the pinned memory that they arrive in are made with the plan
    and kept (row tables of sources outside the arena, until their addresses change): an update
    allocates nothing. Torch's own operations, where the kernel is not in use, do allocate.

    **Addresses** are plain numbers. The caller keeps the memory mapped on the device, and
    accessible, for as long as a call runs. Nothing outside a tensor's bytes is read.

    Calls from several threads take turns. While a stream is captured into a CUDA graph a call is
    refused: the host waits for its result.
    """

    def __init__(
        self,
        offsets: Addresses,
        nbytes: Addresses,
        *,
        device: torch.device | str | int,
        engine: EngineName | None = None,
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Plan for tensors of `nbytes` at `offsets` of an arena (both uint64, shape [tensors]).

        Args:
            offsets: `TensorTable.offset_column`: multiples of 256; a tensor's padding up to the
                next multiple of 256 is its own.
            nbytes: `TensorTable.nbytes_column`.
            device: where arena and sources lie.
            engine: "triton" for the kernel, "torch" for torch's own operations; None takes the
                kernel where it works, and says in the log, once per device, where it does not.
            dtypes: wire names of the tensors as they are packed, to look for NaN and Inf as well:
                `non_finite` then says what the last call found. None does not look.

        Raises:
            WeightBridgeUnavailableError: the kernel was asked for and does not work here, or a
                capture runs.
            ValueError: offsets that are no packed layout.

        """
        self.device = full_device(device)
        self._is_cuda = self.device.type == "cuda"
        self._offsets = np.ascontiguousarray(offsets, np.uint64).astype(np.int64)
        self._table = LeafTable(nbytes)
        self._check_layout()
        refuse_capture(self.device)
        self.engine: EngineName = choose_engine(engine, self.device)
        kind: type[Engine] = KernelEngine if self.engine == "triton" else TorchEngine
        self._engine = kind(self._table, self._offsets, self.device, dtypes)
        self.non_finite = np.zeros(0 if dtypes is None else len(dtypes), bool)
        self._lock = threading.Lock()
        words = self._table.num_words + len(self.non_finite)
        self._out = torch.empty(words, dtype=torch.int64, device=self.device)
        self._host = torch.empty(words, dtype=torch.int64, device="cpu", pin_memory=self._is_cuda)
        self._event: Any = None
        if self._is_cuda:
            make_event: Any = torch.cuda.Event  # torch does not annotate it
            self._event = make_event()
            # Torch may have given memory that work on this stream still uses, and the plan's tables
            # arrive on it; calls come on others.
            self._event.record(torch.cuda.current_stream(self.device))
        self._unfinished = self._is_cuda
        self._timeout_s = self._deadline = 0.0

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._offsets)

    def digest(
        self, arena: int, *, stream: "torch.cuda.Stream | None" = None, timeout_s: float = 60.0
    ) -> bytes:
        """Digest the tensors of the arena that begins at the address `arena`, a multiple of 256.

        Returns:
            16 bytes per tensor, in layout order.

        Raises:
            DeadlineExceeded: the device did not get there within `timeout_s` seconds.

        """
        self._check_arena(arena)
        with self._turn(stream, timeout_s):
            self._clear()
            self._engine.digest(arena, self._out)
            return self._collect()

    def digest_at(
        self,
        sources: Addresses,
        *,
        stream: "torch.cuda.Stream | None" = None,
        timeout_s: float = 60.0,
    ) -> bytes:
        """Digest the bytes at `sources` (addresses, uint64, shape [tensors]; any alignment).

        Returns:
            16 bytes per tensor, in layout order.

        Raises:
            DeadlineExceeded: the device did not get there within `timeout_s` seconds.

        """
        addresses = self._checked(sources)
        with self._turn(stream, timeout_s):
            self._clear()
            self._engine.digest_at(addresses, self._out)
            return self._collect()

    def pack(
        self,
        sources: Addresses,
        arena: int,
        *,
        casts: npt.NDArray[np.uint8] | None = None,
        stream: "torch.cuda.Stream | None" = None,
        timeout_s: float = 60.0,
    ) -> bytes:
        """Copy the contiguous bytes at `sources` into the arena, and digest them on the way.

        The padding behind each tensor, up to the next multiple of 256, is written as zeros. A
        source whose address is its place in the arena is digested there (it was gathered before).

        Args:
            sources: addresses of any alignment, uint64, shape [tensors]; no other overlap with the
                arena.
            arena: address of the arena, a multiple of 256.
            casts: for each tensor 0, or a number of `leaves.CASTS`: the source is float32 and
                rounded to nearest, ties to even, as it is packed. `nbytes` and digest are of the
                result. A NaN stays one; which one is the device's affair.
            stream: what to work on; None for the current one.
            timeout_s: how long the device may take.

        Returns:
            16 bytes per tensor, in layout order.

        Raises:
            DeadlineExceeded: the device did not get there in time; the arena is not to be used.

        """
        self._check_arena(arena)
        addresses = self._checked(sources)
        if casts is None:
            casts = np.zeros(len(self), np.uint8)
        if casts.shape != addresses.shape or not np.isin(casts, [0, *CASTS.values()]).all():
            raise ValueError(f"casts of {sorted(set(casts.tolist()))[:5]} for {len(self)} tensors")
        if (addresses[casts != 0] % 4).any():
            raise ValueError("a source to cast is no multiple of 4: float32 numbers lie at such")
        with self._turn(stream, timeout_s):
            self._clear()
            self._engine.pack(addresses, arena, casts, self._out)
            return self._collect()

    def pack_tensors(
        self,
        tensors: Sequence[torch.Tensor],
        arena: int,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        stream: "torch.cuda.Stream | None" = None,
        timeout_s: float = 60.0,
    ) -> bytes:
        """Pack `tensors` of any strides, in layout order, as their dtypes or as `dtypes`.

        Contiguous ones, float32 to bfloat16 or float16 included, are read once, by `pack`. The
        others are gathered and cast by torch, straight into the arena, and digested there.

        Raises:
            WeightBridgeUnavailableError: a tensor elsewhere, or whose bytes are not its values.
            ValueError: a tensor of another size than the plan's.
            DeadlineExceeded: as `pack`.

        """
        addresses = np.zeros(len(self), np.uint64)
        casts = np.zeros(len(self), np.uint8)
        gathered = []
        wanted = [tensor.dtype for tensor in tensors] if dtypes is None else dtypes
        sizes = self._table.nbytes.tolist()
        for row, (tensor, dtype, size) in enumerate(zip(tensors, wanted, sizes, strict=True)):
            self._check_tensor(row, tensor, dtype, size)
            cast = 0 if tensor.dtype == dtype else _CAST_TO.get(dtype, 0)
            is_read = tensor.dtype == dtype or (cast and tensor.dtype == torch.float32)
            if is_read and tensor.is_contiguous():
                addresses[row], casts[row] = tensor.data_ptr(), cast
            else:
                addresses[row] = arena + int(self._offsets[row])
                gathered.append(row)
        with self._on(stream):
            for row in gathered:
                self._gather(tensors[row], wanted[row], int(addresses[row]), sizes[row])
        return self.pack(addresses, arena, casts=casts, stream=stream, timeout_s=timeout_s)

    def _gather(self, tensor: torch.Tensor, dtype: torch.dtype, address: int, size: int) -> None:
        target = bytes_at(address, size, self.device)
        if tensor.dtype == dtype:
            elements = raw_elements(tensor)
            target.view(elements.dtype).view(elements.shape).copy_(elements)
        else:
            target.view(dtype).view(tensor.shape).copy_(tensor.detach())

    @contextmanager
    def _on(self, stream: "torch.cuda.Stream | None") -> Iterator[None]:
        if not self._is_cuda:
            yield
            return
        if stream is not None and stream.device != self.device:
            raise ValueError(f"a stream of {stream.device} for work on {self.device}")
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            refuse_capture(self.device)
            yield

    @contextmanager
    def _turn(self, stream: "torch.cuda.Stream | None", timeout_s: float) -> Iterator[None]:
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise self._late(timeout_s)
        try:
            self._deadline, self._timeout_s = deadline, timeout_s
            with self._on(stream):
                if self._unfinished:
                    # A call before gave up on the device, which still writes where this one would.
                    self._wait()
                try:
                    yield
                except BaseException:
                    self._note_left()
                    raise
        finally:
            self._lock.release()

    def _clear(self) -> None:
        """Take away what the call before found of NaN and Inf."""
        if len(self.non_finite):
            self._out[self._table.num_words :].zero_()

    def _collect(self) -> bytes:
        """Bring the leaves' digests here and combine them."""
        words = self._out
        if self._event is not None:
            words = self._host
            words.copy_(self._out, non_blocking=True)
            self._event.record()
            self._unfinished = True
            self._wait()
        found, num = words.numpy(), self._table.num_words
        if len(self.non_finite):
            self.non_finite = found[num:] != 0
        return self._table.combine(found[:num])

    def _note_left(self) -> None:
        """Note that work which a failed call put on the stream may still be done."""
        if self._event is not None and not self._unfinished:
            with suppress(RuntimeError):  # a lost device does nothing
                self._event.record()
                self._unfinished = True

    def _wait(self) -> None:
        if self._event is not None and not has_come(self._event, self._deadline):
            raise self._late(self._timeout_s)
        self._unfinished = False

    def _late(self, seconds: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the digests did not arrive from {self.device} within {seconds:.3g} s: work before "
            "them on the stream takes longer, or the device hangs. Pass a longer timeout_s, or "
            "look at what else runs there."
        )

    def _checked(self, addresses: Addresses) -> npt.NDArray[np.int64]:
        found = np.ascontiguousarray(addresses, np.uint64)
        if found.shape != self._offsets.shape:
            raise ValueError(f"{found.shape} addresses for a plan of {len(self)} tensors")
        if (found[self._table.nbytes != 0] == 0).any():
            raise ValueError("a tensor at address 0: its memory was freed, or never there")
        return found.astype(np.int64)

    def _check_arena(self, arena: int) -> None:
        if arena <= 0 or arena % ALIGNMENT:
            raise ValueError(f"an arena at {arena:#x}, expected a multiple of {ALIGNMENT}")

    def _check_layout(self) -> None:
        nbytes = self._table.nbytes
        if self._offsets.shape != nbytes.shape:
            raise ValueError(f"{self._offsets.shape} offsets for {nbytes.shape} tensors")
        order = np.argsort(self._offsets, kind="stable")
        ends = (self._offsets + -(-nbytes // ALIGNMENT) * ALIGNMENT)[order]
        is_apart = (ends[:-1] <= self._offsets[order][1:]).all()
        if (self._offsets % ALIGNMENT).any() or not is_apart:
            raise ValueError(f"offsets that overlap or are no multiples of {ALIGNMENT}")

    def _check_tensor(
        self, row: int, tensor: torch.Tensor, dtype: torch.dtype, nbytes: int
    ) -> None:
        if tensor.device != self.device or tensor.layout is not torch.strided:
            raise WeightBridgeUnavailableError(
                f"tensor {row} is {tensor.layout} on {tensor.device}, expected a dense one on "
                f"{self.device}: copy it there first"
            )
        if is_lazy_view(tensor):
            raise WeightBridgeUnavailableError(
                f"tensor {row} is a lazy conjugate or negative: call resolve_conj().resolve_neg() "
                "first"
            )
        if tensor.numel() * dtype.itemsize != nbytes:
            raise ValueError(
                f"tensor {row} has {tensor.numel()} elements of {dtype}, expected {nbytes} bytes"
            )


# ---- A pass over addresses in a device's memory, with the interface of the CPU's
# `passes.BytePlan`.

_TIMEOUT_S = 60.0


class AddressPass:
    """Copies and digests tensors in the memory of one device, wherever they lie.

    Into an arena that is packed in the order of the tensors, copy and digest are one pass. Work is
    put on torch's current stream of the device; every call returns when it is done there. While
    that stream is captured into a CUDA graph every call is refused, before anything is put on it.
    """

    def __init__(
        self,
        nbytes: npt.NDArray[np.uint64],
        device: torch.device,
        *,
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Plan for tensors of `nbytes` (uint64, shape [tensors]), and of these dtypes."""
        self._device = device
        self._nbytes = np.ascontiguousarray(nbytes, np.uint64)
        self.total_nbytes = int(self._nbytes.sum())
        room = -(-self._nbytes.astype(np.int64) // ALIGNMENT) * ALIGNMENT
        self._offsets = np.cumsum(room) - room
        self._pass = DevicePass(
            self._offsets.astype(np.uint64), self._nbytes, device=device, dtypes=dtypes
        )

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._nbytes)

    @property
    def non_finite(self) -> npt.NDArray[np.bool_]:
        """By tensor: the last digest found NaN or Inf in it. Empty if there were no dtypes."""
        return self._pass.non_finite

    def digest(self, src: Addresses, *, num_threads: int | None = None) -> bytes:
        """Digest the bytes at `src` (addresses, uint64, shape [tensors]): 16 bytes per tensor.

        Raises:
            DeadlineExceeded: the device did not get there in time.

        """
        del num_threads
        return self._pass.digest_at(src)

    def copy(self, src: Addresses, dst: Addresses, *, num_threads: int | None = None) -> None:
        """Copy each tensor from `src` to `dst`; the ranges must not overlap.

        Raises:
            DeadlineExceeded: the device did not get there in time; `dst` may be a mixture.

        """
        del num_threads
        self._copy(src, dst)
        if self._device.type == "cuda":
            self._wait()

    def copy_digest(
        self, src: Addresses, dst: Addresses, *, num_threads: int | None = None
    ) -> bytes:
        """Copy and digest; a tensor whose two addresses are equal is digested only.

        Where `dst` is a packed arena, its padding is written as zeros.

        Raises:
            DeadlineExceeded: as `copy`.

        """
        del num_threads
        base = int(dst[0]) if len(self) else 0
        if (
            base > 0  # where nothing has any bytes, the addresses may all be 0
            and base % ALIGNMENT == 0
            and (dst.astype(np.int64) - base == self._offsets).all()
        ):
            return self._pass.pack(src, base)
        self._copy(src, dst)
        return self._pass.digest_at(dst)

    def _copy(self, src: Addresses, dst: Addresses) -> None:
        refuse_capture(self._device)
        places = zip(src.tolist(), dst.tolist(), self._nbytes.tolist(), strict=True)
        for source, target, nbytes in places:
            if nbytes and source != target:
                origin = bytes_at(source, nbytes, self._device)
                bytes_at(target, nbytes, self._device).copy_(origin, non_blocking=True)

    def _wait(self) -> None:
        event = torch.cuda.current_stream(self._device).record_event()
        if not has_come(event, time.monotonic() + _TIMEOUT_S):
            msg = (
                f"a copy on {self._device} did not end within {_TIMEOUT_S:.0f} s: work before "
                "it on the stream takes longer, or the device hangs. See what runs there."
            )
            raise DeadlineExceeded(msg)
