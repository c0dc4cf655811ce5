"""The trainer's endpoint: one version, published on every channel that some rollout needs.

A channel is a bridge of one transport (and directory). The endpoint publishes through it alone, or
as a rank of a group (`GroupRank`). It knows nothing of Ray: it takes and gives bytes and plain
values.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import VersionNotMonotonic, WeightUpdateRejectedError
from rl_bridge.groups.exchange import GroupExchange
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.interrupts import deferred_interrupts
from rl_bridge.journal import Journal
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.parallel import Placement
from rl_bridge.ray.calls import Announcement
from rl_bridge.ray.pairing import PairChoice, look_around, make_probe
from rl_bridge.trainers.state_dict import Source

_LOG = logging.getLogger(__name__)
_HOME = "shared-memory"
# Transports whose versions lie sealed in this machine's memory and can be imported here, too.
_SEALS = (_HOME, "nixl")
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRank:
    """How an endpoint publishes as one rank of a group.

    Attributes:
        exchange: from a channel's name to the way to the other ranks.
        placements: tells where this rank's tensors lie in the whole ones.
        timeout_s: longest wait for the other ranks, in one step.

    """

    exchange: Callable[[str], GroupExchange]
    placements: Callable[[], Mapping[str, Placement]]
    timeout_s: float


@dataclass(slots=True, eq=False)
class _Channel:
    """A bridge, and what was published through it."""

    bridge: TensorBridge
    group: GroupPublisher | None  # publishes through it as a rank of a group
    current: WeightUpdateManifest | None = None
    before: WeightUpdateManifest | None = None  # until the next publication
    is_used: bool = False  # by a rollout

    def release(self, manifest: WeightUpdateManifest) -> None:
        """Release a version. Idempotent."""
        if self.group is None or not isinstance(manifest, GroupManifest):
            self.bridge.release(manifest.update_id)
        else:
            self.group.release(manifest)


def _in_turn(
    method: Callable[Concatenate["PublisherEndpoint", _P], _R],
) -> Callable[Concatenate["PublisherEndpoint", _P], _R]:
    """Let one such call of an endpoint run at a time, to its end."""

    @wraps(method)
    def call(endpoint: "PublisherEndpoint", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with deferred_interrupts(), endpoint.lock:
            return method(endpoint, *args, **kwargs)

    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """Options of a `PublisherEndpoint`.

    Attributes:
        worker: the endpoint's name.
        rank: its rank.
        node: what the cluster calls this machine.
        address: where other machines reach it; what listens for them listens there.
        directories: where named segments may go, for rollouts in other containers.
        state_dir: where the last version is kept across restarts.
        transports: transport -> more options for `make_weight_bridge`.

    Raises:
        ValueError: an option of a transport that it cannot be used with.

    """

    worker: str = "trainer"
    rank: int = 0
    node: str = ""
    address: str = ""
    directories: Sequence[str] = ()
    state_dir: str | None = None
    transports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, given in self.transports.items():
            if given.get("in_place"):
                raise ValueError(
                    f"options of {name!r}: in_place={given['in_place']!r}, expected False: the "
                    "current version is kept until the next one is out, and tensors that train on "
                    "hold one of the two. Leave it out."
                )


class PublisherEndpoint:
    """Publishes each version once per channel: a transport, and for shared files their directory.

    The current version is always sealed in this machine's memory: a channel that is opened later
    gets it from there, not from weights that may have moved on. If no rollout's channel seals it in
    memory, one more channel does, which costs one copy. The endpoint keeps two versions: the
    current one, and until the next publication the one before it.

    As a rank of a group it publishes its part on each channel: `serve`, `publish` and `drop` must
    be called on all ranks alike. An actor may run several methods at a time: calls take turns.
    """

    def __init__(
        self,
        source: Callable[[], Source],
        options: EndpointOptions = EndpointOptions(),
        *,
        group: GroupRank | None = None,
    ) -> None:
        """Open the first channel; nothing is published yet.

        Args:
            source: gives what to publish: a module, a state dict, or chunks.
            options: its name, its place, and what it keeps.
            group: how this endpoint publishes as a rank of a group; None: it publishes alone.

        Raises:
            WeightBridgeUnavailableError: another live trainer holds `state_dir`.
            WeightBridgeError: shared memory is blocked here, or `state_dir` cannot be used.

        """
        self._source = source
        self._options = options
        self._metadata: Mapping[str, JSONValue] = {}
        self._group = group
        self._channels: dict[str, _Channel] = {}
        self._probe = make_probe()
        self.lock = threading.RLock()
        folder = None if options.state_dir is None else Path(options.state_dir)
        if folder is not None and group is not None:
            folder /= f"rank-{options.rank}"  # all ranks name one directory
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        # One for all channels: a channel that is opened again gets the current version.
        self._journal = Journal(folder)
        try:
            self._open(PairChoice(transport=_HOME, reason="the seal that every channel comes from"))
        except BaseException:
            self._journal.close()
            raise

    def facts(self) -> bytes:
        """Where this endpoint runs and what works here: `EndpointFacts` as JSON."""
        return look_around(
            node=self._options.node,
            address=self._options.address,
            directories=self._options.directories,
            probe=self._probe.ref,
        ).to_json()

    @_in_turn
    def serve(self, choice: bytes) -> bytes:
        """Open a rollout's channel, with the current version on it; idempotent.

        Returns:
            The manifest that the rollout installs before it answers requests; empty if nothing was
            published yet.

        Raises:
            WeightBridgeError: the transport cannot be opened, or carry this version.

        """
        chosen = PairChoice.from_json(choice)
        channel = self._channels.get(chosen.channel)
        if channel is None or (channel.current is None and self._current is not None):
            if channel is not None:
                self._shut(chosen.channel)  # a call that failed half-way left it open
            channel = self._open(chosen)
            try:
                self._carry_over(channel)
            except BaseException:
                self._shut(chosen.channel)
                raise
        channel.is_used = True
        return b"" if channel.current is None else channel.current.to_json().encode()

    @_in_turn
    def drop(self, channel: str) -> None:
        """Close a channel that no rollout uses; the last seal stays open. Idempotent."""
        if channel in self._channels:
            self._channels[channel].is_used = False
        self._drop_spare()

    @_in_turn
    def rejoin(self, group: GroupRank | None) -> None:
        """Keep the bridges and versions, and publish with other exchanges from here on."""
        self._group = group
        for name, channel in self._channels.items():
            channel.group = self._publisher(name, channel.bridge)

    @_in_turn
    def publish(
        self,
        weight_version: int | None = None,
        metadata: Mapping[str, JSONValue] | None = None,
    ) -> tuple[bytes, dict[str, bytes]]:
        """Publish what the source holds now, on every channel.

        Args:
            weight_version: above the last one; None takes the next one of this actor. Ranks of a
                group that know different last ones refuse it (`RanksDisagree`).
            metadata: JSON values of your own.

        Returns:
            The `Announcement`, and channel -> manifest, all as JSON.

        Raises:
            VersionNotMonotonic: the version is not above the last one.
            WeightUpdateRejectedError: the weights moved while they were published; the rollouts
                keep the version before.
            WeightBridgeError: a channel cannot carry it.

        """
        last = self._journal.last_version
        if weight_version is None:
            # A channel may have used a number up for a version that another one could not carry.
            used = [one.bridge.publisher.last_version for one in self._channels.values()]
            weight_version = 1 + max(-1 if one is None else one for one in [last, *used])
        if last is not None and weight_version <= last:
            # Before any channel takes it: half of them would go on otherwise.
            raise VersionNotMonotonic(
                f"weight_version must increase monotonically: {weight_version} came after {last}. "
                "Publish a later version."
            )
        self._drop_spare()
        for channel in self._channels.values():
            if channel.before is not None:
                channel.release(channel.before)
                channel.before = None
        made: dict[str, WeightUpdateManifest] = {}
        try:
            for name, one in sorted(self._channels.items()):  # in the same order on all ranks
                made[name] = self._publish(one, self._source, weight_version, metadata)
            _require_one_root(made)
            self._journal.reserve(weight_version)
        except BaseException:
            for name, manifest in made.items():
                self._channels[name].release(manifest)
            raise
        self._metadata = metadata or {}
        for name, one in self._channels.items():
            one.before, one.current = one.current, made[name]
        return self.announcement(), {
            name: manifest.to_json().encode() for name, manifest in made.items()
        }

    @_in_turn
    def announcement(self) -> bytes:
        """What was published last: `Announcement` as JSON."""
        told, manifest = Announcement(channels=tuple(sorted(self._channels))), self._current
        if manifest is not None:
            out = {"weight_version": manifest.weight_version, "root": manifest.root}
            told = told.model_copy(update=out)
        return told.to_json()

    @_in_turn
    def reports(self) -> bytes:
        """What the consumers told the publisher, channel by channel, as JSON."""
        found = {name: channel.bridge.consumers() for name, channel in self._channels.items()}
        told = {
            channel: [asdict(report) for report in reports] for channel, reports in found.items()
        }
        return json.dumps(told, default=str).encode()

    @_in_turn
    def close(self) -> None:
        """Take back everything that was published. Idempotent."""
        with ExitStack() as ends:  # each of them, also where one fails
            ends.callback(self._journal.close)
            ends.callback(self._probe.close)
            for channel in self._channels.values():
                ends.callback(channel.bridge.close)

    def _open(self, chosen: PairChoice) -> _Channel:
        options = dict(self._options.transports.get(chosen.transport, {}))
        bridge = make_weight_bridge(
            chosen.transport,
            source_worker=self._options.worker,
            source_rank=self._options.rank,
            **(options | chosen.publisher_options),
        )
        channel = _Channel(bridge, self._publisher(chosen.channel, bridge))
        self._channels[chosen.channel] = channel
        _LOG.info("%s opens %s", self._options.worker, chosen)
        return channel

    def _publisher(self, channel: str, bridge: TensorBridge) -> GroupPublisher | None:
        group = self._group
        if group is None:
            return None
        return GroupPublisher(bridge, group.exchange(channel), timeout_s=group.timeout_s)

    def _publish(
        self,
        channel: _Channel,
        source: Callable[[], Source],
        version: int,
        metadata: Mapping[str, JSONValue] | None,
    ) -> WeightUpdateManifest:
        """Publish alone, or this rank's part when all others publish theirs."""
        group = self._group
        if channel.group is None or group is None:
            return channel.bridge.publish(source(), weight_version=version, metadata=metadata)
        return channel.group.publish_from(
            lambda: (source(), group.placements()), weight_version=version, metadata=metadata
        )

    @property
    def _current(self) -> WeightUpdateManifest | None:
        """What was published last: on all channels the same."""
        found = (one.current for one in self._channels.values())
        return next((one for one in found if one is not None), None)

    def _drop_spare(self) -> None:
        """Close every channel that no rollout uses, but not the last one that seals in memory."""
        seals = self._seals
        kept = [] if any(one.is_used for one in seals) else seals[:1]
        for name, channel in list(self._channels.items()):
            if not channel.is_used and channel not in kept:
                self._shut(name)
                _LOG.info("%s shuts %s", self._options.worker, name)

    @property
    def _seals(self) -> list[_Channel]:
        """The channels that seal in memory, and have the current version if there is one."""
        found = [self._channels[name] for name in _SEALS if name in self._channels]
        return [one for one in found if (one.current is None) == (self._current is None)]

    def _shut(self, name: str) -> None:
        self._channels.pop(name).bridge.close()

    def _carry_over(self, channel: _Channel) -> None:
        """Publish the current version, if there is one, on a new channel: as it is sealed."""
        if self._current is None:
            return
        seal = self._seals[0]
        sealed = seal.current
        assert sealed is not None
        with self._opened(seal.bridge, sealed) as weights:
            made = self._publish(channel, lambda: weights, sealed.weight_version, self._metadata)
        _require_one_root({"the sealed one": sealed, "the new one": made})
        channel.current = made

    @contextmanager
    def _opened(
        self, bridge: TensorBridge, manifest: WeightUpdateManifest
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """The tensors that this process published with a version, in its own sealed memory.

        A rank's part is unverified: whoever publishes it again compares the roots.
        """
        if not isinstance(manifest, GroupManifest):
            try:
                yield bridge.import_update(manifest)
            finally:
                bridge.release_imported(manifest.update_id)
            return
        # Not imported, since a part is sealed with the header of its group instead of its own.
        end = bridge.consumer.end
        attachment = end.look(manifest.parts[self._options.rank])
        try:
            yield attachment.tensors
        finally:
            attachment.tensors.forget()
            end.settle()


def _require_one_root(made: Mapping[str, WeightUpdateManifest]) -> None:
    roots = {channel: manifest.root for channel, manifest in made.items()}
    if len(set(roots.values())) > 1:
        version = next(iter(made.values())).weight_version
        raise WeightUpdateRejectedError(
            f"version {version} has another root on each channel: {roots}. The weights moved while "
            "they were published. Call publish between two training steps."
        )
