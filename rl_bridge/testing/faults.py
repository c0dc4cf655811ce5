"""Faults on purpose: a transport that loses, damages or dies, and an observer that kills.

`FaultInjecting` wraps any transport and, without faults, changes nothing. It is also the raw access
of the conformance suite: it knows both ends that it handed out, so that a test can reach the bytes
behind a manifest without asking the transport under test for them.
"""

import ctypes
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from rl_bridge.cuda.devices import DriverName
from rl_bridge.lifecycle import Transition
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import Record, UpdateReport
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.places import CPU_PLACE, Place
from rl_bridge.memory.views import Attachment
from rl_bridge.transports._slots import SlotPublisher
from rl_bridge.transports.base import (
    Availability,
    Carried,
    ConsumerEnd,
    PartRequest,
    PublisherEnd,
    Transport,
)
from rl_bridge.transports.cuda import CUDAIPC, CUDAVMM
from rl_bridge.transports.files.checkpoint import layout_of
from rl_bridge.transports.files.directory import DirectoryStore
from rl_bridge.transports.files.objects import ObjectStore
from rl_bridge.transports.files.store import FileContent, Lease, Marker, VersionStore
from rl_bridge.transports.files.transport import FilesPublisher
from rl_bridge.transports.registry import transport_class


class InjectedFault(RuntimeError):
    """Raised by an injected fault; it is none of the bridge's own exceptions."""


class Step(StrEnum):
    """Where a fault can strike: around each call that the bridge makes into a transport."""

    BEFORE_CARRY = "before carry"
    AFTER_CARRY = "after carry"
    BEFORE_RELEASE = "before release"
    AFTER_RELEASE = "after release"
    BEFORE_ATTACH = "before attach"
    AFTER_ATTACH = "after attach"
    BEFORE_REPORT = "before report"
    AFTER_REPORT = "after report"


def die() -> None:
    """End this process the hard way: SIGKILL, no clean-up, no exit handler."""
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise InjectedFault("injected fault")


@dataclass(frozen=True, slots=True)
class Fault:
    """An action at a step, the `count`-th time that it is reached.

    Attributes:
        step: where.
        action: what; `die`, or anything that raises.
        count: which time, from 1.

    """

    step: Step
    action: Callable[[], None] = _raise
    count: int = 1


class KillAt:
    """An observer that kills its process at one transition of the lifecycle table.

    The transition is recorded when the observer hears of it, and nothing that follows has happened.
    """

    def __init__(
        self,
        event: str,
        *,
        source: str | None = None,
        role: str = "consumer",
        weight_version: int | None = None,
    ) -> None:
        """Wait for a transition.

        Args:
            event: of the table, such as ``install``.
            source: state that it must start from; None takes any.
            role: ``consumer`` or ``publisher``.
            weight_version: of the update; None takes any.

        """
        self._event = event
        self._source = source
        self._role = role
        self._version = weight_version

    def __call__(self, step: Transition) -> None:
        """Hear of a transition."""
        if (
            (step.role, step.event) == (self._role, self._event)
            and self._source in {None, step.source}
            and self._version in {None, step.weight_version}
        ):
            die()


# ---- the bytes behind a manifest ----------------------------------------------------------------

Locate = Callable[[PublisherEnd, str, Mapping[str, Any]], int | Callable[[int], int]]
"""Finds a published update in its publisher's memory: from its end, the update id, the handle."""


def arena_address(end: PublisherEnd, update_id: str, handle: Mapping[str, Any]) -> int:
    """Find a published update's bytes for the transports of rl_bridge.

    In shared memory through the kernel: the shared, writable mapping of the inode that the handle
    names. In local-clone through the snapshot that the publisher's end keeps.

    Raises:
        LookupError: another transport, which needs a `Locate` of its own.

    """
    slot = handle.get("slot")
    if isinstance(slot, Mapping) and {"device", "inode"} <= slot.keys():
        return _shared_mapping(int(slot["device"]), int(slot["inode"]))
    snapshot = getattr(end, "snapshot", None)
    if snapshot is None:
        raise LookupError(
            f"where a {type(end).__name__} keeps update {update_id} is unknown. Give the suite's "
            "class a `locate`: staticmethod(function), where function(end, update_id, handle) "
            "tells the address of the published bytes in the publisher's process."
        )
    return int(snapshot(update_id).address)


