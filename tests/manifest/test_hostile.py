"""Damaged and hostile manifest texts: each is refused with its own error."""

import base64
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge import WeightUpdateManifest
from rl_bridge.errors import (
    DigestMismatch,
    LayoutUnknown,
    MalformedManifest,
    OverlappingRange,
    RangeOverflow,
    WeightManifestValidationError,
)
from rl_bridge.manifest.canonical import canonical_json
from tests.helpers import assemble, forget_layouts, make_manifest, make_table

# bias float32[5] at 0, weight bfloat16[3, 5] at 256, head tied to weight.
MANIFEST = make_manifest(
    make_table(ties={"head": "weight"}), metadata={"step": 1}, handle={"slot": 1}
)
TEXT = MANIFEST.to_json()
HEADER = MANIFEST.header()
LAYOUT = MANIFEST.table.document()
DIGESTS = HEADER["digests"]


def read(text: str | bytes) -> WeightUpdateManifest:
    with forget_layouts():
        return WeightUpdateManifest.from_json(text)


def refused(text: str | bytes, error: type[Exception], said: str) -> None:
    with pytest.raises(WeightManifestValidationError, match=said) as caught:
        read(text)
    assert type(caught.value) is error


def without(document: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != key}


def test_the_text_before_it_is_damaged_is_fine() -> None:
    assert read(TEXT) == MANIFEST
    assert assemble(HEADER, LAYOUT) == TEXT
    assert assemble(HEADER, None) == MANIFEST.to_json(layout=False)


