"""`rl-bridge doctor`: what works on this machine, what does not, why, and what to do about it."""

import ctypes
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_bridge.cli.screen import (
    facts,
    memory_nbytes,
    plain,
    say_json,
    screen,
    size,
    status_text,
    version,
)
from rl_bridge.cuda.devices import has_driver
from rl_bridge.engines.sglang import probe as sglang
from rl_bridge.engines.vllm import probe as vllm
from rl_bridge.errors import WeightBridgeError
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.memory.passes import default_threads, native_cause
from rl_bridge.memory.segment import OwnedSegment, open_segment
from rl_bridge.processes import close_fd
from rl_bridge.ray.calls import INSTALL as INSTALL_RAY
from rl_bridge.ray.pairing import EndpointFacts, choose_transport, look_around
from rl_bridge.transports import registry
from rl_bridge.transports.base import Availability
from rl_bridge.transports.broadcast.transport import backend_cause
from rl_bridge.transports.nixl import library as backends
from rl_bridge.transports.nixl.library import BACKENDS

# ---- a pair: the facts of this side, and the transport that the two use -------------------------


def _written(path: Path | None) -> Path | None:
    if path is not None and not path.is_file():
        raise typer.BadParameter(
            f"there is no file {str(path)!r}. Write it on the trainer's side, with `rl-bridge "
            "doctor --facts > FILE`, and bring it here."
        )
    return path


def say_pair(trainer: Path, directories: list[Path], *, as_json: bool) -> None:
    """Say which transport weights take from the trainer's side to this one, and why."""
    theirs = EndpointFacts.from_json(trainer.read_bytes())
    chosen = choose_transport(theirs, look_around(directories=directories))
    if as_json:
        say_json(chosen.model_dump())
        return
    rows: dict[str, str | Text] = {
        "transport": Text(plain(chosen.transport), style="bold green"),
        "why": plain(chosen.reason),
    }
    for side, options in (
        ("trainer passes", chosen.publisher_options),
        ("engine passes", chosen.consumer_options),
    ):
        if options:
            rows[side] = plain(", ".join(f"{name}={value!r}" for name, value in options.items()))
    rows |= {f"not {name}": plain(why) for name, why in chosen.not_taken.items()}
    screen().print(facts(rows, title=f"from {plain(_where(theirs))} to here"))


def _where(side: EndpointFacts) -> str:
    return f"the trainer at {side.address}" if side.address else "the trainer"


# ---- what this machine can do: each probe tries the thing itself and trusts no version number ----

NIXL_BACKEND = "NIXL "
"""How the names of its backends begin."""

# Engines of others that users ask for.
ENGINES = {"vllm": vllm, "sglang": sglang}

_CHILD_TIMEOUT_S = 20.0
# A consumer's first step, with the standard library alone: open another process's segment.
_OPEN = "import os, sys; print(os.fstat(os.open(sys.argv[1], os.O_RDONLY)).st_ino)"


def _segment() -> closing[OwnedSegment]:
    return closing(OwnedSegment.make("rl_bridge-doctor", vm.PAGE))


def _sealing() -> str | None:
    """Seal a segment and open it as a reader does, which insists on the seals."""
    with _segment() as segment:
        close_fd(open_segment(segment.ref))
    return None


def _ofd_locks() -> str | None:
    """Let two descriptions of one file compete for a lease."""
    with _segment() as segment:
        reader = open_segment(segment.ref)
        try:
            if not leases.try_shared(reader):
                return "a free lease cannot be taken"
            if leases.try_exclusive(segment.fd):
                return "a lease that a reader holds did not keep the writer out"
        finally:
            close_fd(reader)
        if not leases.try_exclusive(segment.fd):
            return "the lease of a reader that is gone was not freed"
    return None


