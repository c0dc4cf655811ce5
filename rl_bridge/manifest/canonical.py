r"""Canonical JSON: equal content gives equal bytes, and nothing else is accepted.

The rules (normative page: ``docs/explanation/manifest-format.md``): keys sorted by code point, no
white space, ASCII only (everything else as ``\uXXXX``), no NaN or infinity, no duplicate keys.

A value is frozen while a model holds it (`freeze`), and plain while it is read or written. `Frozen`
is the base of the models that are written as such JSON.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from json.scanner import py_make_scanner  # type: ignore[attr-defined]  # it is not in the stubs
from types import MappingProxyType
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from rl_bridge.errors import MalformedManifest

RESEND = "Send what to_json() gave, as it is."
"""The remedy for text that somebody rewrote."""

# Any JSON value. Recursive aliases defeat pydantic and mypy in one place or the other, and every
# value of this type passes `freeze`, which checks it at run time.
JSONValue = Any

_MAX_DEPTH = 32
# Python neither reads nor writes longer integers (sys.set_int_max_str_digits).
_MAX_INT = 10**4300
_SHOWN = 5
# Types are looked up by identity: each update takes some hundred of these steps.
_CONSTANT = frozenset({str, bool, type(None)})
_PLAIN = _CONSTANT | {int, float}
_MAPPINGS = frozenset({dict, MappingProxyType})


def canonical_json(value: JSONValue) -> str:
    """Write `value`, plain or frozen, as canonical JSON text."""
    return _ENCODER.encode(value)


def _unproxied(value: object) -> dict[str, JSONValue]:
    if isinstance(value, MappingProxyType):
        return value.copy()
    raise TypeError(f"{type(value).__name__} is no JSON value")


_ENCODER = json.JSONEncoder(
    sort_keys=True,
    separators=(",", ":"),
    ensure_ascii=True,
    allow_nan=False,
    default=_unproxied,
)


def _no_constant(text: str) -> NoReturn:
    raise MalformedManifest(
        f"manifest JSON holds {text}, which is no JSON number. Remove it from the metadata."
    )


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # 1e999 reads as infinity, which could not be written again
        raise MalformedManifest(
            f"manifest JSON holds {text[:48]}, which is too large. Remove it from the metadata."
        )
    return value


def _unique(pairs: list[tuple[str, JSONValue]]) -> dict[str, JSONValue]:
    found = dict(pairs)
    if len(found) != len(pairs):
        times = Counter(key for key, _ in pairs)
        twice = sorted(key for key, count in times.items() if count > 1)
        raise MalformedManifest(
            f"manifest JSON repeats the keys {twice[:_SHOWN]}: two readers could read two "
            f"manifests. {RESEND}"
        )
    return found


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
)


# Reads long strings without the compiled scanner's look at each character. One that has a control
# character passes: who reads with this compares with the canonical text.
_LONG_DECODER: Any = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
)
_scan_string: Callable[[str, int, bool], tuple[str, int]] = _LONG_DECODER.parse_string


def _cut_string(text: str, start: int, strict: bool) -> tuple[str, int]:  # noqa: FBT001 - json calls it
    """Read a JSON string from behind its first quote: without escapes it is only cut out."""
    end = text.find('"', start)
    if end < 0 or text.find("\\", start, end) >= 0:
        return _scan_string(text, start, strict)
    return text[start:end], end + 1


_LONG_DECODER.parse_string = _cut_string
_LONG_DECODER.scan_once = py_make_scanner(_LONG_DECODER)


def decode_json(
    text: str, start: int = 0, *, has_long_strings: bool = False
) -> tuple[JSONValue, int]:
    """Parse one JSON value at `start` and return it with the index after it.

    If long strings are most of it, `has_long_strings` makes that faster; the caller then compares
    the text with the canonical one.
    """
    try:
        return (_LONG_DECODER if has_long_strings else _DECODER).raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise MalformedManifest(f"manifest text is no valid JSON: {error}. {RESEND}") from error


def _number(value: float, where: str) -> float:
    if isinstance(value, int):
        if -_MAX_INT < value < _MAX_INT:
            return int(value)
        raise MalformedManifest(
            f"{where}: an integer of over 4300 digits cannot be read again. Use a string."
        )
    if math.isfinite(value):
        return float(value)
    raise MalformedManifest(f"{where}: {value} cannot be written as JSON. Use None or a string.")


def freeze(value: JSONValue, *, where: str = "metadata", depth: int = 0) -> JSONValue:
    """Copy a JSON value into read-only form: mappings as proxies, lists as tuples."""
    if depth > _MAX_DEPTH:
        raise MalformedManifest(f"{where}: nested deeper than {_MAX_DEPTH} levels. Flatten it.")
    kind = type(value)
    if kind in _CONSTANT or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return _number(value, where)
    if kind in _MAPPINGS or isinstance(value, Mapping):
        frozen: dict[str, JSONValue] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise MalformedManifest(
                    f"{where}: key {key!r} is {type(key).__name__}, expected str. Write it as a "
                    "string."
                )
            # Most are plain: no `where` has to be made for them. (At the limit `freeze` refuses.)
            kind = type(item)
            is_plain = (
                kind in _CONSTANT
                or (kind is int and -_MAX_INT < item < _MAX_INT)
                or (kind is float and math.isfinite(item))
            )
            if is_plain and depth < _MAX_DEPTH:
                frozen[key] = item
            else:
                frozen[key] = freeze(item, where=f"{where}.{key}", depth=depth + 1)
        return MappingProxyType(frozen)
    if isinstance(value, list | tuple):
        return tuple(freeze(item, where=f"{where}[]", depth=depth + 1) for item in value)
    remedy = "Convert it, or leave it out."
    if callable(getattr(value, "tolist", None)):  # numpy's and torch's
        remedy = "Convert it: .item() gives a plain number, .tolist() a list."
    raise MalformedManifest(
        f"{where}: {type(value).__name__} cannot travel in a manifest, "
        f"expected str, int, float, bool, None, list or dict. {remedy}"
    )


def thaw(value: JSONValue) -> JSONValue:
    """Give plain dicts and lists for what `freeze` made."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _MAPPINGS or isinstance(value, Mapping):
        thawed: dict[str, JSONValue] = {}
        for key, item in value.items():
            thawed[key] = item if type(item) in _PLAIN else thaw(item)
        return thawed
    if isinstance(value, tuple):
        return [thaw(item) for item in value]
    return value


