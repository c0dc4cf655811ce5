"""How the ranks of an update group talk: each gives some bytes and gets those of all, in time.

JSON text travels; nothing is unpickled. The user chooses the way: the key-value store of
torch.distributed, a process group, or a function of the user's own.

A publication is a round (`Rounds`). If there is a store, the first verdict that arrives in it ends
the round for every rank, and the next round begins; without a store each rank's own verdict holds
for itself. A store may block without a limit, so a thread of its own asks it, and no deadline is
missed.
"""

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rl_bridge.errors import GroupAborted, WeightBridgeUnavailableError
from rl_bridge.installers.base import require_plain
from rl_bridge.transports.base import checked_seconds

Store = torch._C._distributed_c10d.Store  # noqa: SLF001 - what torch.distributed shows without exporting it
"""A store of torch.distributed, such as a ``TCPStore``."""

_POLL_S = 0.002
# For a last look when the time is up.
_LAST_S = 1.0
# Rounds whose keys stay: a slow rank may still read those of the one before.
_KEPT_ROUNDS = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """A store of torch.distributed, and how one group uses it.

    Attributes:
        store: such as a ``TCPStore``, the same one on every rank. Its process must outlive the
            ranks: if it ends or hangs, every publication fails.
        name: of the group; two groups that share a store need two.
        timeout_s: how long the store may take to answer before and after the steps, which have
            limits of their own.

    Raises:
        TypeError: a limit that is no number.
        ValueError: one that is not above 0.

    """

    store: Store
    name: str = "rl_bridge"
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        checked_seconds("timeout_s", self.timeout_s)


def not_together(step: str, rank: int, what: str) -> str:
    """Message of a step to which not all ranks came."""
    return (
        f"rank {rank}: the ranks did not come together in step {step!r}: {what}. See to it that "
        "every rank takes part, then publish a later version."
    )


class Rounds:
    """The rounds of one group in a store, as one rank sees them.

    The store is asked with a deadline: it may be gone, or hang.
    """

    def __init__(self, options: StoreOptions, rank: int) -> None:
        self.store = options.store
        self._rank = rank
        self._name = options.name
        self._timeout_s = options.timeout_s
        self._round = 0
        self._given: list[tuple[int, str]] = []
        self._questions: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[Any] | None = None
        self._is_late = False

    def begin(self) -> None:
        """Join the round that the other ranks are in.

        Raises:
            GroupAborted: the store is gone or hangs.

        """
        self._round = self.ask("begin", lambda: self._current(0), self._timeout_s)
        old = [key for at, key in self._given if at <= self._round - _KEPT_ROUNDS]
        self._given = [(at, key) for at, key in self._given if at > self._round - _KEPT_ROUNDS]
        for key in old:
            self.ask("begin", partial(self.store.delete_key, key), self._timeout_s)

    def decide(self, verdict: str) -> str:
        """The first verdict that arrives holds for all.

        Raises:
            GroupAborted: the store is gone or hangs, or forgot the verdict: this rank came back
                after the others had been through several rounds.

        """
        return self.ask("verdict", lambda: self._decided(verdict), self._timeout_s)

    def _decided(self, verdict: str) -> str:
        key, this = self.key("verdict"), self._round
        # Looked up first: a verdict is forgotten only after the rounds that follow it.
        is_over = self._current(this) > this
        if is_over and not self.store.check([key]):
            raise GroupAborted(
                not_together(
                    "verdict", self._rank, "the others went on without it, and forgot the end"
                )
            )
        found: str = self.store.compare_set(key, "", verdict).decode()
        self._given.append((this, key))
        self.store.compare_set(f"{self._name}/round", str(this), str(this + 1))
        return found

    def _current(self, first: int) -> int:
        """The round that the group is in."""
        return int(self.store.compare_set(f"{self._name}/round", "", str(first)))

    def key(self, what: str) -> str:
        """Name of something of this round in the store."""
        return f"{self._name}/{self._round}/{what}"

    def put(self, step: str, key: str, text: str, timeout_s: float) -> None:
        """Put a text of this round there; forgotten some rounds later.

        Raises:
            GroupAborted: the store is gone or hangs.

        """
        self.ask(step, lambda: self.store.set(key, text), timeout_s)
        self._given.append((self._round, key))

    def ask(self, step: str, question: Callable[[], T], timeout_s: float) -> T:
        """Ask the store, which blocks for ever if its process hangs.

        A question that missed its deadline goes on in the thread: until it has ended, further ones
        are refused at once.
        """
        before, future = self._last, Future[T]()
        if before is not None and not before.done():
            # One that an interrupt left may be about to end.
            self._wait(step, before, 0.0 if self._is_late else timeout_s)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_answer, args=(self._questions,), name="rl_bridge asking", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._questions.put, None).atexit = False
        self._last = future
        self._questions.put((future, question))
        self._wait(step, future, timeout_s)
        try:
            return future.result()
        except GroupAborted:
            raise
        except (RuntimeError, ValueError) as error:
            raise GroupAborted(not_together(step, self._rank, f"the store: {error}")) from error

    def _wait(self, step: str, future: "Future[T]", timeout_s: float) -> None:
        answered = threading.Event()
        future.add_done_callback(lambda _: answered.set())
        self._is_late = not answered.wait(max(0.0, timeout_s))
        if self._is_late:
            what = (
                f"the store did not answer within {timeout_s:.1f} s: see whether its process runs"
            )
            raise GroupAborted(not_together(step, self._rank, what))


