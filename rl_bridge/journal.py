"""The journal: a publisher's identity and its last version, kept across restarts.

One small JSON file in a state directory, replaced atomically and synced before a version is handed
out, so that a publisher that crashed at any point can never reuse a number (G6). A lock file keeps
a second live publisher out; if something removes it, the next claim takes it again, or finds out
that another publisher came. Without a state directory nothing is written, and a restarted publisher
is another stream with an id of its own.
"""

import fcntl
import os
import threading
import uuid
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from rl_bridge.errors import (
    BridgeClosed,
    VersionNotMonotonic,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.processes import FORKS, SETTLING, in_forked_children, undisturbed

__all__ = ["Journal", "not_above"]

_FILE = "publisher.json"
_LOCK = "publisher.lock"
_FORMAT: Final = "rl_bridge.journal/1"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["rl_bridge.journal/1"]
    last_version: Annotated[StrictInt, Field(ge=0)]
    publisher_id: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]


# A forked child shares the lock's file description: unless it lets go, the directory would stay
# locked after this publisher died.
_OPEN: "weakref.WeakSet[Journal]" = weakref.WeakSet()
_FILES: "weakref.WeakSet[_LockFile]" = weakref.WeakSet()


def _close_in_child() -> None:
    for journal in list(_OPEN):
        journal.abandon()
    for file in list(_FILES):
        file.close()


in_forked_children(_close_in_child)


