"""The bridges that users make: one class for each transport, and a maker by name."""

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, TypedDict, Unpack

from rl_bridge.assembly.end import GroupEnd, GroupTransport
from rl_bridge.assembly.plan import ReshardPlan
from rl_bridge.assembly.wanted import Wanted, WantedLayout
from rl_bridge.bridge.arguments import UpdateRef, check_options, require_transport, update_id_of
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import SegmentError, VersionNotFound, WeightManifestValidationError
from rl_bridge.lifecycle import Observer
from rl_bridge.manifest.compare import Policy
from rl_bridge.manifest.group import GROUP
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.passes import checked_count
from rl_bridge.transports.base import Transport
from rl_bridge.transports.registry import (
    NIXL,
    Broadcast,
    BroadcastInitInfo,
    Counters,
    Entry,
    Files,
    TLSFiles,
    canonical_name,
    transport_class,
)

_LOG = logging.getLogger(__name__)


class LocalTensorCopyBridge(TensorBridge):
    """``local-clone``: one process, every update copied."""

    transport: ClassVar[str] = "local-clone"


class SharedMemoryTensorBridge(TensorBridge):
    """``shared-memory``: CPU tensors between processes of one machine, no copy on import."""

    transport: ClassVar[str] = "shared-memory"


class CUDAVMMTensorBridge(TensorBridge):
    """``cuda-vmm``: GPU tensors between processes of one machine, no copy on import."""

    transport: ClassVar[str] = "cuda-vmm"


class CUDAIPCTensorBridge(TensorBridge):
    """``cuda-ipc``: GPU tensors between processes of one machine, copied on import."""

    transport: ClassVar[str] = "cuda-ipc"


class BroadcastTensorBridge(TensorBridge):
    """``broadcast``: one trainer to many engines over Gloo or NCCL, also on other machines."""

    transport: ClassVar[str] = "broadcast"

    def init_info(self, *, rank_offset: int = 1) -> BroadcastInitInfo:
        """What an engine's side takes as ``init_info=`` to join before the first version.

        Engines that only get manifests need none: a manifest says it as well.

        Args:
            rank_offset: the place in the group of that engine's rank 0.

        Raises:
            TransportUnavailable: the backend is blocked here, or the port is taken.

        """
        assert self.publisher is not None  # it opens the group
        assert isinstance(self._transport, Broadcast)
        return self._transport.init_info(rank_offset=rank_offset)

    def join(self) -> None:
        """Join the group that ``init_info=`` names now, and be sent every version from here on.

        Without it the first `import_update` joins.

        Raises:
            SegmentError: its publisher is gone.
            WeightBridgeUnavailableError: it has no room for this side.
            TransferTimeout: it does not answer in time.

        """
        assert self.consumer is not None  # it joins


class NIXLTensorBridge(TensorBridge):
    """``nixl``: engines read out of the trainer's memory, also from other machines."""

    transport: ClassVar[str] = "nixl"

    def catalog(self, manifest: WeightUpdateManifest | str | None = None) -> tuple[Entry, ...]:
        """What a publisher holds: one entry for each of its slots, with who reads it.

        Args:
            manifest: of any version of the publisher that is asked, or its JSON text. It is asked
                over its control connection, takes no record of it, and need not hold that version
                any more. For a group of ranks, one of the group manifest's ``parts``. None:
                what this bridge itself published, which is empty before the first publication and
                after `close`.

        Raises:
            BridgeClosed: another one was to be asked, and this bridge is closed.
            MalformedManifest: what is given is no manifest.
            ForeignTransport: it is another transport's.
            SegmentError: the publisher is gone, or does not know the token.
            WeightBridgeUnavailableError: it has no room for this side, or NIXL finds no way to it.
            TransferTimeout: it does not answer in time.

        """
        if manifest is None:
            if self._publisher is None:
                return ()
            return NIXL.catalog(self.publisher.end)
        manifest = WeightUpdateManifest.of(manifest, caller="catalog")
        require_transport(manifest, self.transport)
        consumer = self.consumer
        with consumer.turn():
            consumer.check_open()
            return NIXL.catalog(consumer.end, manifest)

    @property
    def counters(self) -> Counters:
        """What this bridge made of NIXL so far, both halves together; once warm, no count grows.

        It is as of now: look again to see what was made since. Zeros before the first use; `close`
        keeps the counts. Connections that readers made to this side are theirs.
        """
        halves = (self._publisher, self._consumer)
        return NIXL.counters(*(half.end for half in halves if half is not None))


