"""The driver: it sends one version to many rollout actors, each by its own transport.

A rollout that dies, hangs or refuses holds no other rollout up: each call has a deadline, and its
error is recorded for this rollout. One that missed a deadline is waited for no more until it has
answered. A rollout that Ray started anew has no transport; it joins again
by itself at the next update.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from rl_bridge.errors import (
    TornEngine,
    WeightBridgeError,
    WeightUpdateRejectedError,
)
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.ray.calls import (
    Deadline,
    RolloutAnswer,
    Steps,
    awaited,
    ended,
    result_of,
    side_by_side,
)
from rl_bridge.ray.pairing import PairChoice
from rl_bridge.ray.trainers import Trainers
from rl_bridge.transports.base import checked_seconds

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetUpdate:
    """The results of one version.

    Attributes:
        weight_version: the version.
        root: its root.
        answers: rollout -> its answer.
        lost: rollout -> why there is no answer: `EngineLost`, `DeadlineExceeded`, or the error of
            joining again; any other error of its actor is the cause of a
            `WeightUpdateRejectedError`.

    """

    weight_version: int
    root: str
    answers: Mapping[str, RolloutAnswer] = field(default_factory=dict)
    lost: Mapping[str, WeightBridgeError] = field(default_factory=dict)

    @property
    def routable(self) -> tuple[str, ...]:
        """The rollouts that hold exactly this version, by the root in their answers."""
        return tuple(name for name, answer in self.answers.items() if self._has_it(answer))

    def require_all(self) -> None:
        """Insist that every rollout has it.

        Raises:
            EngineLost: one died.
            DeadlineExceeded: one did not answer in time.
            TornEngine: one must not serve.
            WeightUpdateRejectedError: one refused it.

        """
        for error in self.lost.values():
            raise error
        for name, answer in self.answers.items():
            if not self._has_it(answer):
                kind = TornEngine if answer.outcome == "torn" else WeightUpdateRejectedError
                raise kind(
                    f"rollout {name!r} did not install version {self.weight_version}, it holds "
                    f"{answer.active_version}: {_why(answer)}. See its log, or replace it: "
                    "RolloutFleet.join(name, actor)."
                )

    def _has_it(self, answer: RolloutAnswer) -> bool:
        return (answer.active_version, answer.active_root) == (self.weight_version, self.root)


@dataclass(slots=True)
class _Member:
    """One rollout, as the driver knows it."""

    actor: Any
    choice: PairChoice
    answer: RolloutAnswer | None = None
    call: Any = None
    """Its last call, while it may be under way: another call would only queue behind it."""


class RolloutFleet:
    """Sends versions of a trainer to rollout actors. Not thread-safe: one driver's.

    The trainer is one actor, or one for each of its ranks, which publish as a group: all of them or
    none. It has the methods of `WeightPublisherActor`, each rollout's actor those of
    `RolloutActor`. One fleet at a time has a trainer, until it is closed or another one takes over.
    """

    def __init__(self, trainer: Any, *, timeout_s: float = 60.0, take_over: bool = False) -> None:
        """Ask the trainer for its last publication.

        Args:
            trainer: the handle of the trainer's actor; or those of its ranks, by rank.
            timeout_s: longest wait for one publication, for all answers to it, or for one joining.
            take_over: take the trainer from another fleet, which may have died with its driver.

        Raises:
            SessionRefused: another fleet has the trainer.
            EngineLost: an actor of the trainer's is dead.
            DeadlineExceeded: one does not answer.
            ValueError: no time, or no actor at all.

        """
        self._timeout_s = checked_seconds("timeout_s", timeout_s)
        self._members: dict[str, _Member] = {}
        self._trainers = Trainers(trainer, timeout_s=timeout_s, take_over=take_over)

    def close(self) -> None:
        """Leave the trainer to the next fleet. The actors and their versions stay."""
        self._members.clear()
        self._trainers.leave()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()

    @property
    def weight_version(self) -> int | None:
        """The version that was published last, as far as is known; None before the first."""
        return self._trainers.current.weight_version

    @property
    def routable(self) -> tuple[str, ...]:
        """The rollouts that hold the current version, by their last answer; none before it."""
        if self.weight_version is None:
            return ()
        current = (self.weight_version, self._trainers.current.root)
        return tuple(
            name
            for name, member in self._members.items()
            if member.answer is not None
            and (member.answer.active_version, member.answer.active_root) == current
        )

    @property
    def choices(self) -> Mapping[str, PairChoice]:
        """Rollout -> the transport that it uses, and why."""
        return MappingProxyType({name: member.choice for name, member in self._members.items()})

    def join(self, name: str, actor: Any) -> PairChoice:
        """Take in a rollout, or another actor in the place of one; it gets the current version.

        Args:
            name: what the driver calls it.
            actor: the handle of its actor.

        Returns:
            The transport that it uses, and why.

        Raises:
            EngineLost: it, or the trainer, is dead.
            DeadlineExceeded: no answer in time.
            WeightBridgeUnavailableError: no transport works between the two.
            WeightUpdateRejectedError: it refused the current version.

        """
        self._members.pop(name, None)
        self._trainers.look_again()
        deadline = Deadline(self._timeout_s)
        _, raised = side_by_side({name: self._joining(name, actor, deadline)}, deadline)
        for error in raised.values():
            raise error
        return self._members[name].choice

    def _joining(self, name: str, actor: Any, deadline: Deadline) -> Steps[RolloutAnswer]:
        """The steps of a join, up to a rollout's answer to the current version."""
        choices = yield from self._trainers.choose(name, actor, deadline)
        choice = choices[0]
        _LOG.info("rollout %s gets weights by %s", name, choice)
        # The trainer first: it must listen before the rollout connects.
        manifest = self._trainers.serve(name, choices, deadline)
        call = actor.join_weights.remote(choice.to_json())
        answer = RolloutAnswer.from_json((yield from awaited(name, "join", call, deadline)))
        if answer.error:
            raise WeightUpdateRejectedError(
                f"rollout {name!r} did not join by {choice.transport}: {answer.error}: "
                f"{answer.message}. See its log, and join it again."
            )
        if name in self._members:
            self._members[name].choice = choice  # now: its first install may come late
        version = self.weight_version
        if manifest:
            call = actor.update_weights.remote(manifest)
            what = f"install version {version}"
            answer = RolloutAnswer.from_json((yield from awaited(name, what, call, deadline)))
        self._members[name] = _Member(actor, choice, answer)
        if manifest and name not in self.routable:
            raise WeightUpdateRejectedError(
                f"rollout {name!r} joined and did not install version {version}, it holds "
                f"{answer.active_version}: {_why(answer)}. It gets no requests. See its log, and "
                "join it again."
            )
        return answer

    def leave(self, name: str) -> None:
        """Forget a rollout; unknown names are ignored. Its actor is not touched.

        At the next update the trainer drops a channel that no rollout uses any more.
        """
        self._members.pop(name, None)

    def update(
        self,
        weight_version: int | None = None,
        *,
        metadata: Mapping[str, JSONValue] | None = None,
    ) -> FleetUpdate:
        """Publish the trainer's weights of now, and have every rollout install them.

        Args:
            weight_version: above the trainer's last one; None takes the next.
            metadata: JSON values of your own, for the manifest.

        Returns:
            The results, by rollout.

        Raises:
            EngineLost: the trainer's actor, or one of its ranks', is dead.
            DeadlineExceeded: the trainer did not publish in time.
            GroupAborted: its ranks did not come together; nothing was published.
            VersionNotMonotonic: the version is not above the last one.
            WeightBridgeError: it could not be published.

        """
        used = {member.choice.channel for member in self._members.values()}
        deadline = Deadline(self._timeout_s)
        manifests = self._trainers.publish(weight_version, metadata, used, deadline)
        published = self._trainers.current
        weight_version = published.weight_version
        assert weight_version is not None  # as it was published just now
        members = dict(self._members)
        self._trainers.look_again()
        for member in members.values():
            member.answer = None
        deadline = Deadline(self._timeout_s)
        late = {name for name, member in members.items() if member.call is not None}
        answers, raised = side_by_side(
            {
                name: self._installing(name, member, manifests, deadline, late)
                for name, member in members.items()
            },
            deadline,
            late=late,
        )
        lost: dict[str, WeightBridgeError] = {}
        for name, error in raised.items():
            lost[name] = _told(name, error)
            _LOG.warning("rollout %s has not version %s: %s", name, weight_version, error)
        return FleetUpdate(
            weight_version=weight_version,
            root=published.root,
            answers=MappingProxyType(answers),
            lost=MappingProxyType(lost),
        )

    def _installing(
        self,
        name: str,
        member: _Member,
        manifests: Mapping[str, bytes],
        deadline: Deadline,
        late: set[str],
    ) -> Steps[RolloutAnswer]:
        """The steps to a rollout's answer; it joins again if it has to.

        If they fail, it stays a member and is asked again next time. One that is `late` with an
        earlier answer costs its deadline once; from then on the others are waited for, and not it.
        """
        manifest = manifests.get(member.choice.channel)
        if manifest is not None:
            what = f"install version {self.weight_version}"
            if member.call is not None:
                yield from ended(name, what, member.call)
                late.discard(name)
            call = member.call = member.actor.update_weights.remote(manifest)
            answer = RolloutAnswer.from_json((yield from awaited(name, what, call, deadline)))
            member.call = None
            if answer.outcome != "unjoined":
                member.answer = answer
                if answer.outcome != "refused" or (
                    yield from self._is_near(name, member, deadline)
                ):
                    return answer
        # Ray started it or the trainer anew: one of the two does not know the other.
        return (yield from self._joining(name, member.actor, deadline))

    def _is_near(self, name: str, member: _Member, deadline: Deadline) -> Steps[bool]:
        """Whether a rollout's channel is still the right one: neither of the two has moved."""
        try:
            choices = yield from self._trainers.choose(name, member.actor, deadline)
        except WeightBridgeError as error:
            _LOG.warning("where rollout %s runs is not known: %s", name, error)
            return True
        return choices[0].channel == member.choice.channel

    def ask(self, name: str) -> RolloutAnswer:
        """Ask a rollout what it holds; one that missed its deadline may be routable by now.

        Raises:
            KeyError: no rollout of that name.
            EngineLost: its actor is dead.
            DeadlineExceeded: it does not answer.

        """
        member = self._members[name]
        member.answer = None
        reference = member.actor.weight_status.remote()
        member.answer = RolloutAnswer.from_json(
            result_of(name, "tell its status", reference, Deadline(self._timeout_s))
        )
        return member.answer


def _told(name: str, error: Exception) -> WeightBridgeError:
    """The cause of a missing answer, as an error of ours."""
    if isinstance(error, WeightBridgeError):
        return error
    cause = str(error).strip().rpartition("\n")[2]
    told = WeightUpdateRejectedError(
        f"rollout {name!r} raised instead of answering: {cause}. See its log, or replace it: "
        "RolloutFleet.join(name, actor)."
    )
    told.__cause__ = error
    return told


def _why(answer: RolloutAnswer) -> str:
    """Say why a rollout does not hold the version of this fleet."""
    if answer.error:
        return f"{answer.error}: {answer.message}"
    if answer.outcome == "unjoined":
        return "it was started anew meanwhile, and has no transport yet"
    return "another driver had it install that"
