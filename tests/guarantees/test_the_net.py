"""Each guarantee has one file of tests, which a newcomer can read, and the docs list them all."""

import ast
import re
from pathlib import Path

import pytest

from rl_bridge import FACES

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
    tree = ast.parse(file.read_text("utf-8"))
    named = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    named += [
        str(part.value)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for by in node.decorator_list
        for part in ast.walk(by)
        if isinstance(part, ast.Constant)
    ]
    for name in named:
        assert not name.startswith("test_") or f"`{name}`" in PAGE, "run docs/_generate/write.py"