class FilesTensorBridge(TensorBridge):
    """``files``: versions as directories, which stay when their trainer ends."""

    transport: ClassVar[str] = "files"

    def versions(self) -> list[WeightUpdateManifest]:
        """Manifests of all versions that are there, in the order of their publication.

        One that several ranks published is listed once all of them have, as long as all its parts
        are there. What cannot be read is logged and left out.

        Raises:
            WeightBridgeUnavailableError: the directory cannot be read.

        """
        return [manifest for _, manifest in self._files.stored()][::-1]

    def newest(self) -> WeightUpdateManifest | None:
        """The one of `versions` that was published last, or None; none of its bytes is read.

        Raises:
            WeightBridgeUnavailableError: the directory cannot be read.

        """
        return next((manifest for _, manifest in self._files.stored()), None)

    def newest_verified(self, *, max_skipped: int = 8) -> WeightUpdateManifest | None:
        """The newest version whose every byte is what was published, or None if there is none yet.

        For a trainer that goes on from it, and an engine that starts late. What is damaged, or goes
        meanwhile, or was rejected by this bridge, is skipped with a warning. An older version than
        the one that is active here is no answer: where nothing from that one on is whole, the call
        ends with `StaleUpdate`, and the active version stays.

        The version has been imported here then, so to import it again, or to install it through
        this bridge, reads no file; `release_imported` lets its memory go.

        Args:
            max_skipped: how many versions are skipped at most. One that lacks a file is waited for
                first, `timeout_s` seconds, as the file may only be seen late.

        Raises:
            TypeError, ValueError: `max_skipped` is no number of 0 or more.
            VersionNotFound: there are versions, or parts of one that is not offered, and none of
                those that were looked at is whole.
            StaleUpdate: the newest version that was not skipped is older than the active one.
            WeightBridgeUnavailableError: the store cannot be read, which says nothing of versions.

        """
        num_left = checked_count("max_skipped", max_skipped + 1)
        if self._files.is_empty():
            return None
        for _, manifest in self._files.stored():
            number = manifest.weight_version
            if self.consumer.order.has_rejected(manifest):
                _LOG.warning("version %d is skipped: it was rejected here before", number)
            else:
                try:
                    self.import_update(manifest)
                except (SegmentError, WeightManifestValidationError) as error:
                    _LOG.warning("version %d is skipped: %s", number, error)
                else:
                    return manifest
            num_left -= 1
            if not num_left:
                break
        raise VersionNotFound(
            f"{self._files.store} has versions, or parts of some, expected a whole one among "
            f"the newest {max_skipped + 1}, got none: the log says what is wrong with each. Look "
            "with `rl-bridge files verify`, raise max_skipped, or name another store."
        )

    def watch(
        self, *, timeout_s: float = 600.0, every_s: float = 0.5
    ) -> Iterator[WeightUpdateManifest]:
        """Yield the newest version that is there, and then the newest at each look that finds one.

        Of several that came between two looks, only the newest is given. With the package
        ``watchfiles`` (extra ``files``), and a directory that only this machine writes to, the
        kernel tells when to look.

        Args:
            timeout_s: ends after so long without a new version.
            every_s: the longest time between two looks.

        Raises:
            TypeError, ValueError: times that are no seconds above 0.
            WeightBridgeUnavailableError: the first look could not read the store, or the time is
                over and the last one could not; one that fails in between is logged.

        """
        return self._files.watch(timeout_s=timeout_s, every_s=every_s)

    def keep(self, update: UpdateRef, is_kept: bool = True) -> None:  # noqa: FBT001, FBT002 - reads as it is said
        """Have a version stay, whatever any publisher's `keep_last` says; False lets it go again.

        It holds for all bridges, and after the end of this one. Of a version that several ranks
        published, all parts stay.

        Args:
            update: the version's manifest, its JSON text, or its update id.
            is_kept: False: publishers remove it in its turn, as if it had not been kept.

        Raises:
            MalformedManifest: what is given names no update.
            VersionNotFound: the version is not there.
            WeightBridgeUnavailableError: the directory cannot be read or written.

        """
        self._files.keep(update_id_of(update, caller="keep"), is_kept=is_kept)

    @property
    def _files(self) -> Files:
        assert isinstance(self._transport, Files)
        return self._transport


