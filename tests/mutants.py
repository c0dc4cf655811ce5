"""Generated bugs: one at a time in a copy of the tree; the tests must catch it (`make mutants`).

Coverage says which lines ran, this says whether anybody looked. `mutants_of` changes one place of a
module that carries G1 to G6: a comparison, a condition, a guard, a call, a number. Which ones are
tried is drawn by a seed, so that a run can be repeated. For each of them the tests of its module's
folder and of `tests/guarantees` run until the first one fails; a mutant that none of them catches
is reported with its line. The working tree is never touched.

Not every survivor is a hole: some changes change nothing that anybody can see. Look at the line,
and write the test that is missing or make the line say less.
"""

import argparse
import ast
import compileall
import os
import py_compile
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, cast

from rich.console import Console

__all__ = ["CARRIERS", "Mutant", "main", "mutants_of", "sample"]

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("rl_bridge", "tests", "docs", "pyproject.toml", "setup.py", "README.md", "LICENSE")

CARRIERS: dict[str, str] = {
    "manifest/canonical.py": "manifest G01 G09",
    "manifest/digest.py": "manifest G02",
    "manifest/model.py": "manifest G02 G06 G09 G01",
    "manifest/table.py": "manifest G02 G09",
    "memory/control.py": "memory G05 G12 G08",
    "memory/flip.py": "memory G03 G04",
    "memory/passes.py": "memory G02",
    "memory/segment.py": "memory G01 G09 G08",
    "memory/slots.py": "memory G01 G07 G08",
    "memory/views.py": "memory G01 G02 G08",
    "lifecycle.py": "lifecycle G06",
    "bridge/consumer.py": "bridge G02 G06 G01 G12",
    "bridge/engine_state.py": "bridge G03 G04 G06",
    "bridge/executor.py": "bridge G03 G04 G05 G06",
    "bridge/publisher.py": "bridge G06 G11 G12 G01",
    "bridge/transaction.py": "bridge G03 G04 G05",
    "installers/module.py": "installers G03 G04 G05",
}
"""The modules that carry G1 to G6: a folder of tests, and the guarantees that they carry."""

TEST_S = 40
"""So long a single test may run; one that hangs has caught its mutant."""
RUN_S = 240
"""So long all tests of a mutant may run."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One defect.

    Attributes:
        path: of the module, below ``rl_bridge``.
        line: where the change begins.
        old: what stands there.
        new: what takes its place.
        source: the whole module with the defect.

    """

    path: str
    line: int
    old: str
    new: str
    source: str

    def __str__(self) -> str:
        shown = [" ".join(text.split()) for text in (self.old, self.new)]
        return f"{self.path}:{self.line}: {' -> '.join(shown)}"


Text = Callable[[ast.AST], str]

# ---- making mutants -----------------------------------------------------------------------------

_OPPOSITE: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "//",
}
# What only people read: a wrong word there is no wrong version.
_WORDS = {"msg", "message", "text", "hint", "note", "shown", "cause"}
_LEAVES = (ast.Raise, ast.Return, ast.Continue, ast.Break)


