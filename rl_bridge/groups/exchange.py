"""How the ranks of an update group talk: each gives some bytes and gets those of all, in time.

What travels is JSON text; nothing is unpickled. Which way it travels is the user's choice: the
key-value store of torch.distributed, a process group, or a function of his own. How a publication
ends is settled for all ranks at once only where there is a store to note it in.
"""

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch
import torch.distributed as dist

from rl_bridge.errors import DeadlineExceeded, GroupAborted, WeightBridgeUnavailableError

__all__ = [
    "Asking",
    "FunctionExchange",
    "GroupExchange",
    "ProcessGroupExchange",
    "Rounds",
    "Store",
    "StoreExchange",
    "not_together",
]

# ---- Asking something that may never answer: in a thread of its own, so that no deadline is
# missed.

T = TypeVar("T")
_Question = tuple["Future[object]", Callable[[], object]]


class Asking:
    """One question at a time, to whatever blocks without a limit of its own.

    A question that got no answer in time stays on its way: until it has one, the next ones are
    refused at once.
    """

    def __init__(self, what: str) -> None:
        """Ask `what`, which messages name. The thread begins with the first question."""
        self._what = what
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._last: Future[object] | None = None
        self._is_late = False
        self._thread: threading.Thread | None = None

    def ask(self, question: Callable[[], T], timeout_s: float) -> T:
        """The answer, or what asking for it raises.

        Raises:
            DeadlineExceeded: there is none within `timeout_s`, or not yet one to the last question.

        """
        before, future = self._last, Future[object]()
        if before is not None and not before.done():
            # (An interrupt leaves a question that is about to be answered.)
            self._wait(before, 0.0 if self._is_late else timeout_s)
        if self._thread is None:
            self._begin()
        self._last = future
        self._questions.put((future, question))
        self._wait(future, timeout_s)
        return future.result()  # type: ignore[return-value]  # what the question gave

    def _wait(self, future: "Future[object]", timeout_s: float) -> None:
        answered = threading.Event()
        future.add_done_callback(lambda _: answered.set())
        self._is_late = not answered.wait(max(0.0, timeout_s))
        if self._is_late:
            msg = (
                f"{self._what} did not answer within {timeout_s:.1f} s. See whether its process "
                "runs, then try again."
            )
            raise DeadlineExceeded(msg)

    def _begin(self) -> None:
        self._thread = threading.Thread(
            target=_answer, args=(self._questions,), name="rl_bridge asking", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._questions.put, None).atexit = False


def _answer(questions: "SimpleQueue[_Question | None]") -> None:
    while (one := questions.get()) is not None:
        future, question = one
        try:
            future.set_result(question())
        except BaseException as error:  # noqa: BLE001 - raised where it was asked
            future.set_exception(error)
        del one, future, question  # else they would live until the next one comes


# ---- How a group's publications end: noted once in a store of torch.distributed, the same for
# all.
#
# A publication is a round. The first verdict that arrives in the store ends it, for every rank;
# then the next round begins.

# Rounds whose keys stay: a slow rank may still read those of the one before.
_KEPT_ROUNDS = 2


def not_together(step: str, rank: int, what: str) -> str:
    """What to say where the ranks did not come together."""
    return (
        f"rank {rank}: the ranks did not come together in step {step!r} of a group's publication: "
        f"{what}. This rank has withdrawn its part. See to it that every rank publishes, then "
        "publish a later version."
    )


