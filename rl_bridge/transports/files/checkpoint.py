"""A version as a checkpoint: which tensor lies where in which file, and what lies beside them.

A version's tensors are written as Hugging Face's checkpoints have them: one file
``model.safetensors``, or several with an index beside them; of an adapter one file
``adapter_model.safetensors``. The placement follows from the layout of the manifest and one number,
the largest size of a file, so a reader works it out for itself and believes no header. (Format of
safetensors: 8 bytes of length, a JSON header, the tensors' bytes without gaps.)

Beside tensors, a checkpoint has the files that engines need to load it, such as ``config.json``,
the tokenizer's, and PEFT's configuration of an adapter. They go along wherever a version is
written.
"""

import json
import logging
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rl_bridge.errors import MalformedManifest, WeightBridgeUnavailableError
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.durable import whole_directory, write_durably
from rl_bridge.memory.passes import BytePlan
from rl_bridge.transports.files.store import (
    GROUP_MANIFEST,
    KEPT,
    LISTS,
    LOCK,
    MANIFEST,
    MARKER,
    FileContent,
)

_LOG = logging.getLogger(__name__)

# ---- where tensors lie ---------------------------------------------------------------------------

INDEX = "model.safetensors.index.json"
WEIGHTS, ADAPTER_WEIGHTS = "model.safetensors", "adapter_model.safetensors"

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_CHUNK_NBYTES = 8 << 20
# safetensors' names of dtypes; bytes of others are written as U8, which no engine loads.
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One file.

    Attributes:
        name: of the file.
        header: its first bytes, up to the first tensor.
        rows: the stored tensors in it, in the order of their bytes.
        nbytes: size of the file.

    """

    name: str
    header: bytes
    rows: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tensors that lie one behind the other in a file, and are read by one thread.

    Attributes:
        file: their file.
        begin: of the first of them.
        rows: the stored tensors.
        plan: digests them.

    """

    file: TensorFile
    begin: int
    rows: tuple[int, ...]
    plan: BytePlan


@dataclass(frozen=True, slots=True)
class FileLayout:
    """All files of a version.

    Attributes:
        files: with tensors.
        index: content of the index; empty where there is one file.
        chunks: all tensors, as they are read.

    """

    files: tuple[TensorFile, ...]
    index: str
    chunks: tuple[Chunk, ...]


_known: OrderedDict[tuple[str, int, bool, str], FileLayout] = OrderedDict()
_REMEMBERED = 8


def layout_of(manifest: WeightUpdateManifest, file_nbytes: int, *, suffix: str = "") -> FileLayout:
    """Lay out the tensors of a version in files of at most `file_nbytes`, or one tensor.

    The files' names end in `suffix`: see `rl_bridge.transports.files.store.Marker`.
    """
    table, is_adapter = manifest.table, manifest.adapter is not None
    key = table.digest, file_nbytes, is_adapter, suffix
    found = _known.get(key)
    if found is None:
        found = _known[key] = _made(table, file_nbytes, suffix, is_adapter=is_adapter)
        while len(_known) > _REMEMBERED:
            _known.popitem(last=False)
    return found


def _made(table: TensorTable, file_nbytes: int, suffix: str, *, is_adapter: bool) -> FileLayout:
    groups: list[list[int]] = [[]]
    size = 0
    for row, nbytes in enumerate(table.nbytes):
        if not is_adapter and groups[-1] and size + nbytes > file_nbytes:
            groups.append([])
            size = 0
        groups[-1].append(row)
        size += nbytes
    names = [name + suffix for name in _file_names(len(groups), is_adapter=is_adapter)]
    files = tuple(_file(table, name, rows) for name, rows in zip(names, groups, strict=True))
    index = ""
    if len(files) > 1:
        where = {table.names[row]: file.name for file in files for row in file.rows}
        document = {"metadata": {"total_size": sum(table.nbytes)}, "weight_map": where}
        index = json.dumps(document, indent=2, sort_keys=True)
    chunks = tuple(chunk for file in files for chunk in _chunks(table, file))
    return FileLayout(files, index, chunks)


def _chunks(table: TensorTable, file: TensorFile) -> Iterator[Chunk]:
    begin = at = len(file.header)
    rows: list[int] = []
    for row in file.rows:
        rows.append(row)
        at += table.nbytes[row]
        if at - begin >= _CHUNK_NBYTES:
            yield _chunk(table, file, begin, rows)
            begin, rows = at, []
    if rows:
        yield _chunk(table, file, begin, rows)


def _chunk(table: TensorTable, file: TensorFile, begin: int, rows: list[int]) -> Chunk:
    return Chunk(file, begin, tuple(rows), BytePlan(table.nbytes_column[rows]))


