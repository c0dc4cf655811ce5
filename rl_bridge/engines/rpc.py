"""Calls from a driver to the ranks of its engine, and the ranks' answers: JSON in, JSON out.

A driver has an `EngineClient`, which numbers its calls: an answer to another call is never taken
for the answer to the last one. Every rank answers every call, a failure too: a rank that raised
would leave the answers of the ranks behind it to the next call. The ranks decide together by what
each of them says to the others, through a `RankGroup`.
"""

import asyncio
import concurrent.futures
import errno
import importlib
import logging
import secrets
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from rl_bridge import errors
from rl_bridge.errors import (
    DeadlineExceeded,
    EngineLost,
    SessionRefused,
    SlotsExhausted,
    TornEngine,
    TransferTimeout,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
    is_shortage,
    require_sendable,
)
from rl_bridge.groups.exchange import gather_bytes

_LOG = logging.getLogger(__name__)

Reply = dict[str, Any]
"""What one rank answers."""
Replies = list[Reply]
"""What all ranks answer, by rank."""

OTHER_RANK = "another rank"
"""How a rank's message begins that only repeats another rank's failure."""

# How often a call under way looks whether its engine is still there.
_LOOK_S = 0.1
# How often a call under way asks a server whether it is there, and how long it waits for an answer.
_HEALTH_EVERY_S = 1.0
_HEALTH_S = 5.0

# Shortages whose type another process can make again from a text alone.
_MADE_OF_TEXT = (WeightBridgeUnavailableError, DeadlineExceeded, SlotsExhausted, TransferTimeout)


# ---- the driver's side --------------------------------------------------------------------------


class EngineClient(ABC):
    """One engine, whatever process it is in. Every call has a deadline."""

    def __init__(self, timeout_s: float) -> None:
        """Give every call `timeout_s` seconds."""
        self.timeout_s = timeout_s
        self.driver = secrets.token_hex(16)
        """The id of the driver that calls; no other driver has the same."""
        self.epoch = 0
        """Of the session that the driver opened last; 0 if it has none."""
        self.is_lost = False
        """Whether the ranks have refused this driver's session since its last commit: another
        driver has the engine, or had it, or the engine was started anew."""
        self.streams: weakref.WeakSet[Any] = weakref.WeakSet()
        """Drivers of the adapters that are brought into the engine through this client."""
        self._calls = 0

    # ---- what each engine has in its own way ----------------------------------------------------

    @abstractmethod
    def call(self, verb: str, payload: Reply, timeout_s: float) -> Replies:
        """Ask all ranks; one reply for each, by rank.

        Raises:
            EngineLost: the engine is gone.
            DeadlineExceeded: it does not answer within `timeout_s`.
            WeightBridgeUnavailableError: its ranks do not have rl_bridge.

        """

    def replicas(self) -> int:
        """How many times the engine has the model, each time on ranks that vote for themselves.

        A call asks the ranks of all replicas, one replica after the other in what it returns.
        """
        return 1

    @abstractmethod
    def pause(self, mode: str | None, *, undoes: bool = False) -> None:
        """Stop scheduling requests; those that come meanwhile wait.

        Args:
            mode: what running requests do, in this engine's words; None: the user has paused the
                engine, and what is frozen stays frozen.
            undoes: requests may run with weights that are about to be undone: whatever the mode,
                none may end with them.

        """

    @abstractmethod
    def resume(self) -> None:
        """Go on."""

    def is_paused(self) -> bool | None:
        """Whether it is stopped, by whomever; None if the engine does not tell."""
        return None

    @abstractmethod
    def drop_caches(self, policy: str | None) -> str:
        """Drop what other weights cached, by a policy of this engine's; None is everything.

        Returned is why some of it was kept; empty if nothing was.
        """

    def label(self) -> str | None:
        """The version label on outputs; None if this engine has none."""
        return None

    def set_label(self, label: str) -> None:  # noqa: B027 - as above
        """Set it."""

    def close(self) -> None:  # noqa: B027 - only some have something to close
        """Close the connection; the engine goes on."""

    # ---- the same for all -----------------------------------------------------------------------

    def ask(self, verb: str, *, within_s: float | None = None, **given: Any) -> Replies:
        """Ask all ranks, in this driver's session.

        Raises:
            EngineLost: the engine is gone, or its answers are to other calls.
            SessionRefused: another driver has the engine.
            WeightBridgeError: a rank failed.

        """
        self._calls += 1
        number = f"{self.driver}-{self._calls}"  # another driver counts from 1 as well
        timeout_s = self.timeout_s if within_s is None else min(within_s, self.timeout_s)
        session = {"driver": self.driver, "epoch": self.epoch}
        payload = {**given, **session, "call": number, "timeout_s": timeout_s}
        replies = self.call(verb, payload, timeout_s)
        for reply in replies:
            if reply.get("call") != number:
                raise EngineLost(
                    f"rank {reply.get('rank')} answers to call {reply.get('call')}, expected "
                    f"{number}: the engine's replies are out of step. Start a fresh engine, and "
                    "install the current version in it before it serves."
                )
        causes = [_failure_in(reply, len(replies)) for reply in replies if not reply["ok"]]
        if causes:
            self.is_lost |= any(isinstance(cause, SessionRefused) for cause in causes)
            raise min(causes, key=_order)
        for reply in replies:
            if "not_told" in reply:
                _LOG.warning(
                    "rank %d: its trainer is not told: %s", reply["rank"], reply["not_told"]
                )
        return replies


