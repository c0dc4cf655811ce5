"""What an acknowledged update leaves behind, and how its phases are timed."""

import logging
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rl_bridge.installers.base import InstallProof

__all__ = ["Acknowledgement", "PhaseClock", "add_note", "describe", "peak_rss_nbytes"]

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """What an acknowledged update left behind.

    Attributes:
        update_id: the update.
        weight_version: its version.
        root: its root; with the proof it says which bytes the engine holds.
        proof: what was found in the engine.
        timings_ms: phase -> milliseconds: attach, verify, prepare, install, prove,
            resume, total; engines tell more apart (pause, cache, label). All but the total add up
            to it, but for what lies between them.
        total_nbytes: bytes of the update.
        peak_rss_nbytes: this process's peak resident memory so far.

    """

    update_id: str
    weight_version: int
    root: str
    proof: InstallProof
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    total_nbytes: int = 0
    peak_rss_nbytes: int = 0


class PhaseClock:
    """Milliseconds of each phase."""

    def __init__(self) -> None:
        """Start with no phase."""
        self.timings_ms: dict[str, float] = {}
        self._split: set[str] = set()

    def run(self, phase: str, action: Callable[[], T]) -> T:
        """Time `action` as `phase`, also if it fails."""
        start = time.perf_counter()
        try:
            return action()
        finally:
            self._add(phase, (time.perf_counter() - start) * 1e3)

    def leave(self, name: str) -> None:
        """A phase of this name was told already: `split` leaves it where it is."""
        self._split.add(name)

    def split(self, phase: str, inner: Mapping[str, float]) -> None:
        """Tell phases inside of `phase` apart from it, each once: all together stay its time."""
        for name, ms in inner.items():
            if name not in self._split:
                self._split.add(name)
                self._add(name, ms)
                self._add(phase, -ms)

    def _add(self, phase: str, ms: float) -> None:
        self.timings_ms[phase] = self.timings_ms.get(phase, 0.0) + ms


def add_note(error: BaseException, note: str) -> None:
    """Say with an error what was done about it; an error that takes no notes goes without."""
    try:
        error.add_note(f"rl_bridge: {note}")
    except Exception:  # noqa: BLE001 - the user's own exception must come out all the same
        _LOG.info("%s (%s takes no notes)", note, type(error).__name__)


def describe(error: BaseException) -> str:
    """Type and text of an error, on one line."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the user's own exception: its type must do
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def peak_rss_nbytes() -> int:
    """Peak resident memory of this process (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
