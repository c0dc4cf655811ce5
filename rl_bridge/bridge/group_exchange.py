"""How the ranks of an update group talk: each gives some bytes and gets those of all, in time.

What travels is JSON text; nothing is unpickled. Which way it travels is the user's choice: the
key-value store of torch.distributed, a process group, or a function of his own.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from rl_bridge.bridge.asking import Asking
from rl_bridge.errors import GroupAborted

__all__ = ["FunctionExchange", "GroupExchange", "ProcessGroupExchange", "StoreExchange"]

T = TypeVar("T")
_POLL_S = 0.002
# For a question that comes when the time is up already.
_LAST_S = 1.0
# Rounds whose keys stay: a slow rank may still read those of the one before.
_KEPT_ROUNDS = 2


class GroupExchange(ABC):
    """One rank's way to the others. Every rank makes the same calls in the same order.

    Attributes:
        rank: of this process, counted from 0.
        world_size: how many ranks.

    """

    def __init__(self, rank: int, world_size: int) -> None:
        """Be one of `world_size` ranks.

        Raises:
            ValueError: `rank` is none of them.

        """
        if not 0 <= rank < world_size:
            msg = f"rank {rank} of world_size {world_size}: expected 0 <= rank < world_size."
            raise ValueError(msg)
        self.rank = rank
        self.world_size = world_size

    def begin(self) -> None:  # noqa: B027 - most need nothing
        """A new publication begins."""

    @abstractmethod
    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Give `payload` and get everybody's, by rank.

        Raises:
            GroupAborted: not all of them came in time; it names the ranks, if it can.

        """

    def decide(self, verdict: str) -> str:
        """Propose how the publication ends; returns what holds for every rank.

        Where the exchange cannot settle it, each rank's own verdict holds for itself.
        """
        return verdict