class GroupBridge(TensorBridge):
    """Imports versions whose parts travel by several transports, each with options of its own.

    Every bridge imports a version of several parts if they all travel by its transport.
    """

    transport: ClassVar[str] = GROUP

    def __init__(
        self,
        wanted: Wanted | WantedLayout | None = None,
        *,
        source_worker: str = "rollout",
        transports: Mapping[str, Mapping[str, object]] | None = None,
        **options: Any,
    ) -> None:
        """Configure; nothing is opened yet.

        Args:
            wanted: what the engine holds: see `parallel`, `slices` and `everything`. None: every
                tensor, whole.
            source_worker: this worker's name.
            transports: name of a transport -> its options, for parts that need some, such as
                ``{"shared-memory": {"directory": path}}``.
            options: as for `TensorBridge`, and ``max_slots`` (most assembled versions held in
                memory at a time) and ``num_threads`` (that verify, copy and digest).

        Raises:
            TypeError: an option of the wrong type, or one that a part's transport does not have.
            ValueError: an option out of its range.

        """
        options["transports"] = transports
        super().__init__(source_worker=source_worker, wanted=wanted, **options)

    def _make_transport(self, options: Mapping[str, object]) -> Transport:
        check_options(GroupTransport, options)
        given: Any = options["transports"]
        transports = _checked_transports({} if given is None else given)
        return GroupTransport.create(
            **{**options, "transports": transports, "wanted": self._wanted}
        )

    def plan(self, layout: GroupLayout) -> ReshardPlan:
        """How this consumer's tensors are made of a group with that layout; made once per layout.

        Raises:
            IncompatibleUpdate: something is wanted that the group does not hold.

        """
        return self._group_end().plan(layout)

    @property
    def nixl_counters(self) -> Counters:
        """Counts of what reading parts over ``nixl`` made so far: see `NIXLTensorBridge.counters`.

        Zeros if no part came that way yet. `NIXLTensorBridge.catalog` lists what a rank holds, and
        who reads it: it takes a group's ``parts``.
        """
        is_open = self._consumer is not None
        return NIXL.counters(self._group_end().known_end("nixl") if is_open else None)

    def _group_end(self) -> GroupEnd:
        end = self.consumer.end
        assert isinstance(end, GroupEnd)
        return end


def _checked_transports(given: object) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for name, options in given.items() if isinstance(given, Mapping) else [("", given)]:
        if not isinstance(name, str) or not isinstance(options, Mapping):
            raise TypeError(
                f"transports={given!r}: expected name of a transport -> its options, such as "
                "{'nixl': {'timeout_s': 60.0}}."
            )
        check_options(transport_class(name), options)
        found[canonical_name(name)] = dict(options)
    return found


# Transports whose bridges users know by a class name. Every other one gets a class when asked for.
_NAMED: dict[str, type[TensorBridge]] = {
    kind.transport: kind
    for kind in (
        LocalTensorCopyBridge,
        SharedMemoryTensorBridge,
        CUDAVMMTensorBridge,
        CUDAIPCTensorBridge,
        BroadcastTensorBridge,
        NIXLTensorBridge,
        FilesTensorBridge,
    )
}


class BridgeOptions(TypedDict, total=False):
    """Options of all transports and of every bridge, for type checkers: a misspelt one is found.

    Which transport has which, the bridge checks when it is made. Options of a transport that was
    registered are unknown here: pass them as ``**`` of a ``dict[str, Any]``.
    """

    address: str
    backend: str
    backend_options: Mapping[str, str] | None
    columns: bool
    config_dir: str | os.PathLike[str] | None
    device: int | None
    directory: str | os.PathLike[str] | None
    fenced: bool
    fetch_once: bool
    file_nbytes: int | None
    group_name: str | None
    in_place: bool
    init_info: BroadcastInitInfo | Mapping[str, object] | str | None
    keep_every: int | None
    keep_last: int
    lease_s: float
    max_consumers: int
    max_slots: int
    nonfinite: Policy | str
    num_threads: int | None
    observer: Observer | None
    override: bool
    port: int
    ready_timeout_s: float
    request_timeout_s: float
    serve: Literal["process", "inline"] | None
    server_name: str
    state_dir: str | os.PathLike[str] | None
    steps: Literal["stable", "stages"] | None
    storage_options: Mapping[str, object] | None
    suspicious: Policy | str
    timeout_s: float
    tls: TLSFiles | Mapping[str, str] | None
    token: str | None
    url: str | os.PathLike[str]
    wanted: Wanted | WantedLayout | None
    world_size: int | None


def make_weight_bridge(
    transport: str = "local-clone",
    *,
    source_worker: str = "local-training",
    source_rank: int = 0,
    **options: Unpack[BridgeOptions],
) -> TensorBridge:
    """Make the bridge of a transport.

    Args:
        transport: ``local-clone``, ``shared-memory``, ``cuda-vmm``, ``cuda-ipc``,
            ``broadcast`` or ``nixl``; short forms ``local``, ``shm``, ``ipc``; or one that was
            registered with `rl_bridge.transports.registry.register_transport`.
        source_worker: this worker's name.
        source_rank: its rank.
        options: what `TensorBridge` and the transport take.

    Raises:
        WeightBridgeUnavailableError: no transport of that name.
        TypeError: an option that the transport does not have.
        ValueError: an option out of its range.

    """
    name = canonical_name(transport)
    kind: Any = _NAMED.get(name) or type("TensorBridge", (TensorBridge,), {"transport": name})
    made: TensorBridge = kind(source_worker=source_worker, source_rank=source_rank, **options)
    return made
