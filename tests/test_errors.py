"""The tree of errors: as its docstring draws it, each documented, each raised by someone."""

import ast
import re
from collections.abc import Iterator

import pytest

from rl_bridge import errors
from tests.raise_sites import errors_raised, modules, said, says_a_remedy

KNOWN = frozenset(errors.__all__)


def tree() -> Iterator[type[Exception]]:
    """Every class of ours, parents first."""
    waiting: list[type[Exception]] = [errors.WeightBridgeError]
    while waiting:
        kind = waiting.pop(0)
        yield kind
        waiting[:0] = [
            child for child in kind.__subclasses__() if child.__module__ == errors.__name__
        ]


def drawn() -> dict[str, str]:
    """Name -> parent, as the docstring draws it."""
    parents: list[str] = []
    found = {}
    block = (errors.__doc__ or "").split("::")[1].split("Each message")[0]
    for line in block.splitlines():
        match = re.match(r"    ((?:[│ ]   )*)(?:[├└]── )?([A-Z]\w+)(?:\((\w+)\))?", line)
        if match:
            depth = len(match[1]) // 4 + ("── " in line)
            parents[depth:] = [match[2]]
            found[match[2]] = parents[depth - 1] if depth else (match[3] or "")
    return found


# ---- the tree -----------------------------------------------------------------------------------


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    real = {
        kind.__name__: next(
            base.__name__ for base in kind.__mro__[1:] if issubclass(base, Exception)
        )
        for kind in tree()
    }
    assert drawn() == real


def test_every_class_is_public_documented_and_listed() -> None:
    names = {kind.__name__ for kind in tree()}
    assert set(errors.__all__) == names
    assert errors.__all__ == sorted(errors.__all__)
    for kind in tree():
        assert (kind.__doc__ or "").strip(), kind


def test_every_error_of_ours_is_a_runtime_error() -> None:
    assert all(issubclass(kind, RuntimeError) for kind in tree())
    assert issubclass(errors.DeadlineExceeded, TimeoutError)


def test_a_blocked_transport_keeps_cause_and_remedy_apart() -> None:
    error = errors.TransportUnavailable("pigeon", "no wings", "Use a horse.")
    assert (error.transport, error.cause, error.remedy) == ("pigeon", "no wings", "Use a horse.")
    assert str(error) == "transport 'pigeon' is blocked: no wings. Use a horse."


# ---- each of them is raised ---------------------------------------------------------------------


def test_every_error_is_made_somewhere() -> None:
    made = {
        node.func.id
        for _, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    bases = {"WeightManifestValidationError"}  # only its subclasses are raised: one per reason
    assert KNOWN - bases - made == set()


def test_every_error_that_the_library_raises_is_in_the_tree() -> None:
    builtins = {"ValueError", "TypeError", "KeyError", "OSError", "RuntimeError", "StopIteration"}
    builtins |= {
        "AgentError",
        "HungUp",
        "MemoryRefused",
        "TornRead",
        "SpeaksPlain",
        "ImportError",
    }  # said within a transport
    builtins.add("HTTPException")  # said within a side-car
    builtins.add("AttributeError")  # what Python itself raises for an attribute of a frozen value
    known = {kind.__name__ for kind in tree()}
    strangers = {
        f"{path}:{line} raises {name}"
        for path, module in modules()
        for line, name, _ in errors_raised(module)
        if name[:1].isupper() and name not in known | builtins
    }
    assert not strangers


# ---- each of them says what to do ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tensor 'w' is a list, expected a tensor. Leave it out of the state dict.", True),
        ("the engine must not serve: call recover().", True),
        ("update x: the publisher has not released it (call release)", True),
        ("unknown transport 'pigeon', expected one of: local-clone.", True),
        ("tensor 'w' is a list, expected a tensor.", False),
        ("publish got a list, which nobody can publish.", False),
        ("names must be unique, and useful.", False),
        ("the engine failed: callbacks were lost.", False),
    ],
)
def test_a_remedy_is_told_from_a_description(text: str, expected: bool) -> None:
    assert says_a_remedy(text) is expected


# What tells nobody what to do itself: module, part of the text, and why nobody needs it there.
NO_REMEDY = {
    ("memory/packing.py", "tensor {} {}."): "the reason that is filled in ends in what to do",
    ("installers/snapshot.py", "of the engine {};"): "so does this one",
    ("installers/wrapped.py", "and cannot now: {}"): "the error that is filled in says it",
    ("manifest/compare.py", "{}"): "each finding says it",
}
# Parts of messages that lack it still. Whoever gives one its remedy takes its line away here.
YET_TO_SAY = [
    "Names must be unique",
    "they are gone",
    "tensors that the update does not hold",
    "expected a module, a state dict or chunks",
    "expected str",
    "names for",
    "was copied back",
    "the engine does not hold version",
    "not take back what was there",
    "installs what bridge.import_update returned",
    "expected an int of 0 or more",
    "this publisher did not publish it",
]


def lacks_a_remedy(text: str) -> bool:
    """Whether a message leaves its reader alone, and is not known to."""
    return not says_a_remedy(text) and not any(part in text for part in YET_TO_SAY)


def test_every_message_says_what_to_do() -> None:
    silent = [row for row in said(KNOWN) if lacks_a_remedy(row[2])]
    excused = {
        row for row in silent for path, part in NO_REMEDY if row[0] == path and part in row[2]
    }
    assert not set(silent) - excused, "\n".join(
        f"{path}:{line}: {text}" for path, line, text in silent if (path, line, text) not in excused
    )
    assert len(excused) >= len(NO_REMEDY), "an excuse that nobody needs any more"


def test_the_messages_are_found_where_they_are_raised() -> None:
    # Should the way of raising change, the test above must not go blind.
    texts = [text for _, _, text in said(KNOWN)]
    assert len(texts) > 100
    assert sum("{}" in text for text in texts) > 50
