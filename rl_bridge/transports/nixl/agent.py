"""One agent of the library: registered memory, peers, and reads, each counted.

All calls into the library are in this module. Its errors come out of whatever calls it as
`AgentError`, so that no other module has to know the library's classes. They come without the
library's frames: a log that keeps the error would keep the library's agent alive, and the agent may
write to slots that are in use again.
"""

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from rl_bridge.errors import TransportUnavailable, WeightBridgeError
from rl_bridge.transports.nixl import library

if TYPE_CHECKING:  # the process that serves reads starts without it
    from rl_bridge.memory.segment import OwnedSegment

Kind = Literal["DRAM", "VRAM"]
State = Literal["DONE", "PROC"]
Ranges = npt.NDArray[np.uint64]
"""One row for each range: address, size, device."""

REMEDY = (
    "Install one package of it: pip install 'rl-bridge[nixl]' (or nixl-cu13), or use broadcast "
    "across machines and shared-memory on one."
)


class AgentError(WeightBridgeError):
    """A call into the library failed. This transport catches it and decides what it means."""


class MemoryRefused(AgentError):
    """The library cannot register memory of this process; trying again does not help."""


@dataclass(slots=True)
class Counters:
    """How much was made so far. In steady state none of the counters grows.

    Attributes:
        registrations: ranges of memory that were registered.
        connections: peers that were connected.
        plans: lists of descriptors that were prepared.

    """

    registrations: int = 0
    connections: int = 0
    plans: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(
            *(getattr(self, item.name) + getattr(other, item.name) for item in fields(self))
        )


class Region:
    """Registered memory; `Host.deregister` ends it."""

    refusal: str = ""
    """Why the host cannot serve it now, which some hosts find out late; empty if it can."""

    def __init__(self, descriptors: Any, count: int, address: int = 0) -> None:
        """Note the library's descriptors, and the address that peers use."""
        self.descriptors = descriptors
        self.count = count
        self.address = address


class Made:
    """A list or a read that the library made, until it is released or the agent is closed.

    The library's own object keeps the library's agent alive, so only this class refers to it, and
    drops it when the agent is closed: frames of an error that refer to this keep nothing alive.
    """

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        """Hold the library's object."""
        self.raw = raw


