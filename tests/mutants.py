"""Planted bugs: one at a time in a copy of the tree; the suite must catch each (`make mutants`).

Coverage says which lines ran, this says whether anybody looked. Each mutant is one changed line in
digest, lifecycle, leases, slots, views, verification, undo, flip or proof, and names the few tests
that have to see it. The working tree is never touched.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

__all__ = ["Mutant", "main", "planted", "read_mutants"]

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("rl_bridge", "tests", "docs", "pyproject.toml", "setup.py", "README.md", "LICENSE")
# Tests of these folders need what only an environment of their own has.
ENVIRONMENTS = {
    "tests/machines": ".venv-machines",
    "tests/engines": ".venv-vllm",
    "tests/sglang": ".venv-sglang",
}
TIMEOUT_S = 180


@dataclass(frozen=True, slots=True)
class Mutant:
    """One defect.

    Attributes:
        path: file below ``rl_bridge``.
        old: what stands there, exactly once.
        new: what takes its place.
        tests: arguments for pytest.

    """

    path: str
    old: str
    new: str
    tests: str


def read_mutants() -> dict[str, Mutant]:
    """All mutants by name."""
    found = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))
    return {name: Mutant(**fields) for name, fields in found.items()}


def copy_tree(target: Path) -> None:
    """Copy what the tests need, with the compiled module, without what tools left there."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", ".hypothesis")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignore)
        elif source.exists():
            shutil.copy(source, target / name)


def environment(tree: Path) -> dict[str, str]:
    """The copy wins over an editable install, in children too."""
    return os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "ci",
    }


def interpreter(tests: str) -> Path:
    """The Python whose environment has what these tests need."""
    for folder, name in ENVIRONMENTS.items():
        if tests.startswith(folder):
            return ROOT / name / "bin" / "python"
    return Path(sys.executable)


