"""Whether a stored version is what was published: every file and every byte of it.

Readers over a bridge verify what they read; this is for whoever wants to know which file of a
version is wrong, and what in it. Files that go along, such as ``config.json``, are in no manifest:
of them nothing is known.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import xxhash

from rl_bridge.errors import (
    ChecksumMismatch,
    MalformedManifest,
    SegmentError,
    WeightManifestValidationError,
)
from rl_bridge.manifest.canonical import thaw
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.packing import checked_block
from rl_bridge.transports.files.checkpoint import ADAPTER_CONFIG, config_for_peft
from rl_bridge.transports.files.layout import INDEX, Chunk, FileLayout, layout_of
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
            return list(_check(store, parts[0], manifest, None))
        for rank, (one, part) in enumerate(zip(parts, manifest.parts, strict=True)):
            found += _check(store, one, part, rank)
    return found


def _check(
    store: VersionStore, version: StoredVersion, part: WeightUpdateManifest, rank: int | None
) -> Iterator[CheckedFile]:
    try:
        handle = FilesHandle.model_validate(thaw(part.handle))
    except ValueError as error:
        msg = f"update {part.update_id}: its handle is none of files. Take another version."
        raise MalformedManifest(msg) from error
    folder, suffix = version.name, version.marker.suffix
    layout = layout_of(
        part.table, handle.file_nbytes, is_adapter=part.adapter is not None, suffix=suffix
    )
    sizes = store.files(folder)
    wrong = _wrong_tensors(store, folder, layout, part, sizes)
    for file in layout.files:
        faults = _faults_of_size(sizes, file.name, file.nbytes)
        if not faults:
            head = bytearray(len(file.header))
            faults = _read(store, folder, file.name, file.nbytes, head)
            if not faults and head != file.header:
                faults = [Fault("", "its header is not the one that its tensors make")]
            faults += wrong.get(file.name, [])
        yield CheckedFile(
            rank=rank,
            folder=folder,
            name=file.name,
            nbytes=file.nbytes,
            num_tensors=len(file.rows),
            faults=tuple(faults),
        )
    small: list[tuple[str, int, list[Fault]]] = [
        (
            LISTS + suffix,
            part.table.lists_nbytes,
            _check_lists(store, folder, LISTS + suffix, part, sizes),
        ),
        (MANIFEST, sizes.get(MANIFEST, 0), _check_manifest(store, folder, part)),
    ]
    # (A configuration of PEFT's is not there where it would not tell the scalings.)
    config = config_for_peft(part, warns=False)
    for name, content in ((INDEX, layout.index.encode()), (ADAPTER_CONFIG, config)):
        if content:
            faults = _compare(store, folder, name + suffix, content, sizes)
            small.append((name + suffix, len(content), faults))
    strangers = sorted(sizes.keys() - {one.name for one in layout.files})
    small += [
        (name, sizes[name], [Fault("", "is no file of this version")])
        for name in strangers
        if name.endswith((".safetensors", ".safetensors" + suffix))  # loaders take the former
    ]
    for name, nbytes, faults in small:
        yield CheckedFile(
            rank=rank,
            folder=folder,
            name=name,
            nbytes=nbytes,
            num_tensors=0,
            faults=tuple(faults),
        )


def _faults_of_size(sizes: Mapping[str, int], name: str, nbytes: int) -> list[Fault]:
    if name not in sizes:
        return [Fault("", f"is not there, expected {nbytes} bytes")]
    if sizes[name] != nbytes:
        return [Fault("", f"has {sizes[name]} bytes, expected {nbytes}")]
    return []


def _read(store: VersionStore, folder: str, name: str, nbytes: int, into: bytearray) -> list[Fault]:
    try:
        store.read(folder, name, nbytes, [(0, memoryview(into))] if into else [])
    except SegmentError as error:
        return [Fault("", str(error))]
    return []


def _compare(
    store: VersionStore, folder: str, name: str, content: bytes, sizes: Mapping[str, int]
) -> list[Fault]:
    faults = _faults_of_size(sizes, name, len(content))
    if not faults:
        there = bytearray(len(content))
        faults = _read(store, folder, name, len(content), there)
        if not faults and there != content:
            faults = [Fault("", "is not what was published")]
    return faults


def _wrong_tensors(
    store: VersionStore,
    folder: str,
    layout: FileLayout,
    part: WeightUpdateManifest,
    sizes: Mapping[str, int],
) -> dict[str, list[Fault]]:
    """File -> what is wrong with tensors in it; files of another size are not read."""
    table = part.table

    def wrong(chunk: Chunk) -> list[Fault]:
        file = chunk.file
        if sizes.get(file.name) != file.nbytes:
            return []
        nbytes = table.nbytes_column[list(chunk.rows)]
        room = np.empty(int(nbytes.sum()), np.uint8)
        starts = np.cumsum(nbytes, dtype=np.uint64) - nbytes
        try:
            pieces = [(chunk.begin, room.data)] if len(room) else []
            store.read(folder, file.name, file.nbytes, pieces)
        except SegmentError as error:
            return [Fault("", str(error))]
        found = chunk.plan.digest(np.uint64(room.ctypes.data) + starts, num_threads=1)
        faults = []
        for place, row in enumerate(chunk.rows):
            got = found[place * DIGEST_NBYTES : (place + 1) * DIGEST_NBYTES]
            expected = part.digests[row * DIGEST_NBYTES : (row + 1) * DIGEST_NBYTES]
            if got != expected:
                what = f"expected checksum {expected.hex()}, got {got.hex()}"
                faults.append(Fault(table.names[row], what))
        return faults

    found: dict[str, list[Fault]] = {}
    with ThreadPoolExecutor(store.num_readers or len(os.sched_getaffinity(0))) as pool:
        for chunk, faults in zip(layout.chunks, pool.map(wrong, layout.chunks), strict=True):
            found.setdefault(chunk.file.name, []).extend(faults)
    return found


def _check_lists(
    store: VersionStore,
    folder: str,
    name: str,
    part: WeightUpdateManifest,
    sizes: Mapping[str, int],
) -> list[Fault]:
    table = part.table
    lists = bytearray(table.lists_nbytes)
    faults = _faults_of_size(sizes, name, len(lists))
    faults = faults or _read(store, folder, name, len(lists), lists)
    if faults:
        return faults
    columns = bytes(lists[table.leaves_nbytes :])
    try:
        if table.leaves:
            checked_block(part, bytes(lists[: table.leaves_nbytes]))
    except ChecksumMismatch:
        return [Fault("", "its digests of leaves are not those of the tensors")]
    if table.columns and xxhash.xxh3_128_hexdigest(columns) != part.columns:
        return [Fault("", "its digests of columns are not those of the manifest")]
    return []


def _check_manifest(store: VersionStore, folder: str, part: WeightUpdateManifest) -> list[Fault]:
    try:
        text = store.read_small(folder, MANIFEST).decode()
        found = WeightUpdateManifest.of(text, caller="check_version")
    except (SegmentError, WeightManifestValidationError, UnicodeDecodeError) as error:
        return [Fault("", str(error))]
    if found.header_digest != part.header_digest:
        expected, got = part.header_digest.hex(), found.header_digest.hex()
        return [Fault("", f"is of another version: expected a header of {expected}, got {got}")]
    return []
