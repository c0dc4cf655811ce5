"""What an object took from the kernel: noted at once, given back however it ends.

Descriptors are closed in forked children, where they would hold leases, locks and memory.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from rl_bridge.memory import vm
from rl_bridge.processes import FORKS, SETTLING, in_forked_children, undisturbed

__all__ = ["FORKS", "SETTLING", "Holding", "close_fd", "forget_fd_in_children"]

# Descriptors that a forked child must not keep: they would hold leases, locks and memory.
_PRIVATE_FDS: set[int] = set()


def forget_fd_in_children(fd: int) -> int:
    """Have `fd` closed in forked children; returns it. Close it through `close_fd`."""
    _PRIVATE_FDS.add(fd)
    return fd


def close_fd(fd: int) -> None:
    """Close a descriptor that `forget_fd_in_children` took; a no-op in a forked child.

    It waits for nothing: while this process forks, the descriptor is closed behind that.
    """
    undisturbed(partial(_close, fd))  # a child that is forked in between would keep it


def _close(fd: int) -> None:
    if fd in _PRIVATE_FDS:
        _PRIVATE_FDS.discard(fd)
        with suppress(OSError):  # somebody closed it by its number
            os.close(fd)


def _close_in_child() -> None:
    for fd in _PRIVATE_FDS:
        with suppress(OSError):  # somebody closed it by its number: the rest is closed all the same
            os.close(fd)
    _PRIVATE_FDS.clear()


in_forked_children(_close_in_child)


class Holding:
    """What an object took from the kernel: noted at once, and given back however it ends.

    An interrupt may come between any two lines, so that what was opened and not noted yet would
    stay open for good. The object makes its holding first, and a finalizer that disposes of it.
    """

    def __init__(self) -> None:
        """Hold nothing yet; belong to this process."""
        self.pid = os.getpid()
        self.fds: list[int] = []
        self.addresses: list[int] = []
        self.nbytes = 0
        self.path: Path | None = None

    @property
    def fd(self) -> int:
        """The descriptor."""
        return self.fds[0]

    def open(self, function: Callable[..., int], *arguments: object) -> int:
        """Open a descriptor with a function of `os`, which forked children do not keep.

        Raises:
            OSError: the function's own.

        """
        with SETTLING, FORKS:
            # One step of the interpreter: no interrupt comes in between opening and noting.
            self.fds.extend(map(function, *([argument] for argument in arguments)))
            _PRIVATE_FDS.update(self.fds)
        return self.fd

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses: whatever is mapped there is unmapped with them.

        Raises:
            OSError: no address space left.

        """
        self.nbytes = nbytes
        self.addresses.append(vm.reserve(nbytes))
        return self.addresses[0]

    def dispose(self) -> None:
        """Give everything back. Idempotent; in a forked child a no-op."""
        if os.getpid() != self.pid:
            return  # its descriptors are closed there
        try:
            if self.addresses:
                vm.unmap_noted(self.addresses, self.nbytes)
            self.unlink()
        finally:  # a lease must end also where the kernel is short of something
            undisturbed(self._close)

    def _close(self) -> None:
        with suppress(OSError):  # told by `dispose`; done here where an interrupt cut that off
            self.unlink()
        _PRIVATE_FDS.difference_update(self.fds)
        while self.fds:
            # Somebody closed it by its number; or a finalizer in the middle of this was faster.
            with suppress(OSError, IndexError):
                os.close(self.fds.pop())

    def unlink(self) -> None:
        """Remove the name of the file, if it is ours."""
        if self.path is not None and self.fds and os.getpid() == self.pid:
            if self.fd in _PRIVATE_FDS and _is_at(self.path, self.fd):
                self.path.unlink(missing_ok=True)
            self.path = None


def _is_at(path: Path, fd: int) -> bool:
    """Whether the open file is the one under that name: what replaced it is not ours to remove."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except OSError:
        return False
