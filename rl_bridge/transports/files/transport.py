"""``files``: a version is a directory that everybody can read, and that outlives its trainer.

The trainer writes each version durably into a directory that the engines see as well, on a local
disk or a network's. It lies there as Hugging Face's checkpoints do, so engines and tools load it as
it is; readers over a bridge verify each byte of it. A version stays when its trainer ends, so an
engine that starts later installs the newest one.
"""

import errno
import logging
import os
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_args
from urllib.parse import unquote, urlsplit

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from rl_bridge.errors import (
    IncompatibleUpdate,
    MalformedManifest,
    SegmentError,
    VersionNotFound,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest.canonical import thaw
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.control import Record, UpdateReport, legible, take_note
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.passes import checked_count, checked_flag, checked_threads
from rl_bridge.memory.slots import Slot
from rl_bridge.memory.views import Attachment, Pin, anonymous_pin
from rl_bridge.transports.base import (
    Availability,
    Carried,
    ConsumerEnd,
    PartRequest,
    PublisherEnd,
    Transport,
    checked_seconds,
)
from rl_bridge.transports.files.checkpoint import Chunk, FileLayout, contents, is_config, layout_of
from rl_bridge.transports.files.directory import DirectoryStore
from rl_bridge.transports.files.host_copies import Copy, HostCopies, Turn
from rl_bridge.transports.files.objects import ObjectStore
from rl_bridge.transports.files.steps import Handshake, Steps
from rl_bridge.transports.files.store import (
    GROUP_MANIFEST,
    LISTS,
    PART,
    Lease,
    Marker,
    RecordFile,
    StoredVersion,
    VersionStore,
    offered,
    orphans,
    parts_of,
    surplus,
    update_id_of,
    version_name,
)
from rl_bridge.transports.files.watching import watch
from rl_bridge.transports.wire.arenas import Arrival, Arrivals, CPUArenas

_LOG = logging.getLogger(__name__)

_MIN_FILE_NBYTES = 1 << 20
_PIECE_NBYTES = 32 << 20
_REMEMBERED = 64
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_ONCE = 1  # what is in a directory is never written again
_Found = TypeVar("_Found")


class FilesHandle(BaseModel):
    """The JSON handle of a manifest.

    Attributes:
        file_nbytes: the largest size of a file, from which the placement follows.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    file_nbytes: StrictInt = Field(ge=_MIN_FILE_NBYTES, lt=2**63)

    @classmethod
    def of(cls, manifest: WeightUpdateManifest) -> Self:
        """The handle of a manifest.

        Raises:
            MalformedManifest: it is none of ``files``.

        """
        try:
            return cls.model_validate(thaw(manifest.handle))
        except ValidationError as error:
            raise MalformedManifest(
                f"update {manifest.update_id}: its handle is none of files ({error.error_count()} "
                "errors). Send the manifest as it was published."
            ) from error


def store_of(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, object],
    request_timeout_s: float,
    lease_s: float,
) -> VersionStore:
    """The store that a url names; nothing is read or made.

    Raises:
        TypeError: no text and no path.
        ValueError: no url that fsspec knows.
        WeightBridgeUnavailableError: a package for such urls is missing.

    """
    if isinstance(url, os.PathLike):
        return DirectoryStore(Path(url).absolute())
    if not isinstance(url, str):
        raise TypeError(f"url={url!r}: expected a directory, such as '/mnt/share/run1', or a url.")
    parts = urlsplit(url)
    if not url or (parts.scheme == "file" and parts.netloc):
        raise ValueError(
            f"url={url!r}: expected a directory, such as '/mnt/share/run1', or a url, such as "
            "s3://bucket/run1. Name one that both sides see."
        )
    if parts.scheme in {"", "file"}:
        return DirectoryStore(Path(unquote(parts.path) if parts.scheme else url).absolute())
    return ObjectStore(
        url,
        storage_options=storage_options,
        request_timeout_s=request_timeout_s,
        lease_s=lease_s,
    )


class Files(Transport):
    """The ``files`` transport.

    Its attributes are its options, checked, and the ``store`` that its url names.
    """

    name: ClassVar[str] = "files"
    crosses_processes: bool = True
    zero_copy_import: bool = False
    binds_header: bool = True

    def __init__(
        self,
        *,
        url: str | os.PathLike[str],
        source_rank: int = 0,
        keep_last: int = 2,
        keep_every: int | None = None,
        config_dir: str | os.PathLike[str] | None = None,
        file_nbytes: int | None = None,
        fenced: bool = True,
        storage_options: Mapping[str, object] | None = None,
        timeout_s: float = 10.0,
        request_timeout_s: float = 120.0,
        lease_s: float = 60.0,
        fetch_once: bool = True,
        num_threads: int | None = None,
        steps: Handshake | None = None,
        ready_timeout_s: float = 1200.0,
    ) -> None:
        """Configure; both sides of a run take the same `url`.

        Args:
            url: the run's directory; the publisher makes it, but not what it lies in. Or a prefix
                of an object store, such as ``s3://bucket/run1``, which fsspec reads.
            source_rank: this publisher's rank; the bridge passes its own.
            keep_last: how many of the newest versions stay, released or not; those that were not
                released stay in any case, as long as their publisher lives.
            keep_every: versions that are multiples of it stay.
            config_dir: whose files but for weights go into each version, such as ``config.json``
                and the tokenizer's: with them, engines load it as a model.
            file_nbytes: the largest size of a file, unless a tensor is larger. None: 5 GiB in
                directories, 512 MiB in object stores, where a file is written from memory.
            fenced: there is one publisher of a rank: a second one is refused as long as the first
                one lives, or, in object stores, takes over; and what an earlier one did not finish
                is removed. False lets several publish.
            storage_options: what fsspec's file system of that url takes, such as ``endpoint_url``.
            timeout_s: how long a reader waits for a version that is not visible yet where it
                looks.
            request_timeout_s: in object stores, the longest wait for one request, such as one that
                writes a file.
            lease_s: in object stores, how long the lease of a reader that was killed keeps a
                version.
            fetch_once: readers on one host, of one user, fetch a version once: the others map the
                first one's memory. False: each fetches for itself.
            num_threads: threads that copy and digest; None takes the usable cores, at most 8.
            steps: in directories, show version N as ``step_N``, too, for orchestrators that know
                nothing of rl_bridge: ``stable`` with the marker ``STABLE``, ``stages`` in the four
                stages of prime-rl's handshake. Of the only publisher, of rank 0.
            ready_timeout_s: in stages, how long a version that is offered waits for a receiver.

        Raises:
            TypeError: an option of the wrong type.
            ValueError: an option out of its range, or a url that fsspec does not know.
            WeightBridgeUnavailableError: a package for such urls is missing.

        """
        self.timeout_s = checked_seconds("timeout_s", timeout_s)
        self.store = store_of(
            url,
            storage_options=storage_options or {},
            request_timeout_s=checked_seconds("request_timeout_s", request_timeout_s),
            lease_s=checked_seconds("lease_s", lease_s),
        )
        self.rank = checked_count("source_rank", source_rank + 1) - 1
        self.keep_last = checked_count("keep_last", keep_last + 1) - 1
        self.keep_every = None if keep_every is None else checked_count("keep_every", keep_every)
        self.config_dir = None if config_dir is None else Path(config_dir).absolute()
        if self.config_dir is not None and not self.config_dir.is_dir():
            raise ValueError(f"config_dir={str(config_dir)!r}: expected a directory.")
        self.file_nbytes = checked_count("file_nbytes", file_nbytes or self.store.file_nbytes)
        if self.file_nbytes < _MIN_FILE_NBYTES:
            raise ValueError(f"file_nbytes={file_nbytes}: expected {_MIN_FILE_NBYTES} or more.")
        self._fenced = checked_flag("fenced", fenced)
        self._fetch_once = checked_flag("fetch_once", fetch_once)
        self.num_threads = checked_threads(num_threads)
        self.steps = self._checked_steps(steps)
        self.ready_timeout_s = checked_seconds("ready_timeout_s", ready_timeout_s)
        # The manifest that was read last, by the version's name and header: watching looks often.
        self._read: tuple[tuple[str, str], Any] = (("", ""), None)

    def _checked_steps(self, steps: Handshake | None) -> Handshake | None:
        if steps is None:
            return None
        if steps not in get_args(Handshake):
            raise ValueError(f"steps={steps!r}: expected one of {get_args(Handshake)}, or None.")
        if self.store.directory is None:
            raise ValueError(
                f"steps={steps!r}: {self.store} has no links, expected a directory. Name one, or "
                "leave steps= out."
            )
        if self.rank or not self._fenced:
            raise ValueError(
                f"steps={steps!r}: expected the only publisher, of rank 0; got rank {self.rank}, "
                f"fenced={self._fenced}. Gather the weights to rank 0."
            )
        return steps

    def stored(self) -> Iterator[tuple[int, WeightUpdateManifest]]:
        """Sequence and manifest of the versions that are there, the newest first.

        A version of several ranks is there if all of them published it, and all its parts are.
        What cannot be read is logged and left out.

        Raises:
            WeightBridgeUnavailableError: the directory cannot be read.

        """
        for version in reversed(offered(self.store.visible())):
            known = (version.name, version.marker.header)
            try:
                named, manifest = self._read
                if named != known:
                    manifest = self.store.manifest(version)
                    self._read = known, manifest
            except WeightBridgeUnavailableError:
                raise  # nothing is wrong with the version: an older one is not the newest
            except (WeightBridgeError, ValueError) as error:
                _LOG.warning("%s in %s is left out: %s", version.name, self.store, error)
                continue
            yield version.marker.sequence, manifest

    def is_empty(self) -> bool:
        """Whether the store has no version yet, nor any part of one, be it whole or damaged.

        Raises:
            WeightBridgeUnavailableError: the store cannot be read.

        """
        if self._is_unmade():
            return True
        return not self.store.visible() and not self.store.damaged()

    def _is_unmade(self) -> bool:
        """Whether it is a directory that its trainer has still to make."""
        return self.store.directory is not None and not self.store.directory.exists()

    def watch(self, *, timeout_s: float, every_s: float) -> Iterator[WeightUpdateManifest]:
        """Yield the newest version, and each one that is newer when it is looked for.

        Raises:
            WeightBridgeUnavailableError: the first look could not read the store, or the time is
                over and the last one could not.

        """

        def newest() -> WeightUpdateManifest | None:
            if self._is_unmade():
                return None
            return next((manifest for _, manifest in self.stored()), None)

        return watch(
            newest,
            self.store.directory,
            timeout_s=checked_seconds("timeout_s", timeout_s),
            every_s=checked_seconds("every_s", every_s),
        )

    def keep(self, update_id: str, *, is_kept: bool) -> None:
        """Have all parts of a version stay, or let them go again.

        Raises:
            VersionNotFound: it is not there.
            WeightBridgeUnavailableError: the store cannot be read or written.

        """
        visible = self.store.visible()
        for one in offered(visible):
            if update_id_of(one, visible) == update_id:
                names = [part.name for part in parts_of(one, visible)]
                with ExitStack() as leases:  # all of them, or none
                    for name in names:
                        leases.enter_context(self.store.leased(name))
                    for name in names:
                        self.store.keep(name, is_kept=is_kept)
                return
        # A part that lost its group may have to be let go as well.
        self.store.keep(self.store.find(update_id), is_kept=is_kept)

    @classmethod
    def probe(cls) -> Availability:
        """It works wherever rl_bridge does."""
        return Availability(cls.name, "pass")

    def publisher_end(self, publisher_id: str) -> "FilesPublisher":
        """Open the trainer's end; what an earlier one of this rank did not finish is removed."""
        return FilesPublisher(self, publisher_id, fenced=self._fenced)

    def consumer_end(self, worker: str, rank: int) -> "FilesConsumer":
        """Open the engine's end."""
        return FilesConsumer(self, worker, rank, fetch_once=self._fetch_once)


class FilesPublisher(PublisherEnd):
    """See `rl_bridge.transports.base.PublisherEnd`.

    Attributes:
        store: where the versions are.
        writer: the right to write there.
        names: update -> name of its version, of those that were not released.

    """

    shows: ClassVar[bool] = True

    def __init__(self, options: Files, publisher_id: str, *, fenced: bool) -> None:
        """Take the right to publish as this rank."""
        self._options, self._publisher_id, self._rank = options, publisher_id, options.rank
        self.store = store = options.store
        self._is_closed = False
        self.writer = store.open_writer(self._rank, fenced=fenced)
        self._steps: Steps | None = None
        if options.steps is not None and store.directory is not None:
            try:
                self._steps = Steps(
                    store.directory,
                    options.steps,
                    options.ready_timeout_s,
                    self.writer.is_superseded,
                )
            except BaseException:
                self.writer.close()
                raise
        self.offers = self._steps is not None
        self._arena: Pin | None = None  # of the version that is being published
        self._headers: dict[str, bytes] = {}
        self.names: dict[str, str] = {}
        self._leases: dict[str, Lease] = {}  # of the same
        self._nbytes: dict[str, int] = {}
        self._joined: set[str] = set()  # parts of groups that all ranks have published
        self._has_written = False
        self._collect()
        if fenced:  # records of earlier publishers of this rank: there is one at a time
            store.remove_records(f"{self._rank}-", but=self._records)

    def offering(
        self, weight_version: int, *, is_part: bool, pause: Callable[[float], None]
    ) -> AbstractContextManager[None]:
        """Offer a step to its receiver."""
        assert self._steps is not None  # as it offers
        if self.writer.is_superseded():  # an offer takes back later steps, which are not its own
            raise self.store.taken_over(self._rank)
        if is_part:
            raise IncompatibleUpdate(
                f"version {weight_version} is one of several ranks, and a step has whole weights: "
                "expected one publisher. Gather the weights to rank 0, or leave steps= out."
            )
        return self._steps.offered(weight_version, pause)

    def carry(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str) -> Carried:
        """Copy and digest; the files are written when the manifest is known."""
        del update_id
        start = time.perf_counter()
        nbytes = plan.table.arena_nbytes
        if self._arena is None or self._arena.nbytes < nbytes:
            self._arena = None
            self._arena = anonymous_pin(nbytes)
        digests = plan.pack(tensors, self._arena.address, num_threads=self._options.num_threads)
        elapsed = (time.perf_counter() - start) * 1e3
        handle = FilesHandle(file_nbytes=self._options.file_nbytes)
        return Carried(
            digests=digests, handle=handle.model_dump(), timings_ms={"stage_digest": elapsed}
        )

    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Keep the digest for the marker; a version that is visible gets a new one."""
        if update_id in self.names:
            self._seal_anew(update_id, header=digest.hex())
        else:
            self._headers[update_id] = digest

    def _seal_anew(self, update_id: str, **changed: object) -> None:
        name, lease = self.names[update_id], self._leases[update_id]
        marker = lease.marker.model_copy(update=changed)
        try:
            self.writer.seal_anew(name, lease, marker)
        except OSError as error:
            raise self._unwritable(name, error) from error

    def join_group(self, update_id: str, group: GroupManifest) -> None:
        """Keep the group's manifest beside its first part, and its header in the part's marker."""
        name = self.names.get(update_id)
        if name is not None and group.parts[0].update_id == update_id:
            try:
                self.writer.add(name, GROUP_MANIFEST, group.to_json().encode())
            except OSError as error:
                raise self._unwritable(name, error) from error
        self.seal_header(update_id, group.header_digest)

    def show_group(self, update_id: str) -> None:
        """Note in the part's marker that the group is published: the first to do so offers it.

        Every rank does, as any of them may have died since all agreed.
        """
        if update_id not in self.names:
            return
        self._joined.add(update_id)
        try:
            self._seal_anew(update_id, is_committed=True)
        except WeightBridgeError:
            _LOG.exception(
                "%s in %s is published, and does not say so; it is listed if another rank's part "
                "does",
                self.names[update_id],
                self.store,
            )
        self._collect()

    def show(self, manifest: WeightUpdateManifest, *, is_part: bool) -> None:
        """Write a version durably, and then its marker."""
        update_id, arena = manifest.update_id, self._arena
        assert arena is not None  # as it was carried just now
        name = version_name(manifest.weight_version, update_id, self._rank)
        marker = Marker(
            sequence=0,
            weight_version=manifest.weight_version,
            update_id=update_id,
            rank=self._rank,
            header=self._headers.pop(update_id).hex(),
            part=manifest.weight_layout.rank if is_part else None,
            world_size=manifest.weight_layout.world_size if is_part else 1,
            suffix=PART if is_part else "",
        )
        layout = layout_of(manifest, self._options.file_nbytes, suffix=marker.suffix)
        table, memory = manifest.table, memoryview(arena.buffer).cast("B")

        def bytes_of(row: int) -> memoryview:
            return memory[table.offsets[row] : table.offsets[row] + table.nbytes[row]]

        files = contents(
            manifest,
            layout,
            bytes_of,
            lists=memory[table.leaves_offset : table.leaves_offset + table.lists_nbytes],
            configs=self._configs(),
            suffix=marker.suffix,
        )
        if self._steps is not None:
            files = self._steps.linked(name, files)
        try:
            lease = self.writer.write(name, files, marker)
        except OSError as error:
            raise self._unwritable(name, error) from error
        if self._steps is not None:
            self._steps.commit()
        self.names[update_id], self._leases[update_id] = name, lease
        self._has_written = True
        self._nbytes[update_id] = sum(file.nbytes for file in layout.files)
        if not is_part:  # none takes the place of older versions before all ranks have published
            self._collect()

    def _configs(self) -> Iterator[tuple[str, bytes]]:
        """The files that go along with each version."""
        folder = self._options.config_dir
        for path in [] if folder is None else sorted(folder.iterdir()):
            if path.is_file() and is_config(path.name):
                yield path.name, path.read_bytes()

    @property
    def arena_address(self) -> int:
        """Where the version lies that is being published; 0 if there was none."""
        return 0 if self._arena is None else self._arena.address

    def last_stored(self) -> int | None:
        """The highest version in the store, of whichever rank."""
        return self.store.last_number()

    def release(self, update_id: str) -> None:
        """Let a version go, once newer ones take its place."""
        self._headers.pop(update_id, None)
        self._nbytes.pop(update_id, None)
        if self.names.pop(update_id, None) is not None:
            self._leases.pop(update_id).close()
            self._collect()

    def _collect(self) -> None:
        """Remove what is not to stay, of this rank's; what is being read goes later.

        What cannot be removed is logged: the version that was just published stands.
        """
        try:
            self._remove_old()
        except (WeightBridgeError, OSError):
            _LOG.exception("older versions in %s were not removed", self.store)

    def _remove_old(self) -> None:
        if self.writer.is_superseded():
            return
        held, visible = set(self.names.values()), self.store.visible()
        found = surplus(
            visible,
            self._rank,
            keep_last=self._options.keep_last,
            keep_every=self._options.keep_every,
            joined=self._joined,
        )
        # Of ranks that a run once had, and may have no more. Not before this one wrote something: a
        # listing of NFS may be an old one until then, and lack the first part of a whole version.
        if self._rank == 0 and self._has_written:
            found += self._orphans(visible)
        for one in found:
            if one.name not in held and self.store.remove(one.name):
                self._joined.discard(one.marker.update_id)
        self.writer.sweep()

    def _orphans(self, visible: Sequence[StoredVersion]) -> list[StoredVersion]:
        """Parts that lost their first one for certain.

        A first part whose marker is damaged, or of a later release, is there: its group may be read
        again once somebody repairs the marker, or by that release.
        """
        found = orphans(visible)
        if not found or self.store.damaged():
            return []
        return orphans(visible, self.store.unfinished())

    @property
    def _records(self) -> str:
        return f"{self._rank}-{self._publisher_id}-"

    def records(self) -> list[Record]:
        """What consumers wrote."""
        return self.store.records(self._records)

    @property
    def nbytes(self) -> int:
        """Bytes of the files of versions that were not released."""
        return sum(self._nbytes.values())

    def close(self) -> None:
        """Let others publish here; versions stay, as many as are kept. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.names.clear()
        while self._leases:
            self._leases.popitem()[1].close()
        self._nbytes.clear()
        self._arena = None
        try:
            if self._steps is not None:
                self._steps.withdraw()
            self._collect()
            self.store.remove_records(self._records)
        finally:
            self.writer.close()

    def _unwritable(self, name: str, error: OSError) -> SegmentError:
        is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        remedy = "free space there" if is_full else "see to the directory and config_dir"
        return SegmentError(
            f"{name} cannot be written in {self.store}: {error.strerror or error}. Nothing was "
            f"published: {remedy}, then publish again."
        )


class FilesConsumer(ConsumerEnd):
    """See `rl_bridge.transports.base.ConsumerEnd`."""

    def __init__(self, options: Files, worker: str, rank: int, *, fetch_once: bool) -> None:
        """Read from a run's store."""
        self._store, self._worker, self._rank = options.store, worker, rank
        self._timeout_s, self._num_threads = options.timeout_s, options.num_threads
        self._is_closed = False
        self._arenas = CPUArenas()
        self._arrivals = Arrivals(self._arenas, f"rlb-files-{rank}")
        self._copies = HostCopies() if fetch_once else None
        # What others may map, until the slot is closed or written again.
        self._offered: weakref.WeakKeyDictionary[Slot, Turn] = weakref.WeakKeyDictionary()
        self._records: dict[str, RecordFile] = {}  # by publisher
        self._updates: dict[str, dict[str, UpdateReport]] = {}
        # Updates whose publisher hears nothing of them any more: it removed the record.
        self._gone: deque[str] = deque(maxlen=_REMEMBERED)

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        """Read a version into memory of this process, or map it where one of this host has it."""
        return self._attached(manifest, self._copies)

    def look(self, manifest: WeightUpdateManifest) -> Attachment:
        """Read what is stored, whatever other processes have."""
        return self._attached(manifest, None)

    def _attached(self, manifest: WeightUpdateManifest, copies: HostCopies | None) -> Attachment:
        handle = FilesHandle.of(manifest)
        return self._as_visible(lambda: self._attached_now(manifest, handle, copies))

    def attach_parts(self, parts: Sequence[PartRequest]) -> list[Attachment]:
        """Attach parts of one version, all of which are leased before the first byte is read."""
        with ExitStack() as leases:
            for part in parts:
                manifest = part.manifest
                _, lease = self._as_visible(partial(self._leased, manifest))
                leases.callback(lease.close)
            return super().attach_parts(parts)

    def _as_visible(self, look: Callable[[], _Found]) -> _Found:
        """Look until it succeeds: a file system may show a version, or its files, a bit later.

        A file of which only the first bytes are there is one of these.
        """
        until, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while True:
            try:
                return look()
            except VersionNotFound:
                left = until - time.monotonic()
                if left <= 0:
                    raise
            time.sleep(min(pause_s, left))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _leased(self, manifest: WeightUpdateManifest) -> tuple[str, Lease]:
        """Name and lease of a version."""
        name = self._store.find(manifest.update_id)
        lease = self._store.lease(name)
        if lease.marker.update_id != manifest.update_id:
            lease.close()
            raise SegmentError(
                f"{name} in {self._store} holds update {lease.marker.update_id}, expected "
                f"{manifest.update_id}. Import another version."
            )
        return name, lease

    def _attached_now(
        self, manifest: WeightUpdateManifest, handle: FilesHandle, copies: HostCopies | None
    ) -> Attachment:
        """Read a version, leased meanwhile, or map it; it must be visible."""
        name, lease = self._leased(manifest)
        header, suffix = bytes.fromhex(lease.marker.header), lease.marker.suffix
        layout = layout_of(manifest, handle.file_nbytes, suffix=suffix)
        try:
            # Before memory is taken: a manifest may claim any size.
            sizes = {file.name: file.nbytes for file in layout.files}
            sizes[LISTS + suffix] = manifest.table.lists_nbytes
            self._store.require_sizes(name, sizes)
            turn = None if copies is None else copies.turn(manifest.update_id)
            if isinstance(turn, Copy):
                mapped = self._mapped(manifest, turn, header)
                if mapped is not None:
                    return mapped
                turn = None
            try:
                return self._fetched(manifest, name, layout, lease.marker, turn)
            except BaseException:
                if turn is not None:
                    turn.close()
                raise
        finally:
            lease.close()

    def _mapped(
        self, manifest: WeightUpdateManifest, copy: Copy, header: bytes
    ) -> Attachment | None:
        """Map what another process fetched; None if it cannot be had, or not any more."""
        table, update_id = manifest.table, manifest.update_id
        try:
            pin = self._arenas.pin_at(copy.slot, update_id, copy.generation, table.arena_nbytes)
        except WeightBridgeError as error:
            _LOG.info("update %s is fetched once more on this host: %s", update_id, error)
            return None
        if pin.header != header:
            return None
        return self._arrivals.attach_pin(pin, table, num_threads=self._num_threads)

    def _fetched(
        self,
        manifest: WeightUpdateManifest,
        name: str,
        layout: FileLayout,
        marker: Marker,
        turn: Turn | None,
    ) -> Attachment:
        """Read a version into memory of this process, and offer it to others."""
        table = manifest.table
        slot = self._arrivals.reserve(table.arena_nbytes)
        self._withdraw(slot)
        try:
            digests = self._read(name, layout, table, slot, turn, suffix=marker.suffix)
        except BaseException:
            self._arrivals.abandon(slot)
            raise
        self._arrivals.commit(
            Arrival(
                update_id=manifest.update_id,
                generation=_ONCE,
                arena_nbytes=table.arena_nbytes,
                layout_digest=table.digest,
                slot=slot,
                digests=digests,
                header=bytes.fromhex(marker.header),
            )
        )
        if turn is not None and digests == manifest.digests:
            self._offered[slot] = turn
            turn.offer(slot)
        attached = self._arrivals.attach(
            manifest.update_id, table, generation=_ONCE, num_threads=self._num_threads
        )
        assert attached is not None  # as it was committed just now
        return attached

    def _withdraw(self, slot: Slot) -> None:
        turn = self._offered.pop(slot, None)
        if turn is not None:
            turn.close()

    def _read(
        self,
        name: str,
        layout: FileLayout,
        table: TensorTable,
        slot: Slot,
        turn: Turn | None,
        *,
        suffix: str,
    ) -> bytes:
        """Read all files into a slot; returns the tensors' digests, made beside that."""
        memory = memoryview(self._arrivals.tensor(slot, table.arena_nbytes).numpy())  # type: ignore[arg-type]  # numpy's types lack it
        found = np.zeros((len(table.names), DIGEST_NBYTES), np.uint8)

        def read(chunk: Chunk) -> None:
            # A large tensor comes piece by piece: others see by that whether this goes on.
            for pieces in _pieces_of(chunk, table, memory):
                self._store.read(name, chunk.file.name, chunk.file.nbytes, pieces)
                if turn is not None:
                    turn.count()
            rows = list(chunk.rows)
            digests = chunk.plan.digest(table.offset_column[rows] + slot.address, num_threads=1)
            found[rows] = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_NBYTES)

        threads = self._num_threads or self._store.num_readers or len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(read, layout.chunks):
                pass  # which raises what a thread raised
        begin = table.leaves_offset
        lists = memory[begin : begin + table.lists_nbytes]
        self._store.read(name, LISTS + suffix, len(lists), [(0, lists)] if len(lists) else [])
        return found.tobytes()

    def lease(self, manifest: WeightUpdateManifest) -> Attachment:
        """Keep a version that others read, and read no byte of it but the marker."""
        _, lease = self._as_visible(lambda: self._leased(manifest))
        try:
            pin = anonymous_pin(1)
        except BaseException:
            lease.close()
            raise
        pin.header = bytes.fromhex(lease.marker.header)
        weakref.finalize(pin.buffer, lease.drop)
        return Attachment(manifest.table, pin, is_part=True)

    def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
        """Write it into this consumer's record; best effort."""
        if self._is_closed:  # a tensor that was kept may die later, and that is reported too
            return
        self.settle()
        if report.update_id in self._gone:
            return
        updates = self._updates.setdefault(manifest.publisher_id, {})
        take_note(updates, report)
        record = Record(
            worker=legible(self._worker),
            rank=self._rank,
            pid=os.getpid(),
            updates=tuple(updates.values()),
        )
        with suppress(OSError):  # the publisher is gone, or the disk is full: the update stands
            self._record_of(manifest).write(record)

    def _record_of(self, manifest: WeightUpdateManifest) -> RecordFile:
        found = self._records.get(manifest.publisher_id)
        if found is None:
            name = f"{manifest.source_rank}-{manifest.publisher_id}-{uuid.uuid4().hex}"
            found = self._records[manifest.publisher_id] = self._store.open_record(name)
        return found

    def settle(self) -> None:
        """Forget what was imported, and close the records that publishers removed at their end."""
        self._arrivals.sweep()
        for publisher_id, record in list(self._records.items()):
            if record.is_removed():
                del self._records[publisher_id]
                self._gone.extend(self._updates.pop(publisher_id, {}))
                record.close()

    def close(self) -> None:
        """Close the records; tensors keep the memory that they show."""
        self._is_closed = True
        for slot in list(self._offered):
            self._withdraw(slot)
        self._arrivals.close()
        while self._records:
            self._records.popitem()[1].close()


def _pieces_of(
    chunk: Chunk, table: TensorTable, memory: memoryview
) -> Iterator[list[tuple[int, memoryview]]]:
    """Ranges of a file, and where each goes, in lists that are read at once."""
    at, nbytes = chunk.begin, 0
    pieces: list[tuple[int, memoryview]] = []
    for row in chunk.rows:
        begin, end = table.offsets[row], table.offsets[row] + table.nbytes[row]
        while begin < end:
            size = min(end - begin, _PIECE_NBYTES - nbytes)
            pieces.append((at, memory[begin : begin + size]))
            begin, at, nbytes = begin + size, at + size, nbytes + size
            if nbytes == _PIECE_NBYTES:
                yield pieces
                pieces, nbytes = [], 0
    if pieces:
        yield pieces
