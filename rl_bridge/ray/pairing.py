"""The transport that a publisher and a consumer use: chosen by what the two really share.

Each endpoint finds out where it runs and what works there (`look_around`), and sends that as JSON.
The consumer's endpoint also tries to open a page of the publisher's sealed memory (`make_probe`).
`choose_transport` is a pure function of these facts: shared memory if memory is shared, else NIXL
if both have it, else broadcast.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from rl_bridge.errors import MalformedManifest, SegmentError, WeightBridgeUnavailableError
from rl_bridge.manifest.canonical import field_problem
from rl_bridge.memory import vm
from rl_bridge.memory.segment import OwnedSegment, SegmentRef, open_segment
from rl_bridge.processes import close_fd
from rl_bridge.transports import registry

PREFERENCE = ("shared-memory", "nixl", "broadcast")
"""Transports between processes that a pair of CPU endpoints chooses from, the best one first."""

_LIMIT = 1 << 20
"""A longer text is no description of an endpoint."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")

Text = Annotated[StrictStr, Field(max_length=4096)]
Options = Annotated[dict[Text, Text], Field(max_length=64)]
Count = Annotated[StrictInt, Field(ge=0, lt=2**63)]


class Said(BaseModel):
    """A message from one endpoint to the other: JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> bytes:
        """As bytes, for the other endpoint."""
        return self.model_dump_json().encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """Read the message of another endpoint.

        Raises:
            MalformedManifest: it is no such message.

        """
        if len(text) > _LIMIT:
            raise MalformedManifest(
                f"{cls.__name__}: {len(text)} bytes came, at most {_LIMIT} are read. Send what the "
                "other endpoint's to_json gave."
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise MalformedManifest(
                f"{cls.__name__}: {field_problem(error)}. Send what the other endpoint's to_json "
                "gave."
            ) from error


class SharedDirectory(Said):
    """A directory, and what tells it from others of the same machine."""

    path: Text
    device: Count
    inode: Count

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Self:
        """The directory at `path`; it must be one that this process may write to."""
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


class EndpointFacts(Said):
    """Where one endpoint of a pair runs, and what works there.

    Attributes:
        boot_id: the running kernel: two endpoints with the same one share a machine.
        pid_namespace: which processes it sees; only within one do pids mean the same.
        user_id: its effective user.
        pid: its process.
        node: what the cluster calls its machine, for the log; empty outside of one.
        address: where others reach it, in numbers; empty if nobody said.
        transports: name -> what blocks it here; an empty text where it works.
        directories: where this endpoint may put named segments.
        probe: the page that a publisher's endpoint offers to be opened; None if it offers none.
        opened: inode of the probe that this endpoint opened; None if it could not, or did not try.

    """

    boot_id: Text
    pid_namespace: Count
    user_id: Count
    pid: Count
    node: Text = ""
    address: Text = ""
    transports: Options = {}
    directories: Annotated[tuple[SharedDirectory, ...], Field(max_length=64)] = ()
    probe: SegmentRef | None = None
    opened: Count | None = None


class PairChoice(Said):
    """What a pair uses.

    Attributes:
        transport: its name.
        reason: why this one.
        publisher_options: what the publisher passes to `make_weight_bridge` for it.
        consumer_options: what the consumer passes.
        not_taken: transport -> why not, of those that come before it.
        group: name of the channel of all ranks of a group; empty for one publisher alone.

    """

    transport: Text
    reason: Text
    publisher_options: Options = {}
    consumer_options: Options = {}
    not_taken: Options = {}
    group: Text = ""

    @property
    def channel(self) -> str:
        """The transport, and its directory if it has one: its pairs share a publication."""
        if self.group:
            return self.group
        directory = self.publisher_options.get("directory")
        return self.transport if directory is None else f"{self.transport}@{directory}"

    def __str__(self) -> str:
        """The choice on one line, for a log."""
        others = "".join(f"; not {name}: {why}" for name, why in self.not_taken.items())
        return f"{self.transport}: {self.reason}{others}"


def make_probe() -> OwnedSegment:
    """A page of sealed memory: a consumer that can open it can open the publisher's weights."""
    return OwnedSegment.make("rl_bridge-probe", vm.PAGE)


