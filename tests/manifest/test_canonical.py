"""Canonical JSON: one text per value, and a frozen copy of whatever the user hands in."""

import json
from collections import OrderedDict
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.errors import MalformedManifest
from rl_bridge.manifest.canonical import canonical_json, decode_json, freeze, thaw

# Text with every kind of character: quotes, controls, beyond the basic plane, lone surrogates.
TEXT = st.text(st.characters(codec=None), max_size=8)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


class _Colour(IntEnum):
    RED = 3


@settings(deadline=None, max_examples=200)
@given(VALUES)
def test_text_is_the_same_there_and_back(value: object) -> None:
    text = canonical_json(value)
    found, end = decode_json(text)
    assert end == len(text)
    assert canonical_json(found) == text
    assert text.isascii()


@settings(deadline=None, max_examples=200)
@given(VALUES)
def test_freezing_and_thawing_keeps_the_text(value: object) -> None:
    assert canonical_json(thaw(freeze(value))) == canonical_json(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, None]}, '{"a":[true,null],"b":1}'),
        ("größe/\n\x7f", '"gr\\u00f6\\u00dfe/\\n\\u007f"'),
        ("𝄞", '"\\ud834\\udd1e"'),
        ([1, 1.0, 1e16, 1e-5, -0.0], "[1,1.0,1e+16,1e-05,-0.0]"),
        # By code point, where UTF-16 order would put the second key first.
        ({"\U0001d11e": 1, "\uffff": 2}, '{"\\uffff":2,"\\ud834\\udd1e":1}'),
    ],
    ids=["keys", "escapes", "surrogate-pair", "numbers", "order-of-keys"],
)
def test_the_text_of_an_example_is_fixed(value: object, text: str) -> None:
    assert canonical_json(value) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nul",
        '{"a":1,"a":1}',
        '{"b":{"a":1,"a":2}}',
        "NaN",
        "[Infinity]",
        "-Infinity",
        "1e999",
        "[-1e400]",
        "9" * 5000,
        "[" * 100_000,
        '{"a":' * 100_000,
    ],
    ids=lambda text: text[:14] or "empty",
)
def test_text_that_is_no_strict_json_is_malformed(text: str) -> None:
    with pytest.raises(MalformedManifest, match=r"manifest"):
        decode_json(text)


def test_many_repeated_keys_are_refused_in_time() -> None:
    # A hostile text must cost its reader no more than its own length: quadratic work here would
    # keep a publisher's peer busy for hours.
    text = "{" + ",".join(f'"{index // 2}":0' for index in range(100_000)) + "}"
    with pytest.raises(MalformedManifest, match="repeats the keys"):
        decode_json(text)


def test_decoding_starts_where_it_is_told_to() -> None:
    assert decode_json('xx{"a":[1]}yy', 2) == ({"a": [1]}, 11)


# ---- freezing -----------------------------------------------------------------------------------


def test_a_frozen_value_is_read_only_through_and_through() -> None:
    frozen = freeze({"a": {"b": [1, {"c": 2}]}})
    with pytest.raises(TypeError):
        frozen["a"] = 1
    with pytest.raises(TypeError):
        frozen["a"]["b"] = 1
    with pytest.raises(TypeError):
        frozen["a"]["b"][0] = 1
    with pytest.raises(TypeError):
        frozen["a"]["b"][1]["c"] = 1
    with pytest.raises(TypeError):
        del frozen["a"]


def test_changing_the_original_afterwards_changes_nothing() -> None:
    original: dict[str, Any] = {"a": {"b": [1, {"c": 2}]}, "flag": True}
    behind = {"a": 1}
    frozen, proxy = freeze(original), freeze(MappingProxyType(behind))
    behind["a"] = 2
    assert proxy["a"] == 1
    original["a"]["b"][1]["c"] = 3
    original["a"]["b"].append(4)
    original["new"] = 5
    thawed = thaw(frozen)
    assert thawed == {"a": {"b": [1, {"c": 2}]}, "flag": True}
    assert (type(thawed), type(thawed["a"]["b"]), thawed["flag"]) == (dict, list, True)


def test_subclasses_become_plain_values() -> None:
    frozen = freeze({"int": _Colour.RED, "float": np.float64(0.5), "map": OrderedDict(x=(1,))})
    assert type(frozen["int"]) is int
    assert type(frozen["float"]) is float
    assert json.dumps(thaw(frozen)) == '{"int": 3, "float": 0.5, "map": {"x": [1]}}'


def _nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


def test_thirty_two_levels_are_allowed_and_no_more() -> None:
    freeze(_nested(32))
    with pytest.raises(MalformedManifest, match="nested deeper than 32 levels"):
        freeze(_nested(33))


@pytest.mark.parametrize("value", ["text", True, None, 1, 1.5])
def test_what_is_nested_too_deep_in_mappings_is_refused_whatever_it_is(value: object) -> None:
    for _ in range(32):
        value = {"a": value}
    freeze(value)
    with pytest.raises(MalformedManifest, match="nested deeper than 32 levels"):
        freeze({"a": value})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1: 2}, r"metadata: key 1 is int, expected str"),
        ({"a": {None: 2}}, r"metadata\.a: key None is NoneType"),
        ({"a": float("nan")}, r"metadata\.a: nan cannot be written as JSON"),
        ({"a": [float("-inf")]}, r"metadata\.a\[\]: -inf"),
        ({"a": {1, 2}}, r"metadata\.a: set cannot travel"),
        ({"a": b"raw"}, r"metadata\.a: bytes cannot travel"),
        ({"a": [np.int64(1)]}, r"metadata\.a\[\]: int64 cannot travel"),
        ({"a": 10**5000}, r"metadata\.a: .*digits"),
    ],
    ids=["int-key", "none-key", "nan", "inf", "set", "bytes", "numpy-int", "huge-int"],
)
def test_what_json_cannot_carry_is_refused_by_its_place(value: object, said: str) -> None:
    with pytest.raises(MalformedManifest, match=said):
        freeze(value)
