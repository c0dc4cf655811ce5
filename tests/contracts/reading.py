"""Reads Python packages without importing them: which names, members and signatures they have.

A wheel is a zip of sources, and a source is parsed. So a package that needs a GPU, or takes minutes
to install, is read in seconds, and nothing of it runs. What a package makes while it runs cannot be
seen here.
"""

import ast
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEEP = 12  # re-exports, and classes above a class, that are followed


@dataclass(frozen=True, slots=True)
class Found:
    """A name where it is defined: by a statement, or as a module of its own (None)."""

    module: str
    node: ast.AST | None


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes, without the object that it is bound to."""

    names: tuple[str, ...]  # by position
    required: frozenset[str]
    only_by_name: frozenset[str]
    takes_more: bool  # *args
    takes_others: bool  # **kwargs

    @classmethod
    def of(cls, node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_bound: bool) -> Self:
        """Of a function as it is written."""
        given = node.args
        ordered = [one.arg for one in (*given.posonlyargs, *given.args)]
        required = set(ordered[: len(ordered) - len(given.defaults)])
        pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        required |= {one.arg for one, default in pairs if default is None}
        names = ordered[1:] if is_bound else ordered
        return cls(
            tuple(names),
            frozenset(required - (set(ordered[:1]) if is_bound else set())),
            frozenset(one.arg for one in given.kwonlyargs),
            given.vararg is not None,
            given.kwarg is not None,
        )

    def refusal(self, count: int, keywords: set[str]) -> str:
        """Why a call with `count` arguments by position and these keywords fails; empty if not."""
        if count > len(self.names) and not self.takes_more:
            return f"takes {len(self.names)} arguments by position, not {count}"
        by_position = set(self.names[:count])
        known = {*self.names, *self.only_by_name} - by_position
        if unknown := sorted(keywords - known):
            return "" if self.takes_others else f"takes no {', '.join(unknown)}"
        if lacking := sorted(self.required - by_position - keywords):
            return f"asks for {', '.join(lacking)}"
        return ""


class Sources:
    """The sources of one package: module names -> trees, parsed when somebody asks."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        """Take the sources: path in the package -> text."""
        self._texts = texts
        self._trees: dict[str, ast.Module] = {}

    @classmethod
    def of_wheel(cls, path: Path) -> Self:
        """Read a wheel, or what `slim` left of one."""
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            texts = {name: wheel.read(name) for name in names if name.endswith(".py")}
        # (Of a compiled module nothing is seen but that it is there.)
        compiled = {f"{name.partition('.')[0]}.py": "" for name in names if name.endswith(".so")}
        return cls(
            {**compiled, **{name: text.decode("utf-8", "replace") for name, text in texts.items()}}
        )

    @classmethod
    def of_folder(cls, root: Path, package: str) -> Self:
        """Read a package that lies in a folder."""
        files = sorted((root / package).rglob("*.py"))
        return cls({str(one.relative_to(root)): one.read_text("utf-8") for one in files})

    @cached_property
    def modules(self) -> dict[str, str]:
        """Name of each module -> its path."""
        paths = {path.removesuffix(".py").replace("/", "."): path for path in self._texts}
        return {name.removesuffix(".__init__"): path for name, path in paths.items()}

    def tree(self, module: str) -> ast.Module | None:
        """A module, parsed; None if there is none of this name."""
        path = self.modules.get(module)
        if path is not None and module not in self._trees:
            self._trees[module] = ast.parse(self._texts[path])
        return self._trees.get(module)

    def find(self, module: str, name: str, depth: int = 0) -> Found | None:
        """Where a module's name is defined, through re-exports; None if it has no such name.

        A name out of another package is found where it is imported.
        """
        tree = self.tree(module)
        if tree is None or depth > _DEEP:
            return None
        found: Found | None = None
        for node in _statements(tree.body):
            if name in _defined(node):
                found = Found(module, node)
            if not isinstance(node, ast.ImportFrom):
                continue
            home = self._home(module, node)
            for one in node.names:
                if one.name == "*":
                    found = self.find(home, name, depth + 1) or found
                elif name == (one.asname or one.name):
                    is_foreign = home.partition(".")[0] != module.partition(".")[0]
                    found = Found(module, node) if is_foreign else None
                    found = found or self.find(home, one.name, depth + 1)
        if found is None and f"{module}.{name}" in self.modules:
            return Found(f"{module}.{name}", None)
        return found

    def _home(self, module: str, node: ast.ImportFrom) -> str:
        """The module that a statement imports from."""
        if not node.level:
            return node.module or ""
        is_package = self.modules[module].endswith("__init__.py")
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def lineage(self, found: Found, depth: int = 0) -> Iterator[Found]:
        """A class and those above it, as far as the package has them."""
        if not isinstance(found.node, ast.ClassDef) or depth > _DEEP:
            return
        yield found
        for base in found.node.bases:
            shown = base.value if isinstance(base, ast.Subscript) else base
            names = ast.unparse(shown).split(".")
            above = self.find(found.module, names[0])
            for name in names[1:]:
                above = self.find(above.module, name) if above and above.node is None else None
            if above is not None:
                yield from self.lineage(above, depth + 1)

    def member(self, found: Found, name: str) -> Found | None:
        """What a class, or a class above it, has under a name: also what methods set."""
        for one in self.lineage(found):
            assert isinstance(one.node, ast.ClassDef)
            for node in _statements(one.node.body):
                if name in _defined(node):
                    return Found(one.module, node)
        for one in self.lineage(found):
            assert one.node is not None
            for part in ast.walk(one.node):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    of_self = isinstance(part.value, ast.Name) and part.value.id == "self"
                    if of_self and part.attr == name:
                        return Found(one.module, part)
        return None

    def signature(self, found: Found, *, is_method: bool) -> Signature | None:
        """What a function, a method or a class takes; None if it cannot be seen."""
        if isinstance(found.node, _FUNCTIONS):
            marks = {ast.unparse(one) for one in found.node.decorator_list}
            return Signature.of(found.node, is_bound=is_method and "staticmethod" not in marks)
        if not isinstance(found.node, ast.ClassDef):
            return None
        made = self.member(found, "__init__")
        if made is not None and isinstance(made.node, _FUNCTIONS):
            return Signature.of(made.node, is_bound=True)
        return self._of_fields(found)

    def _of_fields(self, found: Found) -> Signature:
        """Of a class whose fields are its arguments, such as a dataclass."""
        names: dict[str, bool] = {}
        by_name: set[str] = set()
        for one in reversed(list(self.lineage(found))):
            assert isinstance(one.node, ast.ClassDef)
            marks = [ast.unparse(mark) for mark in (*one.node.decorator_list, *one.node.keywords)]
            kw_only = any("kw_only=True" in mark for mark in marks)
            for node in one.node.body:
                if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                    continue
                if "ClassVar" in ast.unparse(node.annotation):
                    continue
                names[node.target.id] = node.value is None
                if kw_only:
                    by_name.add(node.target.id)
        ordered = tuple(name for name in names if name not in by_name)
        required = frozenset(name for name, is_required in names.items() if is_required)
        return Signature(
            ordered, required, frozenset(by_name), takes_more=False, takes_others=False
        )

    def abstract(self, found: Found) -> set[str]:
        """Names that a class leaves to those below it."""
        left: set[str] = set()
        for one in reversed(list(self.lineage(found))):
            assert isinstance(one.node, ast.ClassDef)
            for node in one.node.body:
                if isinstance(node, _FUNCTIONS):
                    marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
                    (left.add if "abstractmethod" in marks else left.discard)(node.name)
        return left

    def says(self, module: str, text: str) -> bool:
        """Whether a module has a text as a constant: a route, a group of plugins."""
        tree = self.tree(module)
        nodes = ast.walk(tree) if tree is not None else ()
        return any(isinstance(one, ast.Constant) and one.value == text for one in nodes)


def slim(wheel: Path, target: Path) -> None:
    """Keep a wheel's sources, and leave out the rest of it: kernels, mostly."""
    part = target.with_suffix(".part")
    with zipfile.ZipFile(wheel) as full, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as kept:
        for name in full.namelist():
            if name.endswith((".py", ".so")):
                kept.writestr(name, full.read(name) if name.endswith(".py") else b"")
    part.rename(target)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those below an `if`, a `try` or a `with`, all of their branches."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                for inner in getattr(node, name, []):
                    deeper = inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    yield from _statements(deeper)


def _defined(node: ast.stmt) -> set[str]:
    """Names that a statement defines, but for those that it imports from a module."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Import):
        return {one.asname or one.name.partition(".")[0] for one in node.names}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {part.id for one in targets for part in ast.walk(one) if isinstance(part, ast.Name)}
