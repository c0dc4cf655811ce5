"""`rl-bridge inspect`: show what a manifest says. Reads the manifest only, never the weights."""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rl_bridge.cli.screen import (
    duration,
    facts,
    plain,
    say_json,
    screen,
    size,
    table,
    told,
)
from rl_bridge.manifest.canonical import JSONValue, canonical_json
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorDescriptor, TensorTable

_LARGEST = 10

# ---- a manifest that the user names --------------------------------------------------------------

_STDIN = Path("-")


def _existing(path: Path) -> Path:
    # Not typer's own `exists`, which knows no dash. Pipes of the shell's are fine: <(command).
    if path != _STDIN and (not path.exists() or path.is_dir()):
        raise typer.BadParameter(f"{str(path)!r} is no file.")
    return path


ManifestFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        callback=_existing,
        show_default=False,
        help="A manifest's JSON, as manifest.to_json() wrote it; - reads standard input.",
    ),
]


def read_manifest(path: Path) -> WeightUpdateManifest:
    """Read a manifest from a file, or from standard input for ``-``.

    Raises:
        WeightManifestValidationError: it is no valid manifest; the subclass says why.

    """
    text = sys.stdin.buffer.read() if path == _STDIN else path.read_bytes()
    # The format has no white space around it, but files and shells like to end with a line break.
    return WeightUpdateManifest.from_json(text.strip())


# ---- the command ---------------------------------------------------------------------------------