class _LockFile:
    """The lock file, open. Whoever loses it, to an interrupt for instance, lets go of the lock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._fds: list[int] = []
        # (Called once at most: `close` makes it void.)
        self._finalizer = weakref.finalize(self, _let_go, self._fds)
        self._finalizer.atexit = False
        _FILES.add(self)
        try:
            # Not what it lies in: a path with a typing mistake is to be told, not made.
            directory.mkdir(exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            with SETTLING, FORKS:
                # One step of the interpreter: no interrupt comes in between opening and noting.
                self._fds.extend(map(os.open, [directory / _LOCK], [flags], [0o600]))
        except OSError as error:
            msg = (
                f"the state directory {directory} cannot be used: {error}. Make what it lies in, "
                "or choose another one."
            )
            raise WeightBridgeError(msg) from error

    @property
    def fd(self) -> int:
        return self._fds[0]

    @property
    def is_open(self) -> bool:
        return bool(self._fds)

    def lock(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            msg = (
                f"another live publisher uses the state directory {self.directory}. "
                "Stop it first, or give this publisher a directory of its own."
            )
            raise WeightBridgeUnavailableError(msg) from error

    def close(self) -> None:
        with SETTLING, FORKS:  # behind it the next publisher finds the directory free
            _let_go(self._fds)
            self._finalizer.detach()  # behind it: what was cut off, the next call ends


def _let_go(fds: list[int]) -> None:
    undisturbed(partial(_close_all, fds))  # a child that is forked in between would keep it


def _close_all(fds: list[int]) -> None:
    while fds:
        with suppress(OSError):  # whoever closed it by its number: the next one is closed too
            os.close(fds.pop())


class Journal:
    """Hands out versions that only grow; durable where a directory is given."""

    def __init__(self, state_dir: str | os.PathLike[str] | None = None) -> None:
        """Open or start the journal.

        Args:
            state_dir: directory for the journal; made if missing, but not what it lies in. None
                keeps it in memory.

        Raises:
            WeightBridgeUnavailableError: another live publisher holds the directory.
            WeightBridgeError: the directory cannot be used, or the journal is damaged; it is never
                guessed at.

        """
        self._lock = threading.Lock()
        self._held: _LockFile | None = None  # without a state directory
        self._last: int | None = None
        self.publisher_id = uuid.uuid4().hex
        if state_dir is not None:
            directory = Path(state_dir)
            self._acquire(directory)
            _OPEN.add(self)
            self._load(directory)

    @property
    def last_version(self) -> int | None:
        """The highest version handed out so far."""
        return self._last

    def check(self, version: int) -> None:
        """Tell whether `version` may be claimed, without claiming it.

        Raises:
            VersionNotMonotonic: not above every version claimed before.

        """
        if self._last is not None and version <= self._last:
            raise not_above(version, self._last, self.publisher_id)

    def reserve(self, version: int) -> None:
        """Claim `version`; on return it is durable and can never be claimed again.

        Raises:
            VersionNotMonotonic: not above every version claimed before.
            BridgeClosed: this journal is closed.
            WeightBridgeUnavailableError: the lock file was removed, and another live publisher has
                the directory.
            WeightBridgeError: the journal could not be written, or another publisher wrote it
                meanwhile; the version stays unclaimed.

        """
        with self._lock:
            held = self._held
            if held is not None and not held.is_open:
                msg = f"the journal in {held.directory} is closed. Make a new publisher."
                raise BridgeClosed(msg)
            self.check(version)
            if held is not None:
                self._hold_on(held, version)
                self._write(held.directory, version)
            self._last = version

    def close(self) -> None:
        """Let another publisher use the directory."""
        with self._lock:
            if self._held is not None:
                self._held.close()

    def abandon(self) -> None:
        """Let go in a forked child: there, another thread's lock would stay taken for ever."""
        self._lock = threading.Lock()
        self.close()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()

    def _acquire(self, directory: Path, *, version: int | None = None) -> None:
        """Take the lock; with a `version`, in place of one on a file that was removed."""
        file = _LockFile(directory)
        try:
            file.lock()
            if version is not None:
                self._require_unchanged(directory, version)
        except BaseException:
            # At once, whoever keeps the exception: the next claim must find out again.
            file.close()
            raise
        self._held = file

    def _hold_on(self, held: _LockFile, version: int) -> None:
        """Make sure that the lock that is held is the one that another publisher would look at."""
        try:
            if os.path.samestat(os.fstat(held.fd), (held.directory / _LOCK).stat()):
                return
        except OSError:
            pass  # removed, as by a cleaner of old files; what else it is, comes up below
        self._acquire(held.directory, version=version)
        held.close()

    def _require_unchanged(self, directory: Path, version: int) -> None:
        record = _read(directory / _FILE)
        written = None if record is None else (record.publisher_id, record.last_version)
        if written not in {None, (self.publisher_id, self._last)}:
            msg = (
                f"version {version} was not published: the lock file in {directory} was removed, "
                f"and since then another publisher wrote there: {written}, expected "
                f"{(self.publisher_id, self._last)}. Make a new publisher, which goes on behind "
                "that, and keep cleaners of old files away from the directory."
            )
            raise WeightBridgeError(msg)

    def _load(self, directory: Path) -> None:
        try:
            record = _read(directory / _FILE)
        except WeightBridgeError:
            self.close()
            raise
        if record is not None:
            self._last, self.publisher_id = record.last_version, record.publisher_id

    def _write(self, directory: Path, version: int) -> None:
        record = _Record(format=_FORMAT, last_version=version, publisher_id=self.publisher_id)
        temporary = directory / (_FILE + ".new")
        try:
            with temporary.open("w", encoding="ascii") as file:
                file.write(record.model_dump_json())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(directory / _FILE)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            msg = (
                f"version {version} was not published: the journal in {directory} cannot be "
                f"written ({error}). Free space or fix permissions, then publish again."
            )
            raise WeightBridgeError(msg) from error


def not_above(version: int, last: int, publisher_id: str) -> VersionNotMonotonic:
    """The error for a version that is not above the last one."""
    return VersionNotMonotonic(
        f"weight_version must increase monotonically: got {version}, the last one of publisher "
        f"{publisher_id} was {last}. Increment the version after every completed training step."
    )


def _read(path: Path) -> _Record | None:
    if not path.exists():
        return None
    try:
        return _Record.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        msg = (
            f"the publisher's journal {path} is damaged ({error!r}). Move it away to start a "
            "new stream of versions, or restore it to go on with the old one."
        )
        raise WeightBridgeError(msg) from error
