"""Writes the generated parts of the pages: `python docs/_generate/write.py`.

A generated part stands between `<!-- begin generated: NAME -->` and `<!-- end generated -->`. The
tests of the documentation compare what is there with what this script would write.
"""

import ast
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeGuard

from rl_bridge.lifecycle import STATUS, TABLE, Role

__all__ = ["PARTS", "fill", "main", "notebooks", "pictures"]

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
GUARANTEES = sorted((ROOT / "tests" / "guarantees").glob("test_G*.py"))
_PART = re.compile(
    r"(<!-- begin generated: (?P<name>[a-z-]+) -->\n)(?:(?!<!-- ).*\n)*(<!-- end generated -->)"
)


def _moves(role: Role) -> str:
    lines = ["| State | `update_status` says | Moves |", "|---|---|---|"]
    for state, moves in TABLE[role].items():
        shown = ", ".join(f"{event} → {target}" for event, target in moves.items()) or "none"
        lines.append(f"| `{state}` | {STATUS[state]} | {shown} |")
    return "\n".join(lines)


def _option(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    text = " ".join((getattr(parameter, "help", None) or "").split())
    default = parameter.default
    if parameter.required:
        text += " Required."
    elif default is not None and default is not False and not callable(default):
        text += f" Default: `{default}`."
    return f"| {names} | {text.strip()} |"


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All commands by what is typed, those of groups behind their group."""
    for name, command in group.commands.items():
        yield f"{prefix}{name}", command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")


def _command_line() -> str:
    from typer.main import get_command

    from rl_bridge.cli.program import app

    parts = []
    for name, known in _commands(get_command(app)):
        command = known.loaded() if hasattr(known, "loaded") else known
        shown = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
        parts.append(f"## rl-bridge {name}\n\n{shown}")
        rows = [_option(item) for item in command.params if item.name != "help"]
        if rows:
            parts.append("\n".join(["| Option | Meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _public_names() -> str:
    import rl_bridge

    lines = ["| From | Names |", "|---|---|"]
    for name in ("rl_bridge", *(f"rl_bridge.{face}" for face in rl_bridge.FACES)):
        names = ", ".join(f"`{public}`" for public in import_module(name).__all__)
        lines.append(f"| `{name}` | {names} |")
    return "\n".join(lines)


def _versions() -> str:
    """What was read in other packages; who reads it lies beside the tests."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return str(import_module("tests.contracts.check").tables())


def _tests_of(file: Path) -> str:
    tests, on_engines = [], []
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            chosen = [part for by in node.decorator_list for part in ast.walk(by)]
            tests += [str(part.value) for part in chosen if isinstance(part, ast.Constant)]
            tests += [part.name for part in node.body if _is_test(part)]
        elif _is_test(node):
            tests.append(node.name)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ENGINES":
            assert isinstance(node.value, ast.Call)
            on_engines = [ast.literal_eval(name) for name in node.value.args]
    lists = [_list("test", f"in `{file.relative_to(ROOT)}`", tests)]
    if on_engines:
        lists.append(_list("scenario", "of `EngineSuite`, run by vLLM and SGLang", on_engines))
    return "\n\n".join(lists)


def _list(what: str, of: str, names: list[str]) -> str:
    listed = "\n".join(f"    * `{name}`" for name in names)
    plural = "" if len(names) == 1 else "s"
    return f'??? success "{len(names)} {what}{plural} {of}"\n\n{listed}'


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")


def _guarantee(file: Path) -> str:
    """The guarantee that a file holds, as the pages call it: test_G01_sealed.py is `sealed`."""
    return file.stem.split("_", 2)[2].replace("_", "-")


# Where rl_bridge plugs in: what somebody has, what is written there, where that ran, its page.
SEAMS = (
    (
        "TRL",
        "`bridged(GRPOTrainer)`, or `AsyncGRPOTrainer(weight_transfer=BridgeWeightTransfer(url))`",
        "1.16, CPU",
        "how-to/use-with-trl.md",
    ),
    (
        "verl",
        "`checkpoint_engine.backend=rl_bridge`, and two lines beside it",
        "0.9.1, CPU",
        "how-to/use-with-verl.md",
    ),
    (
        "vLLM",
        '`VLLMEngineAdapter(llm)`, or `--weight-transfer-config \'{"backend": "rl_bridge"}\'`',
        "0.27.1, 0.30, 0.32, CPU",
        "how-to/connect-vllm.md",
    ),
    ("SGLang", "`SGLangInstallAdapter(engine)`", "0.5.23, CPU", "how-to/connect-sglang.md"),
    (
        "Ray",
        "actors of `rl_bridge.ray`",
        "CPU",
        "how-to/connect-ray.md",
    ),
    (
        "miles",
        "`--custom-weight-transfer-protocol-path rl_bridge.compat.miles.build_protocol`",
        "its contract, CPU",
        "how-to/use-with-miles.md",
    ),
    (
        "SkyRL",
        "`PolicyWorker = ray.remote(num_gpus=1)(bridged(FSDPPolicyWorkerBase))`",
        "its contract, CPU",
        "how-to/come-from-skyrl.md",
    ),
    (
        "prime-rl",
        "its own names, of `rl_bridge.compat.prime_rl`",
        "-",
        "how-to/come-from-prime-rl.md",
    ),
    ("Transformers", "`weight_sync_callback`", "CPU", "how-to/hook-a-training-loop.md"),
    ("FSDP", "`FSDPWeightExtractor(model)`", "CPU", "how-to/connect-fsdp.md"),
    ("DeepSpeed", "`DeepSpeedWeightExtractor(engine)`", "CPU", "how-to/connect-deepspeed.md"),
    ("Megatron", "`MegatronWeightExtractor(model)`", "CPU", "how-to/connect-megatron.md"),
    ("a loop and a module", "`publish`, `update_weights`", "CPU", "tutorials/first-update.md"),
)


def _seams(folder: str) -> str:
    lines = ["| You have | What you write | Seen running | Page |", "|---|---|---|---|"]
    for name, change, seen, page in SEAMS:
        lines.append(f"| {name} | {change} | {seen} | [{Path(page).stem}]({folder}{page}) |")
    return "\n".join(lines)


def _kills() -> str:
    """What kills did, ours beside SGLang's own route; empty before they were measured."""
    file = ROOT / "benchmarks" / "results" / "kills.json"
    document = json.loads(file.read_text("utf-8"))
    rows = document["summary"]

    def count(killed: str, side: str, *names: str) -> int:
        of_side = [one for one in rows if (one["killed"], one["side"]) == (killed, side)]
        return sum(one.get(name, 0) for one in of_side for name in names)

    shown = (
        ("of the trainer: rounds", "trainer", ("rounds",)),
        ("the server has the version before, whole", "trainer", ("old",)),
        ("or the next one, whole", "trainer", ("new",)),
        ("or **a mixture of both**", "trainer", ("mixed",)),
        ("requests wait until somebody lets them go on", "trainer", ("wait",)),
        *(
            (
                ("told to go on, it answers as neither version", "trainer", ("neither",)),
                ("or says that it has another version", "trainer", ("mislabelled",)),
            )
            if "seed" in document  # older runs did not ask it
            else ()
        ),
        ("the next trainer's update lands", "trainer", ("lands",)),
        ("of the server: rounds", "server", ("rounds",)),
        ("started anew, the next update lands", "server", ("lands",)),
    )
    lines = [
        "| `kill -9` in an update | SGLang's own route | rl_bridge |",
        "|---|---|---|",
    ]
    for words, killed, names in shown:
        found = (count(killed, side, *names) for side in ("stock", "ours"))
        lines.append(f"| {words} | {' | '.join(map(str, found))} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "publisher-moves": lambda: _moves(Role.PUBLISHER),
    "consumer-moves": lambda: _moves(Role.CONSUMER),
    "seams": partial(_seams, ""),
    "seams-from-outside": partial(_seams, "docs/"),
    "kills": _kills,
    "command-line": _command_line,
    "public-names": _public_names,
    "versions": _versions,
    **{f"tests-of-{_guarantee(file)}": partial(_tests_of, file) for file in GUARANTEES},
}


def fill(text: str) -> str:
    """The text of a page with every generated part written anew."""
    return _PART.sub(lambda found: f"{found[1]}{PARTS[found['name']]()}\n{found[3]}", text)


def pictures() -> dict[Path, str]:
    """The pictures of folders and of the lifecycle: where each lies, and what it is to be."""
    folders, states = (
        runpy.run_path(str(Path(__file__).with_name(f"{name}.py")))
        for name in ("folders", "states")
    )
    assets = DOCS / "assets"
    return {
        assets / "folders" / f"{folder.replace('/', '-')}.svg": folders["draw"](folder)
        for folder in folders["FOLDERS"]
    } | {assets / "states" / f"{role}.svg": states["draw"](role) for role in Role}


_INCLUDE = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
_BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def notebook(page: Path) -> str:
    """A tutorial as a notebook: its Python is cells, all else of it stands between them.

    Files that a page shows (blocks with a title) stay text: they run in processes of their own.
    """
    text = _INCLUDE.sub(lambda found: (ROOT / found[1]).read_text("utf-8"), page.read_text("utf-8"))
    cells: list[dict[str, Any]] = []
    for place, part in enumerate(_BLOCK.split(text)):
        is_code, source = place % 2 == 1, part.strip().splitlines(keepends=True)
        if source:
            kind: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []}
            cell = kind if is_code else {"cell_type": "markdown"}
            cells.append({"id": str(place), "metadata": {}, "source": source} | cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def notebooks() -> dict[Path, str]:
    """Each tutorial's notebook: where it lies, and what it is to be."""
    pages = sorted((DOCS / "tutorials").glob("*.md"))
    return {page.with_suffix(".ipynb"): notebook(page) for page in pages}


def main() -> None:
    """Write every page whose generated parts changed, and the pictures."""
    for path, picture in pictures().items():
        path.write_text(picture, "utf-8")
    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        text = path.read_text("utf-8")
        filled = fill(text)
        if filled != text:
            path.write_text(filled, "utf-8")
            print(path.relative_to(ROOT))
    for path, text in notebooks().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
