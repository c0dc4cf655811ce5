"""A transport of one's own: each version is a file in a directory that both sides share."""

import logging
import os
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import ValidationError

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import MalformedManifest, SegmentError
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.transports import (
    Attachment,
    Availability,
    BytePlan,
    Carried,
    ConsumerEnd,
    PackPlan,
    PublisherEnd,
    Record,
    Transport,
    UpdateReport,
    anonymous_pin,
    register_transport,
)

LOG = logging.getLogger(__name__)


@register_transport
class FileTransport(Transport):
    """Versions as files."""

    name: ClassVar[str] = "file"
    crosses_processes: bool = True
    zero_copy_import: bool = False

    def __init__(self, *, directory: str | Path, num_threads: int | None = None) -> None:
        self._directory = Path(directory)
        self._num_threads = num_threads

    @classmethod
    def probe(cls) -> Availability:
        return Availability(cls.name, "pass")

    def publisher_end(self, publisher_id: str) -> PublisherEnd:
        return FilePublisher(self._directory, publisher_id, self._num_threads)

    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        return FileConsumer(self._directory, worker, rank, self._num_threads)


class FilePublisher(PublisherEnd):
    """The trainer's end."""

    def __init__(self, directory: Path, publisher_id: str, num_threads: int | None) -> None:
        self._directory = directory
        self._publisher_id = publisher_id
        self._num_threads = num_threads
        self._paths: dict[str, Path] = {}

    def path(self, update_id: str) -> Path:
        return self._directory / f"{update_id}.arena"

    def carry(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str) -> Carried:
        start = time.perf_counter()
        pin = anonymous_pin(plan.table.arena_nbytes)
        digests = plan.pack(tensors, pin.address, num_threads=self._num_threads)
        path = self.path(update_id)
        try:
            path.write_bytes(memoryview(pin.buffer)[: plan.table.arena_nbytes])
        except OSError as error:
            path.unlink(missing_ok=True)
            raise SegmentError(
                f"cannot write {path}: {error}. Free space, publish again."
            ) from error
        self._paths[update_id] = path
        elapsed = (time.perf_counter() - start) * 1e3
        return Carried(digests=digests, handle={}, timings_ms={"stage_digest": elapsed})

    def release(self, update_id: str) -> None:
        path = self._paths.pop(update_id, None)
        if path is not None:
            path.unlink(missing_ok=True)

    def records(self) -> list[Record]:
        """Read what consumers wrote; a lock on the file says that its writer lives."""
        found = []
        for path in sorted(self._directory.glob(f"{self._publisher_id}-*.record")):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                record = Record.model_validate_json(path.read_bytes())
                presence = "alive" if leases.is_held(fd) else "gone"
            except ValidationError:
                record = Record(worker="?", rank=-1, pid=-1)
                presence = "unreadable"
            finally:
                os.close(fd)
            found.append(record.model_copy(update={"presence": presence}))
        return found

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self._paths.values())

    def close(self) -> None:
        for update_id in list(self._paths):
            self.release(update_id)
        for path in self._directory.glob(f"{self._publisher_id}-*.record"):
            path.unlink(missing_ok=True)


class FileConsumer(ConsumerEnd):
    """The engine's end."""

    def __init__(self, directory: Path, worker: str, rank: int, num_threads: int | None) -> None:
        self._directory = directory
        self._worker = worker
        self._rank = rank
        self._num_threads = num_threads
        self._is_closed = False
        self._records: dict[str, int] = {}
        self._updates: dict[str, dict[str, UpdateReport]] = {}

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        if manifest.handle:
            raise MalformedManifest(f"update {manifest.update_id}: the handle must be empty.")
        # The path follows from the update's id, which is hexadecimal: no path of a peer's choice.
        path = self._directory / f"{manifest.update_id}.arena"
        nbytes = manifest.table.arena_nbytes
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            message = f"update {manifest.update_id} is gone: {error}. Import the latest manifest."
            raise SegmentError(message) from error
        try:
            # Before anything is allocated: a manifest may claim any size.
            found = os.fstat(fd).st_size
            if found != nbytes:
                raise SegmentError(f"{path} has {found} bytes, the manifest says {nbytes}.")
            pin = anonymous_pin(nbytes)
            if vm.read_into(fd, pin.address, nbytes) != nbytes:
                raise SegmentError(f"{path} was truncated while it was read: publish again.")
        finally:
            os.close(fd)
        plan = BytePlan(manifest.table.nbytes_column)
        return Attachment(manifest.table, pin, plan, num_threads=self._num_threads)

    def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
        if self._is_closed:  # a tensor that was kept may die later, and that is reported too
            return
        publisher_id = manifest.publisher_id
        updates = self._updates.setdefault(publisher_id, {})
        updates[report.update_id] = report
        for old in list(updates)[:-6]:
            del updates[old]
        record = Record(
            worker=self._worker,
            rank=self._rank,
            pid=os.getpid(),
            updates=tuple(updates.values()),
        )
        try:
            self._write(publisher_id, record.model_dump_json().encode())
        except OSError as error:  # the publisher is gone, or the disk is full: the update stands
            LOG.warning("the publisher will not hear of %s: %s", report.update_id, error)

    def _write(self, publisher_id: str, text: bytes) -> None:
        if publisher_id not in self._records:
            name = f"{publisher_id}-{uuid.uuid4().hex}.record"
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            fd = self._records[publisher_id] = os.open(self._directory / name, flags, 0o600)
            leases.try_exclusive(fd)
        fd = self._records[publisher_id]
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self._is_closed = True
        for fd in self._records.values():
            os.close(fd)
        self._records.clear()


def main() -> None:
    model = torch.nn.Linear(4, 4)
    with (
        tempfile.TemporaryDirectory() as directory,
        make_weight_bridge("file", source_worker="trainer", directory=directory) as trainer,
        make_weight_bridge("file", source_worker="rollout", directory=directory) as rollout,
    ):
        manifest = trainer.publish(model, weight_version=1)
        tensors = rollout.import_update(manifest.to_json())
        rollout.acknowledge(manifest.update_id)
        assert torch.equal(tensors["weight"], model.weight)
        (report,) = trainer.holders(manifest.update_id)
        print(f"version {report.weight_version} is {report.state} by {report.worker}")


if __name__ == "__main__":
    main()
