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
import torch

from rl_bridge.cuda.digest_engines import Engine, KernelEngine, Places, TorchEngine, bytes_at
from rl_bridge.cuda.leaves import LeafTable
from rl_bridge.cuda.streams import has_come, refuse_capture
from rl_bridge.errors import DeadlineExceeded, WeightBridgeUnavailableError
from rl_bridge.manifest.digest import LEAF_NBYTES, digest_bytes
from rl_bridge.manifest.table import ALIGNMENT
from rl_bridge.memory.passes import Addresses

# ---- the engine of a device: the Triton kernel if it works and is right, else torch --------------

_LOG = logging.getLogger(__name__)

EngineName = Literal["triton", "torch"]

_CAUSES: dict[torch.device, str | None] = {}
_LOCK = threading.Lock()
_TIMEOUT_S = 60.0


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
    table = LeafTable(sizes)
    offsets, total = table.offsets, int(table.offsets[-1] + 2 * LEAF_NBYTES)
    data = (np.arange(total + 1, dtype=np.uint64) * 2_654_435_761 >> 7).astype(np.uint8)
    source = torch.from_numpy(data).to(device)
    memory = torch.zeros(total + ALIGNMENT, dtype=torch.uint8, device=device)
    arena = -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
    engine = KernelEngine(table, device)
    for shift in (0, 1):
        found = []
        for copies in (True, False):
            out = torch.zeros(table.num_words, dtype=torch.int64, device=device)
            if copies:
                engine.pack(offsets + source.data_ptr() + shift, arena, out)
            else:
                engine.digest(offsets + arena, out)
            found.append(table.combine(out.cpu().numpy()))
        places = zip((offsets + shift).tolist(), sizes.tolist(), strict=True)
        expected = b"".join(digest_bytes(data[at : at + n].tobytes()) for at, n in places)
        if found != [expected, expected]:
            return False
    return True


# ---- the pass ------------------------------------------------------------------------------------


