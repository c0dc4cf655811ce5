"""A CUDA tensor as torch exports it to another process: `reduce_tensor`, without its callable.

torch's export is a function and fifteen arguments. Nothing that is received is called here: the
arguments are checked, one by one, and memory is opened by torch's own function for it. Read in the
source of torch 2.13: ``torch/multiprocessing/reductions.py``, ``torch/csrc/StorageSharing.cpp`` and
``torch/csrc/CudaIPCTypes.cpp``.

**One export is one opening.** Each export has a counter of its own in a file that both processes
share. It is 1 when the export is made, and the end of an opened storage takes 1 away. The exporter
keeps the memory until it is exactly 0: an export that nobody opens, or that is opened twice, keeps
the memory for good. So a second opening is refused here, and what will not be opened is declined.
"""

import base64
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Self

import torch

from rl_bridge.cuda.ipc import IPC_HANDLE_NBYTES
from rl_bridge.errors import (
    MalformedManifest,
    RangeBeyondSegment,
    TransportUnavailable,
    UnknownDtype,
    WeightUpdateRejectedError,
)
from rl_bridge.manifest.dtypes import DTYPE_NBYTES

TRANSPORT = "cuda-ipc"
_MAX_INT = 2**63
_COUNTER_FILE = re.compile(rb"/torch_([0-9]{1,10})_[0-9A-Za-z_]{1,64}\0?")
_SAY_AGAIN = "Send what reduce_tensor returned, as it was."
_EXPORT_AGAIN = "Export the tensor once for each process that opens it, and once for each opening."
_EXPANDABLE = (
    "a tensor was exported from an expandable segment: such memory is named by descriptors of the "
    "exporter, which other processes may not take without ptrace rights, and its form changed from "
    "one torch to the next"
)
_NO_EXPANDABLE = (
    "Run the trainer without expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF), or publish over "
    "cuda-vmm or cuda-ipc, whose memory is their own."
)