class FunctionExchange(GroupExchange):
    """Over a function of the user's own."""

    def __init__(
        self, function: Callable[[bytes, float], Sequence[bytes]], *, rank: int, world_size: int
    ) -> None:
        """Use `function`.

        Args:
            function: takes this rank's bytes and a limit in seconds; returns all ranks' bytes, by
                rank, or raises when the time is up.
            rank: of this process.
            world_size: how many ranks.

        """
        super().__init__(rank, world_size)
        self._function = function

    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Call the function."""
        try:
            found = list(self._function(payload, timeout_s))
        except Exception as error:
            raise GroupAborted(
                _lost(step, self.rank, f"{type(error).__name__}: {error}")
            ) from error
        if len(found) != self.world_size or found[self.rank] != payload:
            msg = _lost(step, self.rank, f"the function gave {len(found)} payloads, or wrong ones")
            raise GroupAborted(msg)
        return found


class ProcessGroupExchange(GroupExchange):
    """Over a torch.distributed process group whose backend moves CPU tensors, such as gloo.

    Where a peer dies the group is lost, as torch.distributed has it: make a new one.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        """Use `group`; None: the default one."""
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group

    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Gather the sizes, then the bytes."""
        limit = timedelta(seconds=timeout_s)
        try:
            size = torch.tensor([len(payload)], dtype=torch.int64)
            sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
            _wait(dist.all_gather(sizes, size, group=self._group, async_op=True), limit)
            room = max(1, *(int(one.item()) for one in sizes))
            mine = torch.zeros(room, dtype=torch.uint8)
            if payload:
                mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            found = [torch.zeros_like(mine) for _ in range(self.world_size)]
            _wait(dist.all_gather(found, mine, group=self._group, async_op=True), limit)
        except RuntimeError as error:
            raise GroupAborted(_lost(step, self.rank, str(error))) from error
        return [
            one[: int(num.item())].numpy().tobytes() for one, num in zip(found, sizes, strict=True)
        ]


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
        store: "torch._C._distributed_c10d.Store",
        *,
        rank: int,
        world_size: int,
        name: str = "rl_bridge",
        timeout_s: float = 30.0,
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
        super().__init__(rank, world_size)
        if not timeout_s > 0:
            msg = f"timeout_s={timeout_s!r}: expected a number of seconds above 0."
            raise ValueError(msg)
        self._timeout_s = timeout_s
        self._asking = Asking("the store of the group")
        self._store = store
        self._name = name
        self._round = 0
        self._given: list[tuple[int, str]] = []

    def begin(self) -> None:
        """Join the round that the others are in: one that was decided is over."""
        self._round = self._ask("begin", lambda: self._current(0), self._timeout_s)
        old = [key for at, key in self._given if at <= self._round - _KEPT_ROUNDS]
        self._given = [(at, key) for at, key in self._given if at > self._round - _KEPT_ROUNDS]
        for key in old:
            self._ask("begin", partial(self._store.delete_key, key), self._timeout_s)

    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Put one's own bytes, wait for all; a round that another rank ended is over at once."""
        end = time.monotonic() + timeout_s
        keys = [self._key(f"{step}/{rank}") for rank in range(self.world_size)]
        # A store takes text; JSON is ASCII, and any other bytes come through as well.
        self._put(step, keys[self.rank], payload.decode("latin-1"), timeout_s)
        for key in keys:
            self._await(step, key, end, keys)
        left = max(end - time.monotonic(), _LAST_S)
        found = self._ask(step, lambda: [self._store.get(key) for key in keys], left)
        try:
            return [one.decode().encode("latin-1") for one in found]
        except ValueError as error:
            raise GroupAborted(_lost(step, self.rank, str(error))) from error

    def _await(self, step: str, key: str, end: float, keys: Sequence[str]) -> None:
        verdict, pause = self._key("verdict"), threading.Event()

        def has(*wanted: str) -> bool:
            left = max(end - time.monotonic(), _LAST_S)
            return self._ask(step, lambda: bool(self._store.check(list(wanted))), left)

        while not has(key):
            # (Where it was decided meanwhile, everybody may have come meanwhile as well.)
            if has(verdict) and not has(*keys):
                what = self._ask(step, lambda: self._store.get(verdict), _LAST_S).decode()
                raise GroupAborted(_lost(step, self.rank, f"another rank ended it: {what}"))
            if time.monotonic() > end:
                late = tuple(r for r, k in enumerate(keys) if not has(k))
                raise GroupAborted(_lost(step, self.rank, f"no answer from ranks {late}"), late)
            # (The store's own wait tells the terminal of each time that it did not come.)
            pause.wait(_POLL_S)

    def decide(self, verdict: str) -> str:
        """The first verdict that arrives holds for all.

        Raises:
            GroupAborted: the store is gone or hangs, or forgot the verdict: this rank came back
                after the others had been through several rounds.

        """
        return self._ask("verdict", lambda: self._decided(verdict), self._timeout_s)

    def _decided(self, verdict: str) -> str:
        key, this = self._key("verdict"), self._round
        # Asked first: verdicts are forgotten only behind the rounds that follow them.
        is_over = self._current(this) > this
        if is_over and not self._store.check([key]):
            msg = _lost("verdict", self.rank, "the others went on without it, and forgot the end")
            raise GroupAborted(msg)
        found: str = self._store.compare_set(key, "", verdict).decode()
        self._given.append((this, key))
        self._store.compare_set(f"{self._name}/round", str(this), str(this + 1))
        return found

    def _current(self, first: int) -> int:
        """The round that the group is in."""
        return int(self._store.compare_set(f"{self._name}/round", "", str(first)))

    def _ask(self, step: str, question: Callable[[], T], timeout_s: float) -> T:
        """Ask the store, which blocks without a limit where its process hangs."""
        try:
            return self._asking.ask(question, timeout_s)
        except GroupAborted:
            raise
        except (RuntimeError, ValueError) as error:
            raise GroupAborted(_lost(step, self.rank, f"the store: {error}")) from error

    def _key(self, what: str) -> str:
        return f"{self._name}/{self._round}/{what}"

    def _put(self, step: str, key: str, text: str, timeout_s: float) -> None:
        self._ask(step, lambda: self._store.set(key, text), timeout_s)
        self._given.append((self._round, key))


def _lost(step: str, rank: int, what: str) -> str:
    return (
        f"rank {rank}: the ranks did not come together in step {step!r} of a group's publication: "
        f"{what}. This rank has withdrawn its part. See to it that every rank publishes, then "
        "publish a later version."
    )
