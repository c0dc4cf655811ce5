"""The rules of the house, checked by reading the code: layers, sizes, names, bans.

The checker only parses; it imports nothing, so a broken module cannot hide a broken rule. Its own
tests plant one violation of each kind in a small package and must see it.
"""

import ast
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "rl_bridge"

# Each has a folder in `engines` and a public module at the top.
ENGINES = ("sglang", "vllm")

# Imports point from a higher number to a lower one, never sideways into another package.
LAYERS = {
    "errors": 0,
    "interrupts": 0,
    "processes": 1,
    "manifest": 1,
    "lifecycle": 1,
    "memory": 3,
    "journal": 4,
    "cuda": 4,
    "transports": 5,
    "trainers": 5,
    "installers": 5,
    "assembly": 6,
    "bridge": 7,
    "groups": 8,
    "strategies": 9,
    "engines": 10,
    "hooks": 10,
    "ray": 10,
    "compat": 11,
    "remote": 11,
    "testing": 11,
    **dict.fromkeys(ENGINES, 11),  # their public modules
    "demo": 12,  # over testing: it plants the same faults
    "cli": 13,
}
# The facade (`rl_bridge/__init__.py`) collects names from everywhere: it stands above all layers,
# and only `__main__` stands above it.
FACADE_LAYER = 14
MAIN_LAYER = 15

# What transports share; the registry is also the one module that may name them all.
SHARED_BY_TRANSPORTS = frozenset({"base", "registry", "wire"})
NAMES_ALL_TRANSPORTS = frozenset({"registry"})

# A module below this size that one other module imports is part of that one. (What only the face
# of a package imports is public, and stands for itself.)
FRAGMENT_LINES = 120

# What no layer forbids and the plan of the house does.
NEVERS: tuple[tuple[str, str, str], ...] = (
    *(
        (f"engines.{one}", f"engines.{other}", "no engine imports another one")
        for one, other in itertools.permutations(ENGINES, 2)
    ),
    *(
        ("engines", f"engines.{engine}", "what engines share knows none of them")
        for engine in ENGINES
    ),
    ("bridge", "transports.wire", "only the registry knows the inside of transports"),
    ("bridge", "transports.broadcast", "only the registry knows the inside of transports"),
    ("bridge", "transports.nixl", "only the registry knows the inside of transports"),
    *(
        ("assembly", f"transports.{inside}", "only the registry knows the inside of transports")
        for inside in ("wire", "broadcast", "nixl")
    ),
    ("groups", "transports.wire", "only the registry knows the inside of transports"),
    ("groups", "transports.broadcast", "only the registry knows the inside of transports"),
    ("groups", "transports.nixl", "only the registry knows the inside of transports"),
    ("memory", "cuda", "memory of the CPU knows nothing of GPUs"),
    ("memory", "lifecycle", "memory knows no life cycle"),
)
# Engines' own folders are below `engines` too.
EXCEPT = {"engines": tuple(f"engines.{engine}" for engine in ENGINES)}

PICKLES = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"})
BROAD = frozenset({"Exception", "BaseException"})


@dataclass(frozen=True, slots=True)
class Module:
    """One parsed file: its dotted name, its tree, all nodes of it, and how many lines it has.

    The nodes are listed once: to walk the whole code anew for every rule takes a minute.
    """

    name: str
    path: Path
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    num_lines: int

    def at(self, line: int, text: str) -> str:
        return f"{self.path}:{line}: {text}"


@dataclass(frozen=True, slots=True)
class Edge:
    """One import inside the package."""

    importer: Module
    line: int
    target: str

    def says(self, text: str) -> str:
        return self.importer.at(
            self.line, f"{self.importer.name} imports {self.target}, but {text}"
        )


def parse_tree(root: Path, top: str) -> list[Module]:
    modules = []
    for path in sorted((root / top).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path))
        nodes = tuple(ast.walk(tree))
        modules.append(Module(name, path.relative_to(root), tree, nodes, len(text.splitlines())))
    return modules


