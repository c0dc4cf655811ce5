"""Memory that the kernel may take back when it is short, and that costs nothing until it does."""

import ctypes
import errno
import os

__all__ = ["huge_pages", "spare_pages"]

_MADV_FREE = 8
_MADV_HUGEPAGE = 14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def spare_pages(address: int, nbytes: int) -> None:
    """Let the kernel take anonymous pages when it is short of memory; their bytes may be gone then.

    Whoever writes to them again finds those that were not taken without a page fault. Memory that
    somebody locked (mlockall) is never taken: it stays as it is.

    Raises:
        OSError: no mapped range.

    """
    if nbytes and _libc.madvise(address, nbytes, _MADV_FREE):
        number = ctypes.get_errno()
        if number == errno.EINVAL:
            return
        raise OSError(number, f"madvise(FREE) of {nbytes} bytes: {os.strerror(number)}")


def huge_pages(address: int, nbytes: int) -> bool:
    """Let the kernel use huge pages for an anonymous range; call it before it is written to.

    They are touched in a third of the time, and after `spare_pages` written to again as if nothing
    had been: small ones take as long for that as for the bytes themselves.

    Returns:
        Whether the kernel has them.

    """
    return not _libc.madvise(address, nbytes, _MADV_HUGEPAGE)