def _file_names(count: int, *, is_adapter: bool) -> list[str]:
    if count == 1:
        return [ADAPTER_WEIGHTS if is_adapter else WEIGHTS]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _file(table: TensorTable, name: str, rows: Sequence[int]) -> TensorFile:
    def item_nbytes(row: int) -> int:
        count = 1
        for dim in table.shapes[row]:
            count *= dim
        return table.nbytes[row] // count if count else 1

    # Large items first: each tensor then begins at a multiple of its item's size.
    ordered = sorted(rows, key=lambda row: (-item_nbytes(row), row))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for row in ordered:
        dtype, shape, nbytes = table.dtypes[row], list(table.shapes[row]), table.nbytes[row]
        if dtype not in _NAMES:
            dtype, shape = "uint8", [nbytes]
        entries[table.names[row]] = {
            "dtype": _NAMES[dtype],
            "shape": shape,
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = _LENGTH.pack(len(text)) + text
    return TensorFile(name, header, tuple(ordered), len(header) + at)


# ---- what lies beside them -----------------------------------------------------------------------

ADAPTER_CONFIG = "adapter_config.json"
_OWN = frozenset({MARKER, MANIFEST, GROUP_MANIFEST, LISTS, ADAPTER_CONFIG, INDEX, KEPT, LOCK})
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")


def is_config(file: str) -> bool:
    """Whether a file goes along with the weights: it is none with weights, and none of ours."""
    return file not in _OWN and not file.startswith(".") and not file.endswith(_WEIGHTS)


def config_for_peft(manifest: WeightUpdateManifest, *, warns: bool = True) -> bytes | None:
    """PEFT's configuration of an adapter; None of no adapter, or if it would be read otherwise.

    Without the file nobody loads the adapter as PEFT's, and scales it wrongly: readers over a
    bridge have the scalings in the manifest.
    """
    spec, table = manifest.adapter, manifest.table
    if spec is None:
        return None
    try:
        is_read = not spec.misread({name: table.shapes[row] for name, row in table.rows.items()})
    except MalformedManifest:  # no rank or alpha in it
        is_read = False
    if not is_read and warns:
        _LOG.warning(
            "adapter %s is written without %s: its configuration does not tell its scalings",
            spec.name,
            ADAPTER_CONFIG,
        )
    return spec.peft_text() if is_read else None


# ---- writing -------------------------------------------------------------------------------------


def contents(
    manifest: WeightUpdateManifest,
    layout: FileLayout,
    bytes_of: Callable[[int], memoryview],
    *,
    configs: Iterable[tuple[str, bytes]],
    lists: memoryview | None = None,
    suffix: str = "",
) -> Iterator[FileContent]:
    """All files of a version.

    Args:
        manifest: of the version.
        layout: of its tensors, with the same `suffix`.
        bytes_of: gives the bytes of a stored tensor, by its row.
        configs: name and content of files that go along.
        lists: digests of leaves and columns; None: they are not written.
        suffix: what names end in, but for the manifest's.

    """
    for file in layout.files:
        yield file.name, [file.header, *map(bytes_of, file.rows)]
    if lists is not None:
        yield LISTS + suffix, [lists]
    if layout.index:
        yield INDEX + suffix, [layout.index.encode()]
    config = config_for_peft(manifest)
    if config is not None:
        yield ADAPTER_CONFIG + suffix, [config]
    for name, content in configs:
        yield name + suffix, [content]
    yield MANIFEST, [manifest.to_json().encode()]


def require_free(directory: str | os.PathLike[str]) -> None:
    """See to it that a checkpoint can be written there, before its tensors are read.

    Raises:
        WeightBridgeUnavailableError: the directory has files, or lies in none.

    """
    target = Path(directory).absolute()
    try:
        if target.exists():
            if not target.is_dir():
                raise _unwritable(target, "it is a file, expected a new directory or an empty one")
            if any(target.iterdir()):
                cause = "it is not empty, expected a new directory or an empty one"
                raise _unwritable(target, cause)
        elif not target.parent.is_dir():
            raise _unwritable(target, f"{target.parent} is no directory")
    except OSError as error:
        raise _unwritable(target, error.strerror or str(error)) from error


def write_checkpoint(
    directory: str | os.PathLike[str],
    manifest: WeightUpdateManifest,
    tensors: Mapping[str, torch.Tensor],
    *,
    configs: Mapping[str, bytes],
    file_nbytes: int,
) -> dict[str, int]:
    """Write a version as a checkpoint, with its manifest, durably: all of it is there, or nothing.

    Args:
        directory: a new one, or an empty one; what it lies in must exist.
        manifest: of the version.
        tensors: as they were imported, on any device.
        configs: files that go along, by name.
        file_nbytes: the largest size of a file, unless a tensor is larger.

    Returns:
        The files' names and sizes in bytes.

    Raises:
        WeightBridgeUnavailableError: the directory has files, or cannot be written.

    """
    require_free(directory)
    target = Path(directory).absolute()
    names, found = manifest.table.names, dict[str, int]()
    files = contents(
        manifest,
        layout_of(manifest, file_nbytes),
        lambda row: _bytes_of(tensors[names[row]]),
        configs=configs.items(),
    )
    try:
        with whole_directory(target) as made:
            for file, pieces in files:
                write_durably(made / file, pieces)
                found[file] = sum(len(one) for one in pieces)
    except OSError as error:
        raise _unwritable(target, error.strerror or str(error)) from error
    return found


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's types lack it


def _unwritable(target: Path, cause: str) -> WeightBridgeUnavailableError:
    return WeightBridgeUnavailableError(
        f"{target} cannot be written: {cause}. Name a new directory, in one that exists and can be "
        "written to."
    )