class Host(Protocol):
    """The holder of a publisher's registered memory: an agent, or a process that has one.

    The methods with a body suit an agent, which lives as long as this process.
    """

    serves_itself: ClassVar[bool] = False
    """Whether it makes progress by itself once `help` asks for it; else `progress` does."""
    made: Counters
    """The things that were made so far."""
    ended: str = ""
    """How the last one ended; with `is_hopeless`, another one would end like that, too."""
    is_hopeless: bool = False

    @property
    def num_registered(self) -> int:
        """Ranges of memory that are registered now."""

    @property
    def epoch(self) -> int:
        """Grows when another process takes its place."""
        return 1

    @property
    def is_lost(self) -> bool:
        """Whether it died."""
        return False

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when it answers or dies; -1 without one."""
        return -1

    @property
    def seconds_left(self) -> float | None:
        """How long until it has to have answered; None if it need not."""
        return None

    def hear(self) -> None:
        """Find out whether it has answered or ended, and end it if it is late. Never waits."""
        return

    def ensure(self) -> bool:
        """Replace it if it died.

        Returns:
            Whether it serves; else it will, and `fileno` shows when.

        """
        return True

    def doubt(self, within_s: float) -> None:
        """Have it show within this time that it runs, if it can hang at all."""
        del within_s

    def register(self, ranges: Sequence[tuple[int, int]], kind: Kind, device: int = 0) -> Region:
        """Register ranges (address, size) of this process."""

    def register_segment(self, segment: "OwnedSegment") -> Region:
        """Register a segment, where it is mapped."""
        return self.register([(segment.address, segment.nbytes)], "DRAM")

    def try_again(self, region: Region) -> None:
        """Serve a region that was refused late, if that can be by now. Raises nothing."""
        del region

    def deregister(self, region: Region) -> None:
        """End a registration. Idempotent."""

    def metadata(self, region: Region | None) -> bytes:
        """Describe a region to a peer that will read it; None: only how to reach the host."""

    def progress(self) -> None:
        """Serve peers that read, once."""

    def help(self, *, is_needed: bool) -> None:
        """Serve peers that read from now on, or stop."""
        del is_needed

    def close(self) -> None:
        """End it. Idempotent."""


class Agent(Host):
    """An agent of the library. Thread-safe: the library's own lock is on."""

    num_registered: int = 0

    def __init__(self, role: str, *, backend: str, params: dict[str, str]) -> None:
        """Make an agent.

        Args:
            role: part of the agent's name, for the library's logs.
            backend: what carries the bytes, e.g. ``UCX``.
            params: options of the backend.

        Raises:
            TransportUnavailable: the library is not installed, or its backend cannot be opened.

        """
        try:
            self._module, _ = library.find()
            self._failures = library.failures(self._module)
            self.name = f"rlb-{role}-{secrets.token_hex(8)}"
            self._agent: Any = library.new_agent(self._module, self.name, backend, params)
        except (ImportError, RuntimeError) as error:
            raise TransportUnavailable("nixl", str(error), REMEDY) from error
        self._backend = backend
        self.made = Counters()
        self._lock = threading.Lock()
        self._made: dict[Made, None] = {}
        """Lists and reads that were made and not released."""

    @contextmanager
    def _errors(self, what: str, kind: type[AgentError] = AgentError) -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            raise kind(f"NIXL cannot {what}: {error}.") from error.with_traceback(None)

    # ---- memory ---------------------------------------------------------------------------------

    def register(self, ranges: Sequence[tuple[int, int]], kind: Kind, device: int = 0) -> Region:
        """Register ranges (address, size)."""
        rows = [(address, nbytes, device, "") for address, nbytes in ranges]
        with self._errors(f"register {len(rows)} ranges", MemoryRefused):
            made = self._agent.register_memory(rows, kind, [self._backend])
        with self._lock:
            self.made.registrations += len(rows)
            self.num_registered += len(rows)
        return Region(made, len(rows), rows[0][0] if rows else 0)

    def deregister(self, region: Region) -> None:
        """End a registration. Idempotent."""
        descriptors, region.descriptors = region.descriptors, None
        if descriptors is None or self._agent is None:
            return
        with self._lock:
            self.num_registered -= region.count
        with self._errors("deregister memory"):
            self._agent.deregister_memory(descriptors, [self._backend])

    def metadata(self, region: Region | None) -> bytes:
        """Describe one region to a peer that will read it; None: only how to reach this agent."""
        empty = self._module.nixlBind.nixlRegDList(self._module.nixlBind.DRAM_SEG)
        descriptors = empty if region is None else region.descriptors
        with self._errors("describe memory"):
            found: bytes = self._agent.get_partial_agent_metadata(
                descriptors, region is None, [self._backend]
            )
        return found

    # ---- peers ----------------------------------------------------------------------------------

    def add_peer(self, metadata: bytes, *, is_new: bool = False) -> str:
        """Add a peer, or more of its memory; returns its name."""
        with self._errors("read a peer's metadata"):
            name: str | bytes = self._agent.add_remote_agent(metadata)
        self.made.connections += is_new
        return name.decode("ascii", "replace") if isinstance(name, bytes) else name

    def remove_peer(self, name: str) -> None:
        """Disconnect from a peer and forget its memory. Unknown peers are ignored."""
        try:
            self._agent.remove_remote_agent(name)
        except self._failures:
            return

    # ---- reads ----------------------------------------------------------------------------------

    def prepare(self, peer: str | None, ranges: Ranges, kind: Kind) -> Made:
        """Prepare a list of descriptors; `peer` None is this side."""
        name = "NIXL_INIT_AGENT" if peer is None else peer
        with self._errors(f"prepare {len(ranges)} ranges"):
            made = Made(self._agent.prep_xfer_dlist(name, ranges, kind, [self._backend]))
        self.made.plans += 1
        self._made[made] = None
        return made

    def make_read(self, local: Made, remote: Made, low: int, high: int) -> Made:
        """Make a read of descriptors `low` to `high` of two lists; it can be posted many times."""
        rows = np.arange(low, high, dtype=np.int32)
        with self._errors("make a read"):
            made = Made(
                self._agent.make_prepped_xfer(
                    "READ", local.raw, rows, remote.raw, rows, backends=[self._backend]
                )
            )
        self._made[made] = None
        return made

    def post(self, read: Made) -> State:
        """Begin a read."""
        return self._state(self._agent.transfer, read)

    def check(self, read: Made) -> State:
        """Make progress, and return whether a read has ended."""
        return self._state(self._agent.check_xfer_state, read)

    def _state(self, call: Any, read: Made) -> State:
        try:
            state = call(read.raw)
        except self._failures as error:
            raise AgentError(f"a read failed: {error}.") from error.with_traceback(None)
        finally:
            del call  # it refers to the library's agent: an error's frames must not keep it
        if state not in {"DONE", "PROC"}:
            raise AgentError(f"a read ended in {state}.")
        done: State = state
        return done

    def release(self, *made: Made) -> None:
        """Release reads that have ended, or prepared lists. Idempotent."""
        for one in made:
            try:
                if one.raw is not None:
                    one.raw.release()
            except self._failures:
                pass  # it is under way, and ends with the agent
            finally:
                one.raw = None
            self._made.pop(one, None)

    def progress(self) -> None:
        """Serve peers that read from here, if the network cannot do that by itself."""
        try:
            self._agent.get_new_notifs([self._backend])
        except self._failures as error:
            raise AgentError(f"NIXL makes no progress: {error}.") from error.with_traceback(None)

    def close(self) -> None:
        """End the agent, with reads under way, registered memory and connections. Idempotent.

        No byte arrives after it.
        """
        self.release(*reversed(list(self._made)))  # they would keep the library's agent alive
        self._agent = None
        with self._lock:
            self.num_registered = 0

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._agent is None
