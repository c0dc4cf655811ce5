"""Where the tensors of a version lie in files of safetensors.

A version's tensors are written as Hugging Face's checkpoints have them: one file
``model.safetensors``, or several with an index beside them; of an adapter one file
``adapter_model.safetensors``. The placement follows from the layout of the manifest and one number,
the largest size of a file, so a reader works it out for itself and believes no header. (Format of
safetensors: 8 bytes of length, a JSON header, the tensors' bytes without gaps.)
"""

import json
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.passes import BytePlan

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


def layout_of(
    table: TensorTable, file_nbytes: int, *, is_adapter: bool, suffix: str = ""
) -> FileLayout:
    """Lay out the tensors of a table in files of at most `file_nbytes`, or one tensor.

    The files' names end in `suffix`: see `rl_bridge.transports.files.store.Marker`.
    """
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