def plain(value: JSONValue, *, where: str) -> JSONValue:
    """Copy a JSON value into plain dicts and lists.

    Raises:
        MalformedManifest: as `freeze`.

    """
    return thaw(freeze(value, where=where))


FrozenJSON = Annotated[
    JSONValue, BeforeValidator(lambda value, info: freeze(value, where=info.field_name))
]
"""A field that holds any JSON value, frozen."""


class Frozen(BaseModel):
    """A model of which no attribute can be set or deleted, what it computed included.

    That guards against mistakes. Python code that wants to can reach behind any object.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    def __setattr__(self, name: str, value: Any) -> None:
        self.__delattr__(name)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            f"{type(self).__name__}.{name} cannot be changed: it never changes once it is made."
        )


_EXPECTED = "Input should be "  # as pydantic begins most of its messages


def malformed(what: str, error: ValidationError, remedy: str = RESEND) -> MalformedManifest:
    """Pydantic's error as one of ours, about `what`."""
    return MalformedManifest(f"{what} {field_problem(error)}. {remedy}")


def field_problem(error: ValidationError) -> str:
    """The first problem that pydantic found: which field, what was expected, what was given."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "(the whole)"
    return f"field {where}: {problem_words(first)}"


def problem_words(found: Mapping[str, Any]) -> str:
    """One of pydantic's problems in our words: what was expected, and what was given."""
    if found["type"] == "missing":
        return "it is missing"
    if found["type"] == "value_error":
        return str(found["msg"]).removeprefix("Value error, ").removesuffix(".")
    wrong = "no such field" if found["type"] == "extra_forbidden" else str(found["msg"])
    if wrong.startswith(_EXPECTED):
        expected = wrong.removeprefix(_EXPECTED).partition(",")[0]
        wrong = f"expected {expected.replace('greater than or equal to', 'at least')}"
    return f"{wrong}, got {repr(found.get('input'))[:80]}"
