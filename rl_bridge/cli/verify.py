"""`rl-bridge verify`: read every byte of an update here and compare it with its manifest.

Nothing is reported to the publisher and nothing is acknowledged. While the bytes are read the
kernel's lease is held, as for any reader, so that the publisher cannot overwrite them meanwhile.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from rl_bridge.assembly.assemble import require_sealed
from rl_bridge.bridge.consumer import require_header
from rl_bridge.cli.inspect import ManifestFile, read_manifest
from rl_bridge.cli.screen import (
    error_document,
    facts,
    plain,
    say_json,
    screen,
    size,
    status_text,
    table,
)
from rl_bridge.errors import ChecksumMismatch, DigestMismatch, WeightBridgeError
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.transports.registry import transport_class
from rl_bridge.transports.shared_memory import SharedMemory

_SHOWN = 20
_DIGITS = 12  # of a checksum on the screen; the error and --json have them all


@dataclass(frozen=True, slots=True)
class _Reading:
    """The bytes found behind a manifest, or behind one part of a version of several."""

    part: WeightUpdateManifest
    rank: int | None  # of the part, if there are several
    checksums: dict[str, str]  # of every name
    differing: Mapping[str, None]  # in order
    root: str
    seconds: float
    header: DigestMismatch | None  # what is wrong with the manifest's, where every byte is right

    def label(self, name: str) -> str:
        """A tensor's name in messages: with its rank, if there are several."""
        return name if self.rank is None else f"rank {self.rank}: {name}"


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

    It is read on this machine, where the manifest says that it lies: all of its parts, if several
    ranks published it. The publisher must be alive
    and the update not released. The publisher learns nothing of it: nothing is acknowledged or
    rejected. The exit code is 0 only if every tensor verifies, and so does the manifest's header.
    """
    manifest: WeightUpdateManifest | None = None
    readings: list[_Reading] = []
    failure: WeightBridgeError | None = None
    try:
        manifest = read_manifest(file)
        several = isinstance(manifest, GroupManifest)
        parts = manifest.parts if isinstance(manifest, GroupManifest) else (manifest,)
        for rank, part in enumerate(parts):
            readings.append(_read(manifest, part, rank if several else None, directory))
        _compare(manifest, readings)
    except WeightBridgeError as error:
        failure = error
    if as_json:
        say_json(_document(manifest, readings, failure))
    elif manifest is not None and readings:
        _show(manifest, readings, every_tensor=tensors)
    if failure is not None:
        raise failure


# ---- reading ------------------------------------------------------------------------------------


def _read(
    manifest: WeightUpdateManifest,
    part: WeightUpdateManifest,
    rank: int | None,
    directory: Path | None,
) -> _Reading:
    start = time.perf_counter()
    kind = transport_class(part.transport)
    options = {"directory": directory} if kind is SharedMemory else {}
    transport = kind.create(**options)
    end = transport.consumer_end("rl-bridge-verify", 0)
    header: DigestMismatch | None = None
    try:
        attachment = end.look(part)
        digests = attachment.digests()
        if isinstance(manifest, GroupManifest) and rank is not None:
            bound = {part.transport} if transport.binds_header else set()
            require_sealed(manifest, {rank: attachment.tensors.pin.header}, bound)
        elif digests == part.digests:
            require_header(part, attachment, binds_header=transport.binds_header)
    except DigestMismatch as error:
        header = error.with_traceback(None)  # whose frames hold the lease
    finally:
        end.close()
    seconds = time.perf_counter() - start
    table = part.table
    checksums = {
        name: digests[row * DIGEST_NBYTES : (row + 1) * DIGEST_NBYTES].hex()
        for name, row in table.rows.items()
    }
    differing: dict[str, None] = {}
    if digests != part.digests:
        expected = part.tensors
        wrong = (name for name, found in checksums.items() if found != expected[name].checksum)
        differing = dict.fromkeys(wrong)
    root = table.root_plan.root(digests).hex()
    return _Reading(part, rank, checksums, differing, root, seconds, header)


def _num_tensors(readings: Sequence[_Reading]) -> int:
    return sum(one.part.tensor_count for one in readings)


def _compare(manifest: WeightUpdateManifest, readings: Sequence[_Reading]) -> None:
    num_differing = sum(len(one.differing) for one in readings)
    for one in readings:
        if one.differing:
            name = next(iter(one.differing))
            raise ChecksumMismatch(
                f"tensor checksum mismatch for {one.label(name)!r} in version "
                f"{manifest.weight_version}: expected {one.part.tensors[name].checksum}, got "
                f"{one.checksums[name]} ({num_differing} of {_num_tensors(readings)} tensors "
                "differ). Do not install this update: publish again."
            )
    for one in readings:
        if one.header is not None:
            raise one.header


# ---- showing ------------------------------------------------------------------------------------


def _document(
    manifest: WeightUpdateManifest | None,
    readings: Sequence[_Reading],
    failure: WeightBridgeError | None,
) -> dict[str, JSONValue]:
    document: dict[str, JSONValue] = {
        "status": "pass" if failure is None else "failed",
        "error": error_document(failure),
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
    if manifest is not None and readings:
        document["seconds"] = sum(one.seconds for one in readings)
        document["tensors"] = [
            {
                **({} if one.rank is None else {"rank": one.rank}),
                "name": name,
                "status": "failed" if name in one.differing else "pass",
                "checksum": tensor.checksum,
                "found": one.checksums[name],
            }
            for one in readings
            for name, tensor in one.part.tensors.items()
        ]
        if readings[0].rank is None:
            document["found_root"] = readings[0].root
        else:
            document["parts"] = [
                {"rank": one.rank, "root": one.part.root, "found_root": one.root}
                for one in readings
            ]
    return document


def _show(
    manifest: WeightUpdateManifest, readings: Sequence[_Reading], *, every_tensor: bool
) -> None:
    bad = [name for one in readings for name in one.differing]
    is_header_wrong = any(one.header for one in readings)
    out = screen()
    shown, num_left = _tensor_table(readings, every_tensor=every_tensor)
    out.print(shown)
    if num_left:
        out.print(Text(f"and {num_left} more, all pass (--tensors lists them)", style="dim"))
    out.print()
    status = "failed" if bad or is_header_wrong else "pass"
    num = _num_tensors(readings)
    verdict = f"{len(bad)} of {num} tensors differ" if bad else "every byte fits"
    if is_header_wrong:
        verdict += ", the manifest's header does not"
    nbytes = sum(one.part.total_nbytes for one in readings)
    seconds = sum(one.seconds for one in readings)
    root = manifest.root
    if bad and readings[0].rank is None:
        root = f"{readings[0].root}, expected {root}"
    rows: dict[str, str | Text] = {
        "result": Text.assemble(status_text(status), f": {verdict}"),
        "version": f"{manifest.weight_version} (update {manifest.update_id})",
        "root": root,
        "read": f"{size(nbytes)} in {seconds:.3f} s, {nbytes / seconds / 1e9:.1f} GB/s",
    }
    out.print(facts(rows, title=""))


def _tensor_table(readings: Sequence[_Reading], *, every_tensor: bool) -> tuple[Table, int]:
    """List the tensors that differ, then others until the screen is full; count what is left."""
    bad = [(one, name) for one in readings for name in one.differing]
    good = [(one, name) for one in readings for name in one.checksums if name not in one.differing]
    names = [*bad, *good]
    shown = names if every_tensor else names[: max(_SHOWN, len(bad))]
    made = table("tensor", "size", "result", "checksum")
    for one, name in shown:
        tensor = one.part.tensors[name]
        found = Text(one.checksums[name][:_DIGITS], style="dim")
        if name in one.differing:
            found = Text(f"{found.plain}, expected {tensor.checksum[:_DIGITS]}", style="red")
        result = status_text("failed" if name in one.differing else "pass")
        made.add_row(Text(plain(one.label(name))), size(tensor.nbytes), result, found)
    return made, len(names) - len(shown)
