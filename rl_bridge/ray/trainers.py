"""The trainer as a fleet knows it: one actor, or those of all ranks of a group.

A group's ranks publish together over one small actor, the store. A rank that Ray started anew is in
no group: all ranks then join again, with the same version and the same channels, or begin anew.
"""

import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rl_bridge.errors import DeadlineExceeded, EngineLost, GroupAborted, RanksDisagree
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.ray.calls import Announcement, Deadline, Steps, awaited, require, result_of
from rl_bridge.ray.group_store import GroupMembership, GroupStore
from rl_bridge.ray.pairing import EndpointFacts, PairChoice, choose_for_group, choose_transport

__all__ = [
    "Trainers",
]

_LOG = logging.getLogger(__name__)
# Share of the fleet's time that a rank waits for the others, so that it can still name them.
_SHARE = 0.5


class _MembershipLost(GroupAborted):
    """Ray started a rank anew: it is in no group."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(
            f"trainer rank {rank} did not {what}: it was started anew, and is in no group or in "
            "that of another fleet. Publish a later version: it joins the fleet's group again.",
            (rank,),
        )


class Trainers:
    """Calls all actors at once, and gives the answer of one.

    Attributes:
        is_group: whether they are ranks that publish together.
        current: their last publication, as far as it is known.

    """

    def __init__(self, trainer: Any, *, timeout_s: float) -> None:
        """Ask for the last publication; ranks join a group first.

        Args:
            trainer: the handle of an actor; or those of the ranks of a group, by rank.
            timeout_s: longest wait.

        Raises:
            WeightBridgeError: one is dead, or does not answer.
            ValueError: no actor at all.

        """
        self.is_group = isinstance(trainer, Sequence)
        self._actors = list(trainer) if isinstance(trainer, Sequence) else [trainer]
        if not self._actors:
            raise ValueError("trainer=[]: expected the actors of a group's ranks.")
        self._store: Any = None
        self._group = secrets.token_hex(8)
        self._facts: list[EndpointFacts] = []
        self._is_sure = True
        """Whether `current` is known: no publication may have succeeded without an answer."""
        self._is_joined = True
        """Whether the ranks can reach each other: the store of another fleet may be lost."""
        self._channels: set[str] = set()
        self._drops: list[tuple[str, str, Any]] = []
        deadline = Deadline(timeout_s)
        if self.is_group:
            self.current = self._join_group(deadline)
        else:
            (told,) = self._ask("answer", "weight_announcement", deadline)
            self.current = Announcement.from_json(told)
        self._found = set(self.current.channels)
        """Channels that were open before this fleet."""

    def _join_group(self, deadline: Deadline) -> Announcement:
        # Placed by Ray; it goes when the last handle does.
        self._store = require().remote(num_cpus=0)(GroupStore).remote()
        result_of("the group's store", "begin", self._store.check.remote([]), deadline)
        return self._come_together(deadline)

    def _come_together(self, deadline: Deadline) -> Announcement:
        """Have all ranks join the group, with the same version and the same channels."""
        told = self._join_all(deadline, anew=False)
        if any(one != told[0] for one in told):
            _LOG.warning("the ranks have published different versions: the group begins anew")
            told = self._join_all(deadline, anew=True)
        self.look_again()
        return told[0]

    def _join_all(self, deadline: Deadline, *, anew: bool) -> list[Announcement]:
        def membership(rank: int) -> bytes:
            return GroupMembership(
                rank=rank,
                world_size=len(self._actors),
                timeout_s=deadline.timeout_s * _SHARE,
                anew=anew,
                group=self._group,
            ).to_json()

        given = [(membership(rank), self._store) for rank in range(len(self._actors))]
        told = self._answers(
            "join its group",
            [one.join_weight_group.remote(*mine) for one, mine in self._each(given)],
            deadline,
        )
        return [Announcement.from_json(one) for one in told]

    def _endpoints(self, deadline: Deadline) -> list[EndpointFacts]:
        """Where the actors run, and what works there."""
        if not self._facts:
            self._see_current("answer", deadline)
            told = self._ask("answer", "weight_facts", deadline)
            self._facts = [EndpointFacts.from_json(one) for one in told]
        return self._facts

    def look_again(self, *, at_version: bool = False) -> None:
        """Ask anew where the actors run: Ray may have started one anew, elsewhere.

        Args:
            at_version: ask for the last publication, too: it may be that of another fleet.

        """
        self._facts = []
        self._is_sure = self._is_sure and not at_version

    def choose(self, name: str, actor: Any, deadline: Deadline) -> Steps[list[PairChoice]]:
        """The steps to how a rollout reads them: a choice for each, of one channel.

        Raises:
            WeightBridgeError: it is dead or silent, or nothing works.

        """
        endpoints = self._endpoints(deadline)
        calls = [actor.find_weights.remote(facts.to_json()) for facts in endpoints]
        found = []
        for call in calls:
            told = yield from awaited(name, "join", call, deadline)
            found.append(EndpointFacts.from_json(told))
        if not self.is_group:
            return [choose_transport(endpoints[0], found[0])]
        return list(choose_for_group(list(zip(endpoints, found, strict=True))))

    def serve(self, name: str, choices: Sequence[PairChoice], deadline: Deadline) -> bytes:
        """Open a rollout's channel; the manifest of the current version, empty before the first.

        Args:
            name: the rollout's.
            choices: what `choose` gave for it.
            deadline: until when.

        Raises:
            WeightBridgeError: it cannot be opened.

        """
        self._see_current("answer", deadline)
        self._channels.add(
            choices[0].channel
        )  # first: it may be open without an answer that says so
        given = [(choice.to_json(),) for choice in choices]
        manifest: bytes = self._same(self._ask(f"serve {name}", "serve_weights", deadline, given))
        return manifest

    def _see_current(self, what: str, deadline: Deadline) -> None:
        """Ask for the last publication, unless it is known.

        Ranks are asked each time, and join again if they have to: a rank that Ray started anew
        would publish nothing, and the others would wait for it.
        """
        self._see_dropped(deadline)
        if self._is_sure and not self.is_group:
            return
        try:
            told = [
                Announcement.from_json(one)
                for one in self._ask(what, "weight_announcement", deadline)
            ]
            is_together = self._is_joined and all(one.channels == told[0].channels for one in told)
        except _MembershipLost as error:
            _LOG.warning("%s", error)
            is_together = False
        if not is_together:
            told, self._is_joined = [self._come_together(deadline)], True
        if all(one == told[0] for one in told):  # else the next publication has them join again
            # An actor that was started anew has published nothing: the version before stays out.
            self.current = self.current if told[0].weight_version is None else told[0]
            self._is_sure = True

    def keep_channels(self, used: Collection[str], *, of_all: bool = False) -> None:
        """Have all other channels of this fleet dropped, so that no version is copied for them.

        This waits for nothing.

        Args:
            used: those that rollouts use.
            of_all: drop those that were open before this fleet, too: this driver may have been
                started anew. Rollouts of another driver that lives join again.

        """
        if of_all:
            self._channels.update(self._found)
            self._found = set()
        for channel in self._channels.difference(used):
            _LOG.info("no rollout uses %s any more: the trainer drops it", channel)
            for rank, one in enumerate(self._actors):
                call = self._call(one, "drop_weights", (channel,))
                self._drops.append((self._name(rank), channel, call))
        self._channels.intersection_update(used)

    def _see_dropped(self, deadline: Deadline) -> None:
        """Wait until channels are dropped: an actor may run other methods first."""
        drops, self._drops = self._drops, []
        for name, channel, call in drops:
            try:
                result_of(name, f"drop its channel {channel}", call, deadline)
            except Exception as error:  # noqa: BLE001 - it costs one copy, nothing else
                _LOG.warning("a channel that no rollout uses was not dropped: %s", error)

    def publish(
        self, weight_version: int, metadata: Mapping[str, JSONValue] | None, deadline: Deadline
    ) -> Mapping[str, bytes]:
        """Publish the weights of now; channel -> manifest.

        Raises:
            WeightBridgeError: nothing is published.

        """
        what = f"publish version {weight_version}"
        self._see_current(what, deadline)
        self._is_sure = False  # until its answer is here
        given = [(weight_version, metadata)] * len(self._actors)
        try:
            answers = self._ask(what, "publish_weights", deadline, given)
        except GroupAborted:
            self._is_joined = not self.is_group  # a single trainer is in no group of ours
            raise
        told, manifests = self._same(answers)
        self.current, self._is_sure = Announcement.from_json(told), True
        found: Mapping[str, bytes] = manifests
        return found

    def _ask(
        self,
        what: str,
        method: str,
        deadline: Deadline,
        given: Sequence[tuple[object, ...]] | None = None,
    ) -> list[Any]:
        """Call a method of each, with what is given for each; the answers of all.

        Raises:
            GroupAborted: a rank is not in the group.
            Exception: what the calls raised.

        """
        calls = [
            self._call(actor, method, mine)
            for actor, mine in self._each(given or [()] * len(self._actors))
        ]
        told = self._answers(what, calls, deadline)
        if not self.is_group:
            return told
        for rank, (group, _) in enumerate(told):
            if group != told[0][0]:  # two fleets formed their groups at the same time
                raise _MembershipLost(rank, what)
        return [answer for _, answer in told]

    def _each(self, given: Sequence[tuple[object, ...]]) -> Iterable[tuple[Any, tuple[Any, ...]]]:
        return zip(self._actors, given, strict=True)

    def _call(self, actor: Any, method: str, given: tuple[object, ...]) -> Any:
        if self.is_group:
            return actor.as_weight_rank.remote(method, *given)
        return getattr(actor, method).remote(*given)

    def _answers(self, what: str, calls: Sequence[Any], deadline: Deadline) -> list[Any]:
        """The answers of all, once all have answered."""
        answers: list[Any] = []
        errors: list[Exception] = []
        for rank, call in enumerate(calls):
            try:
                answers.append(result_of(self._name(rank), what, call, deadline))
            except Exception as error:  # noqa: BLE001 - raised below, once all have answered
                errors.append(error)
            else:
                if self.is_group and answers[-1] == ("", None):
                    errors.append(_MembershipLost(rank, what))
        for first in sorted(errors, key=_remoteness):
            raise first
        return answers

    def _name(self, rank: int) -> str:
        return f"trainer rank {rank}" if self.is_group else "trainer"

    def _same(self, answers: Sequence[Any]) -> Any:
        for rank, one in enumerate(answers):
            if one != answers[0]:
                raise RanksDisagree(
                    f"trainer rank {rank} has published something else than rank 0. Make another "
                    "fleet of the same trainers: RolloutFleet(trainers)."
                )
        return answers[0]


def _remoteness(error: Exception) -> int:
    """How far an error is from the first cause: ranks that live fail after the one that died."""
    kinds = (EngineLost, DeadlineExceeded, _MembershipLost, GroupAborted)
    # A rank's own exception comes after a rank's death, and before the errors that follow from it.
    return next((2 * at for at, kind in enumerate(kinds) if isinstance(error, kind)), 1)
