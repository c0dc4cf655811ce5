"""Steps: a run's versions as directories ``step_N``, for orchestrators that know nothing of us.

They look for a marker in ``step_N``, and load the files beside it. prime-rl has had two protocols:
the marker ``STABLE``, and since August 2026 a handshake in four stages (its pull request 3357). The
weights are written once; a step is links to a version's files.

    run1/
        0000000005-3f1c0a9be2d4/        version 5, as in `rl_bridge.transports.files.directory`
        step_5 -> 0000000005-...        "stable": the whole of it is a link

        step_5/                         "stages":
            .sender_ready               the trainer offers version 5, and waits
            .receiver_ready             from the orchestrator, which waits from now on
            .started                    the trainer writes the version
            model.safetensors           and each other file: a link to the version's
            .finished                   a link to the version's own marker

**One marker.** The links are made before the version has its marker, and ``step_5/STABLE`` or
``step_5/.finished`` is that marker. So a version and its step appear in one instant, and where the
version goes nobody finds a marker of its step.

**An attempt is a directory.** Each offer makes a new one, and one that is taken back is renamed
away with all its markers. A receiver of ours holds the directory open that it answered in, so it
takes no attempt for another one, and the markers can be empty files as prime-rl's are.

**What a killed trainer left is not believed.** The next one takes back, as it opens the directory,
each step that is not finished: nobody will finish it. Before it offers step N it takes back all
from N on: they are of a life of the training that went further. Steps below N stay, for they are
what it goes on from.
"""

import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Self

from rl_bridge.errors import DeadlineExceeded, WeightBridgeError, WeightBridgeUnavailableError
from rl_bridge.memory.durable import sync_folder, write_durably
from rl_bridge.transports.base import checked_seconds
from rl_bridge.transports.files.store import MARKER, FileContent

__all__ = [
    "LOOK_S",
    "Handshake",
    "StepReceiver",
    "Steps",
    "receive_step",
    "step_folder",
    "take_back_from",
    "take_back_of",
]

_LOG = logging.getLogger(__name__)

Handshake = Literal["stable", "stages"]
"""Which protocol: a marker alone, or four stages."""

_SENDER_READY, _RECEIVER_READY = ".sender_ready", ".receiver_ready"
_STARTED, _FINISHED = ".started", ".finished"
_MARKERS = (_FINISHED, MARKER, _STARTED, _SENDER_READY, _RECEIVER_READY)
_STEP = re.compile(r"^step_(\d+)$")
LOOK_S = 0.05
"""Between two looks for a marker."""


def step_folder(root: Path, step: int) -> Path:
    """The directory of a step."""
    return root / f"step_{step}"


# ---- the trainer's side --------------------------------------------------------------------------