def mutants_of(path: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    whole = (ROOT / "rl_bridge" / path).read_bytes()
    starts = [0, *accumulate(map(len, whole.splitlines(keepends=True)))]

    def place(node: Any) -> slice:
        begin = starts[node.lineno - 1] + node.col_offset
        return slice(begin, starts[node.end_lineno - 1] + node.end_col_offset)

    def text(node: ast.AST) -> str:
        return whole[place(node)].decode()

    found = []
    for node, new in _changes(ast.parse(whole), text):
        at = place(node)
        changed = whole[: at.start] + new.encode() + whole[at.stop :]
        found.append(Mutant(path, node.lineno, text(node), new, changed.decode()))
    return sorted(found, key=lambda mutant: (mutant.line, mutant.old, mutant.new))


def _changes(tree: ast.Module, text: Text) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and not _is_for_people(function):
            for node in chain.from_iterable(map(_parts, function.body)):
                change = _CHANGES.get(type(node))
                target = node.test if isinstance(node, ast.If | ast.While) else node
                new = change(node, text) if change else None
                if new is not None:
                    yield cast("ast.expr | ast.stmt", target), new


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is below it; functions inside are met by themselves."""
    if isinstance(node, ast.FunctionDef | ast.Assert | ast.JoinedStr) or _is_talk(node):
        return
    yield node
    if not isinstance(node, ast.Raise):  # its text is for people
        for child in ast.iter_child_nodes(node):
            yield from _parts(child)


def _is_for_people(function: ast.FunctionDef) -> bool:
    return function.name in {"__repr__", "__str__", "describe", "_text", "_told", "mismatch"}


def _is_talk(node: ast.AST) -> bool:
    """Whether a statement only makes words, or logs them."""
    if isinstance(node, ast.Assign):
        return any(isinstance(name, ast.Name) and name.id in _WORDS for name in node.targets)
    if isinstance(node, ast.Expr):
        return "_LOG" in ast.dump(node) or isinstance(node.value, ast.Constant)
    return False


def _of_condition(node: ast.If | ast.While, text: Text) -> str | None:
    """A guard never strikes; another condition is turned around."""
    leaves = isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], _LEAVES)
    return "False" if leaves else f"not ({text(node.test)})"


def _of_comparison(node: ast.Compare, text: Text) -> str | None:
    if len(node.ops) > 1:
        return None
    return f"({text(node.left)}) {_OPPOSITE[type(node.ops[0])]} ({text(node.comparators[0])})"


def _of_operation(node: ast.BinOp, text: Text) -> str | None:
    opposite = _OPPOSITE.get(type(node.op))
    return opposite and f"(({text(node.left)}) {opposite} ({text(node.right)}))"


def _of_logic(node: ast.BoolOp, text: Text) -> str | None:
    word = " or " if isinstance(node.op, ast.And) else " and "
    return f"({word.join(f'({text(value)})' for value in node.values)})"


def _of_choice(node: ast.IfExp, text: Text) -> str | None:
    return f"(({text(node.orelse)}) if {text(node.test)} else ({text(node.body)}))"


def _of_call(node: ast.Expr, text: Text) -> str | None:
    """A statement that calls something does not."""
    return "pass" if isinstance(node.value, ast.Call) and "super()" not in text(node) else None


def _of_attribute(node: ast.Assign, text: Text) -> str | None:
    """What was to be kept is not."""
    del text
    return "pass" if all(isinstance(target, ast.Attribute) for target in node.targets) else None


def _of_constant(node: ast.Constant, text: Text) -> str | None:
    if isinstance(node.value, bool):
        return str(not node.value)
    return str(node.value + 1) if isinstance(node.value, int) else text(node) and None


_CHANGES: dict[type[ast.AST], Callable[[Any, Text], str | None]] = {
    ast.If: _of_condition,
    ast.While: _of_condition,
    ast.Compare: _of_comparison,
    ast.BinOp: _of_operation,
    ast.BoolOp: _of_logic,
    ast.IfExp: _of_choice,
    ast.Expr: _of_call,
    ast.Assign: _of_attribute,
    ast.Constant: _of_constant,
    ast.Raise: lambda _node, _text: "pass",
}


def sample(size: int, seed: int) -> list[Mutant]:
    """So many mutants of all carriers, drawn by a seed; 0 takes every one."""
    every = [mutant for path in CARRIERS for mutant in mutants_of(path)]
    drawn = random.Random(seed).sample(every, min(size, len(every))) if size else every
    return sorted(drawn, key=lambda mutant: (mutant.path, mutant.line, mutant.new))


# ---- trying them --------------------------------------------------------------------------------


def copy_tree(target: Path) -> None:
    """Copy what the tests need, with the compiled module, and compile it by content."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", ".hypothesis")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignore)
        elif source.exists():
            shutil.copy(source, target / name)
    # By content and not by time: a mutant may be as long as its module, and as old to the second.
    by_content = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(target / "rl_bridge", quiet=1, invalidation_mode=by_content)


def files_for(path: str) -> list[str]:
    """The tests of a module: those named like it, its folder's, its guarantees', in that order."""
    folder, *guarantees = CARRIERS[path].split()
    named = ROOT / "tests" / folder / f"test_{Path(path).stem}.py"
    files = [named] if named.exists() else []
    for name in guarantees:
        files += sorted((ROOT / "tests" / "guarantees").glob(f"test_{name}_*.py"))
    files += sorted(set((ROOT / "tests" / folder).glob("test_*.py")) - {named})
    return [str(file.relative_to(ROOT)) for file in files]


