"""The trainer as a fleet knows it: one actor, or those of all ranks of a group.

One fleet at a time has a trainer: each actor keeps the fleet's id, and refuses the calls of any
other one by the name of its driver. The ranks of a group publish together over one small actor, the
store. An actor that Ray started anew has no fleet: then all of them join again, with the same
version and the same channels, or begin anew.
"""

import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rl_bridge.errors import DeadlineExceeded, EngineLost, GroupAborted, RanksDisagree
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.processes import process_name
from rl_bridge.ray.calls import Announcement, Deadline, Steps, awaited, require, result_of
from rl_bridge.ray.group_store import FleetMembership, GroupStore
from rl_bridge.ray.pairing import EndpointFacts, PairChoice, choose_for_group, choose_transport

_LOG = logging.getLogger(__name__)
# Share of the fleet's time that a rank waits for the others, so that it can still name them.
_SHARE = 0.5


class _StartedAnew(GroupAborted):
    """Ray started an actor anew: it has no fleet."""


class Trainers:
    """Calls all actors at once, and gives the answer of one.

    Attributes:
        is_group: whether they are ranks that publish together.
        current: their last publication, as far as it is known.

    """

    def __init__(self, trainer: Any, *, timeout_s: float, take_over: bool = False) -> None:
        """Have the actors join this fleet, and ask for their last publication."""
        self.is_group = isinstance(trainer, Sequence)
        self._actors = list(trainer) if isinstance(trainer, Sequence) else [trainer]
        if not self._actors:
            raise ValueError("trainer=[]: expected the actors of a group's ranks.")
        self._fleet = secrets.token_hex(8)
        self._store: Any = None
        self._facts: list[EndpointFacts] = []
        self._is_joined = True
        """Whether the ranks can reach each other, as far as is known."""
        try:
            self.current = self._come_together(Deadline(timeout_s), take_over=take_over)
        except BaseException:
            self.leave()  # some may have joined, and would refuse the next attempt
            raise

    def _come_together(self, deadline: Deadline, *, take_over: bool = False) -> Announcement:
        """Have all actors join, with the same version and the same channels."""
        if self.is_group:
            # A new one each time, since the one before may be lost. Ray places it; it goes with
            # its last handle.
            self._store = require().remote(num_cpus=0)(GroupStore).remote()
            result_of("the group's store", "begin", self._store.check.remote([]), deadline)
        told = self._join_all(deadline, take_over=take_over)
        if any(one != told[0] for one in told):
            _LOG.warning("the ranks have published different versions: the group begins anew")
            told = self._join_all(deadline, anew=True)
        self._facts, self._is_joined = [], True
        return told[0]

    def _join_all(
        self, deadline: Deadline, *, anew: bool = False, take_over: bool = False
    ) -> list[Announcement]:
        calls = []
        for rank, actor in enumerate(self._actors):
            membership = FleetMembership(
                fleet=self._fleet,
                driver=process_name(),
                take_over=take_over,
                rank=rank,
                world_size=len(self._actors) if self.is_group else 0,
                timeout_s=deadline.timeout_s * _SHARE,
                anew=anew,
            )
            calls.append(actor.join_weight_fleet.remote(membership.to_json(), self._store))
        told = self._answers("join the fleet", calls, deadline)
        return [Announcement.from_json(one) for one in told]

    def leave(self) -> None:
        """Leave the actors to the next fleet; this waits for nothing."""
        for actor in self._actors:
            actor.leave_weight_fleet.remote(self._fleet)

    def look_again(self) -> None:
        """Ask anew where the actors run: Ray may have started one anew, elsewhere."""
        self._facts = []

    def choose(self, name: str, actor: Any, deadline: Deadline) -> Steps[list[PairChoice]]:
        """The steps to how a rollout reads them: a choice for each, of one channel."""
        if not self._facts:
            self._see_current("answer", deadline)
            told = self._ask("answer", "weight_facts", deadline)
            self._facts = [EndpointFacts.from_json(one) for one in told]
        endpoints = self._facts
        calls = [actor.find_weights.remote(facts.to_json()) for facts in endpoints]
        found = []
        for call in calls:
            told = yield from awaited(name, "join", call, deadline)
            found.append(EndpointFacts.from_json(told))
        if not self.is_group:
            return [choose_transport(endpoints[0], found[0])]
        return list(choose_for_group(list(zip(endpoints, found, strict=True))))

    def serve(self, name: str, choices: Sequence[PairChoice], deadline: Deadline) -> bytes:
        """Open a rollout's channel; the manifest of the current version, empty before the first."""
        self._see_current("answer", deadline)
        given = [(choice.to_json(),) for choice in choices]
        manifest: bytes = self._same(self._ask(f"serve {name}", "serve_weights", deadline, given))
        return manifest

    def _see_current(self, what: str, deadline: Deadline) -> Announcement:
        """Ask for the last publication; the actors join again if they have to.

        A rank that Ray started anew would publish nothing, and the others would wait for it.
        """
        told: list[Announcement] = []
        if self._is_joined:
            try:
                answers = self._ask(what, "weight_announcement", deadline)
                told = [Announcement.from_json(one) for one in answers]
            except _StartedAnew as error:
                _LOG.warning("%s", error)
        if not told or any(one.channels != told[0].channels for one in told):
            told = [self._come_together(deadline)]
        # Ranks of different versions join again with the next publication, which fails. An actor
        # that was started anew has published nothing: the version before stays out.
        if all(one == told[0] for one in told) and told[0].weight_version is not None:
            self.current = told[0]
        return told[0]

    def publish(
        self,
        weight_version: int | None,
        metadata: Mapping[str, JSONValue] | None,
        used: Collection[str],
        deadline: Deadline,
    ) -> Mapping[str, bytes]:
        """Publish the weights of now; channel -> manifest. Channels without users are dropped."""
        what = f"publish version {'next' if weight_version is None else weight_version}"
        is_open = self._see_current(what, deadline).channels
        num = len(self._actors)
        for channel in set(is_open).difference(used):
            try:
                drop = f"drop its channel {channel}"
                self._ask(drop, "drop_weights", deadline, [(channel,)] * num)
            except Exception as error:  # noqa: BLE001 - it costs one copy, nothing else
                _LOG.warning("a channel that no rollout uses was not dropped: %s", error)
        try:
            answers = self._ask(
                what, "publish_weights", deadline, [(weight_version, metadata)] * num
            )
        except GroupAborted:
            self._is_joined = False
            raise
        told, manifests = self._same(answers)
        self.current = Announcement.from_json(told)
        found: Mapping[str, bytes] = manifests
        return found

    def _ask(
        self,
        what: str,
        method: str,
        deadline: Deadline,
        given: Sequence[tuple[object, ...]] | None = None,
    ) -> list[Any]:
        """Call a method of each, with what is given for each; the answers of all."""
        each = zip(self._actors, given or [()] * len(self._actors), strict=True)
        calls = [actor.for_weight_fleet.remote(self._fleet, method, *mine) for actor, mine in each]
        return [answer for _, answer in self._answers(what, calls, deadline)]

    def _answers(self, what: str, calls: Sequence[Any], deadline: Deadline) -> list[Any]:
        """The answers of all, once all have answered."""
        answers: list[Any] = []
        errors: list[Exception] = []
        for rank, call in enumerate(calls):
            try:
                answers.append(result_of(self._name(rank), what, call, deadline))
            except Exception as error:  # noqa: BLE001 - raised below, once all have answered
                error.add_note(f"rl_bridge: this is from {self._name(rank)}, asked to {what}.")
                errors.append(error)
            else:
                if answers[-1] == (False, None):
                    msg = (
                        f"{self._name(rank)} did not {what}: it was started anew, and has no "
                        "fleet. Publish a later version: it joins this fleet again."
                    )
                    errors.append(_StartedAnew(msg, (rank,)))
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
                    "fleet of the same trainers: RolloutFleet(trainers, take_over=True)."
                )
        return answers[0]


def _remoteness(error: Exception) -> int:
    """How far an error is from the first cause: ranks that live fail after the one that died."""
    kinds = (EngineLost, DeadlineExceeded, _StartedAnew, GroupAborted)
    # A rank's own exception comes after a rank's death, and before the errors that follow from it.
    return next((2 * at for at, kind in enumerate(kinds) if isinstance(error, kind)), 1)
