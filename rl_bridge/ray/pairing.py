"""Which transport a publisher and a consumer use: decided by what the two really share.

Each side looks at where it runs (`look_around`) and says it in JSON; the consumer's side also tries
to open what the publisher's side holds up (`Beacon`). `choose_transport` is a pure function of what
they found: shared memory where memory is shared, else NIXL where both have it, else broadcast.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from rl_bridge.errors import MalformedManifest, SegmentError, WeightBridgeUnavailableError
from rl_bridge.memory import vm
from rl_bridge.memory.holding import close_fd
from rl_bridge.memory.segment import OwnedSegment, SegmentRef, open_segment
from rl_bridge.transports import registry

__all__ = [
    "PREFERENCE",
    "Beacon",
    "PairChoice",
    "Said",
    "SharedDirectory",
    "SideFacts",
    "choose_for_group",
    "choose_transport",
    "look_around",
    "try_beacon",
]

PREFERENCE = ("shared-memory", "nixl", "broadcast")
"""The transports between processes that a pair of CPU sides chooses from, the best one first."""

_LIMIT = 1 << 20
"""More than this is no description of a side, whoever sent it."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")

Text = Annotated[StrictStr, Field(max_length=4096)]
Options = Annotated[dict[Text, Text], Field(max_length=64)]
Count = Annotated[StrictInt, Field(ge=0, lt=2**63)]


class Said(BaseModel):
    """What one side says to the other, as it travels: JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> bytes:
        """As bytes, for the other side."""
        return self.model_dump_json().encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """Read what another side said.

        Raises:
            MalformedManifest: it said something else.

        """
        if len(text) > _LIMIT:
            raise MalformedManifest(
                f"{cls.__name__}: {len(text)} bytes came, at most {_LIMIT} are read. Send what the "
                "other side's to_json gave."
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the text"
            raise MalformedManifest(
                f"{cls.__name__}: {where}: {first['msg']}. Send what the other side's to_json gave."
            ) from error


class SharedDirectory(Said):
    """A directory, and what tells it from others of the same machine."""

    path: Text
    device: Count
    inode: Count

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Self:
        """The directory at `path`.

        Raises:
            WeightBridgeUnavailableError: there is none that this process may write to.

        """
        where = Path(path).absolute()
        try:
            status = where.stat()
        except OSError as error:
            raise WeightBridgeUnavailableError(
                f"directory={str(where)!r} cannot be looked at: {error}. Make it on both sides, "
                "best on a tmpfs, or leave it out."
            ) from error
        if not where.is_dir() or not os.access(where, os.W_OK | os.X_OK):
            raise WeightBridgeUnavailableError(
                f"directory={str(where)!r} is no directory that this user may write to. Choose "
                "another one, or leave it out."
            )
        return cls(path=str(where), device=status.st_dev, inode=status.st_ino)


class SideFacts(Said):
    """Where one side of a pair runs and what works there, as it said or found itself.

    Attributes:
        boot_id: the running kernel: two sides with the same one share a machine.
        pid_namespace: which processes it sees; only within one do pids mean the same.
        user_id: its effective user.
        pid: its process.
        node: what the cluster calls its machine, for the log; empty outside of one.
        address: where others reach it, in numbers; empty if nobody said.
        transports: name -> what blocks it here; an empty text where it works.
        directories: where this side may put named segments.
        beacon: what a publisher's side holds up for others to open; None if it does not.
        opened: inode of the beacon that this side has opened, and None if it could not, or did not
            try.

    """

    boot_id: Text
    pid_namespace: Count
    user_id: Count
    pid: Count
    node: Text = ""
    address: Text = ""
    transports: Options = {}
    directories: Annotated[tuple[SharedDirectory, ...], Field(max_length=64)] = ()
    beacon: SegmentRef | None = None
    opened: Count | None = None


class PairChoice(Said):
    """What a pair uses.

    Attributes:
        transport: its name.
        reason: why this one.
        publisher_options: what the publisher passes to `make_weight_bridge` for it.
        consumer_options: what the consumer passes.
        not_taken: transport -> why not, of those that come before it.
        group: what all ranks of a group call their lane; empty for one publisher alone.

    """

    transport: Text
    reason: Text
    publisher_options: Options = {}
    consumer_options: Options = {}
    not_taken: Options = {}
    group: Text = ""

    @property
    def lane(self) -> str:
        """The transport and where it lies: pairs of one lane read one publication."""
        if self.group:
            return self.group
        directory = self.publisher_options.get("directory")
        return self.transport if directory is None else f"{self.transport}@{directory}"

    def __str__(self) -> str:
        """The choice on one line, for a log."""
        others = "".join(f"; not {name}: {why}" for name, why in self.not_taken.items())
        return f"{self.transport}: {self.reason}{others}"


class Beacon:
    """A page of sealed memory that a publisher's side holds up: who opens it reaches the others."""

    def __init__(self) -> None:
        """Make it; it stays for as long as this object."""
        self._segment = OwnedSegment.make("rl_bridge-beacon", vm.PAGE)

    @property
    def ref(self) -> SegmentRef:
        """Where it is."""
        return self._segment.ref

    def close(self) -> None:
        """Give it back. Idempotent."""
        self._segment.close()