class DevicePass:
    """Copies and digests tensors in the memory of one device, wherever they lie: see `Pass`.

    Into an arena that is packed in the order of the tensors, copy and digest are one pass.

    **Streams.** All work is put on torch's current stream of the device. Whoever wrote what is read
    here has to be on that stream, or that stream has to wait for it. There is no device-wide
    synchronisation: a call returns when an event on that stream says that its work is done;
    everything before it on that stream is done then.

    **Memory.** Row tables, digests and the pinned memory that they arrive in are made with the plan
    and kept (row tables of sources outside the arena, until their addresses change): an update
    allocates nothing. Torch's own operations, where the kernel is not in use, do allocate.

    **Addresses** are plain numbers. The caller keeps the memory mapped on the device, and
    accessible, for as long as a call runs. Nothing outside a tensor's bytes is read.

    Calls from several threads take turns. While a stream is captured into a CUDA graph every call
    is refused, before anything is put on it: the host waits for its result.

    Attributes:
        total_nbytes: size of all tensors.
        engine: "triton" for the kernel, "torch" for torch's own operations.
        non_finite: by tensor: the last digest found NaN or Inf in it. Empty if there were no
            dtypes.

    """

    def __init__(
        self,
        nbytes: Addresses,
        device: torch.device | str | int,
        *,
        engine: EngineName | None = None,
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Plan for tensors of `nbytes` (uint64, shape [tensors]).

        Args:
            nbytes: sizes.
            device: where all lie.
            engine: None takes the kernel where it works, and says in the log, once per device,
                where it does not.
            dtypes: wire names of the tensors, to look for NaN and Inf as well; None does not.

        Raises:
            WeightBridgeUnavailableError: the kernel was asked for and does not work here, or a
                capture runs.

        """
        self.device = full_device(device)
        self._is_cuda = self.device.type == "cuda"
        self._table = LeafTable(nbytes)
        self.total_nbytes = int(self._table.nbytes.sum())
        refuse_capture(self.device)
        self.engine: EngineName = choose_engine(engine, self.device)
        kind: type[Engine] = KernelEngine if self.engine == "triton" else TorchEngine
        self._engine = kind(self._table, self.device, dtypes)
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
        self._deadline = 0.0

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._table.nbytes)

    def digest(self, src: Addresses, *, num_threads: int | None = None) -> bytes:
        """Digest the bytes at `src` (addresses, uint64, shape [tensors]): 16 bytes per tensor.

        Raises:
            DeadlineExceeded: the device did not get there in time.

        """
        del num_threads
        sources = self._checked(src)
        with self._turn():
            self._engine.digest(sources, self._out)
            return self._collect()

    def copy(self, src: Addresses, dst: Addresses, *, num_threads: int | None = None) -> None:
        """Copy each tensor from `src` to `dst`; the ranges must not overlap.

        Raises:
            DeadlineExceeded: the device did not get there in time; `dst` may be a mixture.

        """
        del num_threads
        sources, targets = self._checked(src), self._checked(dst)
        with self._turn():
            self._copy(sources, targets)
            self._record()
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
        sources, targets = self._checked(src), self._checked(dst)
        arena = int(targets[0]) if len(self) else 0
        # Where nothing has any bytes, the addresses may all be 0.
        is_arena = arena > 0 and arena % ALIGNMENT == 0
        is_packed = is_arena and bool((targets - arena == self._table.offsets).all())
        with self._turn():
            if is_packed:
                self._engine.pack(sources, arena, self._out)
            else:
                self._copy(sources, targets)
                self._engine.digest(targets, self._out)
            return self._collect()

    def _copy(self, sources: Places, targets: Places) -> None:
        rows = zip(sources.tolist(), targets.tolist(), self._table.nbytes.tolist(), strict=True)
        for source, target, nbytes in rows:
            if nbytes and source != target:
                origin = bytes_at(source, nbytes, self.device)
                bytes_at(target, nbytes, self.device).copy_(origin, non_blocking=True)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        deadline = time.monotonic() + _TIMEOUT_S
        if not self._lock.acquire(timeout=_TIMEOUT_S):
            raise self._late()
        try:
            self._deadline = deadline
            with torch.cuda.device(self.device) if self._is_cuda else nullcontext():
                refuse_capture(self.device)
                if self._unfinished:
                    # A call before gave up on the device, which still writes where this one would.
                    self._wait()
                if len(self.non_finite):
                    self._out[self._table.num_words :].zero_()
                try:
                    yield
                except BaseException:
                    if not self._unfinished:
                        # The stream may still do the work that this call gave it.
                        with suppress(RuntimeError):  # a lost device does nothing
                            self._record()
                    raise
        finally:
            self._lock.release()

    def _collect(self) -> bytes:
        """Bring the leaves' digests here and combine them."""
        words = self._out
        if self._event is not None:
            words = self._host
            words.copy_(self._out, non_blocking=True)
        self._record()
        self._wait()
        found, num = words.numpy(), self._table.num_words
        if len(self.non_finite):
            self.non_finite = found[num:] != 0
        return self._table.combine(found[:num])

    def _record(self) -> None:
        if self._event is not None:
            self._event.record()
            self._unfinished = True

    def _wait(self) -> None:
        if self._event is not None and not has_come(self._event, self._deadline):
            raise self._late()
        self._unfinished = False

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self.device} was not through with a pass within {_TIMEOUT_S:.3g} s: work before it "
            "on the stream takes longer, or the device hangs. See what runs there."
        )

    def _checked(self, addresses: Addresses) -> Places:
        found = np.ascontiguousarray(addresses, np.uint64)
        if found.shape != self._table.offsets.shape:
            raise ValueError(f"{found.shape} addresses for a plan of {len(self)} tensors")
        if (found[self._table.nbytes != 0] == 0).any():
            raise ValueError("a tensor at address 0: its memory was freed, or never there")
        return found.astype(np.int64)
