"""A pass over addresses in a device's memory, with the interface of the CPU's `passes.BytePlan`."""

import time

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.errors import DeadlineExceeded
from rl_bridge.memory.device.device_pass import DevicePass
from rl_bridge.memory.device.engines import bytes_at
from rl_bridge.memory.device.leaves import ALIGNMENT
from rl_bridge.memory.device.streams import has_come, refuse_capture
from rl_bridge.memory.passes import Addresses

__all__ = ["AddressPass"]

_TIMEOUT_S = 60.0


class AddressPass:
    """Copies and digests tensors in the memory of one device, wherever they lie.

    Into an arena that is packed in the order of the tensors, copy and digest are one pass. Work is
    put on torch's current stream of the device; every call returns when it is done there. While
    that stream is captured into a CUDA graph every call is refused, before anything is put on it.
    """

    def __init__(self, nbytes: npt.NDArray[np.uint64], device: torch.device) -> None:
        """Plan for tensors of `nbytes` (uint64, shape [tensors])."""
        self._device = device
        self._nbytes = np.ascontiguousarray(nbytes, np.uint64)
        self.total_nbytes = int(self._nbytes.sum())
        room = -(-self._nbytes.astype(np.int64) // ALIGNMENT) * ALIGNMENT
        self._offsets = np.cumsum(room) - room
        self._pass = DevicePass(self._offsets.astype(np.uint64), self._nbytes, device=device)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._nbytes)

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