def _order(error: Exception) -> tuple[bool, bool, bool]:
    """Of several ranks' failures the gravest comes first.

    A torn rank; then a cause, before a rank that only repeats another rank's; then a refusal,
    before a shortage, after which the update may come again.
    """
    return not isinstance(error, TornEngine), OTHER_RANK in str(error), is_shortage(error)


def _failure_in(reply: Mapping[str, Any], ranks: int) -> Exception:
    """A rank's failure, as the exception that it was if rl_bridge has that type."""
    kind = getattr(errors, str(reply.get("type")), None)
    where = "" if ranks == 1 else f"rank {reply['rank']}: "
    if isinstance(kind, type) and issubclass(kind, WeightBridgeError):
        try:
            return kind(where + reply["message"])
        except TypeError:
            pass  # this type takes more than a text: the general one must do
    return WeightUpdateRejectedError(
        f"{where}{reply['type']}: {reply['message'].rstrip('.')}. The engine's log has the "
        "traceback."
    )


def lost(error: BaseException, doing: str, who: str = "the engine") -> EngineLost:
    """What the caller gets instead of the engine's own error where the engine is gone."""
    return EngineLost(
        f"{who} was lost while it should {doing} ({type(error).__name__}: {error}). Start a fresh "
        "engine, and install the current version in it before it serves."
    )


def too_late(who: str, doing: str, within_s: float) -> DeadlineExceeded:
    """What the caller gets where an answer did not come in time."""
    return DeadlineExceeded(
        f"{who} did not {doing} within {within_s} s. Look at its log; give the adapter a longer "
        "timeout_s if it was only slow."
    )


def refuse_own_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Refuse to block the event loop in which the engine runs."""
    try:
        is_here = asyncio.get_running_loop() is loop
    except RuntimeError:
        return  # no loop runs in this thread, as it should be
    if is_here:
        raise WeightBridgeUnavailableError(
            "update_weights was called in the engine's own event loop, which it would block. "
            "Call `await asyncio.to_thread(executor.update_weights, manifest)`."
        )


def in_thread(action: Callable[[], Any]) -> "concurrent.futures.Future[Any]":
    """Do something that may never end, in a thread that nobody has to wait for."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(action())
            except BaseException as error:  # noqa: BLE001 - raised where the future is read
                future.set_exception(error)

    threading.Thread(target=run, name="rl_bridge-engine-call", daemon=True).start()
    return future


def watch(
    future: "concurrent.futures.Future[Any]",
    timeout_s: float,
    death: Callable[[], str],
    *,
    every_s: float = _LOOK_S,
) -> None:
    """Wait for an answer, within the deadline and as long as there is an engine to give it.

    Engines' own clients wait forever for what an engine was asked before it died.

    Raises:
        TimeoutError: no answer yet.
        ConnectionError: the engine is dead.

    """
    end = time.monotonic() + timeout_s
    while not future.done():
        left = end - time.monotonic()
        # Death is looked for first, then the answer: one that came before the death is not missed.
        gone = death()
        if (gone or left <= 0) and not future.done():
            raise ConnectionError(gone) if gone else TimeoutError
        concurrent.futures.wait([future], max(0.0, min(every_s, left)))


