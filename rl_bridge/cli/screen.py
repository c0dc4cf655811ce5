"""Output of all commands: the console, sizes, and text that strangers wrote."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_bridge.errors import WeightBridgeError

if TYPE_CHECKING:
    from rl_bridge.manifest.canonical import JSONValue

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_KIB = 1024
# In a file or a pipe a row stays one line, however long: a name that is cut in two is not found.
_UNFOLDED_COLUMNS = 1 << 16
_TRAILING_BLANKS = re.compile(r" +$", re.MULTILINE)
_STYLES = {"pass": "green", "blocked": "yellow", "not installed": "dim", "failed": "bold red"}


class _WithoutTrailingBlanks:
    """A file whose lines lose the blanks by which a table fills up its last column."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(_TRAILING_BLANKS.sub("", text))

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def screen(*, stderr: bool = False) -> Console:
    """Make the console for people: where the output is no terminal, plain text without folding."""
    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        return console
    file = _WithoutTrailingBlanks(sys.stderr if stderr else sys.stdout)
    return Console(
        file=cast("TextIO", file), stderr=stderr, highlight=False, width=_UNFOLDED_COLUMNS
    )


def say_json(value: "JSONValue") -> None:
    """Write canonical JSON, one line, for programs."""
    from rl_bridge.manifest.canonical import canonical_json  # with pydantic, which takes a while

    typer.echo(canonical_json(value))


@contextmanager
def told(*, as_json: bool) -> Iterator[None]:
    """Say an error also as JSON, if the answer was to be JSON."""
    try:
        yield
    except WeightBridgeError as error:
        if as_json:
            say_json({"error": error_document(error)})
        raise


def error_document(error: WeightBridgeError | None) -> "dict[str, JSONValue] | None":
    """An error in a document; None if it went well."""
    return None if error is None else {"type": type(error).__name__, "message": str(error)}


def say_error(error: BaseException) -> None:
    """Write an error as one message, with its type, to standard error."""
    text = Text.assemble(("error: ", "bold red"), f"{type(error).__name__}: {plain(str(error))}")
    screen(stderr=True).print(text, soft_wrap=True)


def plain(text: str) -> str:
    r"""Make text that somebody else wrote (names in a manifest) harmless to a terminal.

    Escape sequences, line breaks and direction marks are written out as ``\x1b`` and the like.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def size(nbytes: int) -> str:
    """Write a number of bytes the way people read it: ``1.25 GiB``."""
    if nbytes < _KIB:
        return f"{nbytes} B"
    value = float(nbytes)
    unit = "B"
    for unit in _UNITS:  # noqa: B007 - the last one is what counts
        value /= _KIB
        if value < _KIB:
            break
    return f"{value:.2f} {unit}"


def duration(seconds: float) -> str:
    """Write a time span to the unit that matters: ``3 min``."""
    for unit, length in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def status_text(status: str) -> Text:
    """Colour one of the words pass, blocked, failed."""
    return Text(status, style=_STYLES.get(status, ""))


# Columns of all commands: numbers stand to the right, and what may be long is folded.
_NUMBERS = {"version", "tensors", "size", "ranks", "ms", "GB/s", "of memcpy"}
_PATHS = {"file", "host", "cert", "key", "ca"}
_FOLDED = {"name", "segment", "tensor", "shape", "notes", "why"} | _PATHS


def table(*columns: str, title: str | None = None) -> Table:
    """Make a table of columns with these names."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        side: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
        made.add_column(name, justify=side, no_wrap=name not in _FOLDED, overflow="fold")
    return made


def facts(rows: dict[str, str | Text], *, title: str) -> Table:
    """Lay out names and values in two columns."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, show_header=False
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value if isinstance(value, Text) else Text(value))
    return table


# ---- Facts about where the program runs: its version, the machine's memory.

_MEMINFO = Path("/proc/meminfo")


def version() -> str:
    """Version of the installed library; a source tree that was never installed has none."""
    try:
        return metadata.version("rl_bridge")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def memory_nbytes() -> tuple[int, int] | None:
    """Bytes of memory that are available, and that there are; None where the kernel hides it."""
    try:
        lines = _MEMINFO.read_text("ascii").splitlines()
    except OSError:
        return None
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    return kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
