"""`rl-bridge status`: where publishers of this machine, or an engine behind a side-car, stand.

It is read-only: it looks at a publisher's descriptors through ``/proc``, and reads its slots'
stamps and consumers' records there. Nothing is locked, so no publisher ever waits for it.
`rl-bridge gc`, at the end, removes what dead publishers left.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from rl_bridge.cli.screen import facts, plain, say_json, screen, size, table
from rl_bridge.cli.sidecar import TLSAuthority, TLSCert, TLSKey, tls_files
from rl_bridge.errors import SegmentError, WeightBridgeUnavailableError
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.memory.control import Record, read_records
from rl_bridge.memory.segment import sweep
from rl_bridge.memory.slots import STAMP_NBYTES, Stamp, parse_stamp
from rl_bridge.processes import close_fd, open_fd
from rl_bridge.remote import RemoteEngine
from rl_bridge.remote.answers import Status
from rl_bridge.transports.wire.tls import TLSFiles

_DIGITS = 12  # of an update id on the screen; --json has all of them
_NO_UPDATE = "0" * 32
# A segment's name, as a file's in a directory and as /proc/<pid>/fd has it of a memfd.
_NAME = re.compile(r"rlb-([0-9a-f]{12})-(?:control|([0-9]+)\.seg)")
_MEMFD = re.compile(rf"/memfd:{_NAME.pattern} \(deleted\)")


def status(  # noqa: PLR0917 - typer calls it by name
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            show_default=False,
            help="A publisher's pid or its directory=, or a side-car's URL; every publisher that "
            "/proc shows unless given.",
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="For a URL: the key that trainer and side-car share.",
        ),
    ] = None,
    tls_cert: TLSCert = None,
    tls_key: TLSKey = None,
    tls_ca: TLSAuthority = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="For a URL: seconds in which it answers.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Show where live publishers, or a side-car's engine, stand.

    Of publishers over shared-memory and cuda-vmm on this machine, as far as this user may look at
    their processes: each slot with its update, and what every consumer said of it. Nothing is
    locked or written. A version's number is known once a consumer has told of it.
    """
    if target is not None and target.startswith(("http://", "https://")):
        if key_file is None:
            raise typer.BadParameter(
                f"{target} answers signed requests only. Give --key-file, the side-car's own key.",
                param_hint="--key-file",
            )
        _show_sidecar(
            target, key_file, tls_files(tls_cert, tls_key, tls_ca), timeout_s, as_json=as_json
        )
        return
    publishers = _found(target)
    if target is not None and not publishers:
        raise WeightBridgeUnavailableError(
            f"{target} has no live publisher that this user can see, expected one over "
            "shared-memory or cuda-vmm. `rl-bridge status` lists all that /proc shows."
        )
    if as_json:
        say_json({"publishers": [_document(one) for one in publishers]})
        return
    out = screen()
    if not publishers:
        out.print("No publisher over shared-memory or cuda-vmm that this user can see is running.")
    for one in publishers:
        _show_publisher(one, out)


# ---- publishers, through /proc -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slot:
    """One slot: what its stamp says, and whether anybody holds its lease."""

    number: int
    nbytes: int
    stamp: Stamp
    is_held: bool

    @property
    def update_id(self) -> str | None:
        return None if self.stamp.update_id == _NO_UPDATE else self.stamp.update_id

    @property
    def state(self) -> str:
        if self.update_id is None:
            return "in use" if self.is_held else "free"
        return "published, leased" if self.is_held else "published"


@dataclass(frozen=True, slots=True)
class _Publisher:
    """One publisher of a process."""

    pid: int | None  # None where it was found by its directory
    label: str
    slots: list[_Slot] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def version_of(self, update_id: str | None) -> int | None:
        """The number of an update, as a consumer told it."""
        for record in self.records:
            for report in record.updates:
                if report.update_id == update_id:
                    return report.weight_version
        return None


def _found(target: str | None) -> list[_Publisher]:
    if target is None:
        pids = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
        return [one for pid in pids for one in _of_process(pid)]
    if target.isascii() and target.isdecimal():
        return _of_process(int(target))
    if Path(target).is_dir():
        named = [(path, _NAME.fullmatch(path.name)) for path in sorted(Path(target).iterdir())]
        return _read([(path, name) for path, name in named if name], None)
    raise typer.BadParameter(
        f"{target!r} is no pid, no directory and no URL, expected such as 4711, /dev/shm/run1 or "
        "http://127.0.0.1:8471. Give one of these, or nothing.",
        param_hint="TARGET",
    )


def _of_process(pid: int) -> list[_Publisher]:
    """The publishers of a process; none if it ended, or this user may not look at it."""
    owned = []
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []
    for path in descriptors:
        try:
            name = _MEMFD.fullmatch(str(path.readlink()))
            if name is not None and _is_owner(pid, path.name, is_slot=name[2] is not None):
                owned.append((path, name))
        except OSError:
            continue  # closed meanwhile
    # (Memory in which a version of several ranks is put together is named alike. It has no control
    # segment, since it is published to nobody.)
    controls = {name[1] for _, name in owned if name[2] is None}
    return _read([(path, name) for path, name in owned if name[1] in controls], pid)