def _answer(questions: "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
    while (one := questions.get()) is not None:
        future, question = one
        try:
            future.set_result(question())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            future.set_exception(error)
        del one, future, question  # else they would live until the next question


class GroupExchange(ABC):
    """One rank's way to the others. Every rank makes the same calls in the same order.

    Attributes:
        rank: of this process, counted from 0.
        world_size: how many ranks.
        rounds: decides how publications end; None: each rank decides for itself.

    """

    rounds: Rounds | None

    def __init__(
        self, rank: int, world_size: int, store: Store | StoreOptions | None = None
    ) -> None:
        """Be one of `world_size` ranks.

        Args:
            rank: of this process.
            world_size: how many ranks.
            store: decides how publications end, for all ranks; the same one on each. None: each
                rank decides for itself.

        Raises:
            ValueError: `rank` is none of them.

        """
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank {rank} of world_size {world_size}: expected 0 <= rank < world_size."
            )
        self.rank = rank
        self.world_size = world_size
        if store is not None and not isinstance(store, StoreOptions):
            store = StoreOptions(store)
        self.rounds = None if store is None else Rounds(store, rank)

    def begin(self) -> None:
        """A new publication begins.

        Raises:
            GroupAborted: the store is gone or hangs.

        """
        if self.rounds is not None:
            self.rounds.begin()

    @abstractmethod
    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Give `payload` and get those of all ranks, by rank.

        Raises:
            GroupAborted: not all of them came in time; it names the ranks, if it can.

        """

    def decide(self, verdict: str) -> str:
        """Propose how the publication ends; returns the verdict that holds for every rank.

        The first proposal that arrives in the store holds. Without a store, the rank's own does.

        Raises:
            GroupAborted: the store is gone or hangs.

        """
        return verdict if self.rounds is None else self.rounds.decide(verdict)


class FunctionExchange(GroupExchange):
    """Over a function of the user's own."""

    def __init__(
        self,
        function: Callable[[bytes, float], Sequence[bytes]],
        *,
        rank: int,
        world_size: int,
        store: Store | StoreOptions | None = None,
    ) -> None:
        """Use `function`.

        Args:
            function: takes this rank's bytes and a limit in seconds; returns all ranks' bytes, by
                rank, or raises when the time is up.
            rank: of this process.
            world_size: how many ranks.
            store: as for `GroupExchange`.

        Raises:
            ValueError: `rank` is none of them.
            TypeError: a coroutine function.

        """
        require_plain(function, "function")
        super().__init__(rank, world_size, store)
        self._function = function

    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Call the function."""
        try:
            found = list(self._function(payload, timeout_s))
        except Exception as error:
            raise GroupAborted(
                not_together(step, self.rank, f"{type(error).__name__}: {error}")
            ) from error
        if len(found) != self.world_size or found[self.rank] != payload:
            what = f"the function gave {len(found)} payloads, or wrong ones"
            raise GroupAborted(not_together(step, self.rank, what))
        return found


class ProcessGroupExchange(GroupExchange):
    """Over a torch.distributed process group whose backend moves CPU tensors, such as gloo.

    If a rank dies or is late, torch.distributed gives up the process group: make a new one.
    """

    def __init__(
        self,
        group: "dist.ProcessGroup | None" = None,
        *,
        store: Store | StoreOptions | None = None,
    ) -> None:
        """Use `group`.

        Args:
            group: of all ranks; None: the default one.
            store: as for `GroupExchange`.

        Raises:
            WeightBridgeUnavailableError: the backend moves no CPU tensors.

        """
        backend = dist.get_backend(group)
        # One backend, or one for each kind of device: "cpu:gloo,cuda:nccl".
        if backend == "nccl" or (":" in backend and "cpu:" not in backend):
            # It would fail in the first publication, and lose the process group.
            raise WeightBridgeUnavailableError(
                f"the process group's backend is {backend!r}, which moves no CPU tensors, and what "
                "the ranks tell each other is text. Pass "
                'group=dist.new_group(backend="gloo").'
            )
        super().__init__(dist.get_rank(group), dist.get_world_size(group), store)
        self._group = group
        self._is_lost = False

    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Gather the sizes, then the bytes."""
        if self._is_lost:
            # A late message would be taken for an answer in this step.
            raise GroupAborted(
                f"rank {self.rank}: the process group of this exchange broke off before, in a step "
                "to which not all ranks came in time. Make a new process group and a new exchange "
                "over it on every rank, then publish a later version."
            )
        try:
            return gather_bytes(
                payload, group=self._group, world_size=self.world_size, timeout_s=timeout_s
            )
        except RuntimeError as error:
            self._is_lost = True
            # (torch's text has a dump of its frames behind the first line, and names no rank.)
            cause = str(error).partition("\n")[0].rstrip(".")
            what = (
                f"one of them died or was late ({cause}). The process group is lost: make a new "
                "one. An exchange over a store names the rank (StoreExchange)"
            )
            raise GroupAborted(not_together(step, self.rank, what)) from error
        except BaseException:
            self._is_lost = True
            raise


