"""Reading a manifest that the user names: a file, or standard input."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["ManifestFile", "read_manifest"]

_STDIN = Path("-")


def _existing(path: Path) -> Path:
    # Not typer's own `exists`, which knows no dash. Pipes of the shell's are fine: <(command).
    if path != _STDIN and (not path.exists() or path.is_dir()):
        msg = f"{str(path)!r} is no file."
        raise typer.BadParameter(msg)
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
