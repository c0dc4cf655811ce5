"""Lines that outlive a crash, and the directory that they lie in.

A line is durable when `append` returns, unless it was told that this one need not be. What a crash
cut off is the last line at most, and of that one nobody was told that it was written: it is dropped
when the file is opened again.
"""

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from rl_bridge.errors import BridgeClosed, WeightBridgeError, WeightBridgeUnavailableError

__all__ = ["DurableLines", "StateDirectory", "write_durably"]

_LOCK = "sidecar.lock"


class StateDirectory:
    """A directory that one side-car at a time uses: a lock, which the kernel lets go of."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Take the directory; it is made if missing, but not what it lies in.

        Raises:
            WeightBridgeUnavailableError: another live side-car has it, or it cannot be used.

        """
        self.path = Path(path)
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            msg = (
                f"the state directory {self.path} cannot be used: {error}. Make what it lies in, "
                "or choose another one."
            )
            raise WeightBridgeUnavailableError(msg) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            msg = (
                f"another live side-car uses the state directory {self.path}. Stop it first, or "
                "give this one a directory of its own."
            )
            raise WeightBridgeUnavailableError(msg) from error

    def close(self) -> None:
        """Let another side-car use it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()


class DurableLines:
    """A text file that only grows, line by line, until it is rewritten as a whole.

    Attributes:
        path: the file.
        found: its lines, as they were when it was opened.
        nbytes: how long it is.

    """

    def __init__(self, path: Path) -> None:
        """Open the file, or make it.

        Raises:
            WeightBridgeError: it cannot be read or written, or is no ASCII text.

        """
        self.path = path
        self._fd = -1
        try:
            self._open()
            whole = path.read_bytes()
            end = whole.rfind(b"\n") + 1
            if end < len(whole):
                os.ftruncate(self._fd, end)
            self.nbytes = end
            self.found = whole[:end].decode("ascii").splitlines()
        except (OSError, UnicodeError) as error:
            self.close()
            raise _unusable(path, error) from error

    def append(self, line: str, *, sync: bool = True) -> None:
        """Write one line; on return it is durable.

        Args:
            line: without its end.
            sync: False for a line that may be lost with the machine, but not with the process.

        Raises:
            WeightBridgeError: it could not be written, and is not there.
            BridgeClosed: the file is closed.

        """
        if self._fd < 0:
            msg = f"{self.path} is closed. Start a new side-car."
            raise BridgeClosed(msg)
        data = f"{line}\n".encode("ascii")
        try:
            written = os.write(self._fd, data)
            if written != len(data):
                msg = f"only {written} of {len(data)} bytes fit"
                raise OSError(msg)  # noqa: TRY301 - handled like every other one, right below
            if sync:
                os.fdatasync(self._fd)
        except OSError as error:
            with suppress(OSError):  # else the next start drops a part, or reads the whole
                os.ftruncate(self._fd, self.nbytes)
            raise _unusable(self.path, error) from error
        self.nbytes += len(data)

    def rewrite(self, lines: Iterable[str]) -> None:
        """Replace the file as a whole: a crash leaves the old one or the new one.

        Raises:
            WeightBridgeError: it could not be written; the old one stands.

        """
        data = "".join(f"{line}\n" for line in lines).encode("ascii")
        write_durably(self.path, data)
        self.close()
        try:
            self._open()
        except OSError as error:
            raise _unusable(self.path, error) from error
        self.nbytes = len(data)

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o600)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file's content atomically.

    Raises:
        WeightBridgeError: it could not be written; what was there stands.

    """
    temporary = path.with_name(path.name + ".new")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: Exception) -> WeightBridgeError:
    return WeightBridgeError(
        f"the side-car's file {path} cannot be used: {error}. Free space, or mend its permissions; "
        "a damaged one may be moved away with the whole directory."
    )
