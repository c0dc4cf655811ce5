"""The trainer's side: one version, published for every transport that some rollout needs.

Knows nothing of Ray: what it takes and gives are bytes and plain values.
"""

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import VersionNotMonotonic, WeightUpdateRejectedError
from rl_bridge.groups.exchange import GroupExchange
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.journal import Journal
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_digests import LEAVES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.parallel import Placement
from rl_bridge.ray.calls import Announcement
from rl_bridge.ray.pairing import Beacon, PairChoice, look_around
from rl_bridge.trainers.state_dict import Source

__all__ = [
    "GroupLane",
    "Lane",
    "MakeLane",
    "Manifest",
    "PublisherSide",
    "SingleLane",
]

# ---- One way on which a trainer's actor publishes: by itself, or as a rank of a group.
#
# Knows nothing of Ray.

Manifest = WeightUpdateManifest | GroupManifest


class Lane(ABC):
    """A bridge, and how versions are published through it."""

    def __init__(self, bridge: TensorBridge) -> None:
        """Publish through `bridge`, which is the lane's from here on."""
        self.bridge = bridge

    @abstractmethod
    def publish(
        self, source: Source, *, weight_version: int, metadata: Mapping[str, JSONValue] | None
    ) -> Manifest:
        """Publish a version.

        Raises:
            WeightBridgeError: it cannot be published; nothing of it is.

        """

    @abstractmethod
    def release(self, manifest: Manifest) -> None:
        """Let go of a version. Idempotent."""

    @abstractmethod
    def sealed(self, manifest: Manifest) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """What this process published with a version, out of its own sealed memory."""


class SingleLane(Lane):
    """Versions that this process publishes alone."""

    def publish(
        self, source: Source, *, weight_version: int, metadata: Mapping[str, JSONValue] | None
    ) -> Manifest:
        """Publish a version."""
        return self.bridge.publish(source, weight_version=weight_version, metadata=metadata)

    def release(self, manifest: Manifest) -> None:
        """Let go of a version."""
        self.bridge.release(manifest.update_id)

    @contextmanager
    def sealed(self, manifest: Manifest) -> Iterator[Mapping[str, torch.Tensor]]:
        """What was published, verified."""
        assert isinstance(manifest, WeightUpdateManifest)
        try:
            yield self.bridge.import_update(manifest)
        finally:
            self.bridge.release_imported(manifest.update_id)


class GroupLane(Lane):
    """Versions that this process publishes as one rank of many."""

    def __init__(
        self,
        bridge: TensorBridge,
        exchange: GroupExchange,
        placements: Callable[[], Mapping[str, Placement]],
        *,
        timeout_s: float,
    ) -> None:
        """Be a rank.

        Args:
            bridge: as for `Lane`.
            exchange: how the ranks talk.
            placements: tells where this rank's tensors lie in the whole ones.
            timeout_s: longest wait for the other ranks, in one step.

        """
        super().__init__(bridge)
        self._rank = exchange.rank
        self._placements = placements
        self._publisher = GroupPublisher(bridge, exchange, timeout_s=timeout_s)

    def publish(
        self, source: Source, *, weight_version: int, metadata: Mapping[str, JSONValue] | None
    ) -> Manifest:
        """Publish this rank's part, when all others publish theirs."""
        return self._publisher.publish(
            source, self._placements(), weight_version=weight_version, metadata=metadata
        )

    def release(self, manifest: Manifest) -> None:
        """Let go of this rank's part."""
        assert isinstance(manifest, GroupManifest)
        self._publisher.release(manifest)

    @contextmanager
    def sealed(self, manifest: Manifest) -> Iterator[Mapping[str, torch.Tensor]]:
        """This rank's part. Who publishes it again compares the roots."""
        assert isinstance(manifest, GroupManifest)
        # Not imported: with a part is sealed the header of its group, and not one of its own.
        end = self.bridge.consumer.end
        attachment = end.look(manifest.parts[self._rank])
        try:
            yield {name: one for name, one in attachment.tensors.items() if name != LEAVES}
        finally:
            attachment.tensors.forget()
            end.settle()


# ---- the rest builds on the parts above

MakeLane = Callable[[str, TensorBridge], Lane]
"""Makes of a bridge the lane of that name."""