def try_beacon(ref: SegmentRef) -> int | None:
    """Open a beacon the way a consumer opens weights; its inode, or None if that fails."""
    with suppress(SegmentError):
        close_fd(open_segment(ref))
        return ref.inode
    return None


def look_around(
    *,
    node: str = "",
    address: str = "",
    directories: Sequence[str | os.PathLike[str]] = (),
    beacon: Beacon | None = None,
    publisher: SideFacts | None = None,
) -> SideFacts:
    """Find out where this process runs and what works here.

    Args:
        node: what the cluster calls this machine.
        address: where other machines reach this one, in numbers.
        directories: directories that this side may share; the paths may differ from side to side.
        beacon: on a publisher's side, what it holds up.
        publisher: on a consumer's side, what the publisher's said: its beacon is opened.

    Raises:
        WeightBridgeUnavailableError: a directory that cannot be used, or no Linux with ``/proc``.

    """
    try:
        boot_id = _BOOT_ID.read_text("ascii").strip()
        pid_namespace = _PID_NAMESPACE.stat().st_ino
    except OSError as error:
        raise WeightBridgeUnavailableError(
            f"this process cannot see where it runs: {error}. Run it where /proc is mounted."
        ) from error
    theirs = None if publisher is None else publisher.beacon
    return SideFacts(
        boot_id=boot_id,
        pid_namespace=pid_namespace,
        user_id=os.geteuid(),
        pid=os.getpid(),
        node=node,
        address=address,
        transports=dict(_transports()),
        directories=tuple(SharedDirectory.at(path) for path in directories),
        beacon=None if beacon is None else beacon.ref,
        opened=None if theirs is None else try_beacon(theirs),
    )


def _transports() -> Iterator[tuple[str, str]]:
    for name in PREFERENCE:
        if name not in registry.TRANSPORTS:
            yield name, "not part of this version of rl_bridge"
            continue
        found = registry.probe(name)
        yield name, "" if found.status == "pass" else found.cause or "blocked"


def choose_transport(
    publisher: SideFacts,
    consumer: SideFacts,
    *,
    preference: Sequence[str] = PREFERENCE,
) -> PairChoice:
    """Choose a pair's transport; a pure function.

    Args:
        publisher: what the trainer's side said.
        consumer: what the engine's side said, after it looked for the publisher.
        preference: transports that may be used, the best one first.

    Raises:
        WeightBridgeUnavailableError: none of them works between the two; says why of each.

    """
    not_taken: dict[str, str] = {}
    for name in preference:
        found = _found(name, publisher, consumer)
        if isinstance(found, PairChoice):
            return found.model_copy(update={"not_taken": not_taken})
        not_taken[name] = found
    raise _none_works(f"{_who(publisher)} and {_who(consumer)}", not_taken)