def imports(module: Module) -> Iterator[tuple[int, str, str | None]]:
    """Every import, lazy and type-checking ones too, as (line, module, name taken from it)."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, "." * node.level + (node.module or ""), alias.name


def edges(modules: Sequence[Module]) -> Iterator[Edge]:
    known = {module.name for module in modules}
    for module in modules:
        for line, target, name in imports(module):
            if target == PACKAGE or target.startswith(f"{PACKAGE}."):
                full = f"{target}.{name}"
                yield Edge(module, line, full if full in known else target)


def part_of(name: str) -> str | None:
    """The package below `rl_bridge` that a module belongs to, None for the facade itself."""
    _, _, rest = name.partition(".")
    return rest.split(".")[0] or None


def layer_of(name: str) -> int | None:
    part = part_of(name)
    if part is None:
        return FACADE_LAYER
    return MAIN_LAYER if part == "__main__" else LAYERS.get(part)


def check_layers(modules: Sequence[Module]) -> list[str]:
    found = [
        module.at(1, f"{module.name} belongs to no layer: put it into one, or add it to the table")
        for module in modules
        if layer_of(module.name) is None
    ]
    for edge in edges(modules):
        upper, lower = layer_of(edge.importer.name), layer_of(edge.target)
        if upper is None or lower is None or part_of(edge.importer.name) == part_of(edge.target):
            continue
        if lower > upper:
            found.append(edge.says(f"imports point down (layer {upper} to {lower})"))
        elif lower == upper:
            found.append(edge.says(f"packages of layer {upper} do not import each other"))
    return found


def transport_of(name: str) -> str | None:
    prefix = f"{PACKAGE}.transports."
    return name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else None


def check_transports(modules: Sequence[Module]) -> list[str]:
    found = []
    for edge in edges(modules):
        mine, other = transport_of(edge.importer.name), transport_of(edge.target)
        if mine is None or other is None or mine == other or mine in NAMES_ALL_TRANSPORTS:
            continue
        if other not in SHARED_BY_TRANSPORTS and not other.startswith("_"):
            found.append(edge.says("transports do not import each other"))
    return found


def check_absolute_imports(modules: Sequence[Module]) -> list[str]:
    return [
        module.at(line, "a relative import: write the full name")
        for module in modules
        for line, target, _ in imports(module)
        if target.startswith(".")
    ]


def graph(modules: Sequence[Module]) -> dict[str, set[str]]:
    """Which module imports which, by name; packages' own files count as modules."""
    found: dict[str, set[str]] = {module.name: set() for module in modules}
    for edge in edges(modules):
        if edge.target in found and edge.target != edge.importer.name:
            found[edge.importer.name].add(edge.target)
    return found


def check_fragments(modules: Sequence[Module]) -> list[str]:
    """Find what only one other module imports and what is too small for a file of its own."""
    users: dict[str, set[str]] = {module.name: set() for module in modules}
    for importer, targets in graph(modules).items():
        for target in targets:
            users[target].add(importer)
    faces = {module.name for module in modules if module.path.name == "__init__.py"}
    faces |= {f"{PACKAGE}.{engine}" for engine in ENGINES}
    return [
        module.at(
            1,
            f"{module.num_lines} lines that only {user} imports: one concept, one file; move it "
            "there",
        )
        for module in modules
        if module.num_lines < FRAGMENT_LINES
        and module.path.name != "__init__.py"
        and len(users[module.name]) == 1
        and not users[module.name] & faces
        for user in users[module.name]
    ]


def check_circles(modules: Sequence[Module]) -> list[str]:
    """Find modules that import each other, directly or through others."""
    imported = graph(modules)
    reached = {name: reachable(imported, name) for name in imported}
    found = []
    for module in modules:
        circle = sorted(
            other for other in reached[module.name] if module.name in reached.get(other, ())
        )
        if circle and circle[0] == module.name:
            found.append(module.at(1, f"a circle of imports: {', '.join(circle)}"))
    return found


def reachable(imported: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(imported[start])
    while todo:
        other = todo.pop()
        if other not in seen:
            seen.add(other)
            todo.extend(imported[other])
    return seen


def check_nevers(modules: Sequence[Module]) -> list[str]:
    """Find imports that the plan of the house forbids, beyond its layers."""
    return [
        edge.says(why)
        for edge in edges(modules)
        for importer, target, why in NEVERS
        if below(importer, edge.importer.name)
        and below(target, edge.target)
        and not any(below(other, edge.importer.name) for other in EXCEPT.get(importer, ()))
    ]


def below(package: str, name: str) -> bool:
    return f"{name}.".startswith(f"{PACKAGE}.{package}.")


def check_faces_declare_their_names(modules: Sequence[Module]) -> list[str]:
    """Find faces of packages without `__all__`: what they offer is imported from elsewhere."""
    return [
        module.at(1, "no __all__")
        for module in modules
        if module.path.name == "__init__.py"
        and "__all__" not in {name for node in module.tree.body for name in assigned(node)}
    ]


def check_private_names_stay(modules: Sequence[Module]) -> list[str]:
    """Find imports of names with an underscore: those belong to the module that defines them."""
    return [
        module.at(line, f"takes {name} from {target}: a name that others take has no underscore")
        for module in modules
        for line, target, name in imports(module)
        if target.startswith(PACKAGE)
        and name is not None
        and name.startswith("_")
        and not name.endswith("__")
        and f"{target}.{name}" not in {other.name for other in modules}
    ]


def assigned(node: ast.stmt) -> Iterator[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    yield from (target.id for target in targets if isinstance(target, ast.Name))


def check_docstrings(modules: Sequence[Module]) -> list[str]:
    return [
        module.at(1, "no module docstring")
        for module in modules
        if not (ast.get_docstring(module.tree) or "").strip()
    ]


def check_no_pickle(modules: Sequence[Module]) -> list[str]:
    return [
        module.at(line, f"imports {target}: nothing that unpickles may be in the library")
        for module in modules
        for line, target, _ in imports(module)
        if target.split(".")[0] in PICKLES
    ]


def check_no_sleep(modules: Sequence[Module]) -> list[str]:
    lines = [(module, line) for module in modules for line in sleeps(module)]
    return [module.at(line, "time.sleep: wait for an event, boundedly") for module, line in lines]


def sleeps(module: Module) -> Iterator[int]:
    clocks = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            clocks |= {alias.asname or alias.name for alias in node.names if alias.name == "time"}
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for alias in node.names if alias.name in {"sleep", "*"})
    for node in module.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr="sleep") if name in clocks:
                yield node.lineno


