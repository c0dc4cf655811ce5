"""Whether a stored version is what was published: every file and every byte of it.

Readers over a bridge verify what they read; this is for whoever wants to know which file of a
version is wrong, and what in it. Files that go along, such as ``config.json``, are in no manifest:
of them nothing is known.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from rl_bridge.errors import (
    ChecksumMismatch,
    SegmentError,
    WeightManifestValidationError,
)
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.packing import checked_block
from rl_bridge.transports.files.checkpoint import (
    ADAPTER_CONFIG,
    INDEX,
    Chunk,
    config_for_peft,
    layout_of,
)
from rl_bridge.transports.files.store import LISTS, MANIFEST, StoredVersion, VersionStore
from rl_bridge.transports.files.transport import FilesHandle

__all__ = ["CheckedFile", "Fault", "check_version"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a file.

    Attributes:
        tensor: the tensor whose bytes are other ones; empty: the file itself.
        what: what was expected and what is there.

    """

    tensor: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """One file of a version, and what is wrong with it.

    Attributes:
        rank: of the part that it is of; None: of a whole version.
        folder: name of the version or part in its store.
        name: of the file.
        nbytes: the size that it must have.
        num_tensors: how many tensors lie in it.
        faults: empty if every byte is right.

    """

    rank: int | None
    folder: str
    name: str
    nbytes: int
    num_tensors: int
    faults: tuple[Fault, ...]


def check_version(
    store: VersionStore, parts: Sequence[StoredVersion], manifest: WeightUpdateManifest
) -> list[CheckedFile]:
    """Read and digest every byte of a version, which is leased meanwhile.

    Args:
        store: where it is.
        parts: of the version, by rank; or the whole version.
        manifest: of it; of a group, the group's.

    Raises:
        VersionNotFound: a part is gone, or is being removed.
        MalformedManifest: a handle is none of ``files``.

    """
    found: list[CheckedFile] = []
    with ExitStack() as held:
        for one in parts:
            held.enter_context(store.leased(one.name))
        if not isinstance(manifest, GroupManifest):
            return list(_Part(store, parts[0], manifest).check(None))
        for rank, (one, part) in enumerate(zip(parts, manifest.parts, strict=True)):
            found += _Part(store, one, part).check(rank)
    return found