def look_around(
    *,
    node: str = "",
    address: str = "",
    directories: Sequence[str | os.PathLike[str]] = (),
    probe: SegmentRef | None = None,
    publisher: EndpointFacts | None = None,
) -> EndpointFacts:
    """Find out where this process runs and what works here.

    Args:
        node: what the cluster calls this machine.
        address: where other machines reach this one, in numbers.
        directories: directories that this endpoint may share; the paths may differ from those of
            other endpoints.
        probe: at a publisher, where the page is that it offers (`make_probe`).
        publisher: at a consumer, the publisher's facts: their probe is opened.

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
    probed = {name: registry.probe(name) for name in PREFERENCE}
    opened = None
    if publisher is not None and publisher.probe is not None:
        with suppress(SegmentError):  # in the way in which a consumer opens weights
            close_fd(open_segment(publisher.probe))
            opened = publisher.probe.inode
    return EndpointFacts(
        boot_id=boot_id,
        pid_namespace=pid_namespace,
        user_id=os.geteuid(),
        pid=os.getpid(),
        node=node,
        address=address,
        transports={
            name: "" if found.status == "pass" else found.cause or "blocked"
            for name, found in probed.items()
        },
        directories=tuple(SharedDirectory.at(path) for path in directories),
        probe=probe,
        opened=opened,
    )


def choose_transport(publisher: EndpointFacts, consumer: EndpointFacts) -> PairChoice:
    """Choose a pair's transport; a pure function.

    Args:
        publisher: the trainer's facts.
        consumer: the engine's facts, found with those of the publisher.

    Raises:
        WeightBridgeUnavailableError: none of them works between the two; says why of each.

    """
    (choice,) = choose_for_group([(publisher, consumer)])
    return choice.model_copy(update={"group": ""})


def choose_for_group(
    pairs: Sequence[tuple[EndpointFacts, EndpointFacts]],
) -> tuple[PairChoice, ...]:
    """Choose the transport that one consumer reads all ranks of a group by; a pure function.

    Args:
        pairs: by rank, the rank's facts, and the consumer's, found with those of that rank.

    Returns:
        By rank, the choice: all of one transport and one channel.

    Raises:
        WeightBridgeUnavailableError: none of them works with every rank; says why of each.

    """
    not_taken: dict[str, str] = {}
    for name in PREFERENCE:
        found = [_found(name, *pair) for pair in pairs]
        choices = [one for one in found if isinstance(one, PairChoice)]
        if len(choices) < len(found):
            rank, cause = next((r, one) for r, one in enumerate(found) if isinstance(one, str))
            not_taken[name] = cause if len(pairs) == 1 else f"rank {rank}: {cause}"
        elif any(one.consumer_options != choices[0].consumer_options for one in choices):
            not_taken[name] = "no one directory is shared with all ranks"
        else:
            channel = "+".join(dict.fromkeys(one.channel for one in choices))
            changes = {"not_taken": not_taken, "group": channel}
            return tuple(one.model_copy(update=changes) for one in choices)
    causes = "; ".join(f"{name}: {cause}" for name, cause in not_taken.items())
    publishers = _who(pairs[0][0]) if len(pairs) == 1 else f"{len(pairs)} ranks"
    raise WeightBridgeUnavailableError(
        f"no transport between {publishers} and {_who(pairs[0][1])}: {causes}. Put both on one "
        "machine, give both a shared directory, or install what is missing."
    )


def _found(name: str, publisher: EndpointFacts, consumer: EndpointFacts) -> PairChoice | str:
    """How a pair uses a transport, or why it cannot."""
    find = _network if name != "shared-memory" else _memory
    return _blocked(name, publisher, consumer) or find(name, publisher, consumer)


def _blocked(name: str, publisher: EndpointFacts, consumer: EndpointFacts) -> str:
    for endpoint, facts in (("publisher", publisher), ("consumer", consumer)):
        cause = facts.transports.get(name, "not known there")
        if cause:
            return f"blocked at the {endpoint}: {cause}"
    return ""


def _memory(name: str, publisher: EndpointFacts, consumer: EndpointFacts) -> PairChoice | str:
    """Shared memory, or why it is none."""
    if publisher.boot_id != consumer.boot_id:
        return "they run on different machines"
    cause = _unseen(publisher, consumer)
    if not cause:
        tried = "" if publisher.probe is None else " (tried)"
        reason = f"one machine, and the publisher's memory is reachable through /proc{tried}"
        return PairChoice(transport=name, reason=reason)
    for mine in publisher.directories:
        for theirs in consumer.directories:
            if (mine.device, mine.inode) == (theirs.device, theirs.inode):
                # Each endpoint by its own path: containers mount one directory in different places.
                return PairChoice(
                    transport=name,
                    reason=f"one machine, and {mine.path} is a directory of both",
                    publisher_options={"directory": mine.path},
                    consumer_options={"directory": theirs.path},
                )
    return f"one machine, but {cause}, and they share no directory"


def _unseen(publisher: EndpointFacts, consumer: EndpointFacts) -> str:
    """Why the consumer cannot open the publisher's memory through /proc; empty if it can."""
    if publisher.pid_namespace != consumer.pid_namespace:
        return "the two do not see each other's processes (two PID namespaces)"
    if publisher.probe is not None:
        if consumer.opened == publisher.probe.inode:
            return ""
        return f"the consumer cannot open the memory of process {publisher.pid} through /proc"
    if consumer.user_id not in {0, publisher.user_id}:
        return f"user {consumer.user_id} may not open what user {publisher.user_id} holds"
    return ""


def _network(name: str, publisher: EndpointFacts, consumer: EndpointFacts) -> PairChoice | str:
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
        return "the publisher's endpoint did not say at which address it is reached"
    return PairChoice(transport=name, reason=f"{name} works on both, which run on one machine")


def _who(facts: EndpointFacts) -> str:
    place = f" on node {facts.node}" if facts.node else ""
    return f"process {facts.pid}{place}"