# ---- the text as a whole ------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda _: "", "no manifest of format rl_bridge.manifest/3"),
    "not-json": (lambda _: "weights.safetensors", "no manifest of format"),
    "cut-off": (lambda t: t[:30], "and was cut off"),
    "a-path": (lambda _: "/mnt/run/manifest.json", "Path.*read_text"),
    "other-format": (lambda t: t.replace("manifest/3", "manifest/4"), "same rl_bridge release"),
    "no-format": (lambda t: "{" + t[t.index('"header"') :], "no manifest of format"),
    "leading-space": (lambda t: " " + t, "no manifest of format"),
    "pretty": (lambda t: t.replace(":", ": "), "no manifest of format"),
    "trailing-word": (lambda t: t + "\nok", "expected its layout or the end"),
    "trailing-form-feed": (lambda t: t + "\f", "expected its layout or the end"),
    "trailing-text": (lambda t: t + "x", "expected its layout or the end"),
    "truncated": (lambda t: t[:-2], "expected its layout or the end"),
    "truncated-header": (lambda t: t[: len(t) // 3], "no valid JSON"),
    "header-null": (lambda _: '{"format":"rl_bridge.manifest/3","header":null}', "no JSON object"),
    "header-list": (lambda _: '{"format":"rl_bridge.manifest/3","header":[]}', "no JSON object"),
    "space-in-header": (lambda t: t.replace('"root":', '"root": '), "not canonical JSON"),
    "unsorted-header": (
        lambda t: t.replace('"source_rank":0,', "").replace('"root"', '"source_rank":0,"root"'),
        "not canonical JSON",
    ),
    "duplicate-key": (
        lambda t: t.replace('"source_rank":0', '"source_rank":0,"source_rank":0'),
        "repeats the keys .'source_rank'.",
    ),
    "duplicate-metadata-key": (lambda t: t.replace('"step":1', '"step":1,"step":2'), "'step'"),
    "escaped-letter": (lambda t: t.replace('"trainer"', '"\\u0074rainer"'), "not canonical JSON"),
    "upper-case-escape": (lambda t: t.replace('"trainer"', '"\\u00FC"'), "not canonical JSON"),
    "number-with-exponent": (lambda t: t.replace("1700000000.25", "1.70000000025e9"), "canonical"),
    "number-with-plus-zero": (lambda t: t.replace("1700000000.25", "1700000000.250"), "canonical"),
    "nan": (lambda t: t.replace("1700000000.25", "NaN"), "NaN, which is no JSON number"),
    "infinity": (lambda t: t.replace("1700000000.25", "Infinity"), "Infinity"),
    "huge-float": (lambda t: t.replace("1700000000.25", "1e999"), "1e999"),
    "huge-int": (lambda t: t.replace('"step":1', '"step":' + "9" * 5000), "no valid JSON"),
    "deep": (lambda t: t.replace('"step":1', '"step":' + "[" * 99999 + "]" * 99999), "JSON"),
    "nested-too-deep": (lambda t: t.replace('"step":1', '"s":' + "[" * 40 + "]" * 40), "32 levels"),
    "no-layout-key": (lambda t: t.replace(',"layout":', ',"layouts":'), "expected its layout"),
    "something-after-header": (lambda t: t.replace(',"layout":', ',"x":1,"layout":'), "its layout"),
}


@pytest.mark.parametrize("case", CASES)
def test_text_that_is_not_the_canonical_text_is_malformed(case: str) -> None:
    damage, said = CASES[case]
    assert damage(TEXT) != TEXT
    refused(damage(TEXT), MalformedManifest, said)


@pytest.mark.parametrize(
    "text",
    [TEXT.replace("trainer", "größe"), TEXT.encode() + b"\xff", TEXT.replace("trainer", "\ud800")],
    ids=["text", "bytes", "surrogate"],
)
def test_text_beyond_ascii_is_malformed(text: str | bytes) -> None:
    refused(text, MalformedManifest, "not ASCII.*Send what to_json")


# ---- the header ---------------------------------------------------------------------------------


@pytest.mark.parametrize("field", sorted(HEADER))
def test_a_missing_field_is_named(field: str) -> None:
    refused(assemble(without(HEADER, field), LAYOUT), MalformedManifest, field)


@pytest.mark.parametrize(
    "field", ["table", "self", "tensors", "extra", "__class__", "model_config"]
)
def test_an_unknown_field_is_named(field: str) -> None:
    refused(assemble(HEADER | {field: 1}, LAYOUT), MalformedManifest, field)


WRONG_FIELDS: list[tuple[str, object]] = [
    ("created_at", 1700000000),
    ("created_at", "now"),
    ("digests", "&&&&"),
    ("digests", "größe"),
    ("digests", 5),
    ("digests", None),
    ("digests", DIGESTS + "="),
    ("digests", DIGESTS[:-1]),
    ("digests", DIGESTS.replace("A", "A\n", 1)),
    ("handle", None),
    ("handle", [1]),
    ("handle", "fd:3"),
    ("layout_digest", 5),
    ("metadata", None),
    ("metadata", []),
    ("metadata", {"layout": []}),
    ("metadata", {"layout": {"rank": True}}),
    ("publisher_id", "B" * 32),
    ("publisher_id", "b" * 31),
    ("root", None),
    ("root", ""),
    ("root", 7),
    ("source_rank", -1),
    ("source_rank", True),
    ("source_rank", 0.0),
    ("source_rank", "0"),
    ("source_worker", None),
    ("transport", 1),
    ("update_id", "../../../etc/passwd"),
    ("update_id", "a" * 32 + "\n"),
    ("update_id", 5),
    ("weight_version", -1),
    ("weight_version", 2**63),
    ("weight_version", 10**4000),
    ("weight_version", 3.0),
    ("weight_version", True),
]


def _case(field: str, value: object) -> str:
    text = repr(value)
    return f"{field}={text if len(text) < 20 else text[:9] + '...' + text[-9:]}"


@pytest.mark.parametrize(
    ("field", "value"), WRONG_FIELDS, ids=[_case(*item) for item in WRONG_FIELDS]
)
def test_a_field_of_the_wrong_type_or_range_is_named(field: str, value: object) -> None:
    text = assemble(HEADER | {field: value}, LAYOUT)
    if field == "layout_digest":  # `assemble` would put the right one
        text = TEXT.replace(f'"{MANIFEST.layout_digest}"', "5")
    # A whole number for a float is the one thing that parses: only its text is not canonical.
    refused(text, MalformedManifest, "not canonical" if value == 1700000000 else field)


def test_base64_with_stray_bits_is_malformed() -> None:
    # 32 bytes end in "...x=": the last digit has two bits that decode to nothing.
    stray = DIGESTS[:-2] + chr(ord(DIGESTS[-2]) + 1) + "="
    assert base64.b64decode(stray) == MANIFEST.digests
    refused(assemble(HEADER | {"digests": stray}, LAYOUT), MalformedManifest, "not canonical")


def test_base64_of_the_other_alphabet_is_malformed() -> None:
    other = base64.urlsafe_b64encode(b"\xfb" * 32).decode()
    text = assemble(HEADER | {"digests": other}, LAYOUT)
    refused(text, MalformedManifest, "digests is not canonical base64")


LONG = make_manifest(make_table(), metadata={"digests": '"\\\n\u00e9', "note": "x" * (1 << 19)})
LONG_CASES = {
    "control-character": ('"note":"x', '"note":"\t', "not canonical JSON"),
    "escape": ('"note":"x', '"note":"\\u0078', "not canonical JSON"),
    "repeated-key": ('"note":"x', '"note":"","note":"x', "repeats the keys"),
    "open-string": ('xx"', "xx", "no valid JSON"),
}


def test_a_manifest_of_long_text_is_read_back() -> None:
    assert read(LONG.to_json()) == LONG
    assert read(LONG.to_json()).to_json() == LONG.to_json()


@pytest.mark.parametrize("case", LONG_CASES)
def test_long_text_that_is_not_canonical_is_malformed(case: str) -> None:
    sound, damaged, said = LONG_CASES[case]
    refused(LONG.to_json().replace(sound, damaged), MalformedManifest, said)


def test_layout_metadata_without_its_defaults_is_malformed() -> None:
    # Accepting it would give one manifest two texts.
    for metadata in ({"step": 1}, {"layout": {}, "step": 1}):
        text = assemble(HEADER | {"metadata": metadata}, LAYOUT)
        refused(text, MalformedManifest, "not canonical")


def with_digests(digests: bytes) -> str:
    return assemble(HEADER | {"digests": base64.b64encode(digests).decode()}, LAYOUT)


@pytest.mark.parametrize("num", [0, 1, 3])
def test_a_wrong_number_of_digests_is_malformed(num: int) -> None:
    refused(with_digests(bytes(16 * num)), MalformedManifest, f"{16 * num} bytes, expected 32")


ALTERED: dict[str, tuple[str, str]] = {
    "root": (TEXT.replace(MANIFEST.root, "0" * 32), "version 3.*root.*altered"),
    "digest": (with_digests(bytes([MANIFEST.digests[0] ^ 1]) + MANIFEST.digests[1:]), "root"),
    "layout": (TEXT.replace('"offsets":[0,256]', '"offsets":[0,257]'), "digest is .* names"),
    "shorter-layout": (TEXT[:-1], "altered"),
    "longer-layout": (TEXT + "}", "altered"),
}


@pytest.mark.parametrize("case", ALTERED)
def test_what_was_altered_does_not_belong_to_the_digest_that_names_it(case: str) -> None:
    text, said = ALTERED[case]
    refused(text, DigestMismatch, said)


# ---- the layout ---------------------------------------------------------------------------------


def test_an_altered_layout_is_refused_also_where_the_layout_is_known() -> None:
    with forget_layouts():
        WeightUpdateManifest.from_json(TEXT)
        with pytest.raises(DigestMismatch):
            WeightUpdateManifest.from_json(TEXT.replace('"bias"', '"bios"'))


def test_a_layout_with_a_digest_of_its_own_still_needs_the_root() -> None:
    renamed = LAYOUT | {"names": ["bios", "weight"]}
    refused(assemble(HEADER, renamed), DigestMismatch, "root")
    changes: list[dict[str, object]] = [
        {"dtypes": ["int32", "bfloat16"]},
        {"shapes": [[1, 5], [3, 5]]},
        {"ties": {}},
    ]
    for change in changes:
        refused(assemble(HEADER, LAYOUT | change), DigestMismatch, "root")


@pytest.mark.parametrize("field", sorted(LAYOUT))
def test_a_missing_layout_field_is_malformed(field: str) -> None:
    refused(
        assemble(HEADER, without(LAYOUT, field)), MalformedManifest, "ties|leaves out|missing|canon"
    )


@pytest.mark.parametrize("field", ["self", "extra", "digest", "rows"])
def test_an_unknown_layout_field_is_named(field: str) -> None:
    refused(assemble(HEADER, LAYOUT | {field: {}}), MalformedManifest, field)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arena_nbytes": True}, "arena_nbytes"),
        ({"arena_nbytes": 512.0}, "arena_nbytes"),
        ({"arena_nbytes": "512"}, "arena_nbytes"),
        ({"device": None}, "device"),
        ({"dtypes": "float32"}, "dtypes"),
        ({"dtypes": [None, "int8"]}, "dtypes.0"),
        ({"names": ["bias", 3]}, "names.1"),
        ({"names": {"bias": 1}}, "names"),
        ({"nbytes": [20, None]}, "nbytes.1"),
        ({"offsets": [False, 256]}, "offsets.0"),
        ({"shapes": [[5], [3, 5.0]]}, "shapes.1.1"),
        ({"shapes": [[5], 15]}, "shapes.1"),
        ({"shapes": [[5], [[3], 5]]}, "shapes.1.0"),
        ({"trainable": 11}, "trainable"),
    ],
    ids=str,
)
def test_a_layout_field_of_the_wrong_type_is_named(change: dict[str, object], said: str) -> None:
    refused(assemble(HEADER, LAYOUT | change), MalformedManifest, said)