class Rounds:
    """The rounds of one group in a store, as one rank sees them.

    The store is asked with a deadline: it may be gone, or hang.
    """

    def __init__(
        self,
        store: "torch._C._distributed_c10d.Store",
        *,
        rank: int,
        name: str,
        timeout_s: float,
    ) -> None:
        """Use `store`.

        Args:
            store: a ``TCPStore``, for instance.
            rank: of this process.
            name: of the group; two groups that share a store need two.
            timeout_s: how long the store may take to answer.

        Raises:
            ValueError: a limit that is not above 0.

        """
        if not timeout_s > 0:
            msg = f"timeout_s={timeout_s!r}: expected a number of seconds above 0."
            raise ValueError(msg)
        self.store = store
        self.asking = Asking("the store of the group")
        self._rank = rank
        self._name = name
        self._timeout_s = timeout_s
        self._round = 0
        self._given: list[tuple[int, str]] = []

    def begin(self) -> None:
        """Join the round that the others are in: one that was decided is over.

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
        # Asked first: verdicts are forgotten only behind the rounds that follow them.
        is_over = self._current(this) > this
        if is_over and not self.store.check([key]):
            msg = not_together(
                "verdict", self._rank, "the others went on without it, and forgot the end"
            )
            raise GroupAborted(msg)
        found: str = self.store.compare_set(key, "", verdict).decode()
        self._given.append((this, key))
        self.store.compare_set(f"{self._name}/round", str(this), str(this + 1))
        return found

    def _current(self, first: int) -> int:
        """The round that the group is in."""
        return int(self.store.compare_set(f"{self._name}/round", "", str(first)))

    def key(self, what: str) -> str:
        """What something of this round is called in the store."""
        return f"{self._name}/{self._round}/{what}"

    def put(self, step: str, key: str, text: str, timeout_s: float) -> None:
        """Put a text of this round there; forgotten some rounds later.

        Raises:
            GroupAborted: the store is gone or hangs.

        """
        self.ask(step, lambda: self.store.set(key, text), timeout_s)
        self._given.append((self._round, key))

    def ask(self, step: str, question: Callable[[], T], timeout_s: float) -> T:
        """Ask the store, which blocks without a limit where its process hangs.

        Raises:
            GroupAborted: it is gone, or does not answer in time.

        """
        try:
            return self.asking.ask(question, timeout_s)
        except GroupAborted:
            raise
        except (RuntimeError, ValueError) as error:
            msg = not_together(step, self._rank, f"the store: {error}")
            raise GroupAborted(msg) from error


# ---- the rest builds on the parts above

Store = torch._C._distributed_c10d.Store  # noqa: SLF001 - what torch.distributed shows without exporting it
"""A store of torch.distributed, such as a ``TCPStore``."""

_POLL_S = 0.002
# For a question that comes when the time is up already.
_LAST_S = 1.0
_NAME = "rl_bridge"
_TIMEOUT_S = 30.0


class GroupExchange(ABC):
    """One rank's way to the others. Every rank makes the same calls in the same order.

    Attributes:
        rank: of this process, counted from 0.
        world_size: how many ranks.
        rounds: where it is noted how publications end; None: nowhere.

    """

    def __init__(self, rank: int, world_size: int, rounds: Rounds | None = None) -> None:
        """Be one of `world_size` ranks.

        Raises:
            ValueError: `rank` is none of them.

        """
        if not 0 <= rank < world_size:
            msg = f"rank {rank} of world_size {world_size}: expected 0 <= rank < world_size."
            raise ValueError(msg)
        self.rank = rank
        self.world_size = world_size
        self.rounds = rounds

    def begin(self) -> None:
        """A new publication begins.

        Raises:
            GroupAborted: the store is gone or hangs.

        """
        if self.rounds is not None:
            self.rounds.begin()

    @abstractmethod
    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Give `payload` and get everybody's, by rank.

        Raises:
            GroupAborted: not all of them came in time; it names the ranks, if it can.

        """

    def decide(self, verdict: str) -> str:
        """Propose how the publication ends; returns what holds for every rank.

        The first proposal that arrives in the store. Without one, each rank's own holds for itself.

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
        store: Store | None = None,
        name: str = _NAME,
        store_timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """Use `function`.

        Args:
            function: takes this rank's bytes and a limit in seconds; returns all ranks' bytes, by
                rank, or raises when the time is up.
            rank: of this process.
            world_size: how many ranks.
            store: where it is noted how publications end, once for all ranks; the same one on each.
                None: each rank's own end holds for itself.
            name: of the group in the store; two groups that share one need two.
            store_timeout_s: how long the store may take to answer.

        Raises:
            ValueError: `rank` is none of them, or a limit that is not above 0.

        """
        super().__init__(rank, world_size, _rounds(store, rank, name, store_timeout_s))
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

    Where a rank dies, or is late, the group is lost, as torch.distributed has it: make a new one.
    """

    def __init__(
        self,
        group: "dist.ProcessGroup | None" = None,
        *,
        store: Store | None = None,
        name: str = _NAME,
        store_timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """Use `group`.

        Args:
            group: of all ranks; None: the default one.
            store: where it is noted how publications end, once for all ranks; the same one on each.
                None: each rank's own end holds for itself.
            name: of the group in the store; two groups that share one need two.
            store_timeout_s: how long the store may take to answer.

        Raises:
            WeightBridgeUnavailableError: the backend moves no CPU tensors.
            ValueError: a limit that is not above 0.

        """
        _require_cpu(dist.get_backend(group))
        rank = dist.get_rank(group)
        rounds = _rounds(store, rank, name, store_timeout_s)
        super().__init__(rank, dist.get_world_size(group), rounds)
        self._group = group
        self._is_lost = False

    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Gather the sizes, then the bytes."""
        if self._is_lost:
            # What comes late would be taken for an answer to what is asked now.
            msg = (
                f"rank {self.rank}: the process group of this exchange broke off before, in a step "
                "to which not all ranks came in time. Make a new process group and a new exchange "
                "over it on every rank, then publish a later version."
            )
            raise GroupAborted(msg)
        limit = timedelta(seconds=timeout_s)
        try:
            return self._gathered(payload, limit)
        except RuntimeError as error:
            self._is_lost = True
            what = f"{error}. The process group is lost: make a new one"
            raise GroupAborted(not_together(step, self.rank, what)) from error
        except BaseException:
            self._is_lost = True
            raise

    def _gathered(self, payload: bytes, limit: timedelta) -> list[bytes]:
        size = torch.tensor([len(payload)], dtype=torch.int64, device="cpu")
        sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
        _wait(dist.all_gather(sizes, size, group=self._group, async_op=True), limit)
        room = max(1, *(int(one.item()) for one in sizes))
        mine = torch.zeros(room, dtype=torch.uint8, device="cpu")
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        found = [torch.zeros_like(mine) for _ in range(self.world_size)]
        _wait(dist.all_gather(found, mine, group=self._group, async_op=True), limit)
        return [
            one[: int(num.item())].numpy().tobytes() for one, num in zip(found, sizes, strict=True)
        ]


def _require_cpu(backend: str) -> None:
    """Refuse what would fail in the middle of the first publication, and take the group along."""
    # One backend, or one for each kind of device: "cpu:gloo,cuda:nccl".
    if backend == "nccl" or (":" in backend and "cpu:" not in backend):
        msg = (
            f"the process group's backend is {backend!r}, which moves no CPU tensors, and what the "
            'ranks tell each other is text. Pass group=dist.new_group(backend="gloo").'
        )
        raise WeightBridgeUnavailableError(msg)


def _rounds(store: Store | None, rank: int, name: str, timeout_s: float) -> Rounds | None:
    return None if store is None else Rounds(store, rank=rank, name=name, timeout_s=timeout_s)


def _wait(work: "dist.Work | None", limit: timedelta) -> None:
    if work is not None and not work.wait(limit):
        msg = "the collective did not end in time"
        raise RuntimeError(msg)


class StoreExchange(GroupExchange):
    """Over a store of torch.distributed. Also settles how a publication ends, once for all ranks.

    The store's process must outlive the ranks: else its end ends every publication, and one that
    hangs does when the time is up.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        name: str = _NAME,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """Use `store`.

        Args:
            store: a ``TCPStore``, for instance.
            rank: of this process.
            world_size: how many ranks.
            name: of the group; two groups that share a store need two.
            timeout_s: how long the store may take to answer before and behind the steps, which
                have limits of their own.

        Raises:
            ValueError: `rank` is none of them, or a limit that is not above 0.

        """
        self.rounds: Rounds = Rounds(store, rank=rank, name=name, timeout_s=timeout_s)
        super().__init__(rank, world_size, self.rounds)

    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Put one's own bytes, wait for all; a round that another rank ended is over at once."""
        end, rounds = time.monotonic() + timeout_s, self.rounds
        keys = [rounds.key(f"{step}/{rank}") for rank in range(self.world_size)]
        # A store takes text; JSON is ASCII, and any other bytes come through as well.
        rounds.put(step, keys[self.rank], payload.decode("latin-1"), timeout_s)
        for key in keys:
            self._await(step, key, end, keys)
        left = max(end - time.monotonic(), _LAST_S)
        found = rounds.ask(step, lambda: [rounds.store.get(key) for key in keys], left)
        try:
            return [one.decode().encode("latin-1") for one in found]
        except ValueError as error:
            raise GroupAborted(not_together(step, self.rank, str(error))) from error

    def _await(self, step: str, key: str, end: float, keys: Sequence[str]) -> None:
        rounds, pause = self.rounds, threading.Event()
        verdict = rounds.key("verdict")

        def has(*wanted: str) -> bool:
            left = max(end - time.monotonic(), _LAST_S)
            return rounds.ask(step, lambda: bool(rounds.store.check(list(wanted))), left)

        while not has(key):
            # (Where it was decided meanwhile, everybody may have come meanwhile as well.)
            if has(verdict) and not has(*keys):
                what = rounds.ask(step, lambda: rounds.store.get(verdict), _LAST_S).decode()
                msg = not_together(step, self.rank, f"another rank ended it: {what}")
                raise GroupAborted(msg)
            if time.monotonic() > end:
                late = tuple(r for r, k in enumerate(keys) if not has(k))
                msg = not_together(step, self.rank, f"no answer from ranks {late}")
                raise GroupAborted(msg, late)
            # (The store's own wait tells the terminal of each time that it did not come.)
            pause.wait(_POLL_S)