def gather_bytes(payload: bytes, *, group: Any, world_size: int, timeout_s: float) -> list[bytes]:
    """What each rank of a process group of the CPU gives, by rank; all ranks must call it.

    Raises:
        RuntimeError: a rank died, or did not come in time; the group is lost then.

    """
    limit = timedelta(seconds=timeout_s)
    size = torch.tensor([len(payload)], dtype=torch.int64, device="cpu")
    sizes = [torch.zeros_like(size) for _ in range(world_size)]
    _wait(dist.all_gather(sizes, size, group=group, async_op=True), limit)
    room = max(1, *(int(one.item()) for one in sizes))
    mine = torch.zeros(room, dtype=torch.uint8, device="cpu")
    if payload:
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    found = [torch.zeros_like(mine) for _ in range(world_size)]
    _wait(dist.all_gather(found, mine, group=group, async_op=True), limit)
    return [one[: int(num.item())].numpy().tobytes() for one, num in zip(found, sizes, strict=True)]


def _wait(work: "dist.Work | None", limit: timedelta) -> None:
    if work is not None and not work.wait(limit):
        raise RuntimeError("the collective did not end in time")


class StoreExchange(GroupExchange):
    """Over a store of torch.distributed, which also decides for all how a publication ends."""

    rounds: Rounds

    def __init__(self, store: Store | StoreOptions, *, rank: int, world_size: int) -> None:
        """Use `store`.

        Args:
            store: a ``TCPStore``, for instance; the same one on each rank.
            rank: of this process.
            world_size: how many ranks.

        Raises:
            ValueError: `rank` is none of them.

        """
        super().__init__(rank, world_size, store)

    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Put one's own bytes, wait for all; a round that another rank ended is over at once."""
        rounds, verdict = self.rounds, self.rounds.key("verdict")
        keys = [rounds.key(f"{step}/{rank}") for rank in range(self.world_size)]
        # A store takes text; JSON is ASCII, and any other bytes come through as well.
        rounds.put(step, keys[self.rank], payload.decode("latin-1"), timeout_s)
        found, end = self._wait_for(step, keys, verdict, timeout_s)
        late = tuple(rank for rank, text in enumerate(found) if text is None)
        if late and end is not None:
            raise GroupAborted(not_together(step, self.rank, f"another rank ended it: {end}"))
        if late:
            raise GroupAborted(not_together(step, self.rank, f"no answer from ranks {late}"), late)
        try:
            return [str(text).encode("latin-1") for text in found]
        except ValueError as error:
            raise GroupAborted(not_together(step, self.rank, str(error))) from error

    def _wait_for(
        self, step: str, keys: Sequence[str], verdict: str, timeout_s: float
    ) -> tuple[list[str | None], str | None]:
        """Wait until all keys are there, or the verdict, or the time is up; what is there then."""
        end, pause, store = time.monotonic() + timeout_s, threading.Event(), self.rounds.store

        def ask(question: Callable[[], T]) -> T:
            return self.rounds.ask(step, question, max(end - time.monotonic(), _LAST_S))

        def has(*wanted: str) -> bool:
            return ask(lambda: bool(store.check(list(wanted))))

        while not has(*keys) and not has(verdict) and time.monotonic() < end:
            # The store's own wait prints a line to the terminal each time that it times out.
            pause.wait(_POLL_S)
        # When another rank has decided, all ranks may have come by now.
        wanted = [*keys, verdict]
        *found, ended = ask(
            lambda: [store.get(key).decode() if store.check([key]) else None for key in wanted]
        )
        return found, ended
