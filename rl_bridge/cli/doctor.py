"""`rl-bridge doctor`: what works on this machine, what does not, why, and what to do about it."""

import os
import platform
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_bridge.cli import probes
from rl_bridge.cli.environment import memory_nbytes, version
from rl_bridge.cli.pairs import (
    AddressOption,
    DirectoryOption,
    FactsOption,
    PairOption,
    say_facts,
    say_pair,
)
from rl_bridge.cli.screen import facts, plain, say_json, screen, size, status_text
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.memory.passes import default_threads
from rl_bridge.transports import registry
from rl_bridge.transports.base import Availability
from rl_bridge.transports.nixl.backends import BACKENDS

__all__ = ["doctor"]

# Without these two there is nothing that rl_bridge could do here.
_NEEDED = frozenset({"local-clone", "shared-memory"})

_PURPOSES = {
    "local-clone": "one process, every update copied",
    "shared-memory": "CPU tensors between processes, no copy on import",
    "cuda-vmm": "CUDA tensors between processes",
    "broadcast": "one trainer to many engines, also on other machines",
    "cuda-ipc": "CUDA tensors between processes, the older way",
    "nixl": "engines read from all trainer ranks, also on other machines",
    "torch module": "any torch.nn.Module: copy, alias and flip",
    "ray": "places trainer and rollouts; rl_bridge.ray carries versions between its actors",
    "vllm": "engines of vLLM; what of it works is told below",
    "sglang": "engines of SGLang; what of it works is told below",
    "compiled pass": "copies and digests at memory speed, without the GIL",
}


@dataclass(frozen=True, slots=True)
class _Check:
    """One line of the table."""

    group: str
    found: Availability
    purpose: str


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    as_facts: FactsOption = False,
    pair: PairOption = None,
    address: AddressOption = "",
    directory: DirectoryOption = None,
) -> None:
    """Tell what works on this machine, and why the rest does not.

    Transports, engines and features of the kernel; what does not work says what to do. The exit
    code is 1 only if shared-memory or local-clone is blocked: without the rest, rl_bridge is slower
    or goes fewer ways.

    For two sides: --facts on the trainer's writes a file, and --pair with that file on the engine's
    says which transport the two use, and why not another one.
    """
    if as_facts:
        say_facts(address, directory or [])
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
    found = [("transports", registry.probe(name)) for name in registry.TRANSPORTS]
    found.append(("engines", Availability("torch module", "pass")))
    found += [("engines", probes.engine(name)) for name in probes.ENGINES]
    for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        found += [(f"what {name} offers", item) for item in probes.engine_features(engine)]
    found += [("what NIXL offers", item) for item in probes.nixl_backends()]
    found.append(("clusters", probes.ray()))
    found.append(("machine", probes.compiled_pass()))
    found += [("machine", probes.feature(name)) for name in probes.FEATURES]
    return [_Check(group, item, _purpose(item.name)) for group, item in found]


def _purpose(name: str) -> str:
    for engine in probes.ENGINES.values():
        if name in engine.FEATURES:
            return str(engine.FEATURES[name].purpose)
    if name.startswith(probes.NIXL_BACKEND):
        return BACKENDS.get(name.removeprefix(probes.NIXL_BACKEND), "")
    return probes.FEATURES[name][0] if name in probes.FEATURES else _PURPOSES.get(name, "")


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
        table.add_row(f"  {check.found.name}", status_text(check.found.status), _words(check))
    out.print(table)
    out.print()
    if missing:
        verdict = Text(f"Not ready: {' and '.join(missing)} blocked.", style="bold red")
    else:
        blocked = sum(check.found.status != "pass" for check in checks)
        more = f" Blocked: {blocked}, as said above." if blocked else ""
        verdict = Text.assemble(("Ready: local-clone and shared-memory work.", "bold green"), more)
    out.print(verdict)


def _words(check: _Check) -> Text:
    if check.found.status == "pass":
        return Text(check.purpose, style="dim")
    return Text.assemble(
        plain(check.found.cause), ("\n→ ", "bold"), plain(check.found.remedy), overflow="fold"
    )
