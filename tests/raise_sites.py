"""Reads, without running it, what the library raises and which words it raises it with."""

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import rl_bridge

__all__ = ["errors_raised", "messages", "modules", "said", "says_a_remedy"]

ROOT = Path(rl_bridge.__file__).parent
LAYERS = [
    *("manifest", "lifecycle.py", "journal.py", "memory", "cuda", "transports", "trainers"),
    *(
        "installers",
        "assembly",
        "bridge",
        "groups",
        "strategies",
        "engines",
        "hooks.py",
        "ray",
        "remote",
    ),
]
"""Those that users call."""

_VERBS = (
    "add|allow|ask|call|cast|check|choose|close|convert|copy|cut|do|drop|export|extract|fix|flatten"
    "|free|get|give|import|increment|install|join|keep|leave|let|load|lower|make|mend|move|name"
    "|open|pass|publish|put|raise|read|register|reject|release|remove|restart|restore|run|see"
    "|send|set|split|start|stop|take|tell|tie|try|update|upgrade|use|wait|wrap|write"
)
# What to do begins a sentence or a clause. Or the reader sees all that there is to choose from, or
# is asked what nobody else can know.
_REMEDY = re.compile(
    rf"(?:[.:;] |\(|, or )(?:{_VERBS})\b|expected one of|allowed now|\?$", re.IGNORECASE
)


def says_a_remedy(text: str) -> bool:
    """Whether a message tells its reader to do something."""
    return _REMEDY.search(text) is not None


@cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    """Every module of `LAYERS`, by its path; each is read once."""
    return tuple(
        (str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8")))
        for layer in LAYERS
        for path in _files(ROOT / layer)
    )


def _files(layer: Path) -> list[Path]:
    if not layer.exists():
        raise FileNotFoundError(f"{layer}: LAYERS names what the library does not have")
    return sorted(layer.rglob("*.py")) if layer.is_dir() else [layer]


@cache
def _assigned(module: ast.Module) -> tuple[tuple[int, str, ast.expr], ...]:
    """Line, name and value of everything that a module assigns to a plain name."""
    return tuple(
        (node.lineno, node.targets[0].id, node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    )


@cache
def _functions(module: ast.Module) -> dict[str, ast.FunctionDef]:
    """The functions of a module by name; of two of one name, the first."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, node)
    return found


def errors_raised(module: ast.Module) -> Iterator[tuple[int, str, list[ast.expr]]]:
    """Line, class and arguments of each new error that a module raises."""
    for node in ast.walk(module):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield node.lineno, getattr(node.exc.func, "id", ""), node.exc.args


def messages(module: ast.Module, known: Collection[str]) -> Iterator[tuple[int, str]]:
    """Line and text of every message that a module raises one of the `known` errors with."""
    steps: list[tuple[int, ast.expr | tuple[str, list[ast.expr]]]] = [
        (line, value) for line, name, value in _assigned(module) if name == "msg"
    ]
    steps += [(line, (name, args)) for line, name, args in errors_raised(module)]
    said: list[ast.expr] = []
    for line, step in sorted(steps, key=lambda pair: pair[0]):
        if isinstance(step, ast.expr):
            said.append(step)
            continue
        name, args = step
        # TransportUnavailable takes its remedy as an argument of its own.
        if name in known and len(args) == 1:
            for value in said if ast.unparse(args[0]) == "msg" else args:
                if not _is_handed_on(value, module):
                    yield from ((line, text) for text in _forms(value, module))
        said = []


@cache
def said(known: frozenset[str]) -> tuple[tuple[str, int, str], ...]:
    """Module, line and text of every message that the library raises a `known` error with."""
    return tuple(
        (path, line, text) for path, module in modules() for line, text in messages(module, known)
    )


def _is_handed_on(value: ast.expr, module: ast.Module) -> bool:
    """Whether it is another error's message, or one that came in from elsewhere, as it is."""
    if isinstance(value, ast.Name):
        return _text(value, module) == "{}"
    if isinstance(value, ast.JoinedStr):
        # Where it comes from is put before it, and nothing is said about it.
        *_, joint, last = [ast.Constant(""), *value.values]
        is_error = isinstance(last, ast.FormattedValue) and ast.unparse(last.value) == "error"
        return is_error and ast.unparse(joint) == "': '"
    return ast.unparse(value) == "str(error)"


def _forms(value: ast.expr, module: ast.Module) -> list[str]:
    """Every form that a message can take; of one that a function makes, whatever it returns."""
    if isinstance(value, ast.IfExp):
        return _forms(value.body, module) + _forms(value.orelse, module)
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func).split(".")[-1]
        for other in [module, *(other for _, other in modules())]:
            if node := _functions(other).get(name):
                ends = [end.value for end in ast.walk(node) if isinstance(end, ast.Return)]
                return [text for end in ends if end for text in _forms(end, other)]
        return [ast.unparse(value)]
    return [_text(value, module)]


def _text(value: ast.expr, module: ast.Module) -> str:
    """Literal text with what its module assigns to names filled in, and other values left open."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part, module) for part in value.values)
    if isinstance(value, ast.BinOp):
        return _text(value.left, module) + _text(value.right, module)
    if isinstance(value, ast.FormattedValue) and isinstance(value.value, ast.Name):
        value = value.value
    if isinstance(value, ast.Name):
        found = _assigned(module)
        if value.id.isupper() and value.id not in {name for _, name, _ in found}:
            # A constant that another module of the library defines, such as a remedy.
            found = tuple(one for _, other in modules() for one in _assigned(other))
        for _, name, assigned in found:
            if name == value.id:
                return " | ".join(_forms(assigned, module)) if _is_text(assigned) else "{}"
    return "{}"


def _is_text(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, str)
    return isinstance(value, ast.JoinedStr | ast.IfExp)