def inspect(
    file: ManifestFile,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor, not only the largest.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Show what a manifest says: its source, layout and tensors.

    Everything that can be wrong with a manifest is checked. The weights are not read: that is what
    verify does.
    """
    with told(as_json=as_json):
        manifest = read_manifest(file)
    if as_json:
        say_json(_document(manifest, every_tensor=tensors))
        return
    out = screen()
    for part in (
        facts(_header_facts(manifest), title="Update"),
        facts(_layout_facts(manifest), title="Layout"),
        _dtype_table(manifest.table),
        _tensor_table(manifest, every_tensor=tensors),
    ):
        out.print(Padding(part, (0, 0, 1, 0), expand=False))


def _by_size(manifest: WeightUpdateManifest) -> list[TensorDescriptor]:
    return sorted(manifest.tensors.values(), key=lambda tensor: (-tensor.nbytes, tensor.name))


def _dtypes(table: TensorTable) -> dict[str, tuple[int, int]]:
    """Count stored tensors and bytes of each dtype, most bytes first."""
    found: dict[str, tuple[int, int]] = {}
    for dtype, nbytes in zip(table.dtypes, table.nbytes, strict=True):
        count, total = found.get(dtype, (0, 0))
        found[dtype] = (count + 1, total + nbytes)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


# ---- for programs -------------------------------------------------------------------------------


def _document(manifest: WeightUpdateManifest, *, every_tensor: bool) -> dict[str, JSONValue]:
    table = manifest.table
    header = manifest.header()
    for part in (header, *header.get("parts", ())):
        del part["digests"]  # each tensor's stands with the tensor, as its checksum
    document: dict[str, JSONValue] = {
        "header": header,
        "layout": {
            "algorithm": table.algorithm,
            "arena_nbytes": table.arena_nbytes,
            "columns": table.columns,
            "device": table.device,
            "dtypes": {
                dtype: {"tensors": count, "nbytes": nbytes}
                for dtype, (count, nbytes) in _dtypes(table).items()
            },
            "digest": table.digest,
            "leaves": table.leaves,
            "tensor_count": manifest.tensor_count,
            "tied_count": len(table.ties),
            "total_nbytes": manifest.total_nbytes,
            "trainable_count": None if table.trainable is None else table.trainable.count("1"),
        },
        "largest": [_tensor_document(tensor) for tensor in _by_size(manifest)[:_LARGEST]],
    }
    if every_tensor:
        document["tensors"] = [_tensor_document(tensor) for tensor in manifest.tensors.values()]
    return document


def _tensor_document(tensor: TensorDescriptor) -> dict[str, JSONValue]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "nbytes": tensor.nbytes,
        "offset": tensor.offset,
        "checksum": tensor.checksum,
        "tied_to": tensor.tied_to,
    }


# ---- for people ---------------------------------------------------------------------------------


def _header_facts(manifest: WeightUpdateManifest) -> dict[str, str | Text]:
    metadata = dict(manifest.header()["metadata"])
    metadata.pop("layout", None)  # shown with the layout
    return {
        "version": Text(str(manifest.weight_version), style="bold"),
        "update": manifest.update_id,
        "root": manifest.root,
        "publisher": manifest.publisher_id,
        "source": f"{plain(manifest.source_worker)}, rank {manifest.source_rank}",
        "created": moment(manifest.created_at),
        **_ways(manifest),
        # Canonical JSON is ASCII without control characters: harmless to a terminal.
        "metadata": canonical_json(metadata) if metadata else "none",
    }


def moment(created_at: float) -> str:
    """Write a manifest's time, which may be anything."""
    try:
        moment = datetime.fromtimestamp(created_at, tz=UTC)
    except (OverflowError, ValueError, OSError):
        return f"{created_at} seconds since 1970"
    age = time.time() - created_at
    when = f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    return f"{when}, {duration(age)} ago" if age >= 0 else f"{when}, in the future"


def _ways(manifest: WeightUpdateManifest) -> dict[str, str | Text]:
    """How its bytes travel: by one transport, or each part by its own."""
    if not isinstance(manifest, GroupManifest):
        return {"transport": plain(manifest.transport), "handle": _handle(manifest)}
    parts = (
        f"rank {rank}: {plain(part.transport)}, {size(part.total_nbytes)}, from "
        f"{plain(part.source_worker)}, publisher {part.publisher_id[:12]}"
        for rank, part in enumerate(manifest.parts)
    )
    return {"parts": "\n".join(parts)}


def _handle(manifest: WeightUpdateManifest) -> str:
    """Write the transport's handle, one part a line."""
    handle = manifest.header()["handle"]
    lines = []
    for name, value in sorted(handle.items()):
        fields = value.items() if isinstance(value, dict) else [("", value)]
        shown = (f"{key} {plain(str(item))}".strip() for key, item in fields if item != "")
        lines.append(f"{plain(name)}: {', '.join(shown)}")
    return "\n".join(lines) or "none"


def _layout_facts(manifest: WeightUpdateManifest) -> dict[str, str | Text]:
    table = manifest.table
    tied = f", {len(table.ties)} of them tied to another" if table.ties else ""
    nbytes = f"{size(table.total_nbytes)} ({table.total_nbytes} bytes)"
    found: dict[str, str | Text] = {"tensors": f"{manifest.tensor_count}{tied}", "size": nbytes}
    if not isinstance(manifest, GroupManifest):
        padding = table.arena_nbytes - table.total_nbytes - table.lists_nbytes
        found |= {"size": f"{nbytes}, padding {size(padding)}", "parallel": _parallel(manifest)}
    found |= {
        "digest": f"{table.digest} ({table.algorithm})",
    }
    if table.trainable is not None:
        found["trainable"] = f"{table.trainable.count('1')} of {len(table.names)} stored tensors"
    return found


def _parallel(manifest: WeightUpdateManifest) -> str:
    layout = manifest.weight_layout
    sizes = {
        "tensor": layout.tensor_parallel_size,
        "pipeline": layout.pipeline_parallel_size,
        "expert": layout.expert_parallel_size,
        "data": layout.data_parallel_size,
    }
    degrees = [f"{name} parallel {degree}" for name, degree in sizes.items() if degree != 1]
    world = f"rank {layout.rank} of {layout.world_size}"
    return ", ".join([plain(layout.kind), world, *degrees])


def _dtype_table(stored: TensorTable) -> Table:
    shown = table("dtype", "tensors", "size", title="Types")
    for dtype, (count, nbytes) in _dtypes(stored).items():
        shown.add_row(dtype, str(count), size(nbytes))
    return shown


def _tensor_table(manifest: WeightUpdateManifest, *, every_tensor: bool) -> Table:
    tensors = list(manifest.tensors.values()) if every_tensor else _by_size(manifest)[:_LARGEST]
    total = manifest.tensor_count
    title = f"The {len(tensors)} largest of {total} tensors (--tensors lists all)"
    if len(tensors) == total:
        title = "Tensors"
    shown = table("name", "dtype", "shape", "size", "checksum", title=title)
    shown.columns[-1].style = "dim"
    for tensor in tensors:
        name = Text(plain(tensor.name))
        if tensor.tied_to is not None:
            name.append(f" = {plain(tensor.tied_to)}", style="dim")
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        shown.add_row(name, tensor.dtype, shape, size(tensor.nbytes), tensor.checksum[:12])
    return shown
