"""Each guarantee has one file of tests, which a newcomer can read, and the docs list them all."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from rl_bridge import FACES
from rl_bridge.testing import EngineSuite

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs/explanation/failure-guarantees.md").read_text("utf-8")
FILES = sorted(HERE.glob("test_G*.py"))
PUBLIC = re.compile(rf"rl_bridge(\.({'|'.join(FACES)}))?$|tests\.guarantees\.kit$")


def test_each_guarantee_has_one_file() -> None:
    promised = re.findall(r"^### G(\d+) (\w[\w -]*)$", PAGE, re.MULTILINE)
    named = [f"test_G{int(n):02}_{re.sub('[ -]', '_', name.lower())}.py" for n, name in promised]
    assert [file.name for file in FILES] == named
    assert len(named) == 12


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_short_begins_with_its_guarantee_and_uses_public_names_only(file: Path) -> None:
    text = file.read_text("utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 250
    number = int(file.stem[6:8])
    assert (ast.get_docstring(tree) or "").startswith(f"G{number} ")
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith(("rl_bridge", "tests")):
                assert PUBLIC.match(name), f"{file.name} imports {name}"
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            assert isinstance(node.value, ast.Name), f"{file.name}:{node.lineno}"
            assert node.value.id == "self", f"{file.name}:{node.lineno} reaches for {node.attr}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_page_of_the_guarantees_names_each_file_and_each_test(file: Path) -> None:
    assert f"*Held by* `tests/guarantees/{file.name}`" in PAGE
    for name in re.findall(r"\btest_[a-z]\w+", file.read_text("utf-8")):
        assert f"`{name}`" in PAGE, "run docs/_generate/write.py"


ENGINES = {"tests/engines/test_ranks.py": "TestVLLM", "tests/sglang/test_ranks.py": "TestSGLang"}


def test_each_scenario_of_engines_holds_a_guarantee() -> None:
    scenarios = {name for name in vars(EngineSuite) if name.startswith("test_")}
    files = [import_module(f"tests.guarantees.{file.stem}") for file in FILES]
    assert {name for file in files for name in getattr(file, "ENGINES", ())} == scenarios


@pytest.mark.parametrize("file", ENGINES)
def test_vllm_and_sglang_run_each_scenario_of_engines(file: str) -> None:
    tree = ast.parse((HERE.parents[1] / file).read_text("utf-8"))
    (suite,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == ENGINES[file]
    )
    assert [ast.unparse(base) for base in suite.bases] == ["EngineSuite"]
    assert not suite.decorator_list or "timeout" in ast.unparse(suite.decorator_list[0])
    own = {node.name for node in suite.body if isinstance(node, ast.FunctionDef)}
    # (A killed rank takes an engine of its own: in the full matrix, and in tests of servers.)
    assert {name for name in own if name.startswith("test_")} <= {
        "test_a_rank_that_is_killed_is_a_typed_error_and_a_fresh_engine_takes_the_version"
    }
    assert f"`{file}`" in PAGE
