"""`rl-bridge gc`: remove the named segments that dead publishers left in a directory."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from rl_bridge.cli.screen import plain, say_json, screen, size
from rl_bridge.memory.segment import sweep

__all__ = ["gc"]


def gc(
    directory: Annotated[
        Path,
        typer.Argument(
            exists=True,
            file_okay=False,
            readable=True,
            show_default=False,
            help="What was given to the bridges as directory=.",
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Remove what dead publishers left in a directory.

    A publisher's start does the same by itself. Segments whose publisher lives are never touched,
    and neither is any other file. Without directory= there is nothing to remove: the kernel frees
    such segments with the last process that uses them.
    """
    swept = sweep(directory, dry_run=dry_run)
    total = sum(nbytes for _, nbytes in swept)
    if as_json:
        say_json(
            {
                "directory": str(directory),
                "dry_run": dry_run,
                "segments": [{"name": name, "nbytes": nbytes} for name, nbytes in swept],
                "total_nbytes": total,
            }
        )
        return
    out = screen()
    where = plain(str(directory))
    if not swept:
        found = "no dead publisher's segment" if any(directory.glob("rlb-*")) else "no segment"
        out.print(f"Nothing to remove: {found} in {where}.", markup=False)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("segment", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for name, nbytes in swept:
        table.add_row(Text(name), size(nbytes))
    out.print(table)
    done = "Would remove" if dry_run else "Removed"
    noun = "segment" if len(swept) == 1 else "segments"
    out.print(f"{done} {len(swept)} {noun}, {size(total)}, from {where}.", markup=False)