def names_broad(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Tuple):
        return any(names_broad(item) for item in node.elts)
    return isinstance(node, ast.Name) and node.id in BROAD


def does_nothing(body: Sequence[ast.stmt]) -> bool:
    return all(
        isinstance(node, ast.Pass | ast.Continue)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in body
    )


def check_no_swallowed_errors(modules: Sequence[Module]) -> list[str]:
    found = []
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ExceptHandler):
                if node.type is None:
                    found.append(module.at(node.lineno, "a bare except"))
                elif names_broad(node.type) and does_nothing(node.body):
                    found.append(module.at(node.lineno, "swallows every exception"))
            elif isinstance(node, ast.Call) and any(map(names_broad, node.args)):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
                if name == "suppress" or (isinstance(name, ast.Name) and name.id == "suppress"):
                    found.append(module.at(node.lineno, "swallows every exception"))
    return found


Rule = Callable[[Sequence[Module]], list[str]]

LIBRARY_RULES: tuple[Rule, ...] = (
    check_layers,
    check_transports,
    check_absolute_imports,
    check_fragments,
    check_circles,
    check_nevers,
    check_faces_declare_their_names,
    check_private_names_stay,
    check_docstrings,
    check_no_pickle,
    check_no_swallowed_errors,
)
TEST_RULES: tuple[Rule, ...] = (check_no_sleep, check_no_swallowed_errors)


def rule_name(rule: Rule) -> str:
    return rule.__name__.removeprefix("check_")


# ------------------------------------------------------------------------------ the real code


@pytest.fixture(scope="module")
def real_code() -> Iterator[dict[str, list[Module]]]:
    """The library and the tests, parsed once; not kept for the tests of other files."""
    # What parses makes objects by the hundred thousand, and none of them is garbage.
    gc.disable()
    try:
        found = {top: parse_tree(ROOT, top) for top in (PACKAGE, "tests")}
    finally:
        gc.enable()
    yield found
    found.clear()


@pytest.mark.parametrize("rule", LIBRARY_RULES, ids=rule_name)
def test_the_library_keeps(rule: Rule, real_code: dict[str, list[Module]]) -> None:
    modules = real_code[PACKAGE]
    assert modules, "nothing was read: the checker looks in the wrong place"
    assert rule(modules) == []


@pytest.mark.parametrize("rule", TEST_RULES, ids=rule_name)
def test_the_tests_keep(rule: Rule, real_code: dict[str, list[Module]]) -> None:
    modules = real_code["tests"]
    assert modules
    assert rule(modules) == []


# ------------------------------------------------------------------------------ the checker

# In the files below, @ stands for the name of the package.
HEAD = '"""A module."""\n\n__all__: list[str] = []\n'

CLEAN = {
    "__init__.py": HEAD + "from @.bridge import use\n",
    "__main__.py": '"""Entry."""\nimport @\nfrom @.cli import main\n',
    "errors.py": HEAD,
    "manifest/__init__.py": HEAD + "from @.manifest import model\n",
    "manifest/model.py": HEAD + "from @.errors import Bad\n",
    "journal/__init__.py": HEAD + "from @ import errors, manifest\n",
    "transports/__init__.py": HEAD,
    "transports/base.py": HEAD,
    "transports/_wire.py": HEAD + "from @.transports.base import Transport\n",
    "transports/registry.py": HEAD + "def load():\n    import @.transports.one\n",
    "transports/one.py": HEAD + "from @.transports.base import Transport\n",
    "transports/two/__init__.py": HEAD + "from @.transports.two import inner\n",
    "transports/two/inner.py": HEAD + "from @.transports import _wire, base\n",
    "installers/__init__.py": HEAD + "import @.journal\n",
    "bridge/__init__.py": HEAD + "try:\n    x = 1\nexcept Exception:\n    x = 2\n    raise\n",
    "cli/__init__.py": HEAD + "import @.bridge, @.transports.registry\n",
}