def _is_owner(pid: int, fd: str, *, is_slot: bool) -> bool:
    """Tell a publisher's descriptor from a consumer's, which reads slots and locks its record."""
    info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text("ascii")
    flags = re.search(r"^flags:\s*([0-7]+)$", info, re.MULTILINE)
    is_writable = flags is not None and int(flags[1], 8) & os.O_ACCMODE == os.O_RDWR
    return is_writable and (is_slot or "\nlock:" not in info)


def _read(named: list[tuple[Path, re.Match[str]]], pid: int | None) -> list[_Publisher]:
    """Read the segments of live publishers."""
    found: dict[str, _Publisher] = {}
    for path, name in named:
        try:
            fd = open_fd(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue  # released meanwhile, or another user's
        try:
            if pid is None and not leases.has_owner(fd):
                continue  # a dead publisher's: `rl-bridge gc` removes it
            publisher = found.setdefault(name[1], _Publisher(pid, name[1]))
            nbytes = os.fstat(fd).st_size
            if name[2] is None:
                publisher.records.extend(read_records(fd, nbytes))
            else:
                stamp = parse_stamp(os.pread(fd, STAMP_NBYTES, max(0, nbytes - vm.PAGE)))
                if stamp is not None:
                    slot = _Slot(int(name[2]), nbytes, stamp, leases.is_held(fd))
                    publisher.slots.append(slot)
        except SegmentError:
            continue  # cut off: it has no reports any more
        finally:
            close_fd(fd)
    for publisher in found.values():
        publisher.slots.sort(key=lambda slot: slot.number)
    return list(found.values())


def _document(one: _Publisher) -> dict[str, JSONValue]:
    return {
        "pid": one.pid,
        "publisher": one.label,
        "slots": [
            {
                "number": slot.number,
                "nbytes": slot.nbytes,
                "update_id": slot.update_id,
                "weight_version": one.version_of(slot.update_id),
                "state": slot.state,
                "is_leased": slot.is_held,
            }
            for slot in one.slots
        ],
        "consumers": [record.model_dump(mode="json") for record in one.records],
    }


def _show_publisher(one: _Publisher, out: Console) -> None:
    where = "" if one.pid is None else f" in process {one.pid}"
    total = size(sum(slot.nbytes for slot in one.slots))
    out.print(Text(f"Publisher {one.label}{where}: {len(one.slots)} slots, {total}", style="bold"))
    slots = table("slot", "version", "update", "size", "state")
    for slot in one.slots:
        update = slot.update_id
        number = one.version_of(update)
        version = str(number) if number is not None else "not told yet" if update else ""
        cells = (version, (update or "")[:_DIGITS], size(slot.nbytes), slot.state)
        slots.add_row(str(slot.number), *cells)
    out.print(slots)
    consumers = table("consumer", "rank", "pid", "presence", "version", "state", "why")
    for record in one.records:
        who = (plain(record.worker), str(record.rank), str(record.pid), record.presence)
        last = record.updates[-1] if record.updates else None
        held = [str(report.weight_version) for report in record.updates if report.tensors_held]
        said = ("", "nothing yet", "")
        if last is not None:
            holds = f"{last.state}, holds {', '.join(held)}" if held else last.state
            said = (str(last.weight_version), plain(holds), plain(last.reason or ""))
        consumers.add_row(*who, *said)
    out.print(consumers if one.records else Text("No consumer yet.", style="dim"))
    out.print()


# ---- a side-car ----------------------------------------------------------------------------------


def _show_sidecar(
    url: str, key_file: Path, tls: TLSFiles | None, timeout_s: float, *, as_json: bool
) -> None:
    try:
        engine = RemoteEngine(url, key_file, timeout_s=timeout_s, tls=tls)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="TARGET") from error
    with engine:
        found = engine.status()
    if as_json:
        say_json(found.model_dump(mode="json"))
        return
    screen().print(facts(_status_facts(found), title=f"Engine behind {plain(url)}"))


def _status_facts(found: Status) -> dict[str, str | Text]:
    pending, ack = found.pending, found.last_acknowledgement
    rows: dict[str, str | Text] = {
        "state": Text(found.state, style="green" if found.servable else "bold red"),
        "version": "none"
        if found.active_weight_version is None
        else str(found.active_weight_version),
        "update": found.active_update_id or "",
        "root": found.active_root or "",
        "lost": plain(found.lost),
        "waits": f"version {pending.weight_version}, {pending.stage}" if pending else "",
        "busy": plain(found.busy or ""),
        "transport": plain(found.transport),
        "recovery": plain(f"{found.recovery.outcome}: {found.recovery.detail}"),
        "proof": "" if ack is None else plain(ack.proof.method),
    }
    return {name: value for name, value in rows.items() if value}


# ---- what dead publishers left ------------------------------------------------------------------


def gc(
    directory: Annotated[
        Path,
        typer.Argument(
            exists=True,
            file_okay=False,
            readable=True,
            metavar="DIRECTORY",
            show_default=False,
            help="The directory= that the bridges were given.",
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
    shown = table("segment", "size")
    for name, nbytes in swept:
        shown.add_row(Text(name), size(nbytes))
    out.print(shown)
    done = "Would remove" if dry_run else "Removed"
    noun = "segment" if len(swept) == 1 else "segments"
    out.print(f"{done} {len(swept)} {noun}, {size(total)}, from {where}.", markup=False)