def test_a_damaged_layout_keeps_its_own_error_through_the_text() -> None:
    changes: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"offsets": [0, 0]}, OverlappingRange, "'weight'"),
        ({"shapes": [[10**4000], [3, 5]]}, RangeOverflow, "'bias'"),
        ({"names": ["weight", "bias"]}, MalformedManifest, "sorted"),
    ]
    for change, error, said in changes:
        refused(assemble(HEADER, LAYOUT | change), error, said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("null", "layout"),
        ("[]", "layout"),
        ("{}", "layout|Field"),
        (canonical_json(LAYOUT).replace(":", ": "), "canonical|layout"),
        (canonical_json(LAYOUT)[:-1] + ',"ties":{}}', "repeats the keys"),
        (canonical_json(LAYOUT).replace("512", "1e999"), "1e999"),
        (canonical_json(LAYOUT).replace("[5]", "[" * 99999), "JSON"),
        (canonical_json(LAYOUT) + " ", "canonical|layout"),
    ],
    ids=["null", "list", "empty", "spaces", "duplicate", "infinite", "deep", "trailing"],
)
def test_layout_text_that_is_not_canonical_is_malformed(text: str, said: str) -> None:
    refused(assemble(HEADER, text), MalformedManifest, said)


# ---- compact ------------------------------------------------------------------------------------