class _Part:
    """A stored version, or one part of it, whose files are checked."""

    def __init__(
        self, store: VersionStore, version: StoredVersion, manifest: WeightUpdateManifest
    ) -> None:
        self._store, self._folder, self._suffix = store, version.name, version.marker.suffix
        self._manifest, self._sizes = manifest, store.files(version.name)
        nbytes = FilesHandle.of(manifest).file_nbytes
        self._layout = layout_of(manifest, nbytes, suffix=self._suffix)

    def check(self, rank: int | None) -> Iterator[CheckedFile]:
        made = partial(CheckedFile, rank=rank, folder=self._folder)
        wrong = self._wrong_tensors()
        for file in self._layout.files:
            head = bytearray(len(file.header))
            faults = self._read(file.name, file.nbytes, head)
            if not faults and head != file.header:
                faults = [Fault("", "its header is not the one that its tensors make")]
            yield made(
                name=file.name,
                nbytes=file.nbytes,
                num_tensors=len(file.rows),
                faults=(*faults, *wrong.get(file.name, ())),
            )
        for name, nbytes, faults in self._others():
            yield made(name=name, nbytes=nbytes, num_tensors=0, faults=tuple(faults))

    def _others(self) -> Iterator[tuple[str, int, list[Fault]]]:
        """Name, size and faults of the files without tensors, and of strangers among weights."""
        suffix, sizes = self._suffix, self._sizes
        yield LISTS + suffix, self._manifest.table.lists_nbytes, self._check_lists(LISTS + suffix)
        yield MANIFEST, sizes.get(MANIFEST, 0), self._check_manifest()
        # (A configuration of PEFT's is not there where it would not tell the scalings.)
        config = config_for_peft(self._manifest, warns=False)
        for name, content in ((INDEX, self._layout.index.encode()), (ADAPTER_CONFIG, config)):
            if content:
                there = bytearray(len(content))
                faults = self._read(name + suffix, len(content), there)
                if not faults and there != content:
                    faults = [Fault("", "is not what was published")]
                yield name + suffix, len(content), faults
        for name in sorted(sizes.keys() - {one.name for one in self._layout.files}):
            if name.endswith((".safetensors", ".safetensors" + suffix)):  # loaders take the former
                yield name, sizes[name], [Fault("", "is no file of this version")]

    def _read(self, name: str, nbytes: int, into: bytearray) -> list[Fault]:
        """Read the beginning of a file; returns why it cannot be, or is no such file."""
        found = self._sizes.get(name)
        if found is None:
            return [Fault("", f"is not there, expected {nbytes} bytes")]
        if found != nbytes:
            return [Fault("", f"has {found} bytes, expected {nbytes}")]
        try:
            pieces = [(0, memoryview(into))] if into else []
            self._store.read(self._folder, name, nbytes, pieces)
        except SegmentError as error:
            return [Fault("", str(error))]
        return []

    def _wrong_tensors(self) -> dict[str, list[Fault]]:
        """File -> what is wrong with tensors in it; files of another size are not read."""
        found: dict[str, list[Fault]] = {}
        chunks = self._layout.chunks
        with ThreadPoolExecutor(self._store.num_readers or len(os.sched_getaffinity(0))) as pool:
            for chunk, faults in zip(chunks, pool.map(self._wrong_in, chunks), strict=True):
                found.setdefault(chunk.file.name, []).extend(faults)
        return found

    def _wrong_in(self, chunk: Chunk) -> list[Fault]:
        file, table = chunk.file, self._manifest.table
        if self._sizes.get(file.name) != file.nbytes:
            return []
        nbytes = table.nbytes_column[list(chunk.rows)]
        room = np.empty(int(nbytes.sum()), np.uint8)
        starts = np.cumsum(nbytes, dtype=np.uint64) - nbytes
        try:
            pieces = [(chunk.begin, room.data)] if len(room) else []
            self._store.read(self._folder, file.name, file.nbytes, pieces)
        except SegmentError as error:
            return [Fault("", str(error))]
        found = chunk.plan.digest(np.uint64(room.ctypes.data) + starts, num_threads=1)
        faults = []
        for place, row in enumerate(chunk.rows):
            got = found[place * DIGEST_NBYTES : (place + 1) * DIGEST_NBYTES]
            expected = self._manifest.digests[row * DIGEST_NBYTES : (row + 1) * DIGEST_NBYTES]
            if got != expected:
                what = f"expected checksum {expected.hex()}, got {got.hex()}"
                faults.append(Fault(table.names[row], what))
        return faults

    def _check_lists(self, name: str) -> list[Fault]:
        table = self._manifest.table
        lists = bytearray(table.lists_nbytes)
        faults = self._read(name, len(lists), lists)
        if faults:
            return faults
        columns = bytes(lists[table.leaves_nbytes :])
        try:
            if table.leaves:
                checked_block(self._manifest, bytes(lists[: table.leaves_nbytes]))
        except ChecksumMismatch:
            return [Fault("", "its digests of leaves are not those of the tensors")]
        if table.columns and xxhash.xxh3_128_hexdigest(columns) != self._manifest.columns:
            return [Fault("", "its digests of columns are not those of the manifest")]
        return []

    def _check_manifest(self) -> list[Fault]:
        try:
            text = self._store.read_small(self._folder, MANIFEST).decode()
            found = WeightUpdateManifest.of(text, caller="check_version")
        except (SegmentError, WeightManifestValidationError, UnicodeDecodeError) as error:
            return [Fault("", str(error))]
        expected, got = self._manifest.header_digest.hex(), found.header_digest.hex()
        if got != expected:
            return [Fault("", f"is of another version: expected a header of {expected}, got {got}")]
        return []
