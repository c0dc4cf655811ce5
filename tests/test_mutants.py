"""The list of planted bugs does not rot: each still has its place, its file and its tests.

And their runner does not take what it could not try for tried.
"""

import ast
import shutil
import sysconfig
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import ROOT, Mutant, build, judge, planted, read_mutants, sanity

MUTANTS = read_mutants()


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 18


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_can_be_planted(name: str) -> None:
    mutant = MUTANTS[name]
    path = ROOT / "rl_bridge" / mutant.path
    text = planted(path.read_text("utf-8"), mutant)
    if path.suffix == ".py":
        ast.parse(text)
    assert Path(ROOT, mutant.tests.split()[0]).exists()


def test_a_bug_whose_place_is_gone_is_told() -> None:
    mutant = next(iter(MUTANTS.values()))
    with pytest.raises(ValueError, match="stale: 0 places"):
        planted("", mutant)


# ---- the compiled module ------------------------------------------------------------------------

SOURCE = "memory/_native.c"
COMPILER = str(sysconfig.get_config_var("CC") or "cc").split()[0]
compiling = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"no C compiler: {COMPILER} is not to be found"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy with an extension of two lines, and one that an earlier build left."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    memory = tmp_path / "rl_bridge" / "memory"
    memory.mkdir(parents=True)
    (tmp_path / "rl_bridge" / "__init__.py").write_text('__version__ = "0"\n')
    (tmp_path / "rl_bridge" / SOURCE).write_text(
        "int answer(void) { return 42; }\n#if 0\nelsewhere();\n#endif\n"
    )
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (memory / f"_native{suffix}").write_bytes(b"of an earlier build")
    return tmp_path


def modules(tree: Path) -> list[bytes]:
    return [path.read_bytes() for path in (tree / "rl_bridge" / "memory").glob("*.so")]


def c_mutant(old: str, new: str) -> Mutant:
    return Mutant(path=SOURCE, old=old, new=new, tests="")


@pytest.fixture(params=[0, 1], ids=["tests pass", "tests fail"])
def tests_say(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Whatever is planted, the tests say this."""
    status = int(request.param)
    monkeypatch.setattr(mutants, "run_tests", lambda *_: (status, "1 passed"))
    return status


def test_a_build_that_fails_ends_the_run_and_leaves_no_earlier_module(tree: Path) -> None:
    (tree / "rl_bridge" / SOURCE).write_text("#error this is no C\n")
    with pytest.raises(SystemExit, match="does not build"):
        build(tree)
    assert modules(tree) == []


@compiling
def test_a_build_that_fails_behind_one_that_did_not_says_what_the_compiler_said(
    tree: Path,
) -> None:
    assert build(tree) == modules(tree)[0] != b"of an earlier build"
    (tree / "rl_bridge" / SOURCE).write_text("#error this is no C\n")
    with pytest.raises(SystemExit, match=r"(?s)does not build.*this is no C"):
        build(tree)
    assert modules(tree) == []


@compiling
def test_a_defect_that_does_not_compile_is_neither_caught_nor_survives(
    tree: Path, tests_say: int
) -> None:
    with pytest.raises(SystemExit, match="does not build"):
        judge(tree, c_mutant("42;", "no such name;"))
    assert "42" in (tree / "rl_bridge" / SOURCE).read_text(), "it is taken out again"
    assert len(modules(tree)) == 1
    del tests_say


@compiling
def test_a_defect_in_a_line_that_is_not_compiled_here_is_neither_caught_nor_survives(
    tree: Path, tests_say: int
) -> None:
    assert "not compiled here" in judge(tree, c_mutant("elsewhere();", "nowhere();"))
    assert judge(tree, c_mutant("42", "43")) == ("caught" if tests_say else "SURVIVED")


@pytest.mark.parametrize("cause", ["the compiled module is missing", ""])
def test_a_compiled_module_that_is_not_in_use_cannot_be_judged(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(tree: Path, *command: str, python: Path | None = None) -> tuple[int, str]:
        del python
        if "native_cause" in command[-1]:
            return 0 if cause else 1, cause
        return 0, str(tree)

    monkeypatch.setattr(mutants, "run", run)
    monkeypatch.setattr(mutants, "build", lambda _: b"")
    with pytest.raises(SystemExit, match="not in use"):
        sanity(tmp_path, {"one": c_mutant("a", "b")})
    sanity(tmp_path, {"another": Mutant(path="memory/vm.py", old="a", new="b", tests="")})
