"""What an object took from the kernel, given back however the object ends.

An object makes its holding first: if it fails while it is made, or is dropped instead of closed, it
leaves nothing behind. In forked children descriptors are closed (`rl_bridge.processes`), and
`dispose` does nothing.
"""

import os
import weakref
from collections.abc import Callable
from pathlib import Path

from rl_bridge.memory import vm
from rl_bridge.processes import close_fd, open_fd


class Holding:
    """A descriptor, a range of addresses, and the name of a file; each of them, or none.

    Attributes:
        pid: the process that it belongs to.
        fd: the descriptor; -1 before `open` and after `dispose`.
        path: the file's name, to be removed; None if there is none.

    """

    def __init__(self, owner: object = None) -> None:
        """Hold nothing yet; what is held then is given back with `owner`, at the latest."""
        self.pid = os.getpid()
        self.fd = -1
        self.path: Path | None = None
        self._range: tuple[int, int] | None = None
        if owner is not None:
            # Not at exit: a daemon thread may still be copying, and the kernel cleans up itself.
            weakref.finalize(owner, self.dispose).atexit = False

    def open(self, function: Callable[..., int], *arguments: object) -> int:
        """Open a descriptor with a function of `os`, which forked children do not keep.

        Raises:
            OSError: the function's own.

        """
        self.fd = open_fd(function, *arguments)
        return self.fd

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses: what is mapped there is unmapped with them.

        Raises:
            OSError: no address space left.

        """
        address = vm.reserve(nbytes)
        self._range = address, nbytes
        return address

    def dispose(self) -> None:
        """Give everything back. Idempotent; in a forked child a no-op."""
        if os.getpid() != self.pid:
            return
        known, self._range = self._range, None
        try:
            if known is not None:
                vm.unmap(*known)
            self.unlink()
        finally:  # a lease must end also if the kernel is short of something
            fd, self.fd = self.fd, -1
            if fd >= 0:
                close_fd(fd)

    def unlink(self) -> None:
        """Remove the name of the file, if the file is still this one."""
        path, self.path = self.path, None
        if path is not None and os.getpid() == self.pid and _is_at(path, self.fd):
            path.unlink(missing_ok=True)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except OSError:
        return False