def _moves() -> str | None:
    """Move a private mapping of a segment, as a flip does, and read it at its new address."""
    mark = b"moved"
    with _segment() as segment:
        vm.store(segment.address, mark)
        source, target = vm.reserve(vm.PAGE), vm.reserve(vm.PAGE)
        try:
            vm.map_fixed(source, vm.PAGE, segment.fd)
            vm.move(source, vm.PAGE, target)
            if ctypes.string_at(target, len(mark)) != mark:
                return "a moved mapping does not show what it showed before"
        finally:
            vm.unmap(source, vm.PAGE)
            vm.unmap(target, vm.PAGE)
    return None


def _page_scan() -> str | None:
    """Write to one of two pages and ask the kernel which one it was."""
    address = vm.reserve(2 * vm.PAGE)
    with _segment() as segment:
        try:
            vm.map_fixed(address, vm.PAGE, segment.fd)
            if vm.private_ranges(address, vm.PAGE) is None:
                return "the kernel has no PAGEMAP_SCAN, or /proc/self/pagemap is not readable"
            vm.store(address, b"x")
            if vm.private_ranges(address, vm.PAGE) != [(address, vm.PAGE)]:
                return "the kernel did not report a page that was written to"
        finally:
            vm.unmap(address, 2 * vm.PAGE)
    return None


