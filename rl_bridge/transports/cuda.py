"""``cuda-vmm`` and ``cuda-ipc``: names that users know, not served by this release yet.

They answer honestly: that the transport is to come, before anything else, so that nobody installs a
driver for it; then what this machine lacks. There is no fallback to another transport.
"""

import ctypes
from typing import ClassVar

import torch

from rl_bridge.errors import TransportUnavailable
from rl_bridge.transports.base import Availability, ConsumerEnd, PublisherEnd, Transport

__all__ = ["CUDAIPC", "CUDAVMM", "cuda_cause"]

_REMEDY = "Use shared-memory with a CPU copy of the weights on one machine."


def cuda_cause() -> str | None:
    """What this machine lacks for CUDA memory sharing; None if it lacks nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"libcuda.so.1, the NVIDIA driver's library, cannot be loaded ({error})"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "the NVIDIA driver reports no usable device"
    return None


class _CUDATransport(Transport):
    crosses_processes: bool = True
    zero_copy_import: bool = True

    def __init__(self, *, num_threads: int | None = None) -> None:
        """Take the options that all transports take."""
        del num_threads

    @classmethod
    def probe(cls) -> Availability:
        """Blocked, with the precise cause."""
        cause = f"the {cls.name} transport is not part of this release of rl_bridge"
        lack = cuda_cause()
        if lack is not None:
            cause += f" (and {lack})"
        return Availability(cls.name, "blocked", cause, _REMEDY)

    def publisher_end(self, publisher_id: str) -> PublisherEnd:
        """Refuse.

        Raises:
            TransportUnavailable: always, with the cause.

        """
        del publisher_id
        raise self._refusal()

    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        """Refuse.

        Raises:
            TransportUnavailable: always, with the cause.

        """
        del worker, rank
        raise self._refusal()

    def _refusal(self) -> TransportUnavailable:
        found = self.probe()
        return TransportUnavailable(found.name, found.cause, found.remedy)


class CUDAVMM(_CUDATransport):
    """The ``cuda-vmm`` transport."""

    name: ClassVar[str] = "cuda-vmm"


class CUDAIPC(_CUDATransport):
    """The ``cuda-ipc`` transport."""

    name: ClassVar[str] = "cuda-ipc"