class Run:
    """The tests of one mutant (or of none), in a forked process of this one."""

    def __init__(self, tree: Path, mutant: Mutant | None, tests: list[str]) -> None:
        """Plant the bug, and begin."""
        self.tree, self.mutant = tree, mutant
        self.output = tree / "output.txt"
        self.begun = time.monotonic()
        if mutant is not None:
            (tree / "rl_bridge" / mutant.path).write_text(mutant.source, "utf-8")
        self.pid = os.fork()
        if self.pid == 0:
            _run_tests(tree, tests, self.output)
        self.ended = os.pidfd_open(self.pid)

    def verdict(self) -> str | None:
        """``caught``, ``survived`` or why neither can be said; None while it runs."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        seconds = time.monotonic() - self.begun
        if not done and seconds < RUN_S:
            return None
        if not done:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.ended)
        if self.mutant is not None:
            shutil.copy(
                ROOT / "rl_bridge" / self.mutant.path, self.tree / "rl_bridge" / self.mutant.path
            )
        if not done:
            return f"survived {RUN_S} s"
        code = os.waitstatus_to_exitcode(status)
        # Failed, did not even import, or took its process down.
        return (
            "survived"
            if code == 0
            else "caught"
            if code in {1, 2} or code < 0
            else f"pytest {code}"
        )

    def last_words(self) -> str:
        """The test that failed first, or what pytest said in the end."""
        lines = self.output.read_text("utf-8", "replace").splitlines()
        failed = [line.split()[1] for line in lines if line.startswith(("FAILED", "ERROR "))]
        return failed[0] if failed else (lines or [""])[-1]


def _run_tests(tree: Path, tests: list[str], output: Path) -> None:
    """In the child: become a run of pytest in the copy."""
    code = 3
    try:
        os.setpgid(0, 0)
        os.chdir(tree)
        os.environ |= {
            "PYTHONPATH": str(tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_PROFILE": "ci",
            "OMP_NUM_THREADS": "1",
        }
        sys.dont_write_bytecode = True
        sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in {"", str(ROOT)})]
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_S}", "--tb=line"]
        options += ["-m", "not full"]
        code = int(pytest.main([*options, *tests]))
        sys.stdout.flush()
    except BaseException:  # the parent reads it, and goes on with the next one
        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


def _preload() -> None:
    """Import what every run needs, and nothing of rl_bridge: a forked child has it at once."""
    for name in ("numpy", "pydantic", "pytest", "torch", "xxhash"):
        import_module(name)
    sys.modules["torch"].set_num_threads(1)
    assert "rl_bridge" not in sys.modules


def judge(mutants: list[Mutant], jobs: int, folder: Path) -> Iterator[tuple[Mutant, str, Run]]:
    """Try mutants, some at a time, each in a copy of its own."""
    waiting = list(reversed(mutants))
    free = [folder / str(job) for job in range(jobs)]
    for tree in free:
        copy_tree(tree)
    running: list[Run] = []
    while waiting or running:
        while waiting and free:
            mutant = waiting.pop()
            running.append(Run(free.pop(), mutant, files_for(mutant.path)))
        ended = [run.ended for run in running]
        select.select(ended, [], [], RUN_S / 10)
        for run in list(running):
            verdict = run.verdict()
            if verdict is not None:
                running.remove(run)
                assert run.mutant is not None
                yield run.mutant, verdict, run
                free.append(run.tree)


def main() -> int:
    """Try a sample; 1 if fewer are caught than asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only modules whose path holds one of these")
    parser.add_argument("--sample", type=int, default=120, help="how many; 0 takes every one")
    parser.add_argument("--seed", type=int, default=1, help="which")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--at-least", type=float, default=60, help="per cent that must be caught")
    given = parser.parse_args()
    if given.words:
        for path in [p for p in CARRIERS if not any(word in p for word in given.words)]:
            del CARRIERS[path]
    chosen = sample(given.sample, given.seed)
    _preload()
    survivors, begun = [], time.monotonic()
    say = partial(Console(soft_wrap=True, highlight=False).print, markup=False)
    with tempfile.TemporaryDirectory(prefix="rl_bridge-mutants-") as folder:
        for mutant, verdict, run in judge(chosen, given.jobs, Path(folder).resolve()):
            if verdict != "caught":
                survivors.append(f"{mutant}  [{verdict}]")
            seconds = time.monotonic() - run.begun
            say(f"{verdict:9} {seconds:5.1f} s  {mutant}")
            say(f"{'':19}{run.last_words()}")
    caught = 100 * (1 - len(survivors) / max(len(chosen), 1))
    say(f"\n{caught:.0f} % of {len(chosen)} were caught in {time.monotonic() - begun:.0f} s.")
    for survivor in sorted(survivors):
        say(survivor)
    return 0 if caught >= given.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