def published_address(end: PublisherEnd, update_id: str, handle: Mapping[str, Any]) -> int:
    """Find a published update's bytes where its publisher's end keeps them in device memory."""
    del handle
    assert isinstance(end, SlotPublisher)
    return end.address_of(update_id)


def locate_in_files(
    end: PublisherEnd, update_id: str, handle: Mapping[str, Any]
) -> Callable[[int], int]:
    """Find the bytes of an update's arena in a mapping of its files: the transport ``files``."""
    assert isinstance(end, FilesPublisher)
    assert isinstance(end.store, DirectoryStore | ObjectStore)  # of fsspec's local file system
    name = end.names.get(update_id)
    if name is None:  # it is carried, and not written yet
        return lambda offset: end.arena_address + offset
    store = end.store
    folder = store.root / name if isinstance(store, DirectoryStore) else Path(store.path(name))
    text = (folder / "manifest.json").read_text(encoding="utf-8")
    manifest = WeightUpdateManifest.from_json(text)
    table = manifest.table

    def address(offset: int) -> int:
        for file in layout_of(manifest, handle["file_nbytes"]).files:
            at = len(file.header)
            for row in file.rows:
                begin = offset - table.offsets[row]
                if 0 <= begin < table.nbytes[row]:
                    return _mapped(folder / file.name) + at + begin
                at += table.nbytes[row]
        return _mapped(folder / "lists.bin") + offset - table.leaves_offset

    return address


def damage_stored(store: VersionStore, update_id: str) -> None:
    """Flip the last byte of the largest file of a version over ``files``, where it is stored.

    Raises:
        VersionNotFound: it is not there.
        SegmentError: it cannot be read.

    """
    assert isinstance(store, DirectoryStore | ObjectStore)
    name = store.find(update_id)
    sizes = store.files(name)
    file = max(sizes, key=sizes.__getitem__)
    content = bytearray(store.read_small(name, file))
    content[-1] ^= 255
    if isinstance(store, ObjectStore):
        store.put(store.path(name, file), bytes(content))
    else:
        (store.root / name / file).write_bytes(content)


def die_in_publication(end: PublisherEnd) -> None:
    """Have this process die in its next publication over ``files``.

    All files of the version are written by then but for its manifest, and the marker.
    """
    assert isinstance(end, FilesPublisher)
    write = end.writer.write

    def fatal(name: str, files: Iterable[FileContent], marker: Marker) -> Lease:
        def begun() -> Iterator[FileContent]:
            *most, _manifest = files
            yield from most
            die()

        return write(name, begun(), marker)

    vars(end.writer)["write"] = fatal


_MAPPED: list[mmap.mmap] = []  # kept: an address into one must stay good


def _mapped(path: Path) -> int:
    with path.open("r+b") as file:
        _MAPPED.append(mmap.mmap(file.fileno(), 0))
    return ctypes.addressof(ctypes.c_char.from_buffer(_MAPPED[-1]))


def _shared_mapping(device: int, inode: int) -> int:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123 - streamed
        for line in maps:
            span, rights, offset, at, number = line.split(maxsplit=5)[:5]
            major, minor = (int(part, 16) for part in at.split(":"))
            if (
                int(number) == inode
                and os.makedev(major, minor) == device
                and rights[1] == "w"
                and rights[3] == "s"
                and int(offset, 16) == 0
            ):
                return int(span.split("-")[0], 16)
    raise LookupError(f"this process has no shared, writable mapping of inode {inode}")


def flip_byte(address: int, place: Place = CPU_PLACE) -> None:
    """Turn the bits of one byte around, in memory of this process or of a device."""
    byte = place.bytes_at(address, 1)
    byte ^= 255
    byte.cpu()  # now, also on a device, and not when its stream gets there: others look as well


# ---- transports ---------------------------------------------------------------------------------


