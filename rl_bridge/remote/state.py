"""What a side-car keeps on disk: its ledger of updates, and the nonces of answered requests.

The ledger is written before and after each step of the engine. It holds the last committed update
and the update that is on its way, so a side-car that was killed knows what to bring its engine back
to. A nonce counts once, also over a restart.

Both are files of durable lines. A line is durable when `append` returns, unless the caller said
that it need not be. A crash can only cut off the last line. No caller was told that the cut line
was written, so it is dropped when the file is opened again.
"""

import fcntl
import os
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from rl_bridge.errors import (
    BridgeClosed,
    SignatureRefused,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.remote.signing import Credentials

# ---- the directory, and durable lines ------------------------------------------------------------

_LOCK = "sidecar.lock"


class StateDirectory:
    """A directory that one side-car at a time uses; its lock ends with the process."""

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


# ---- the ledger of updates -----------------------------------------------------------------------

Step = Literal["prepared", "committing", "committed", "ended"]
_FILE = "updates.log"
_BREAK = "\t"
_SURPLUS_NBYTES = 256 * 1024
_Id = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]


class Entry(BaseModel):
    """One line: which update took which step.

    Attributes:
        format: of the line.
        step: what is, or is about to be, done.
        update_id: the update.
        publisher_id: whose it is.
        weight_version: its version.
        root: its root.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["rl_bridge.sidecar/1"] = "rl_bridge.sidecar/1"
    step: Step
    update_id: _Id
    publisher_id: _Id
    weight_version: Annotated[StrictInt, Field(ge=0)]
    root: _Id

    @classmethod
    def of(cls, manifest: WeightUpdateManifest, step: Step) -> "Entry":
        """The line for a step of an update."""
        return cls(
            step=step,
            update_id=manifest.update_id,
            publisher_id=manifest.publisher_id,
            weight_version=manifest.weight_version,
            root=manifest.root,
        )


class Ledger:
    """The steps of one engine's updates. Not thread-safe: one step is taken at a time.

    Attributes:
        active: the update that was committed last; None before the first.
        pending: the one that was prepared, or being committed, and of which no end is written.

    """

    def __init__(self, directory: Path) -> None:
        """Read what was done so far.

        Raises:
            WeightBridgeError: the file cannot be used, or is damaged; it is never guessed at.

        """
        self.active: Entry | None = None
        self.pending: Entry | None = None
        self._texts: dict[str, str] = {}
        self._lines = DurableLines(directory / _FILE)
        try:
            for line in self._lines.found:
                head, _, text = line.partition(_BREAK)
                self._take(Entry.model_validate_json(head), text or None)
        except ValidationError as error:
            self._lines.close()
            msg = (
                f"the side-car's ledger {directory / _FILE} is damaged ({error!r}). Move the "
                "directory away and start with a fresh engine."
            )
            raise WeightBridgeError(msg) from error
        self._least_nbytes = self._lines.nbytes

    def manifest_of(self, entry: Entry) -> WeightUpdateManifest:
        """The manifest that came with a commit.

        Raises:
            WeightBridgeError: there is none, or it is damaged.

        """
        return WeightUpdateManifest.from_json(self._texts.get(entry.update_id, ""))

    def note(self, manifest: WeightUpdateManifest, step: Step) -> None:
        """Write down a step.

        A commit's beginning, with the manifest, and its failure are durable on return. The others
        survive the process and not the machine: a start does the same without them, since what it
        takes for being committed it commits again.

        Raises:
            WeightBridgeError: it could not be written.

        """
        self._note(Entry.of(manifest, step), manifest)

    def settle(self, entry: Entry, step: Step) -> None:
        """Write down what became of an update that a crash cut off.

        Raises:
            WeightBridgeError: it could not be written.

        """
        if self.pending is not None:
            self._note(entry.model_copy(update={"step": step}), None)

    def tidy(self) -> None:
        """Keep what counts, and drop the rest.

        Raises:
            WeightBridgeError: it could not be written; what was there stands.

        """
        kept = [entry for entry in (self.active, self.pending) if entry is not None]
        # What begins a commit carries the manifest.
        texts = {entry.update_id: self._texts.get(entry.update_id) for entry in kept}
        self._texts = {name: text for name, text in texts.items() if text is not None}
        lines = []
        for entry in kept:
            text = self._texts.get(entry.update_id)
            if text is not None and entry.step == "committed":
                lines.append(_line(entry.model_copy(update={"step": "committing"}), text))
                text = None
            lines.append(_line(entry, text))
        self._lines.rewrite(lines)
        self._least_nbytes = self._lines.nbytes

    def _note(self, entry: Entry, manifest: WeightUpdateManifest | None) -> None:
        begins = entry.step == "committing" and manifest is not None
        text = manifest.to_json() if begins and manifest is not None else None
        was_begun = self.pending is not None and self.pending.step == "committing"
        fails = entry.step == "ended" and was_begun
        self._lines.append(_line(entry, text), sync=begins or fails)
        self._take(entry, text)
        if self._lines.nbytes > 4 * self._least_nbytes + _SURPLUS_NBYTES:
            self.tidy()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._lines.close()

    def _take(self, entry: Entry, text: str | None) -> None:
        if text is not None:
            self._texts[entry.update_id] = text
        if entry.step == "committed":
            self.active, self.pending = entry, None
        elif entry.step == "ended":
            self.pending = None
        else:
            self.pending = entry
        kept = {one.update_id for one in (self.active, self.pending) if one is not None}
        for name in self._texts.keys() - kept:
            del self._texts[name]


def _line(entry: Entry, text: str | None) -> str:
    # The manifest behind the entry as it is: its text must stay canonical to the byte.
    return entry.model_dump_json() + (f"{_BREAK}{text}" if text else "")


# ---- the nonces of answered requests -------------------------------------------------------------

_LINE = re.compile(r"([0-9]{1,12}) ([0-9a-f]{32}|-)")
_NO_NONCE = "-"  # beside the time below which everything is refused
_SURPLUS = 4096


class NonceBook:
    """Nonces of the requests whose time is within the window. Thread-safe.

    A nonce is kept for as long as a request with its time would be taken. What is forgotten stays
    refused by its time, even where the clock is set back: the book remembers the latest time that
    it forgot.
    """

    def __init__(self, path: Path, *, max_skew_s: float, now: float) -> None:
        """Open the book.

        Args:
            path: its file.
            max_skew_s: how far a request's time may be from this machine's, either way.
            now: seconds since the epoch.

        Raises:
            WeightBridgeError: the file cannot be used, or is damaged; it is never guessed at.

        """
        self._lock = threading.Lock()
        self._max_skew_s = max_skew_s
        self._floor = 0
        self._times: dict[str, int] = {}
        self._lines = DurableLines(path)
        for line in self._lines.found:
            match = _LINE.fullmatch(line)
            if match is None:
                self._lines.close()
                msg = (
                    f"the nonces in {path} are damaged: {line[:60]!r}, expected a time and a "
                    "nonce. Move the directory away and give both sides a new key."
                )
                raise WeightBridgeError(msg)
            if match[2] == _NO_NONCE:
                self._floor = max(self._floor, int(match[1]))
            else:
                self._times[match[2]] = int(match[1])
        self._forget(now)
        self._rewrite()

    def check_time(self, given: Credentials, *, now: float) -> None:
        """Refuse what is too old, or from the future, before anything else is looked at.

        Raises:
            SignatureRefused: outside of the window.

        """
        if abs(now - given.time) > self._max_skew_s or given.time <= self._floor:
            msg = (
                f"the request's time is {given.time}, expected {now:.0f} +- {self._max_skew_s:g} s "
                "by this machine's clock. Set the clocks of both machines, or send it anew."
            )
            raise SignatureRefused(msg)

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
        with self._lock:
            self.check_time(given, now=now)
            if given.nonce in self._times:
                msg = (
                    f"the request's nonce {given.nonce} was used already, expected a new one: this "
                    "is a replay. Send it with a new signature."
                )
                raise SignatureRefused(msg)
            self._lines.append(f"{given.time} {given.nonce}", sync=sync)
            self._times[given.nonce] = given.time
            self._num_lines += 1
            if self._num_lines > _SURPLUS:
                self._forget(now)
            if self._num_lines > 2 * len(self._times) + _SURPLUS:
                self._rewrite()

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._lines.close()

    def _forget(self, now: float) -> None:
        oldest = now - self._max_skew_s
        gone = [nonce for nonce, time in self._times.items() if time < oldest]
        for nonce in gone:
            self._floor = max(self._floor, self._times.pop(nonce))

    def _rewrite(self) -> None:
        lines = [f"{self._floor} {_NO_NONCE}"]
        lines += [f"{time} {nonce}" for nonce, time in self._times.items()]
        self._lines.rewrite(lines)
        self._num_lines = len(lines)
