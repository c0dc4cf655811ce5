"""A version is fetched once on a host: its first reader lets others map the copy.

What was fetched lies in a sealed segment of the process that fetched it
(`rl_bridge.memory.segment`). That process makes a small file in the host's directory for temporary
files, named by the update, and holds its lock. While it fetches, it counts the pieces in the file,
so that others, which wait, see that it goes on. When all bytes are there and their digests are the
manifest's, it writes down where the segment is: others lease and map it, as they would map a
publisher's, and verify it themselves.

Nothing depends on it. A process that dies loses the lock, and the next one fetches; one that hangs,
or whose memory cannot be opened, as from another container, costs a second fetch. The file goes
with the slot, or when the slot is written again; what a killed process left is removed by the next
reader.
"""

import logging
import os
import stat
import struct
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, StrictInt, ValidationError

from rl_bridge.memory import segment as leases
from rl_bridge.memory.holding import Holding
from rl_bridge.memory.segment import SegmentRef
from rl_bridge.memory.slots import Slot

_LOG = logging.getLogger(__name__)

_COUNT = struct.Struct("<Q")
_MAX_NBYTES = 4096
PATIENCE_S = 10.0
"""How long a fetch of another process may stand still while this one waits for it."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class Copy(BaseModel):
    """Where a process of this host has a version.

    Attributes:
        slot: segment with the version's arena.
        generation: which write of the slot it is.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: SegmentRef
    generation: StrictInt


class Turn:
    """The right to fetch a version for this host; ends with `close`, or with its object."""

    def __init__(self, held: Holding) -> None:
        """Count from zero."""
        self._held = held
        weakref.finalize(self, held.dispose)  # also at exit: the kernel unlinks no names
        self._lock = threading.Lock()
        self._count = 0

    def count(self) -> None:
        """Tell those who wait that one more piece is here. Thread-safe."""
        with self._lock, suppress(OSError):  # the disk is full: others fetch by themselves
            self._count += 1
            os.pwrite(self._held.fd, _COUNT.pack(self._count), 0)

    def offer(self, slot: Slot) -> None:
        """Let others map the slot, which was stamped."""
        copy = Copy(slot=slot.segment.ref, generation=slot.generation)
        with suppress(OSError):  # the same
            os.pwrite(self._held.fd, copy.model_dump_json().encode(), _COUNT.size)

    def close(self) -> None:
        """Offer it no more. Idempotent."""
        self._held.dispose()


class HostCopies:
    """What the processes of this host, of one user, have fetched."""

    def __init__(self) -> None:
        """Remove what killed processes left."""
        own = f"rlb-files-{os.geteuid()}-"
        # (Containers may share the directory, and not /proc, through which memory is mapped.)
        self._prefix = f"{own}{Path('/proc/self/ns/pid').stat().st_ino}-"
        try:
            self._directory = Path(tempfile.gettempdir())
        except FileNotFoundError:  # there is none that this process may write to: it is alone
            self._directory = Path("/proc")  # where nobody can make a file
        for path in self._directory.glob(f"{own}*"):
            held = self._open(path, os.O_RDWR)
            if held is not None:
                with suppress(OSError):  # no locks there: then nobody offers anything
                    self._lock(held, path)
                held.dispose()  # with its name, if it was locked

    def turn(self, update_id: str) -> Turn | Copy | None:
        """A copy that is there, after a fetch that is under way; or the right to fetch.

        Returns:
            None: nobody is to wait for this process, which fetches for itself.

        """
        path = self._directory / f"{self._prefix}{update_id}"
        seen, until, pause_s = b"", time.monotonic() + PATIENCE_S, _FIRST_PAUSE_S
        while True:
            held = self._open(path, os.O_RDWR | os.O_CREAT)
            if held is None:
                return None
            try:
                if self._lock(held, path):
                    os.ftruncate(held.fd, 0)
                    return Turn(held)
                found = os.pread(held.fd, _MAX_NBYTES, 0)
            except OSError:
                held.dispose()
                return None
            held.dispose()
            if len(found) > _COUNT.size:
                with suppress(ValidationError):  # half of it: it is being written
                    return Copy.model_validate_json(found[_COUNT.size :])
            if found != seen:
                seen, until = found, time.monotonic() + PATIENCE_S
            elif time.monotonic() >= until:
                _LOG.info("update %s is fetched twice: another fetch stands still", update_id)
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _open(self, path: Path, flags: int) -> Holding | None:
        """Open a file that is this user's own; None if it cannot be had."""
        held = Holding()
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            status = os.fstat(held.open(os.open, path, flags, 0o600))
        except OSError:
            held.dispose()
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            held.dispose()
            return None
        return held

    @staticmethod
    def _lock(held: Holding, path: Path) -> bool:
        """Lock a file, unless somebody has; from then on its name goes with `held`."""
        if not leases.try_exclusive(held.fd):
            return False
        held.path = path  # a file that was removed meanwhile has lost its name
        return bool(os.fstat(held.fd).st_nlink)