@dataclass(frozen=True, slots=True)
class Calls:
    """torch's two functions for an export; tests give others."""

    open: Callable[..., torch.UntypedStorage]
    decline: Callable[..., Any]
    kind: str = "cuda"

    @classmethod
    def of_torch(cls) -> Self:
        """The real ones."""
        kind: Any = torch.UntypedStorage
        return cls(kind._new_shared_cuda, kind._release_ipc_counter_cuda)  # noqa: SLF001


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchHandle:
    """One export, checked.

    Attributes:
        dtype: of the tensor, by its name.
        shape: of the tensor.
        stride: of the tensor, in elements.
        offset: of its first element in the storage, in elements.
        handle: torch's name of the block that the storage lies in.
        storage_nbytes: size of the storage.
        storage_offset: of the storage in the block, in bytes.
        counter: name of the file with the export's counter.
        counter_offset: of the counter in the file.
        event: handle of the event after which the bytes are there.
        waits: whether the event has to be waited for.

    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    handle: bytes
    storage_nbytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits: bool

    def __post_init__(self) -> None:
        """Check the fields that depend on nothing else."""
        self._check_types()
        self._check_handle()
        self._check_range()

    # ---- making one -----------------------------------------------------------------------------

    @classmethod
    def of(cls, reduced: object) -> Self:
        """Take what ``torch.multiprocessing.reductions.reduce_tensor`` returned.

        Raises:
            MalformedManifest: it is something else.
            TransportUnavailable: the tensor lies in an expandable segment.
            WeightManifestValidationError: its parts contradict each other.

        """
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        if not isinstance(reduced, tuple | list) or len(reduced) != 2:  # noqa: PLR2004 - that is its form
            raise MalformedManifest(f"an export is a function and its arguments. {_SAY_AGAIN}")
        function, given = reduced
        if function is not rebuild_cuda_tensor:
            raise MalformedManifest(
                f"an export names {function!r}, expected torch's rebuild_cuda_tensor. {_SAY_AGAIN}"
            )
        if not isinstance(given, tuple | list) or len(given) != 15:  # noqa: PLR2004 - as above
            raise MalformedManifest(f"an export has 15 arguments. {_SAY_AGAIN}")
        _, size, stride, offset, _, dtype, _, handle, nbytes, at, _, *rest = given
        counter, counter_offset, event, waits = rest
        if not isinstance(dtype, torch.dtype):
            raise MalformedManifest(f"an export has the dtype {dtype!r}. {_SAY_AGAIN}")
        if handle is None:
            # torch exports a tensor without elements like this; there is nothing to be opened.
            handle, counter, counter_offset, event, waits = b"", b"", 0, b"", False
        return cls(
            dtype=str(dtype).removeprefix("torch."),
            shape=_integers("shape", size),
            stride=_integers("stride", stride),
            offset=offset,
            handle=handle,
            storage_nbytes=nbytes,
            storage_offset=at,
            counter=counter,
            counter_offset=counter_offset,
            event=event,
            waits=waits,
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            key: base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Read `to_dict`'s, from anywhere.

        Raises:
            MalformedManifest: it is something else.
            TransportUnavailable: the tensor lies in an expandable segment.
            WeightManifestValidationError: its parts contradict each other.

        """
        fields: dict[str, Any] = dict(given)
        if set(fields) != set(cls.__dataclass_fields__):
            raise MalformedManifest(
                f"an export has the fields {sorted(map(str, fields))}. {_SAY_AGAIN}"
            )
        for key in ("handle", "counter", "event"):
            try:
                fields[key] = base64.b64decode(fields[key], validate=True)
            except (TypeError, ValueError) as error:
                raise MalformedManifest(
                    f"an export's {key} is no base64: {error}. {_SAY_AGAIN}"
                ) from error
        for key in ("shape", "stride"):
            fields[key] = _integers(key, fields[key])
        return cls(**fields)

    # ---- checking -------------------------------------------------------------------------------

    def _check_types(self) -> None:
        numbers = (self.offset, self.storage_nbytes, self.storage_offset, self.counter_offset)
        raw = (self.handle, self.counter, self.event)
        if (
            any(type(number) is not int or not 0 <= number < _MAX_INT for number in numbers)
            or any(type(value) is not bytes for value in raw)
            or type(self.waits) is not bool
            or len(self.shape) != len(self.stride)
        ):
            raise MalformedManifest(f"an export has arguments of other types. {_SAY_AGAIN}")
        if self.dtype not in DTYPE_NBYTES:
            raise UnknownDtype(f"an export has the dtype {self.dtype!r}. Cast the tensor first.")

    def _check_handle(self) -> None:
        if not self.handle:
            if self.numel:
                raise MalformedManifest(f"an export of elements has no handle. {_SAY_AGAIN}")
            return
        # A version and a kind stand before the rest; older torches had neither. Which versions it
        # knows, torch says when it opens one.
        if len(self.handle) != IPC_HANDLE_NBYTES and self.handle[1:2] == b"e":
            raise TransportUnavailable(TRANSPORT, _EXPANDABLE, _NO_EXPANDABLE)
        head = self.handle[:-IPC_HANDLE_NBYTES]
        is_plain = not head or head[1:] == b"c"
        if len(self.handle) < IPC_HANDLE_NBYTES or not is_plain:
            raise MalformedManifest(
                f"an export's handle of {len(self.handle)} bytes has no known form. {_SAY_AGAIN}"
            )
        if _COUNTER_FILE.fullmatch(self.counter) is None:
            raise MalformedManifest(f"an export's counter is in {self.counter!r}. {_SAY_AGAIN}")

    def _check_range(self) -> None:
        if not self.numel:
            return
        steps = zip(self.shape, self.stride, strict=True)
        last = self.offset + sum((size - 1) * step for size, step in steps)
        if (last + 1) * DTYPE_NBYTES[self.dtype] > self.storage_nbytes:
            raise RangeBeyondSegment(
                f"an export of shape {self.shape} reaches behind its storage of "
                f"{self.storage_nbytes} bytes. {_SAY_AGAIN}"
            )

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def exporter(self) -> int | None:
        """Process that exported it; None where nothing has to be opened."""
        match = _COUNTER_FILE.fullmatch(self.counter)
        return None if match is None else int(match[1])

    # ---- opening --------------------------------------------------------------------------------

    def open(self, device: torch.device, calls: Calls) -> torch.Tensor:
        """Open it: once, and never again. The tensor looks at the exporter's memory.

        Raises:
            WeightUpdateRejectedError: it was opened, or declined, in this process before.
            TransportUnavailable: it cannot be opened here, with the cause.

        """
        kind: torch.dtype = getattr(torch, self.dtype)
        if not self.handle:
            return torch.empty(self.shape, dtype=kind, device=device)
        if self.exporter == os.getpid():
            raise TransportUnavailable(
                TRANSPORT,
                "a handle cannot be opened in the process that made it",
                "Use the tensor itself there.",
            )
        _USED.take(self)
        try:
            storage = calls.open(
                device.index or 0,
                self.handle,
                self.storage_nbytes,
                self.storage_offset,
                self.counter,
                self.counter_offset,
                self.event,
                self.waits,
            )
        except RuntimeError as error:
            self._decline(calls)
            first = str(error).partition("\n")[0]
            raise TransportUnavailable(
                TRANSPORT,
                f"CUDA IPC handle reconstruction failed: {first}",
                "Run both sides on one GPU and in one IPC namespace, or use cuda-vmm.",
            ) from error
        flat = torch.empty(0, dtype=kind, device=storage.device)
        return flat.set_(storage, self.offset, self.shape, self.stride)

    def decline(self, calls: Calls) -> bool:
        """Tell the exporter that it will not be opened; False if it was opened or declined."""
        if not self.handle or not _USED.note(self):
            return False
        self._decline(calls)
        return True

    def _decline(self, calls: Calls) -> None:
        calls.decline(self.counter, self.counter_offset)


def _integers(name: str, given: object) -> tuple[int, ...]:
    found = tuple(given) if isinstance(given, tuple | list | torch.Size) else (None,)
    if any(type(number) is not int or not 0 <= number < _MAX_INT for number in found):
        raise MalformedManifest(f"an export has the {name} {given!r}. {_SAY_AGAIN}")
    return found


def decline(handles: Iterable[TorchHandle], calls: Calls) -> int:
    """Decline the exports that were not opened; returns their number."""
    return sum(handle.decline(calls) for handle in handles)


class _Used:
    """Which exports this process opened or declined: torch uses no counter of a file twice."""

    NUM_FILES = 256  # of 10,000 exports each

    def __init__(self) -> None:
        self._files: OrderedDict[bytes, int] = OrderedDict()  # one bit for each counter
        self._lock = threading.Lock()

    def note(self, handle: TorchHandle) -> bool:
        """Note an export; False if it was noted before."""
        bit = 1 << min(handle.counter_offset, 1 << 20)
        with self._lock:
            known = self._files.pop(handle.counter, 0)
            self._files[handle.counter] = known | bit
            while len(self._files) > self.NUM_FILES:
                self._files.popitem(last=False)
        return not known & bit

    def take(self, handle: TorchHandle) -> None:
        """Note an export that is to be opened.

        Raises:
            WeightUpdateRejectedError: it was noted before.

        """
        if not self.note(handle):
            raise WeightUpdateRejectedError(
                f"an export of process {handle.exporter} is opened a second time: its memory would "
                f"never be freed. {_EXPORT_AGAIN}"
            )


_USED = _Used()
