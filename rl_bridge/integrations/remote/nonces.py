"""Which requests were answered already: a nonce counts once, also over a restart."""

import re
import threading
from pathlib import Path

from rl_bridge.errors import SignatureRefused, WeightBridgeError
from rl_bridge.integrations.remote.durable import DurableLines
from rl_bridge.integrations.remote.signing import Credentials

__all__ = ["NonceBook"]

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