def choose_for_group(
    pairs: Sequence[tuple[SideFacts, SideFacts]], *, preference: Sequence[str] = PREFERENCE
) -> tuple[PairChoice, ...]:
    """Choose the transport that one consumer reads all ranks of a group by; a pure function.

    Args:
        pairs: by rank, what the rank's side said, and the consumer's after it looked for that rank.
        preference: transports that may be used, the best one first.

    Returns:
        By rank, the choice: all of one transport and one lane.

    Raises:
        WeightBridgeUnavailableError: none of them works with every rank; says why of each.

    """
    not_taken: dict[str, str] = {}
    for name in preference:
        found = [_found(name, *pair) for pair in pairs]
        choices = [one for one in found if isinstance(one, PairChoice)]
        if len(choices) < len(found):
            causes = ((rank, one) for rank, one in enumerate(found) if isinstance(one, str))
            not_taken[name] = "rank {}: {}".format(*next(causes))
        elif any(one.consumer_options != choices[0].consumer_options for one in choices):
            not_taken[name] = "no one directory is shared with all ranks"
        else:
            lane = "+".join(dict.fromkeys(one.lane for one in choices))
            changes = {"not_taken": not_taken, "group": lane}
            return tuple(one.model_copy(update=changes) for one in choices)
    raise _none_works(f"{len(pairs)} ranks and {_who(pairs[0][1])}", not_taken)


def _found(name: str, publisher: SideFacts, consumer: SideFacts) -> PairChoice | str:
    """How a pair uses a transport, or why it cannot."""
    find = _network if name != "shared-memory" else _memory
    return _blocked(name, publisher, consumer) or find(name, publisher, consumer)


def _none_works(who: str, not_taken: Mapping[str, str]) -> WeightBridgeUnavailableError:
    causes = "; ".join(f"{name}: {cause}" for name, cause in not_taken.items())
    return WeightBridgeUnavailableError(
        f"no transport between {who}: {causes}. Put both on one machine, give both a shared "
        "directory, or install what is missing."
    )


def _blocked(name: str, publisher: SideFacts, consumer: SideFacts) -> str:
    for side, facts in (("publisher", publisher), ("consumer", consumer)):
        cause = facts.transports.get(name, "not known there")
        if cause:
            return f"blocked at the {side}: {cause}"
    return ""


def _memory(name: str, publisher: SideFacts, consumer: SideFacts) -> PairChoice | str:
    """Shared memory, or why it is none."""
    if publisher.boot_id != consumer.boot_id:
        return "they run on different machines"
    cause = _unseen(publisher, consumer)
    if not cause:
        tried = "" if publisher.beacon is None else " (tried)"
        reason = f"one machine, and the publisher's memory is reachable through /proc{tried}"
        return PairChoice(transport=name, reason=reason)
    for mine in publisher.directories:
        for theirs in consumer.directories:
            if (mine.device, mine.inode) == (theirs.device, theirs.inode):
                # Each side by its own path: containers mount one directory in different places.
                return PairChoice(
                    transport=name,
                    reason=f"one machine, and {mine.path} is a directory of both",
                    publisher_options={"directory": mine.path},
                    consumer_options={"directory": theirs.path},
                )
    return f"one machine, but {cause}, and they share no directory"


def _unseen(publisher: SideFacts, consumer: SideFacts) -> str:
    """Why the consumer cannot open the publisher's memory through /proc; empty if it can."""
    if publisher.pid_namespace != consumer.pid_namespace:
        return "the two do not see each other's processes (two PID namespaces)"
    if publisher.beacon is not None:
        if consumer.opened == publisher.beacon.inode:
            return ""
        return f"the consumer cannot open the memory of process {publisher.pid} through /proc"
    if consumer.user_id not in {0, publisher.user_id}:
        return f"user {consumer.user_id} may not open what user {publisher.user_id} holds"
    return ""


def _network(name: str, publisher: SideFacts, consumer: SideFacts) -> PairChoice | str:
    if publisher.address:
        # UCX sees that they share a machine, tries its memory, and fails where that is kept apart.
        apart = name == "nixl" and publisher.boot_id == consumer.boot_id
        where = publisher.address + (" (on one machine: set UCX_TLS=tcp for both)" if apart else "")
        return PairChoice(
            transport=name,
            reason=f"{name} works on both, and reaches the publisher at {where}",
            publisher_options={"address": publisher.address},
        )
    if publisher.boot_id != consumer.boot_id:
        return "the publisher's side did not say at which address it is reached"
    return PairChoice(transport=name, reason=f"{name} works on both, which run on one machine")


def _who(facts: SideFacts) -> str:
    place = f" on node {facts.node}" if facts.node else ""
    return f"process {facts.pid}{place}"
