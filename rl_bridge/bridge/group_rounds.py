"""How a group's publications end: noted once in a store of torch.distributed, the same for all.

A publication is a round. The first verdict that arrives in the store ends it, for every rank; then
the next round begins.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from rl_bridge.bridge.asking import Asking
from rl_bridge.errors import GroupAborted

__all__ = ["Rounds", "not_together"]

T = TypeVar("T")
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