def test_a_compact_text_of_an_unknown_layout_says_what_to_send() -> None:
    refused(MANIFEST.to_json(layout=False), LayoutUnknown, "one full manifest.*layout=True")


def test_a_compact_text_that_names_another_known_layout_does_not_get_through() -> None:
    other = make_table({"x": ("int8", (1,)), "y": ("int8", (1,))})
    compact = MANIFEST.to_json(layout=False).replace(MANIFEST.layout_digest, other.digest)
    with forget_layouts():
        WeightUpdateManifest.from_json(make_manifest(other).to_json())
        with pytest.raises(DigestMismatch, match="root"):
            WeightUpdateManifest.from_json(compact)


# ---- depth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["header", "layout"])
def test_no_depth_of_nesting_escapes_as_a_recursion_error(part: str) -> None:
    # Between what the decoder takes and what everything behind it takes lie a few levels only.
    layout = canonical_json(LAYOUT | ({"device": "@"} if part == "layout" else {}))
    base = assemble(HEADER | ({"transport": "@"} if part == "header" else {}), layout)
    limit = sys.getrecursionlimit()
    for depth in range(limit - 150, limit + 5):
        value = "[" * depth + "1" + "]" * depth
        if part == "header":
            text = base.replace('"@"', value)
        else:
            text = assemble(HEADER, layout.replace('"@"', value))
        refused(text, MalformedManifest, "manifest")


# ---- whatever else ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_any_single_damage_is_refused_by_a_typed_error(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(TEXT) - 1))
    kind = data.draw(st.sampled_from(["change", "drop", "insert", "cut"]))
    letter = data.draw(st.characters(min_codepoint=32, max_codepoint=126))
    damaged = {
        "change": TEXT[:at] + letter + TEXT[at + 1 :],
        "drop": TEXT[:at] + TEXT[at + 1 :],
        "insert": TEXT[:at] + letter + TEXT[at:],
        "cut": TEXT[:at],
    }[kind]
    if damaged == TEXT:
        return
    try:
        found = read(damaged)
    except WeightManifestValidationError:
        return
    # Only what the digests do not cover may differ, and then the text is that manifest's own.
    assert found.to_json() == damaged
    assert (found.root, found.table, found.digests) == (
        MANIFEST.root,
        MANIFEST.table,
        MANIFEST.digests,
    )
