"""``cuda-ipc``: a name that users know, not served by this release yet.

It answers honestly: that the transport is to come, before anything else, so that nobody installs a
driver for it; then what this machine lacks. There is no fallback to another transport.
"""

from typing import ClassVar

from rl_bridge.errors import TransportUnavailable
from rl_bridge.memory.vmm.local import cuda_cause
from rl_bridge.transports.base import Availability, ConsumerEnd, PublisherEnd, Transport

__all__ = ["CUDAIPC", "cuda_cause"]

_REMEDY = "Use cuda-vmm, or shared-memory with a CPU copy of the weights, on one machine."


class CUDAIPC(Transport):
    """The ``cuda-ipc`` transport."""

    name: ClassVar[str] = "cuda-ipc"
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