class Server:
    """A server in front of an engine, by its URL. Each request has a deadline."""

    def __init__(
        self,
        url: str,
        timeout_s: float,
        *,
        install: str,
        headers: Mapping[str, str] | None = None,
        health: str = "",
    ) -> None:
        """Prepare the connection; nothing is sent.

        By the route `health` it tells whether its engine lives; empty: it ends with its engine.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"engine={url!r}: expected a server's URL, such as 'http://127.0.0.1:8000'."
            )
        try:
            self._httpx = importlib.import_module("httpx")
        except ImportError as error:
            raise WeightBridgeUnavailableError(
                f"a server's URL needs httpx. Install it: {install}."
            ) from error
        self.codes = self._httpx.codes
        self._url = url.rstrip("/")
        self._health = health
        # Not by a proxy: a driver reaches its engine itself. And no connection is kept open: the
        # server closes what idles, perhaps just when the next request is sent.
        self._client, self._health_client = (
            self._httpx.Client(
                base_url=self._url,
                timeout=timeout,
                headers=headers,
                limits=self._httpx.Limits(max_keepalive_connections=0),
                trust_env=False,
            )
            for timeout in (timeout_s, _HEALTH_S)
        )

    def __str__(self) -> str:
        return self._url

    def send(self, method: str, path: str, doing: str, within_s: float, **request: Any) -> Any:
        """Send a request; the response of httpx, whatever its status.

        Raises:
            DeadlineExceeded: it is not all there in time.
            EngineLost: the server, or the engine behind it, is gone.
            WeightBridgeUnavailableError: this process is short of something; nothing was sent.

        """
        try:
            asked = in_thread(
                lambda: self._client.request(method, path, timeout=within_s, **request)
            )
            # Watched: httpx waits so long for each piece, and a server for an engine that is dead.
            if not concurrent.futures.wait([asked], min(_HEALTH_EVERY_S, within_s)).done:
                watch(asked, within_s, self._death, every_s=_HEALTH_EVERY_S)
            return asked.result()
        except (self._httpx.TimeoutException, TimeoutError) as error:
            raise too_late(f"the server at {self}", doing, within_s) from error
        except (self._httpx.TransportError, ConnectionError) as error:
            if isinstance(error, self._httpx.ConnectError):
                require_sendable(error, f"a request to the server at {self}")
            raise lost(error, doing, f"the server at {self}") from error

    def content(self, reply: Any) -> Any:
        """What a response says: its JSON, or its text if it is none."""
        try:
            return reply.json()
        except ValueError:
            return reply.text

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._client.close()
        self._health_client.close()

    def _death(self) -> str:
        if not self._health:
            return ""
        try:
            reply = self._health_client.get(self._health)
        except self._httpx.ConnectError as error:
            # While it shuts down it keeps what is under way. All else is a shortage on this side.
            is_dead = _errno(error) in {errno.ECONNREFUSED, errno.ECONNRESET}
        except (self._httpx.TransportError, OSError):
            return ""  # busy, or as above; there is a deadline
        else:
            is_dead = reply.status_code == self.codes.SERVICE_UNAVAILABLE
        return "its engine ended" if is_dead else ""


def _errno(error: BaseException) -> int | None:
    """The errno of the operating system's error behind one of httpx's; None if there is none."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno is not None:
            return link.errno
        link = link.__cause__ or link.__context__
    return None


# ---- the ranks' side ----------------------------------------------------------------------------


def failure_reply(error: Exception) -> Reply:
    """A failure, as a rank answers it: type and message.

    A shortage is told as a type that stays one in the driver's process, whatever raised it: that
    the update may come again must not be lost on the way.
    """
    kind, message = type(error).__name__, str(error)
    if is_shortage(error) and type(error) not in _MADE_OF_TEXT:
        if not isinstance(error, WeightBridgeError):
            said = f"{kind}: {message.rstrip('.')}" if message else kind
            message = f"{said}. Free some of it, and try again."
        kind = WeightBridgeUnavailableError.__name__
    return {"ok": False, "type": kind, "message": message}


def clear_frames(error: BaseException) -> None:
    """Drop the tensors in an exception's frames: log records that are kept keep it alive."""
    chain: list[BaseException] = [error]
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        chain += [e for e in (link.__cause__, link.__context__) if e is not None and e not in chain]


class RankGroup:
    """The ranks that compute one model together: what each says, all hear."""

    def __init__(self, rank: int, size: int, process_group: Any = None) -> None:
        """Use a process group of torch's over the CPU; one rank alone needs none."""
        self.rank = rank
        self.size = size
        self.timeout_s = 600.0  # for the others
        self._group = process_group

    def hear(self, text: str) -> list[str]:
        """What every rank says, by rank; all ranks must call it.

        Raises:
            EngineLost: a rank died, or hangs.

        """
        if self.size == 1:
            return [text]
        try:
            said = gather_bytes(
                text.encode(), group=self._group, world_size=self.size, timeout_s=self.timeout_s
            )
        except RuntimeError as error:
            raise EngineLost(
                f"rank {self.rank} cannot ask the others: {error}. Start a fresh engine, and "
                "install the current version in it before it serves."
            ) from error
        return [one.decode() for one in said]

    def vote(self, word: str) -> list[str]:
        """What every rank says; one that cannot ask the others takes that for a no."""
        try:
            return self.hear(word)
        except EngineLost:
            _LOG.exception("rank %d cannot ask the others", self.rank)
            return ["no"]