_LOG = logging.getLogger(__name__)
_HOME = "shared-memory"
# Lanes whose versions lie sealed in this machine's memory, and can be imported here, too.
_SEALS = (_HOME, "nixl")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _in_turn(
    method: Callable[Concatenate["PublisherSide", _P], _R],
) -> Callable[Concatenate["PublisherSide", _P], _R]:
    """Let one such call of a side in at a time."""

    @wraps(method)
    def call(side: "PublisherSide", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with side._lock:  # noqa: SLF001 - its own class
            return method(side, *args, **kwargs)

    return call


class PublisherSide:
    """Publishes each version once per lane: a transport, and for shared files their directory.

    The version is always sealed in this machine's memory, and a lane that is opened later gets the
    current version from that seal, not from weights that may have moved on. That costs one copy: a
    lane of its own has the seal only where no rollout's lane is one already. It keeps two versions:
    the current one, and the one before it, until the next.

    As a rank of a group, it publishes its part on each lane: `serve`, `publish` and `drop` are
    called on all ranks alike. Thread-safe, for actors that run several methods at a time: calls are
    taken in turn.
    """

    def __init__(
        self,
        source: Callable[[], Source],
        *,
        worker: str = "trainer",
        rank: int = 0,
        node: str = "",
        address: str = "",
        directories: Sequence[str] = (),
        state_dir: str | None = None,
        options: Mapping[str, Mapping[str, object]] | None = None,
        make_lane: MakeLane | None = None,
    ) -> None:
        """Open the first lane; nothing is published yet.

        Args:
            source: gives what to publish: a module, a state dict, or chunks.
            worker: this side's name.
            rank: its rank.
            node: what the cluster calls this machine.
            address: where other machines reach it; what listens for them listens there.
            directories: where named segments may go, for rollouts in other containers.
            state_dir: where the last version is kept across restarts.
            options: transport -> more options for `make_weight_bridge`.
            make_lane: how versions are published through a bridge; None: by this side alone.

        Raises:
            WeightBridgeUnavailableError: another live trainer holds `state_dir`.
            WeightBridgeError: shared memory is blocked here, or `state_dir` cannot be used.
            ValueError: an option that it cannot be used with.

        """
        for name, given in (options or {}).items():
            if given.get("in_place"):
                raise ValueError(
                    f"options of {name!r}: in_place={given['in_place']!r}, expected False: the "
                    "current version is kept until the next one is out, and tensors that train on "
                    "hold one of the two. Leave it out."
                )
        self._source = source
        self._worker = worker
        self._rank = rank
        self._node = node
        self._address = address
        self._directories = tuple(directories)
        self._options = {name: dict(given) for name, given in (options or {}).items()}
        self._metadata: Mapping[str, JSONValue] = {}
        self._make_lane = make_lane or (lambda _, bridge: SingleLane(bridge))
        self._lanes: dict[str, Lane] = {}
        self._manifests: dict[str, Manifest] = {}
        self._before: dict[str, Manifest] = {}
        self._asked: set[str] = set()
        """Lanes that rollouts use."""
        self._beacon = Beacon()
        self._lock = threading.RLock()
        # Of the side, and not of its lanes: one that is opened again gets the version of now.
        self._journal = Journal(_folder(state_dir, rank=None if make_lane is None else rank))
        try:
            self._open(PairChoice(transport=_HOME, reason="the seal that every lane comes from"))
        except BaseException:
            self._journal.close()
            raise

    def facts(self) -> bytes:
        """Where this side runs and what works here: `SideFacts` as JSON."""
        return look_around(
            node=self._node,
            address=self._address,
            directories=self._directories,
            beacon=self._beacon,
        ).to_json()

    @_in_turn
    def serve(self, choice: bytes) -> bytes:
        """Open a rollout's lane, with the current version on it; idempotent.

        Returns:
            The manifest that the rollout installs before it answers requests; empty if nothing was
            published yet.

        Raises:
            WeightBridgeError: the transport cannot be opened, or carry this version.

        """
        chosen = PairChoice.from_json(choice)
        is_behind = bool(self._manifests) and chosen.lane not in self._manifests
        if is_behind and chosen.lane in self._lanes:
            self._shut(chosen.lane)  # an interrupt came where it was opened, or shut
        if chosen.lane not in self._lanes:
            lane = self._open(chosen)
            if is_behind:
                self._carry_over(chosen.lane, lane)
        self._asked.add(chosen.lane)
        manifest = self._manifests.get(chosen.lane)
        return b"" if manifest is None else manifest.to_json().encode()

    @_in_turn
    def drop(self, lane: str) -> None:
        """Close a lane that no rollout uses; the last seal stays open. Idempotent."""
        self._asked.discard(lane)
        self._drop_spare()

    @_in_turn
    def reseat(self, make_lane: MakeLane) -> None:
        """Go on with the same bridges and versions, in a group that talks in another way."""
        self._make_lane = make_lane
        self._lanes = {name: make_lane(name, lane.bridge) for name, lane in self._lanes.items()}

    @_in_turn
    def publish(
        self, weight_version: int, metadata: Mapping[str, JSONValue] | None = None
    ) -> tuple[bytes, dict[str, bytes]]:
        """Publish what the source holds now, on every lane.

        Returns:
            The `Announcement`, and lane -> manifest, all as JSON.

        Raises:
            VersionNotMonotonic: the version is not above the last one.
            WeightUpdateRejectedError: the weights moved while they were published; the rollouts
                keep the version before.
            WeightBridgeError: a lane cannot carry it.

        """
        last = self._journal.last_version
        if last is not None and weight_version <= last:
            # Before any lane takes it: half of them would go on otherwise.
            raise VersionNotMonotonic(
                f"weight_version must increase monotonically: {weight_version} came after {last}. "
                "Publish a later version."
            )
        self._drop_spare()
        for lane, manifest in self._before.items():
            self._lanes[lane].release(manifest)
        self._before = {}
        made: dict[str, Manifest] = {}
        try:
            for name, one in sorted(self._lanes.items()):  # on all ranks one behind the other
                made[name] = one.publish(
                    self._source(), weight_version=weight_version, metadata=metadata
                )
            _require_one_root(made)
            self._journal.reserve(weight_version)
            # (Where the version is known from here on, an interrupt takes nothing of it back.)
            self._before, self._manifests, self._metadata = self._manifests, made, metadata or {}
        except BaseException:
            if self._manifests is not made:
                for lane, manifest in made.items():
                    self._lanes[lane].release(manifest)
            raise
        return self.announcement(), {lane: text.to_json().encode() for lane, text in made.items()}

    @_in_turn
    def announcement(self) -> bytes:
        """What was published last: `Announcement` as JSON."""
        told, manifest = Announcement(lanes=tuple(sorted(self._lanes))), self._current
        if manifest is not None:
            out = {"weight_version": manifest.weight_version, "root": manifest.root}
            told = told.model_copy(update=out)
        return told.to_json()

    @_in_turn
    def reports(self) -> bytes:
        """What the consumers told the publisher, lane by lane, as JSON."""
        found = {name: lane.bridge.consumers() for name, lane in self._lanes.items()}
        told = {lane: [asdict(report) for report in reports] for lane, reports in found.items()}
        return json.dumps(told, default=str).encode()

    @_in_turn
    def close(self) -> None:
        """Take back everything that was published. Idempotent."""
        with ExitStack() as ends:  # each of them, also where one fails
            ends.callback(self._journal.close)
            ends.callback(self._beacon.close)
            for lane in self._lanes.values():
                ends.callback(lane.bridge.close)

    def _open(self, chosen: PairChoice) -> Lane:
        bridge = make_weight_bridge(
            chosen.transport,
            source_worker=self._worker,
            source_rank=self._rank,
            **{
                **self._options.get(chosen.transport, {}),
                **chosen.publisher_options,
            },
        )
        lane = self._lanes[chosen.lane] = self._make_lane(chosen.lane, bridge)
        _LOG.info("%s opens %s", self._worker, chosen)
        return lane

    @property
    def _current(self) -> Manifest | None:
        """What was published last: on all lanes the same."""
        return next(iter(self._manifests.values()), None)

    def _drop_spare(self) -> None:
        """Shut every lane that no rollout uses, but for the last seal.

        Among them is what an interrupt left of a lane that was to be opened or shut.
        """
        seals = [lane for lane in _SEALS if lane in (self._manifests or self._lanes)]
        kept = self._asked.intersection(seals) or seals[:1]
        for lane in self._lanes.keys() - self._asked.union(kept):
            self._shut(lane)
            _LOG.info("%s shuts %s", self._worker, lane)

    def _shut(self, lane: str) -> None:
        # In this order: a lane without the version is known as one that is not to be used.
        self._manifests.pop(lane, None)
        self._before.pop(lane, None)
        self._lanes.pop(lane).bridge.close()

    def _carry_over(self, name: str, lane: Lane) -> None:
        """Publish the current version on a new lane, from where it is sealed."""
        seal = next(name for name in _SEALS if name in self._manifests)
        sealed = self._manifests[seal]
        try:
            with self._lanes[seal].sealed(sealed) as weights:
                self._manifests[name] = lane.publish(
                    weights, weight_version=sealed.weight_version, metadata=self._metadata
                )
            _require_one_root(self._manifests)
        except BaseException:
            self._shut(name)
            raise


def _folder(state_dir: str | None, *, rank: int | None) -> Path | None:
    """Where the last version is kept; ranks of one class name one directory."""
    if state_dir is None:
        return None
    folder = Path(state_dir) if rank is None else Path(state_dir) / f"rank-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _require_one_root(made: Mapping[str, Manifest]) -> None:
    roots = {lane: manifest.root for lane, manifest in made.items()}
    if len(set(roots.values())) > 1:
        version = next(iter(made.values())).weight_version
        raise WeightUpdateRejectedError(
            f"version {version} has another root on each lane: {roots}. The weights moved while "
            "they were published. Call publish between two training steps."
        )
