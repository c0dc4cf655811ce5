"""Memory that the kernel may take back when it is short, and that costs nothing until it does."""

import ctypes
import os

__all__ = ["spare_pages"]

_MADV_FREE = 8
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def spare_pages(address: int, nbytes: int) -> None:
    """Let the kernel take anonymous pages when it is short of memory; their bytes may be gone then.

    Whoever writes to them again finds those that were not taken without a page fault.

    Raises:
        OSError: not an anonymous, page-aligned range.

    """
    if nbytes and _libc.madvise(address, nbytes, _MADV_FREE):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise(FREE) of {nbytes} bytes: {os.strerror(number)}")