class HostVMM(CUDAVMM):
    """``cuda-vmm`` on host memory: its real sockets and processes, without a GPU.

    Only what the GPU and its driver do by themselves is missing: kernels, drains, faults. Tests
    that want it by name register it.
    """

    name: ClassVar[str] = "cuda-vmm-on-host"
    driver_name: ClassVar[DriverName] = "host"
    locate: ClassVar[Locate] = staticmethod(published_address)


class HostIPC(CUDAIPC):
    """``cuda-ipc`` on host memory, as `HostVMM` is ``cuda-vmm``."""

    name: ClassVar[str] = "cuda-ipc-on-host"
    driver_name: ClassVar[DriverName] = "host"
    locate: ClassVar[Locate] = staticmethod(published_address)


class FaultInjecting(Transport):
    """Any transport, with faults. Takes a transport object: make it in the process it runs in.

    Attributes:
        inner: the wrapped transport.
        faults: what strikes when; a test may change the list at any time.
        publishers: every publisher's end that was opened.
        drops_reports: consumers' reports are lost on the way.
        corrupt_next: damage the next published update's bytes, right after its digest was taken.

    """

    name: ClassVar[str] = "fault-injecting"
    crosses_processes: bool = True
    zero_copy_import: bool = True

    def __init__(self, inner: Transport, *faults: Fault, locate: Locate = arena_address) -> None:
        """Wrap `inner`; manifests go by its name, so that the other side needs no wrapper."""
        vars(self)["name"] = inner.name
        self.crosses_processes = inner.crosses_processes
        self.zero_copy_import = inner.zero_copy_import
        self.binds_header = inner.binds_header
        self.writable_import = inner.writable_import
        self.inner = inner
        self.faults = list(faults)
        self.publishers: list[_FaultyPublisher] = []
        self.drops_reports = False
        self.corrupt_next = False
        self.locate = locate
        self._reached: dict[Step, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def over(
        cls,
        transport: type[Transport] | str,
        options: Mapping[str, Any] | None = None,
        *faults: Fault,
        locate: Locate | None = None,
    ) -> Self:
        """Make a transport, given by its class or its name, with its options, and wrap it."""
        kind = transport_class(transport) if isinstance(transport, str) else transport
        if locate is None:
            locate = getattr(kind, "locate", arena_address)
        return cls(kind.create(**(options or {})), *faults, locate=locate)

    @classmethod
    def probe(cls) -> Availability:
        """It works wherever the wrapped transport does."""
        return Availability(cls.name, "pass")

    def publisher_end(self, publisher_id: str) -> PublisherEnd:
        """Open the trainer's end."""
        end = _FaultyPublisher(self, self.inner.publisher_end(publisher_id))
        self.publishers.append(end)
        return end

    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        """Open the engine's end."""
        return _FaultyConsumer(self, self.inner.consumer_end(worker, rank))

    def reach(self, step: Step) -> None:
        """Strike, if a fault waits here."""
        with self._lock:
            count = self._reached[step] = self._reached.get(step, 0) + 1
            struck = [fault for fault in self.faults if (fault.step, fault.count) == (step, count)]
        for fault in struck:
            fault.action()

    def _publisher_of(self, manifest: WeightUpdateManifest) -> "_FaultyPublisher":
        for end in self.publishers:
            if manifest.update_id in end.handles:
                return end
        raise LookupError(f"update {manifest.update_id} was not published here")

    def corrupt(self, manifest: WeightUpdateManifest, offset: int) -> None:
        """Flip one byte of a published update, at `offset` of its arena.

        Raises:
            LookupError: it was not published through this object.

        """
        publisher = self._publisher_of(manifest)
        found = self.locate(
            publisher.inner, manifest.update_id, publisher.handles[manifest.update_id]
        )
        address = found(offset) if callable(found) else found + offset
        flip_byte(address, publisher.place)


class AroundPublisher(PublisherEnd):
    """A publisher's end that does what another one does; tests change some of it."""

    def __init__(self, inner: PublisherEnd) -> None:
        """Stand in front of `inner`."""
        self.inner = inner
        self.place = inner.place
        self.columns = inner.columns
        self.offers = inner.offers
        vars(self)["shows"] = inner.shows

    def offering(
        self, weight_version: int, *, is_part: bool, pause: Callable[[float], None]
    ) -> AbstractContextManager[None]:
        """Pass on."""
        return self.inner.offering(weight_version, is_part=is_part, pause=pause)

    def carry(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str) -> Carried:
        """Pass on."""
        return self.inner.carry(plan, tensors, update_id)

    def show(self, manifest: WeightUpdateManifest, *, is_part: bool) -> None:
        """Let others find a version."""
        self.inner.show(manifest, is_part=is_part)

    def join_group(self, update_id: str, group: GroupManifest) -> None:
        """Pass on."""
        self.inner.join_group(update_id, group)

    def show_group(self, update_id: str) -> None:
        """Pass on."""
        self.inner.show_group(update_id)

    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Pass on."""
        self.inner.seal_header(update_id, digest)

    def last_stored(self) -> int | None:
        """Pass on."""
        return self.inner.last_stored()

    def release(self, update_id: str) -> None:
        """Pass on."""
        self.inner.release(update_id)

    def records(self) -> list[Record]:
        """Pass on."""
        return self.inner.records()

    @property
    def nbytes(self) -> int:
        """Pass on."""
        return self.inner.nbytes

    def close(self) -> None:
        """Pass on."""
        self.inner.close()


class AroundConsumer(ConsumerEnd):
    """A consumer's end that does what another one does; tests change some of it."""

    def __init__(self, inner: ConsumerEnd) -> None:
        """Stand in front of `inner`."""
        self.inner = inner

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        """Pass on."""
        return self.inner.attach(manifest)

    def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
        """Pass on."""
        self.inner.report(manifest, report)

    def settle(self) -> None:
        """Pass on."""
        self.inner.settle()

    def close(self) -> None:
        """Pass on."""
        self.inner.close()


class _FaultyPublisher(AroundPublisher):
    def __init__(self, owner: FaultInjecting, inner: PublisherEnd) -> None:
        super().__init__(inner)
        self.owner = owner
        self.handles: dict[str, Mapping[str, Any]] = {}

    def carry(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str) -> Carried:
        self.owner.reach(Step.BEFORE_CARRY)
        carried = self.inner.carry(plan, tensors, update_id)
        self.handles[update_id] = carried.handle
        try:
            if self.owner.corrupt_next and plan.table.arena_nbytes:
                self.owner.corrupt_next = False
                found = self.owner.locate(self.inner, update_id, carried.handle)
                flip_byte(found(0) if callable(found) else found, self.place)
            self.owner.reach(Step.AFTER_CARRY)
        except BaseException:
            self.inner.release(update_id)
            raise
        return carried

    def release(self, update_id: str) -> None:
        self.owner.reach(Step.BEFORE_RELEASE)
        self.inner.release(update_id)
        self.owner.reach(Step.AFTER_RELEASE)


class _FaultyConsumer(AroundConsumer):
    def __init__(self, owner: FaultInjecting, inner: ConsumerEnd) -> None:
        super().__init__(inner)
        self._owner = owner

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        self._owner.reach(Step.BEFORE_ATTACH)
        attachment = self.inner.attach(manifest)
        self._owner.reach(Step.AFTER_ATTACH)
        return attachment

    def lease(self, manifest: WeightUpdateManifest) -> Attachment:
        self._owner.reach(Step.BEFORE_ATTACH)
        attachment = self.inner.lease(manifest)
        self._owner.reach(Step.AFTER_ATTACH)
        return attachment

    def attach_parts(self, parts: Sequence[PartRequest]) -> list[Attachment]:
        self._owner.reach(Step.BEFORE_ATTACH)
        attached = self.inner.attach_parts(parts)
        self._owner.reach(Step.AFTER_ATTACH)
        return attached

    def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
        if self._owner.drops_reports:
            return
        self._owner.reach(Step.BEFORE_REPORT)
        self.inner.report(manifest, report)
        self._owner.reach(Step.AFTER_REPORT)
