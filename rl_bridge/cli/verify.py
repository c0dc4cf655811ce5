"""`rl-bridge verify`: read every byte of an update here and compare it with its manifest.

Nothing is reported to the publisher and nothing is acknowledged. While the bytes are read the
kernel's lease is held, as for any reader, so that the publisher cannot overwrite them meanwhile.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from rl_bridge.bridge.consumer import require_header
from rl_bridge.cli.screen import (
    ManifestFile,
    facts,
    plain,
    read_manifest,
    say_json,
    screen,
    size,
    status_text,
)
from rl_bridge.errors import ChecksumMismatch, DigestMismatch, WeightBridgeError
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.transports.registry import transport_class
from rl_bridge.transports.shared_memory import SharedMemory

_SHOWN = 20
_DIGITS = 12  # of a checksum on the screen; the error and --json have them all


@dataclass(frozen=True, slots=True)
class _Reading:
    """The bytes found behind a manifest."""

    checksums: dict[str, str]  # of every name
    differing: tuple[str, ...]
    root: str
    seconds: float
    header: DigestMismatch | None  # what is wrong with the manifest's, where every byte is right


def verify(
    file: ManifestFile,
    directory: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            show_default=False,
            help="Where named segments lie, if the publisher's bridge was given directory=.",
        ),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor's result.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Verify every byte of a published update.

    It is read on this machine, where the manifest says that it lies. The publisher must be alive
    and the update not released. The publisher learns nothing of it: nothing is acknowledged or
    rejected. The exit code is 0 only if every tensor verifies, and so does the manifest's header.
    """
    manifest: WeightUpdateManifest | None = None
    reading: _Reading | None = None
    failure: WeightBridgeError | None = None
    try:
        manifest = read_manifest(file)
        reading = _read(manifest, directory)
        _compare(manifest, reading)
    except WeightBridgeError as error:
        failure = error
    if as_json:
        say_json(_document(manifest, reading, failure))
    elif manifest is not None and reading is not None:
        _show(manifest, reading, every_tensor=tensors)
    if failure is not None:
        raise failure


# ---- reading ------------------------------------------------------------------------------------


def _read(manifest: WeightUpdateManifest, directory: Path | None) -> _Reading:
    start = time.perf_counter()
    kind = transport_class(manifest.transport)
    options = {"directory": directory} if kind is SharedMemory else {}
    transport = kind.create(**options)
    end = transport.consumer_end("rl-bridge-verify", 0)
    header: DigestMismatch | None = None
    try:
        attachment = end.look(manifest)
        digests = attachment.digests()
        if digests == manifest.digests:
            require_header(manifest, attachment, binds_header=transport.binds_header)
    except DigestMismatch as error:
        header = error.with_traceback(None)  # whose frames hold the lease
    finally:
        end.close()
    seconds = time.perf_counter() - start
    table = manifest.table
    checksums = {
        name: digests[row * DIGEST_NBYTES : (row + 1) * DIGEST_NBYTES].hex()
        for name, row in table.rows.items()
    }
    differing: tuple[str, ...] = ()
    if digests != manifest.digests:
        expected = manifest.tensors
        differing = tuple(
            name for name, found in checksums.items() if found != expected[name].checksum
        )
    return _Reading(checksums, differing, table.root_plan.root(digests).hex(), seconds, header)


def _compare(manifest: WeightUpdateManifest, reading: _Reading) -> None:
    if reading.differing:
        name = reading.differing[0]
        msg = (
            f"tensor checksum mismatch for {name!r} in version {manifest.weight_version}: "
            f"expected {manifest.tensors[name].checksum}, got {reading.checksums[name]} "
            f"({len(reading.differing)} of {manifest.tensor_count} tensors differ). "
            "Do not install this update: publish again."
        )
        raise ChecksumMismatch(msg)
    if reading.header is not None:
        raise reading.header


# ---- showing ------------------------------------------------------------------------------------


def _document(
    manifest: WeightUpdateManifest | None,
    reading: _Reading | None,
    failure: WeightBridgeError | None,
) -> dict[str, JSONValue]:
    document: dict[str, JSONValue] = {
        "status": "pass" if failure is None else "failed",
        "error": failure and {"type": type(failure).__name__, "message": str(failure)},
    }
    if manifest is not None:
        document |= {
            "update_id": manifest.update_id,
            "weight_version": manifest.weight_version,
            "transport": manifest.transport,
            "root": manifest.root,
            "tensor_count": manifest.tensor_count,
            "total_nbytes": manifest.total_nbytes,
        }
    if manifest is not None and reading is not None:
        bad = set(reading.differing)
        document |= {
            "found_root": reading.root,
            "seconds": reading.seconds,
            "tensors": [
                {
                    "name": name,
                    "status": "failed" if name in bad else "pass",
                    "checksum": tensor.checksum,
                    "found": reading.checksums[name],
                }
                for name, tensor in manifest.tensors.items()
            ],
        }
    return document


def _show(manifest: WeightUpdateManifest, reading: _Reading, *, every_tensor: bool) -> None:
    bad = reading.differing
    out = screen()
    table, num_left = _tensor_table(manifest, reading, every_tensor=every_tensor)
    out.print(table)
    if num_left:
        out.print(Text(f"and {num_left} more, all pass (--tensors lists them)", style="dim"))
    out.print()
    status = "failed" if bad or reading.header else "pass"
    verdict = f"{len(bad)} of {manifest.tensor_count} tensors differ" if bad else "every byte fits"
    if reading.header is not None:
        verdict += ", the manifest's header does not"
    rate = manifest.total_nbytes / reading.seconds / 1e9
    rows: dict[str, str | Text] = {
        "result": Text.assemble(status_text(status), f": {verdict}"),
        "version": f"{manifest.weight_version} (update {manifest.update_id})",
        "root": reading.root if not bad else f"{reading.root}, expected {manifest.root}",
        "read": f"{size(manifest.total_nbytes)} in {reading.seconds:.3f} s, {rate:.1f} GB/s",
    }
    out.print(facts(rows, title=""))


def _tensor_table(
    manifest: WeightUpdateManifest, reading: _Reading, *, every_tensor: bool
) -> tuple[Table, int]:
    """List the tensors that differ, then others until the screen is full; count what is left."""
    bad = set(reading.differing)
    names = [*reading.differing, *(name for name in manifest.tensors if name not in bad)]
    shown = names if every_tensor else names[: max(_SHOWN, len(bad))]
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("checksum", no_wrap=True)
    for name in shown:
        tensor = manifest.tensors[name]
        found = Text(reading.checksums[name][:_DIGITS], style="dim")
        if name in bad:
            found = Text(f"{found.plain}, expected {tensor.checksum[:_DIGITS]}", style="red")
        result = status_text("failed" if name in bad else "pass")
        table.add_row(Text(plain(name)), size(tensor.nbytes), result, found)
    return table, len(names) - len(shown)