def run(tree: Path, *command: str, python: Path | None = None) -> tuple[int, str]:
    """Run Python in the copy; exit status (a run out of time counts as 124) and output."""
    try:
        done = subprocess.run(
            [str(python or sys.executable), *command],
            cwd=tree,
            env=environment(tree),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return 124, str(error)
    return done.returncode, done.stdout + done.stderr


def run_tests(tree: Path, tests: str) -> tuple[int, str]:
    """Run some tests in the copy, up to the first failure."""
    each_s = 150 if tests.startswith("tests/engines") else 60  # an engine has to start
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={each_s}"]
    return run(tree, "-m", "pytest", *options, *tests.split(), python=interpreter(tests))


def build(tree: Path) -> bytes:
    """Compile the extension of the copy; returns the module's bytes.

    Without a compiler the package does without the module, and says so in passing: what an earlier
    build left would then be tested in place of this one. Nothing of it is kept, therefore.

    Raises:
        SystemExit: it was not built.

    """
    folder = tree / "rl_bridge" / "memory"
    for old in folder.glob("_native*.so"):
        old.unlink()
    shutil.rmtree(tree / "build", ignore_errors=True)
    status, output = run(tree, "setup.py", "build_ext", "--inplace", "--force")
    built = list(folder.glob("_native*.so"))
    if status or len(built) != 1:
        raise SystemExit(f"the extension of the copy does not build ({status}):\n{output[-3000:]}")
    return built[0].read_bytes()


def planted(text: str, mutant: Mutant) -> str:
    """Put the defect into a file's text.

    Raises:
        ValueError: its place is not there exactly once.

    """
    if text.count(mutant.old) != 1:
        msg = f"stale: {text.count(mutant.old)} places in {mutant.path} for {mutant.old!r}"
        raise ValueError(msg)
    return text.replace(mutant.old, mutant.new)


def judge(tree: Path, mutant: Mutant) -> str:
    """Plant one defect, run its tests, take it out again: ``caught``, or what is wrong.

    Raises:
        SystemExit: the compiled module does not build, with the defect or without it.

    """
    is_compiled = mutant.path.endswith(".c")
    path = tree / "rl_bridge" / mutant.path
    text = path.read_text("utf-8")
    try:
        changed = planted(text, mutant)
    except ValueError as error:
        return str(error)
    whole = build(tree) if is_compiled else b""
    try:
        path.write_text(changed, "utf-8")
        if is_compiled and build(tree) == whole:
            return "not compiled here: the module is the same with the defect"
        status, output = run_tests(tree, mutant.tests)
    finally:
        path.write_text(text, "utf-8")
        if is_compiled:
            build(tree)
    if status in {1, 2, 124} or status < 0:  # failed, did not even import, hung, crashed
        return "caught"
    last = output.strip().splitlines()[-1] if output.strip() else ""
    return "SURVIVED" if status == 0 else f"no verdict, pytest said {status}: {last}"


def sanity(tree: Path, chosen: dict[str, Mutant], jobs: int = 1) -> None:
    """Without a defect every chosen test passes, in the copy and nowhere else.

    Raises:
        SystemExit: one fails, or a defect of the compiled module would go unnoticed, as that is not
            in use.

    """
    _, where = run(tree, "-c", "import rl_bridge; print(rl_bridge.__file__)")
    if not where.strip().startswith(str(tree)):
        raise SystemExit(f"the tests would run {where.strip()} instead of the copy in {tree}")
    if any(mutant.path.endswith(".c") for mutant in chosen.values()):
        build(tree)
        ask = "from rl_bridge.memory.passes import native_cause; print(native_cause())"
        status, cause = run(tree, "-c", ask)
        if status or cause.strip() != "None":
            raise SystemExit(f"the compiled module of the copy is not in use: {cause.strip()}")
    every = sorted({mutant.tests for mutant in chosen.values()})
    # Nothing is changed in the copy: several may run in it at a time.
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = list(pool.map(lambda tests: run_tests(tree, tests), every))
    for tests, (status, output) in zip(every, verdicts, strict=True):
        if status:
            raise SystemExit(f"without any defect, {tests} fails ({status}):\n{output[-3000:]}")


def trees(folder: Path, jobs: int) -> "queue.SimpleQueue[Path]":
    """Copies of the tree, one for each mutant that is judged at a time."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for job in range(jobs):
        copy_tree(folder / str(job))
        free.put(folder / str(job))
    return free


def timed(free: "queue.SimpleQueue[Path]", mutant: Mutant) -> tuple[str, float]:
    """Judge a mutant in a copy that nobody else uses: the verdict and its seconds."""
    tree = free.get()
    start = time.monotonic()
    try:
        return judge(tree, mutant), time.monotonic() - start
    finally:
        free.put(tree)


def main() -> int:
    """Judge all mutants, or those whose name holds a word; 1 if one of them survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=2, help="how many are judged at a time")
    given = parser.parse_args()
    words = given.words
    chosen = {
        name: mutant
        for name, mutant in read_mutants().items()
        if not words or any(word in name for word in words)
    }
    console = Console()
    not_tried = [name for name, one in chosen.items() if not interpreter(one.tests).exists()]
    for name in not_tried:
        del chosen[name]
        console.print(f"{name}: [yellow]not tried[/], make test-machines makes its environment")
    table = Table(title="Planted bugs")
    for column in ("defect", "file", "verdict", "seconds"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    bad = 0
    with (
        tempfile.TemporaryDirectory(prefix="rl_bridge-mutants-") as folder,
        ThreadPoolExecutor(given.jobs) as pool,
    ):
        free = trees(Path(folder).resolve(), given.jobs)
        sanity(Path(folder).resolve() / "0", chosen, given.jobs)
        running = {pool.submit(timed, free, mutant): name for name, mutant in chosen.items()}
        for done in as_completed(running):
            name, (verdict, seconds) = running[done], done.result()
            bad += verdict != "caught"
            took = f"{seconds:.1f}"
            colour = "green" if verdict == "caught" else "red"
            console.print(f"{name}: [{colour}]{verdict}[/] in {took} s")
            table.add_row(name, chosen[name].path, f"[{colour}]{verdict}[/]", took)
    console.print(table)
    more = f" Not tried: {len(not_tried)}." if not_tried else ""
    console.print(f"{len(chosen) - bad} of {len(chosen)} planted bugs were caught.{more}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
