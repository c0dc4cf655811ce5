"""The journal: a publisher's identity and its last version, kept across restarts.

One small JSON file in a state directory, replaced atomically and synced before a version is handed
out, so that a publisher that crashed at any point can never reuse a number (G6). A lock file keeps
a second live publisher out, and a claim that finds the lock file removed is refused: another
publisher may have come. Without a state directory nothing is written, and a restarted publisher is
another stream with an id of its own.

(No SQLite: its locks end as soon as anything in the same process closes the file, a backup say.)
"""

import fcntl
import os
import threading
import uuid
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from rl_bridge.errors import (
    BridgeClosed,
    VersionNotMonotonic,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.memory.durable import replace_durably
from rl_bridge.memory.holding import Holding

_FILE = "publisher.json"
_LOCK = "publisher.lock"
_FORMAT: Final = "rl_bridge.journal/1"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["rl_bridge.journal/1"]
    last_version: Annotated[StrictInt, Field(ge=0)]
    publisher_id: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]


class Journal:
    """Hands out versions that only grow; durable if a directory is given.

    Attributes:
        publisher_id: names the stream of versions.
        last_version: the highest version handed out so far; None before the first.

    """

    def __init__(self, state_dir: str | os.PathLike[str] | None = None) -> None:
        """Open or start the journal.

        Args:
            state_dir: directory for the journal; made if missing, for this user alone, but not what
                it lies in. None keeps it in memory.

        Raises:
            WeightBridgeUnavailableError: another live publisher holds the directory.
            WeightBridgeError: the directory cannot be used, or the journal is damaged; it is never
                guessed at.

        """
        self.publisher_id = uuid.uuid4().hex
        self.last_version: int | None = None
        self._directory = None if state_dir is None else Path(state_dir)
        self._turn = threading.Lock()
        self._pid = os.getpid()
        self._lock = Holding(self)
        if self._directory is None:
            return
        try:
            self._take_lock(self._directory)
            record = _read(self._directory / _FILE)
        except BaseException:
            self.close()
            raise
        if record is not None:
            self.last_version, self.publisher_id = record.last_version, record.publisher_id

    def reserve(self, version: int) -> None:
        """Claim `version`; on return it is durable and can never be claimed again.

        Raises:
            VersionNotMonotonic: not above every version claimed before.
            BridgeClosed: this journal is closed, or belongs to the parent process.
            WeightBridgeError: the journal could not be written, or its lock file was removed; the
                version stays unclaimed.

        """
        if os.getpid() != self._pid:  # before the lock: at the fork, another thread may have had it
            raise BridgeClosed("this journal is that of the parent process. Make a new publisher.")
        with self._turn:
            if self.last_version is not None and version <= self.last_version:
                raise not_above(version, self.last_version, self.publisher_id)
            if self._directory is not None:
                self._require_lock(self._directory, version)
                self._write(self._directory, version)
            self.last_version = version

    def close(self) -> None:
        """Let another publisher use the directory. Idempotent."""
        self._lock.dispose()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()

    def _take_lock(self, directory: Path) -> None:
        try:
            # Without its parents: a path with a typing mistake must be reported, not made.
            directory.mkdir(exist_ok=True, mode=0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            fd = self._lock.open(os.open, directory / _LOCK, flags, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WeightBridgeUnavailableError(
                f"another live publisher uses the state directory {directory}. Stop it first, or "
                "give this publisher a directory of its own."
            ) from error
        except OSError as error:
            raise WeightBridgeError(
                f"the state directory {directory} cannot be used: {error}. Make what it lies in, "
                "or choose another one, on a file system of this machine."
            ) from error

    def _require_lock(self, directory: Path, version: int) -> None:
        """Make sure that the lock that is held is the one that another publisher would look at."""
        if self._lock.fd < 0:
            raise BridgeClosed(f"the journal in {directory} is closed. Make a new publisher.")
        try:
            if os.path.samestat(os.fstat(self._lock.fd), (directory / _LOCK).stat()):
                return
        except OSError:
            pass  # it is not there
        raise WeightBridgeError(
            f"version {version} was not published: the lock file in {directory} was removed, and "
            "another publisher may have come since. Make a new publisher, which goes on from "
            "what is written there, and keep cleaners of old files away from the directory."
        )

    def _write(self, directory: Path, version: int) -> None:
        record = _Record(format=_FORMAT, last_version=version, publisher_id=self.publisher_id)
        try:
            replace_durably(directory, _FILE, record.model_dump_json().encode("ascii"))
        except OSError as error:
            raise WeightBridgeError(
                f"version {version} was not published: the journal in {directory} cannot be "
                f"written ({error}). Free space or fix permissions, then publish again."
            ) from error


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
        raise WeightBridgeError(
            f"the publisher's journal {path} is damaged ({error!r}). Move it away to start a "
            "new stream of versions, or restore it to go on with the old one."
        ) from error
