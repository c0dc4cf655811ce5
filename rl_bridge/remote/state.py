"""What a side-car keeps over a crash: its engine's updates, and the nonces of answered requests.

Both lie in one SQLite file with a write-ahead log, which one side-car at a time has open. A change
that must outlive the machine is synced before the call returns. One that need only outlive the
process is synced with the next one that must. SQLite drops a change that a crash cut off.

SQLite knows nothing of forks: a child that closed the connection would take the log away from its
parent. So a child never does, not even at its end.
"""

import ctypes
import fcntl
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from rl_bridge.errors import (
    BridgeClosed,
    SignatureRefused,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightManifestValidationError,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.processes import close_fd, in_forked_children, open_fd
from rl_bridge.remote.signing import Credentials

_FILE = "state.db"
# SQLite's own lock ends when anything in this process closes the file, a backup for instance.
_LOCK = "sidecar.lock"
# With an exclusive lock from the first access on, the log needs no shared memory.
_SETTINGS = "PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL;"
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS updates (
    slot TEXT PRIMARY KEY, step TEXT NOT NULL, manifest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS nonces (nonce TEXT PRIMARY KEY, time INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS nonces_by_time ON nonces (time);
COMMIT;
"""


class StateDirectory:
    """A directory that one side-car at a time uses; its lock ends with the process. Thread-safe."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Take the directory; it is made if missing, but not what it lies in.

        Raises:
            WeightBridgeUnavailableError: another live side-car has it, or it cannot be used.

        """
        self.path = Path(path)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._is_closed = False
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            lock_fd = open_fd(
                os.open, self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise self._unfit(error) from error
        release = weakref.finalize(self, close_fd, lock_fd)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / _FILE).touch(mode=0o600)
            self._db = sqlite3.connect(
                self.path / _FILE, timeout=0, isolation_level=None, check_same_thread=False
            )
        except BlockingIOError as error:
            release()
            raise WeightBridgeUnavailableError(
                f"another live side-car uses the state directory {self.path}. Stop it first, or "
                "give this one a directory of its own."
            ) from error
        except (OSError, sqlite3.Error) as error:
            release()
            raise self._unfit(error) from error
        self._release = release
        _OPEN.add(self)
        try:
            self._db.executescript(_SETTINGS)
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            self.close()
            raise self.unusable(error) from error

    def _unfit(self, error: Exception) -> WeightBridgeUnavailableError:
        return WeightBridgeUnavailableError(
            f"the state directory {self.path} cannot be used: {error}. Make what it lies in, or "
            "choose another one."
        )

    @contextmanager
    def change(self, *, sync: bool) -> Iterator[sqlite3.Connection]:
        """Make a change as a whole or not at all; on return it is durable.

        Args:
            sync: False for a change that may be lost with the machine, but not with the process.

        Raises:
            BridgeClosed: the directory is closed, or the parent process has it.
            WeightBridgeError: it could not be written, and is not there.

        """
        if os.getpid() != self._pid:
            raise BridgeClosed(
                f"{self.path} is the parent process's. Start a side-car with one of its own."
            )
        with self._lock:
            if self._is_closed:
                raise BridgeClosed(f"{self.path} is closed. Start a new side-car.")
            try:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
                with self._db:  # which ends the transaction, one way or the other
                    self._db.execute("BEGIN IMMEDIATE")
                    yield self._db
            except sqlite3.Error as error:
                raise self.unusable(error) from error

    def unusable(self, error: Exception) -> WeightBridgeError:
        """The error for a file that cannot be read or written."""
        cause = str(error).rstrip(".")
        return WeightBridgeError(
            f"the side-car's file {self.path / _FILE} cannot be used: {cause}. Free "
            "space, or mend its permissions. If it is damaged, move the directory away, give both "
            "sides a new key and start with a fresh engine."
        )

    def close(self) -> None:
        """Let another side-car use it. Idempotent; in a forked child a no-op."""
        if os.getpid() == self._pid:
            with self._lock:
                self._is_closed = True
                self._db.close()
                self._release()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()


_OPEN: weakref.WeakSet[StateDirectory] = weakref.WeakSet()


def _keep_in_child() -> None:
    for state in list(_OPEN):
        # A reference that nobody gives back: the connection is not closed even at the child's end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(state._db))  # noqa: SLF001 - of this module


in_forked_children(_keep_in_child)


# ---- the ledger of updates -----------------------------------------------------------------------

Step = Literal["prepared", "committing", "committed", "ended"]


@dataclass(frozen=True, slots=True)
class Entry:
    """An update, and the last of its steps that was written down.

    Attributes:
        step: what is, or is about to be, done.
        manifest: the update's.

    """

    step: Step
    manifest: WeightUpdateManifest


class Ledger:
    """The steps of one engine's updates. Not thread-safe: one step is taken at a time.

    It is written before and after each step of the engine, so that a side-car that was killed knows
    what to bring its engine back to.

    Attributes:
        active: the update that was committed last; None before the first.
        pending: the one that was prepared, or being committed, and of which no end is written.

    """

    def __init__(self, state: StateDirectory) -> None:
        """Read what was done so far.

        Raises:
            WeightBridgeError: the file cannot be used, or is damaged; it is never guessed at.

        """
        self._state = state
        with state.change(sync=False) as db:
            rows = db.execute("SELECT slot, step, manifest FROM updates").fetchall()
        try:
            found = {
                slot: Entry(step, WeightUpdateManifest.from_json(text)) for slot, step, text in rows
            }
        except WeightManifestValidationError as error:
            raise state.unusable(error) from error
        self.active, self.pending = found.get("active"), found.get("pending")

    def note(self, manifest: WeightUpdateManifest, step: Step) -> None:
        """Write down a step.

        A commit's beginning and its failure are durable on return. The others survive the process
        and not the machine: a start does the same without them, since what it takes for being
        committed it commits again.

        Raises:
            WeightBridgeError: it could not be written.

        """
        was_begun = self.pending is not None and self.pending.step == "committing"
        is_last = step in {"committed", "ended"}
        with self._state.change(sync=step == "committing" or (step == "ended" and was_begun)) as db:
            db.execute("DELETE FROM updates WHERE slot = 'pending'")
            if step != "ended":
                row = ["active" if is_last else "pending", step, manifest.to_json()]
                db.execute("INSERT OR REPLACE INTO updates VALUES (?, ?, ?)", row)
        self.pending = None if is_last else Entry(step, manifest)
        if step == "committed":
            self.active = Entry(step, manifest)


# ---- the nonces of answered requests -------------------------------------------------------------

_FLOOR = ""  # the row of no nonce has the time up to which everything is refused


class NonceBook:
    """Nonces of the requests whose time is within the window: one counts once. Thread-safe.

    A nonce is kept for as long as a request with its time would be taken. What is forgotten stays
    refused by its time, even where the clock is set back: the book remembers the latest time that
    it forgot.
    """

    def __init__(self, state: StateDirectory, *, max_skew_s: float, now: float) -> None:
        """Open the book.

        Args:
            state: where it is kept.
            max_skew_s: how far a request's time may be from this machine's, either way.
            now: seconds since the epoch.

        Raises:
            WeightBridgeError: the file cannot be used.

        """
        self._state, self._max_skew_s = state, max_skew_s
        with state.change(sync=True) as db:
            row = db.execute("SELECT time FROM nonces WHERE nonce = ?", [_FLOOR]).fetchone()
            self._floor = 0 if row is None else int(row[0])
            self._forget(db, now)

    def check_time(self, given: Credentials, *, now: float) -> None:
        """Refuse what is too old, or from the future, before anything else is looked at.

        Raises:
            SignatureRefused: outside of the window.

        """
        if abs(now - given.time) > self._max_skew_s or given.time <= self._floor:
            raise SignatureRefused(
                f"the request's time is {given.time}, expected {now:.0f} +- {self._max_skew_s:g} s "
                "by this machine's clock. Set the clocks of both machines, or send it anew."
            )

    def claim(self, given: Credentials, *, now: float, sync: bool = True) -> None:
        """Take a nonce; on return that is durable. Only for requests whose signature is right.

        Args:
            given: of the request.
            now: seconds since the epoch.
            sync: False where it need only outlive this process, and not the machine.

        Raises:
            SignatureRefused: it was taken before, or is too old by now.
            WeightBridgeError: it could not be written down; the request must not be served.

        """
        with self._state.change(sync=sync) as db:
            self.check_time(given, now=now)
            try:
                db.execute("INSERT INTO nonces VALUES (?, ?)", [given.nonce, given.time])
            except sqlite3.IntegrityError as error:
                raise SignatureRefused(
                    f"the request's nonce {given.nonce} was used already, expected a new one: this "
                    "is a replay. Send it with a new signature."
                ) from error
            self._forget(db, now)

    def _forget(self, db: sqlite3.Connection, now: float) -> None:
        old = [now - self._max_skew_s, _FLOOR]
        (newest,) = db.execute(
            "SELECT max(time) FROM nonces WHERE time < ? AND nonce != ?", old
        ).fetchone()
        if newest is not None:
            db.execute("DELETE FROM nonces WHERE time < ? AND nonce != ?", old)
            self._floor = max(self._floor, newest)
            db.execute("INSERT OR REPLACE INTO nonces VALUES (?, ?)", [_FLOOR, self._floor])