def _proc_visibility() -> str | None:
    """Have another process open a segment of this one through /proc, as every consumer does."""
    with _segment() as segment:
        where = f"/proc/{os.getpid()}/fd/{segment.fd}"
        try:
            child = subprocess.run(  # noqa: S603 - our own interpreter, our own words
                [sys.executable, "-I", "-S", "-c", _OPEN, where],
                capture_output=True,
                text=True,
                timeout=_CHILD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"another process did not open {where} within {_CHILD_TIMEOUT_S:.0f} s"
        if child.returncode:
            said = child.stderr.strip().rpartition("\n")[2] or f"exit code {child.returncode}"
            return f"another process cannot open {where}: {said}"
        if child.stdout.strip() != str(segment.ref.inode):
            return f"another process sees another file at {where}"
    return None


# Name -> (what it is good for, the probe: a cause or None, what to do where it is blocked).
FEATURES: dict[str, tuple[str, Callable[[], str | None], str]] = {
    "memfd sealing": (
        "nobody can shrink or rewrite a published version",
        _sealing,
        "Linux 5.1 or later; in a container, allow memfd_create.",
    ),
    "OFD locks": (
        "a reader that is killed frees its lease at once",
        _ofd_locks,
        "Linux 3.15 or later, not through an emulation layer.",
    ),
    "/proc visibility": (
        "processes find each other's segments without names",
        _proc_visibility,
        "Give both sides directory=, for instance one in /dev/shm.",
    ),
    "MREMAP_DONTUNMAP": (
        "install by flip",
        _moves,
        "Linux 5.13 or later. Until then install with mode='copy'.",
    ),
    "PAGEMAP_SCAN": (
        "proves an install by flip or alias without reading the bytes again",
        _page_scan,
        "Linux 6.7 or later. Until then such a proof digests the bytes: slower, as strong.",
    ),
    "NCCL": (
        "broadcast between GPUs, with backend='nccl'",
        lambda: backend_cause("nccl"),
        "Install torch for CUDA where GPUs are. Until then broadcast goes over Gloo, on the CPU.",
    ),
}


def _found(name: str, cause: str | None, remedy: str, *, is_installed: bool = True) -> Availability:
    if cause is None:
        return Availability(name, "pass")
    return Availability(name, "blocked", cause, remedy, is_installed)


def feature(name: str) -> Availability:
    """Try one of `FEATURES`."""
    _, probe, remedy = FEATURES[name]
    try:
        cause = probe()
    except (WeightBridgeError, OSError) as error:
        cause = str(error)
    return _found(name, cause, remedy, is_installed=name != "NCCL" or has_driver())


def compiled_pass() -> Availability:
    """Tell whether copies and digests run in the compiled module."""
    remedy = (
        "Install rl_bridge again (from a clone: pip install -e .) where a C compiler is. Until "
        "then Python does it: slower, same digests."
    )
    return _found("compiled pass", native_cause(), remedy)


def engine(name: str) -> Availability:
    """Tell whether one of `ENGINES` is installed; its features are tried by `engine_features`.

    It is not imported: that takes many seconds, and may take the GPU.
    """
    found = ENGINES[name].PACKAGE
    return _package(name, found.install, is_installed=found.version() is not None)


def _package(name: str, install: str, *, is_installed: bool) -> Availability:
    cause = None if is_installed else f"{name} is not installed"
    return _found(name, cause, f"Install it: {install}.", is_installed=is_installed)


def engine_features(name: str) -> list[Availability]:
    """Try the features of an installed engine in a child; empty if it is not installed."""
    found: list[Availability] = ENGINES[name].probe()
    return found


def ray() -> Availability:
    """Tell whether Ray is installed, without importing it."""
    is_installed = importlib.util.find_spec("ray") is not None
    return _package("ray", INSTALL_RAY, is_installed=is_installed)


def nixl_backends() -> list[Availability]:
    """Try NIXL's backends in a child; empty if NIXL is not installed."""
    try:
        causes = backends.causes()
    except ImportError:
        return []  # the transport's own row says so
    except RuntimeError as error:
        remedy = "See whether NIXL works: rl-bridge doctor says so of the transport nixl."
        return [_found(f"{NIXL_BACKEND}backends", str(error), remedy)]
    remedy = "Nothing, unless you want backend= to be that: nixl uses UCX."
    return [_found(f"{NIXL_BACKEND}{name}", cause, remedy) for name, cause in causes.items()]


# ---- the command ---------------------------------------------------------------------------------

# Without these two there is nothing that rl_bridge could do here.
_NEEDED = frozenset({"local-clone", "shared-memory"})

_PURPOSES = {
    "local-clone": "one process, every update copied",
    "shared-memory": "CPU tensors between processes, no copy on import",
    "cuda-vmm": "CUDA tensors between processes",
    "broadcast": "one trainer to many engines, also on other machines",
    "cuda-ipc": "CUDA tensors between processes, the older way",
    "nixl": "engines read from all trainer ranks, also on other machines",
    "files": "versions as directories, which outlive their trainer",
    "torch module": "any torch.nn.Module: copy, alias and flip",
    "ray": "places trainer and rollouts; rl_bridge.ray carries versions between its actors",
    "vllm": "engines of vLLM; its features are listed below",
    "sglang": "engines of SGLang; its features are listed below",
    "compiled pass": "copies and digests at memory speed, without the GIL",
}


@dataclass(frozen=True, slots=True)
class _Check:
    """One line of the table."""

    group: str
    found: Availability
    purpose: str

    @property
    def status(self) -> str:
        """For people: what nobody installed is not broken."""
        return self.found.status if self.found.is_installed else "not installed"


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    as_facts: Annotated[
        bool,
        typer.Option(
            "--facts", help="Write what this side is, as JSON, for --pair on the other side."
        ),
    ] = False,
    pair: Annotated[
        Path | None,
        typer.Option(
            "--pair",
            callback=_written,
            help="Name the transport to this side from the trainer that wrote this file (--facts).",
        ),
    ] = None,
    address: Annotated[
        str, typer.Option("--address", help="With --facts: where others reach this machine.")
    ] = "",
    directory: Annotated[
        list[Path] | None,
        typer.Option(
            "--directory",
            metavar="<dir>",
            help="With --facts or --pair: a directory that both may share.",
        ),
    ] = None,
) -> None:
    """Tell what works on this machine, and why the rest does not.

    Transports, engines and features of the kernel; what does not work says what to do. "Not
    installed": a package or a GPU's driver is not here, which nothing else needs. "Blocked": it is
    here and does not work. The exit code is 1 only if shared-memory or local-clone is blocked:
    without the rest, rl_bridge is slower or goes fewer ways.

    For two sides: --facts on the trainer's writes a file, and --pair with that file on the engine's
    says which transport the two use, and why not another one.
    """
    if as_facts:
        typer.echo(look_around(address=address, directories=directory or []).to_json().decode())
        return
    if pair is not None:
        say_pair(pair, directory or [], as_json=as_json)
        return
    checks = _run_checks()
    missing = sorted(
        check.found.name
        for check in checks
        if check.found.status != "pass" and check.found.name in _NEEDED
    )
    if as_json:
        say_json(_document(checks, ready=not missing))
    else:
        _show(checks, missing, screen())
    if missing:
        raise typer.Exit(1)


