"""The manifest: canonical there and back, a golden file, immutable, itself through every copy."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rl_bridge import TensorDescriptor, WeightLayout, WeightUpdateManifest
from rl_bridge.errors import (
    DigestMismatch,
    MalformedManifest,
    WeightManifestValidationError,
)
from rl_bridge.manifest.digest import digest_bytes
from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.manifest.model import LayoutCache
from rl_bridge.manifest.table import TensorTable
from tests.helpers import forget_layouts, make_manifest, make_table

GOLDEN = Path(__file__).parent / "golden"
# Lone surrogates too: a str may hold them, and JSON can say them.
TEXT = st.text(st.characters(codec=None), max_size=8)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
IDS = st.text("0123456789abcdef", min_size=32, max_size=32)


@st.composite
def manifests(draw: st.DrawFn) -> WeightUpdateManifest:
    tensors = draw(
        st.dictionaries(
            TEXT,
            st.tuples(
                st.sampled_from(sorted(DTYPE_NBYTES)),
                st.lists(st.integers(0, 2000), max_size=3).map(tuple),
            ),
            min_size=1,
            max_size=5,
        )
    )
    free = draw(st.sets(TEXT, max_size=2)) - tensors.keys()
    ties = {name: draw(st.sampled_from(sorted(tensors))) for name in sorted(free)}
    trainable = draw(st.none() | st.frozensets(st.sampled_from(sorted(tensors))))
    table = TensorTable.pack(tensors, ties=ties, trainable=trainable)
    metadata = draw(st.dictionaries(TEXT.filter(lambda key: key != "layout"), JSON, max_size=3))
    return WeightUpdateManifest(
        update_id=draw(IDS),
        publisher_id=draw(IDS),
        source_worker=draw(TEXT),
        source_rank=draw(st.integers(0, 2**31)),
        weight_version=draw(st.integers(0, 2**63 - 1)),
        transport=draw(TEXT),
        created_at=draw(st.floats(0, 4e9)),
        metadata=metadata,
        handle=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        digests=draw(st.binary(min_size=16 * len(tensors), max_size=16 * len(tensors))),
        table=table,
    )


@settings(deadline=None, max_examples=150)
@given(manifests())
def test_the_text_is_the_same_there_and_back(manifest: WeightUpdateManifest) -> None:
    text = manifest.to_json()
    with forget_layouts():
        again = WeightUpdateManifest.from_json(text)
        compact = again.to_json(layout=False)
        from_compact = WeightUpdateManifest.from_json(compact.encode("ascii"))
    assert again == from_compact == manifest
    assert again.to_json() == from_compact.to_json() == text
    assert from_compact.to_json(layout=False) == compact
    assert hash(again) == hash(manifest)
    document = json.loads(text)
    assert text == json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    assert list(document) == ["format", "header", "layout"]
    assert text.isascii()
    assert text.isprintable()


# ---- golden files -------------------------------------------------------------------------------


def golden_manifest() -> WeightUpdateManifest:
    """The example of the normative page: five tensors, one empty, one without dimensions, a tie."""
    tensors = {
        "bias": ("float32", (2,), "0000803f000000c0"),
        "empty": ("int64", (0, 3), ""),
        "größe": ("uint8", (3,), "010203"),
        "norm.scale": ("float32", (), "0000003f"),
        "wte": ("bfloat16", (2, 3), "803f004040408040a040c040"),
    }
    table = TensorTable.pack(
        {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()},
        ties={"lm_head": "wte"},
        trainable=frozenset({"bias", "wte"}),
        leaves=True,
    )
    return WeightUpdateManifest(
        update_id="0123456789abcdef0123456789abcdef",
        publisher_id="fedcba9876543210fedcba9876543210",
        source_worker="trainer",
        source_rank=0,
        weight_version=7,
        transport="local-clone",
        created_at=1750000000.25,
        metadata={"step": 7},
        digests=b"".join(digest_bytes(bytes.fromhex(data)) for _, _, data in tensors.values()),
        table=table,
    )


def hostile_but_valid_manifest() -> WeightUpdateManifest:
    """Every kind of value that the format allows."""
    return make_manifest(
        make_table({"": ("complex128", (0,)), 'a\n"\\/\x7f\U0001d11e': ("bool", (3,))}),
        source_worker="tr\u00e4n\u0435\u0440\u2028",
        source_rank=2**40,
        weight_version=2**63 - 1,
        transport="shared-memory",
        metadata={
            "z": [None, True, False, -1, 10**30, 1.0, -0.0, 1e-7, 1e22],
            "ключ": {"": {}},
            "layout": {"world_size": 4, "rank": 2, "pipeline_parallel_size": 2},
        },
        handle={"slot": {"inode": 2**62, "name": ""}},
    )


@pytest.mark.parametrize(
    ("name", "make"),
    [("example", golden_manifest), ("every_value", hostile_but_valid_manifest)],
    ids=["example", "every_value"],
)
def test_the_bytes_of_the_format_do_not_change(name: str, make: Any) -> None:
    # A difference here is a new format: change FORMAT and the normative page first.
    text = (GOLDEN / f"{name}.json").read_text("ascii").removesuffix("\n")
    assert make().to_json() == text
    with forget_layouts():
        assert WeightUpdateManifest.from_json(text) == make()


# ---- what a manifest tells ----------------------------------------------------------------------


def test_a_manifest_says_what_it_is() -> None:
    manifest = make_manifest(make_table(ties={"head": "weight"}))
    assert manifest.tensor_count == 3
    assert manifest.total_nbytes == 50
    assert set(manifest.tensors) == {"bias", "weight", "head"}
    assert isinstance(manifest.tensors["bias"], TensorDescriptor)
    assert manifest.tensors["bias"].checksum == manifest.digests[:16].hex()
    assert manifest.layout_digest == manifest.table.digest
    assert manifest.weight_layout == WeightLayout()
    del vars(manifest)["weight_layout"]  # it is made again, from the metadata
    assert manifest.weight_layout == WeightLayout()
    assert repr(manifest) == str(manifest)
    assert repr(manifest) == (
        f"<WeightUpdateManifest v3 shared-memory 3 tensors 50 bytes root={manifest.root[:12]} "
        f"update=aaaaaaaa>"
    )


def test_the_layout_metadata_is_always_filled() -> None:
    assert dict(make_manifest().metadata) == {"layout": WeightLayout().to_metadata()}
    manifest = make_manifest(metadata={"layout": {"rank": 1, "world_size": 2}, "step": 1})
    assert manifest.metadata["layout"]["world_size"] == 2
    assert manifest.metadata["layout"]["kind"] == "full-state"
    assert manifest.metadata["step"] == 1


def test_the_root_is_computed_when_it_is_not_given_and_checked_when_it_is() -> None:
    root = make_manifest().root
    assert make_manifest(root=root).root == root
    with pytest.raises(DigestMismatch, match=f"version 3: .*{'0' * 32}.*{root}.*ask the publisher"):
        make_manifest(root="0" * 32)


# ---- immutability -------------------------------------------------------------------------------


COMPUTED = ("tensors", "weight_layout", "header_digest", "layout_digest", "new")


@pytest.mark.parametrize("field", [*sorted(WeightUpdateManifest.model_fields), *COMPUTED])
def test_no_attribute_can_be_assigned_or_deleted(field: str) -> None:
    manifest = make_manifest()
    before = manifest.to_json()
    with pytest.raises(AttributeError, match=f"{field} cannot be changed"):
        setattr(manifest, field, "x")
    with pytest.raises(AttributeError, match=f"{field} cannot be changed"):
        delattr(manifest, field)
    assert manifest.to_json() == before


@pytest.mark.parametrize("field", ["weight_version", "publisher_id", "handle", "root"])
def test_a_field_that_is_forced_into_the_object_changes_the_headers_digest(field: str) -> None:
    manifest = make_manifest()
    sealed = manifest.header_digest
    vars(manifest)[field] = vars(make_manifest(weight_version=7, publisher_id="c" * 32)).get(field)
    if field in {"handle", "root"}:
        vars(manifest)[field] = {"slot": 1} if field == "handle" else "0" * 32
    assert manifest.header_digest != sealed


def test_what_the_caller_handed_in_is_not_the_manifests_own() -> None:
    metadata: dict[str, Any] = {"a": [1, {"b": 2}], "layout": {"rank": 0}}
    handle: dict[str, Any] = {"slot": {"inode": 1}}
    manifest = make_manifest(metadata=metadata, handle=handle)
    before = manifest.to_json()
    manifest.header()["metadata"]["a"].append(2)
    manifest.document()["layout"]["ties"]["x"] = "bias"
    metadata["a"][1]["b"] = 3
    metadata["layout"]["rank"] = 5
    metadata["new"] = 1
    handle["slot"]["inode"] = 2
    assert manifest.to_json() == before


# ---- copies -------------------------------------------------------------------------------------


def test_copies_are_the_manifest_itself() -> None:
    manifest = make_manifest()
    assert copy.copy(manifest) is manifest
    assert copy.deepcopy(manifest) is manifest
    assert copy.deepcopy([manifest])[0] is manifest


def test_a_pickle_is_the_canonical_text() -> None:
    manifest = make_manifest(make_table(ties={"head": "weight"}))
    with forget_layouts():
        again = pickle.loads(pickle.dumps(manifest))
    assert again == manifest
    assert again.to_json() == manifest.to_json()
    assert manifest.to_json().encode() in pickle.dumps(manifest)


def test_a_changed_copy_is_validated() -> None:
    manifest = make_manifest()
    later = manifest.model_copy(update={"weight_version": 4})
    assert (later.weight_version, later.root, manifest.weight_version) == (4, manifest.root, 3)
    other = manifest.model_copy(update={"digests": bytes(32)}, deep=True)
    assert other.root == make_manifest(digests=bytes(32)).root != manifest.root
    with pytest.raises(MalformedManifest, match="weight_version"):
        manifest.model_copy(update={"weight_version": -1})
    with pytest.raises(DigestMismatch):
        manifest.model_copy(update={"root": "1" * 32})


class _Envelope(BaseModel):
    manifest: WeightUpdateManifest


def test_a_manifest_is_a_field_of_the_users_own_model() -> None:
    envelope = _Envelope(manifest=make_manifest(metadata={"a": [1]}))
    assert _Envelope.model_validate_json(envelope.model_dump_json()) == envelope
    assert _Envelope.model_validate(envelope.model_dump()) == envelope
    damaged = envelope.model_dump()
    damaged["manifest"]["header"]["root"] = "0" * 32
    with pytest.raises(WeightManifestValidationError):
        _Envelope.model_validate(damaged)


def test_the_parts_of_the_text_are_not_taken_for_fields() -> None:
    parts = json.loads(make_manifest().to_json())
    with pytest.raises(MalformedManifest, match="from_json"):
        WeightUpdateManifest(**parts)
    assert WeightUpdateManifest.model_validate(parts).to_json() == make_manifest().to_json()


@pytest.mark.parametrize(
    "value", [float("nan"), object(), {1: 2, "x": 3}], ids=["nan", "object", "keys"]
)
def test_a_document_that_is_no_json_is_malformed(value: object) -> None:
    with pytest.raises(MalformedManifest, match="no JSON value"):
        WeightUpdateManifest.model_validate({"format": value})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_time_that_cannot_be_written_is_malformed(value: float) -> None:
    with pytest.raises(MalformedManifest, match="created_at"):
        make_manifest(created_at=value)


def test_equal_content_is_equal_and_anything_else_is_not() -> None:
    manifest = make_manifest()
    assert manifest == make_manifest()
    assert len({manifest, make_manifest()}) == 1
    assert manifest != make_manifest(metadata={"a": 1})
    others: list[object] = ["text", None, manifest.to_json()]
    assert manifest not in others


# ---- compact ------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n", " \t\n\n"])
def test_white_space_behind_the_text_is_ignored(end: str) -> None:
    manifest = make_manifest()
    for text in (manifest.to_json(), manifest.to_json(layout=False)):
        assert WeightUpdateManifest.from_json(text + end) == manifest
        assert WeightUpdateManifest.from_json((text + end).encode()) == manifest


@pytest.mark.parametrize("given", [Path("manifest.json"), None, {"format": 1}])
def test_what_is_no_text_is_malformed(given: Any) -> None:
    with pytest.raises(MalformedManifest, match="expected a manifest's text"):
        WeightUpdateManifest.from_json(given)


def test_manifests_of_one_run_share_one_layout_object() -> None:
    with forget_layouts():
        one = WeightUpdateManifest.from_json(make_manifest().to_json())
        other = WeightUpdateManifest.from_json(make_manifest(update_id="c" * 32).to_json())
        assert one.table is other.table


# ---- the cache ----------------------------------------------------------------------------------


def test_an_equal_layout_is_remembered_once_and_the_longest_unused_is_forgotten_first() -> None:
    cache: LayoutCache[TensorTable] = LayoutCache(2)
    first, second, third = (make_table({f"t{index}": ("int8", (1,))}) for index in range(3))
    assert cache.add(first) is first
    assert cache.add(make_table({"t0": ("int8", (1,))})) is first
    cache.add(second)
    assert cache.get(first.digest) is first
    cache.add(third)
    assert cache.get(second.digest) is None
    assert cache.get(first.digest) is first
    assert cache.get(third.digest) is third