class Steps:
    """The steps of a directory's only publisher.

    Where the directory cannot be written, a method raises WeightBridgeUnavailableError.
    """

    def __init__(
        self,
        root: Path,
        handshake: Handshake,
        timeout_s: float,
        is_superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take back what an earlier publisher began; this one has the right to publish.

        Args:
            root: the run's directory.
            handshake: by which protocol.
            timeout_s: how long a receiver is waited for.
            is_superseded: whether another publisher has taken this one's place: then steps are its.

        """
        self._is_superseded = is_superseded
        self._name = ""  # of the version that the offered step links to
        self._attempt = -1  # the directory of the offered step, open; so no other is taken for it
        self._root, self._handshake, self._timeout_s = root, handshake, timeout_s
        self._offered: Path | None = None
        with _told(root):
            for path in root.glob(".step_*-*"):
                shutil.rmtree(path, ignore_errors=True)
            for _, folder in _steps_in(root):
                if not _is_finished(folder):
                    _take_back(folder)

    @contextmanager
    def offered(self, step: int, pause: Callable[[float], None]) -> Iterator[None]:
        """Offer a version, and take it back where the block fails, which publishes it.

        Args:
            step: the version.
            pause: waits for so many seconds; what it raises ends the offer.

        Raises:
            DeadlineExceeded: no receiver was ready in time.

        """
        folder = step_folder(self._root, step)
        take_back_from(self._root, step)
        if folder.exists():
            raise _no_step(folder, "it holds more than links and markers")
        self._offered = folder
        try:
            if self._handshake == "stages":
                self._await_receiver(folder, step, pause)
            yield
        except BaseException:
            self.withdraw()
            raise

    def _await_receiver(self, folder: Path, step: int, pause: Callable[[float], None]) -> None:
        with _told(folder):
            folder.mkdir()
            self._attempt = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            sync_folder(self._root)
            _mark(folder, _SENDER_READY)
        until = time.monotonic() + self._timeout_s
        while not (folder / _RECEIVER_READY).exists():
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"version {step} was not published: {folder} was offered for "
                    f"{self._timeout_s:g} s, expected {_RECEIVER_READY} in it, got "
                    f"{_markers_in(folder)}. See to the orchestrator, or give it more "
                    "ready_timeout_s, then publish again."
                )
            pause(min(LOOK_S, left_s))
        with _told(folder):
            _mark(folder, _STARTED)

    def linked(self, name: str, files: Iterable[FileContent]) -> Iterator[FileContent]:
        """Pass on what is written into the offered version; make the links behind the last file."""
        folder = self._offered
        assert folder is not None  # as it is being published
        written = []
        for file, pieces in files:
            yield file, pieces
            written.append(file)
        # The files are on disk by now, and the marker is not, so the links say nothing yet.
        self._name = name
        if self._handshake == "stable":
            folder.symlink_to(name)
        elif not self._is_own(folder):
            raise _no_step(folder, "another trainer took back what this one offered there")
        else:
            for file in written:
                (folder / file).symlink_to(Path("..", name, file))
            sync_folder(folder)
            (folder / _FINISHED).symlink_to(Path("..", name, MARKER))
            sync_folder(folder)
        sync_folder(self._root)

    def commit(self) -> None:
        """The version has its marker: the step stands as long as the version does."""
        self._forget()

    def withdraw(self) -> None:
        """Take back what is offered, if anything is. What fails is logged: it is not finished.

        A step of that number may be another trainer's by now, which has this one's place: it stays.
        """
        folder = self._offered
        try:
            if folder is not None and self._is_own(folder) and not self._is_superseded():
                _take_back(folder)
        except (OSError, WeightBridgeError):
            _LOG.exception("%s was not taken back", folder)
        finally:
            self._forget()

    def _forget(self) -> None:
        attempt, self._attempt = self._attempt, -1
        self._offered, self._name = None, ""
        if attempt >= 0:
            os.close(attempt)

    def _is_own(self, folder: Path) -> bool:
        """Whether a step is the one that this publisher offers now."""
        if self._attempt >= 0:
            return _is_at(folder, self._attempt)
        return bool(self._name) and folder.is_symlink() and folder.readlink() == Path(self._name)


def take_back_from(root: Path, first: int) -> None:
    """Take back all steps from one on. In a directory that has more than links, its markers go."""
    with _told(root):
        for step, folder in _steps_in(root):
            if step >= first:
                _take_back(folder)


def take_back_of(root: Path, name: str) -> None:
    """Take back the step of a version that goes, if it has one; best effort: its marker goes."""
    folder = step_folder(root, int(name.partition("-")[0]))
    is_link = folder.is_symlink()
    with suppress(OSError):  # no link: there is no step, or none of ours
        target = (folder if is_link else folder / _FINISHED).readlink()
        if (target if is_link else target.parent).name == name:
            _take_back(folder)


def _take_back(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
        sync_folder(folder.parent)
    elif _is_view(folder):  # in one move, so that no marker outlives another one
        aside = folder.with_name(f".{folder.name}-{secrets.token_hex(8)}")
        folder.rename(aside)
        sync_folder(folder.parent)
        shutil.rmtree(aside, ignore_errors=True)
    elif folder.is_dir():
        for marker in _MARKERS:
            (folder / marker).unlink(missing_ok=True)
        sync_folder(folder)


def _steps_in(root: Path) -> list[tuple[int, Path]]:
    if not root.exists():
        return []
    found = [(_STEP.match(path.name), path) for path in root.iterdir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def _is_view(folder: Path) -> bool:
    """Whether a step has nothing but links and markers."""
    if folder.is_symlink():
        return True
    return folder.is_dir() and all(
        path.is_symlink() or path.name in _MARKERS for path in folder.iterdir()
    )


def _is_finished(folder: Path) -> bool:
    return (folder / MARKER).exists() or (folder / _FINISHED).exists()


def _mark(folder: Path, marker: str) -> None:
    write_durably(folder / marker, [])
    sync_folder(folder)


def _markers_in(folder: Path) -> str:
    found = [marker for marker in reversed(_MARKERS) if (folder / marker).exists()]
    return ", ".join(found) or "no marker"


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Name the directory where it cannot be written."""
    try:
        yield
    except OSError as error:
        raise _no_step(folder, error.strerror or str(error)) from error


def _no_step(folder: Path, cause: str) -> WeightBridgeUnavailableError:
    return WeightBridgeUnavailableError(
        f"{folder} cannot be a step: {cause}. Move away what is there, or name a directory that "
        "this user may write to."
    )


# ---- the orchestrator's side ---------------------------------------------------------------------


def receive_step(folder: str | os.PathLike[str], *, timeout_s: float) -> Path:
    """Take a version in four stages: say that this side is ready, and wait until all of it is here.

    Attempts of a trainer that was killed are left behind: then the next one's offer is awaited.

    Args:
        folder: of the step, such as ``run1/step_5``; the trainer makes it.
        timeout_s: how long offer and version are waited for, together.

    Returns:
        the directory, with the files of a checkpoint.

    Raises:
        DeadlineExceeded: it was not offered, or not finished in time.
        WeightBridgeUnavailableError: the directory cannot be written.

    """
    with StepReceiver(folder, timeout_s=timeout_s) as receiver:
        while not receiver.look():
            time.sleep(LOOK_S)
    return receiver.folder


class StepReceiver:
    """`receive_step`, look by look, for those who wait in their own way. It raises the same."""

    def __init__(self, folder: str | os.PathLike[str], *, timeout_s: float) -> None:
        """Begin; nothing is answered yet."""
        self.folder, self._timeout_s = Path(folder), checked_seconds("timeout_s", timeout_s)
        self._until = time.monotonic() + timeout_s
        self._attempt = -1  # the directory that was answered in, open

    def look(self) -> bool:
        """Answer an offer, or see whether what was answered is finished.

        Raises:
            DeadlineExceeded: it is too late.

        """
        with _told(self.folder):
            if self._attempt < 0:
                self._attempt = _answered(self.folder)
            if self._attempt >= 0:
                is_finished = _has(self._attempt, _FINISHED)
                if not _is_at(self.folder, self._attempt):  # taken back
                    self.close()
                elif is_finished:
                    return True
        if time.monotonic() >= self._until:
            expected = _SENDER_READY if self._attempt < 0 else _FINISHED
            raise DeadlineExceeded(
                f"{self.folder} was waited for, {self._timeout_s:g} s: expected {expected} in it, "
                f"got {_markers_in(self.folder)}. See to the trainer, or pass a longer timeout."
            )
        return False

    def close(self) -> None:
        """Stop looking. Idempotent."""
        attempt, self._attempt = self._attempt, -1
        if attempt >= 0:
            os.close(attempt)

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Stop looking."""
        self.close()


def _answered(folder: Path) -> int:
    """Answer an offer; returns the open directory of the attempt, -1 where there is no offer."""
    try:
        attempt = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        if _has(attempt, _SENDER_READY):
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            os.close(os.open(_RECEIVER_READY, flags, 0o644, dir_fd=attempt))
            found, attempt = attempt, -1
            return found
    except FileNotFoundError:  # taken back meanwhile
        pass
    finally:
        if attempt >= 0:
            os.close(attempt)
    return -1


def _has(attempt: int, marker: str) -> bool:
    try:
        os.stat(marker, dir_fd=attempt)
    except FileNotFoundError:
        return False
    return True


def _is_at(folder: Path, attempt: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(attempt))
    except FileNotFoundError:
        return False