def _run_checks() -> list[_Check]:
    groups = {
        "transports": map(registry.probe, registry.TRANSPORTS),
        "engines": [Availability("torch module", "pass"), *map(engine, ENGINES)],
        "what vLLM offers": engine_features("vllm"),
        "what SGLang offers": engine_features("sglang"),
        "what NIXL offers": nixl_backends(),
        "clusters": [ray()],
        "machine": [compiled_pass(), *map(feature, FEATURES)],
    }
    return [
        _Check(group, found, _purpose(found.name))
        for group, all_of in groups.items()
        for found in all_of
    ]


def _purpose(name: str) -> str:
    for engine in ENGINES.values():
        if name in engine.FEATURES:
            return str(engine.FEATURES[name].purpose)
    if name.startswith(NIXL_BACKEND):
        return BACKENDS.get(name.removeprefix(NIXL_BACKEND), "")
    return FEATURES[name][0] if name in FEATURES else _PURPOSES.get(name, "")


def _environment() -> dict[str, str]:
    return {
        "rl_bridge": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": f"{platform.system()} {platform.release()}",
        "cores": f"{len(os.sched_getaffinity(0))} usable, {default_threads()} threads per pass",
        "memory": _memory(),
    }


def _memory() -> str:
    memory = memory_nbytes()
    return "unknown" if memory is None else f"{size(memory[0])} available of {size(memory[1])}"


def _document(checks: list[_Check], *, ready: bool) -> dict[str, JSONValue]:
    return {
        "checks": [
            {
                "group": check.group,
                "name": check.found.name,
                "status": check.found.status,
                "is_installed": check.found.is_installed,
                "purpose": check.purpose,
                "cause": check.found.cause,
                "remedy": check.found.remedy,
            }
            for check in checks
        ],
        "environment": dict(_environment()),
        "status": "pass" if ready else "blocked",
    }


def _show(checks: list[_Check], missing: list[str], out: Console) -> None:
    out.print(facts(dict(_environment()), title="rl_bridge doctor"))
    out.print()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    group = ""
    for check in checks:
        if check.group != group:
            if group:
                table.add_row()
            group = check.group
            table.add_row(Text(group[:1].upper() + group[1:], style="bold"))
        table.add_row(f"  {check.found.name}", status_text(check.status), _words(check))
    out.print(table)
    out.print()
    if missing:
        out.print(Text(f"Not ready: {' and '.join(missing)} blocked.", style="bold red"))
    else:
        out.print(Text("Ready: local-clone and shared-memory work.", style="bold green"))
    for status, says in (
        ("not installed", "Not installed, and not needed by the rest"),
        ("blocked", "Blocked, as said above"),
    ):
        names = [check.found.name for check in checks if check.status == status]
        if names:
            out.print(f"{says}: {', '.join(names)}.", markup=False)


def _words(check: _Check) -> Text:
    if check.found.status == "pass":
        return Text(check.purpose, style="dim")
    return Text.assemble(
        plain(check.found.cause), ("\n→ ", "bold"), plain(check.found.remedy), overflow="fold"
    )