IN_TRY = "try:\n    f()\nexcept"
IF_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
MUTE = check_no_swallowed_errors

PLANTED: dict[str, tuple[Rule, str, str]] = {
    "import-up": (check_layers, "errors.py", "import @.manifest"),
    "import-up-by-name": (check_layers, "journal/x.py", "from @ import bridge"),
    "import-up-late": (check_layers, "manifest/x.py", "def f():\n    from @.journal import y"),
    "import-up-for-types": (check_layers, "manifest/x.py", IF_TYPES + "import @.cli"),
    "import-of-the-facade": (check_layers, "bridge/x.py", "from @ import use"),
    "import-of-main": (check_layers, "__init__.py", "import @.__main__"),
    "import-sideways": (check_layers, "installers/x.py", "from @.transports.base import T"),
    "module-in-no-layer": (check_layers, "utils.py", ""),
    "transport-module": (check_transports, "transports/two/x.py", "from @.transports import one"),
    "transport-folder": (
        check_transports,
        "transports/x.py",
        "from @.transports.two.inner import y",
    ),
    "transport-in-base": (check_transports, "transports/base.py", "import @.transports.one"),
    "relative-import": (check_absolute_imports, "manifest/x.py", "from . import model"),
    "fragment": (check_fragments, "transports/one.py", ""),
    "circle": (check_circles, "errors.py", "import @.manifest"),
    "never": (check_nevers, "memory/x.py", "def f():\n    from @.cuda import y"),
    "missing-all": (check_faces_declare_their_names, "memory/__init__.py", ""),
    "private-name": (check_private_names_stay, "bridge/x.py", "from @.errors import _describe"),
    "missing-docstring": (check_docstrings, "memory/x.py", ""),
    "pickle": (check_no_pickle, "memory/x.py", "import pickle"),
    "late-pickle": (check_no_pickle, "memory/x.py", "def f():\n    from cloudpickle import dumps"),
    "part-of-dill": (check_no_pickle, "memory/x.py", "import dill.source as s"),
    "sleep": (check_no_sleep, "x.py", "import time\ntime.sleep(1)"),
    "sleep-by-alias": (check_no_sleep, "x.py", "import time as t\nwait = t.sleep"),
    "sleep-by-name": (check_no_sleep, "x.py", "from time import monotonic, sleep as s"),
    "bare-except": (MUTE, "bridge/x.py", IN_TRY + ":\n    raise"),
    "mute-except": (MUTE, "bridge/x.py", IN_TRY + " Exception:\n    pass"),
    "mute-except-in-tuple": (MUTE, "bridge/x.py", IN_TRY + " (OSError, BaseException):\n    ..."),
    "suppress": (
        MUTE,
        "bridge/x.py",
        "import contextlib as c\nwith c.suppress(Exception):\n    f()",
    ),
}
# A module that lacks something is planted whole; the others are a good module with a bad line.
WHOLE = {"missing-all": '"""A module."""\n__all__[:] = []', "missing-docstring": "__all__ = []"}


def build(root: Path, files: dict[str, str]) -> list[Module]:
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("@", PACKAGE), encoding="utf-8")
    return parse_tree(root, PACKAGE)


def full(files: dict[str, str]) -> dict[str, str]:
    """The same files, none of them a fragment."""
    return {name: text + "\n" * FRAGMENT_LINES for name, text in files.items()}


@pytest.mark.parametrize("rule", dict.fromkeys(LIBRARY_RULES + TEST_RULES), ids=rule_name)
def test_the_checker_accepts_a_clean_house(rule: Rule, tmp_path: Path) -> None:
    assert rule(build(tmp_path, full(CLEAN))) == []


@pytest.mark.parametrize("planted", PLANTED)
def test_the_checker_sees_a_planted(planted: str, tmp_path: Path) -> None:
    rule, name, line = PLANTED[planted]
    text = WHOLE.get(planted, f"{CLEAN.get(name, HEAD)}{line}\n")
    found = rule(build(tmp_path, full(CLEAN) | {name: text}))
    assert len(found) == 1, found
    assert found[0].startswith(f"{PACKAGE}/{name}:")


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _, _ in PLANTED.values()} == {*LIBRARY_RULES, *TEST_RULES}
