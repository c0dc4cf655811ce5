"""The normative page of the manifest format: its vectors, its lines and its rules hold."""

import copy
import json
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from rl_bridge import errors
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.digest import LEAF_NBYTES, digest_bytes, leaf_digests, text_digest
from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.passes import BytePlan

DOCS = Path(__file__).resolve().parents[1] / "docs"
FORMAT_PAGE = (DOCS / "explanation" / "manifest-format.md").read_text("utf-8")


def rows(text: str, after: str) -> list[list[str]]:
    """The body of the first table behind a mark, cell by cell, without code marks."""
    lines = text.partition(after)[2].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|--"))
    body = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        body.append([cell.strip().strip("`").strip() for cell in line.strip("|").split("|")])
    return body


PATTERNS: dict[str, Callable[[int], bytes]] = {
    "zero": bytes,
    "ff": lambda size: b"\xff" * size,
    "mod251": lambda size: (bytes(range(251)) * (size // 251 + 1))[:size],
}
VECTORS = rows(FORMAT_PAGE, "<!-- vectors: digests -->")
COLUMNS = rows(FORMAT_PAGE, "<!-- vectors: columns -->")
TENSORS = rows(FORMAT_PAGE, "<!-- vectors: tensors -->")


def by_plan(data: bytes, *, native: bool) -> str:
    array = np.frombuffer(data, np.uint8) if data else np.zeros(1, np.uint8)
    plan = BytePlan(np.array([len(data)], np.uint64), native=native)
    return plan.digest(np.array([array.ctypes.data], np.uint64)).hex()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector[0]}-{vector[1]}")
def test_every_implementation_gives_the_digest_of_the_page(vector: list[str]) -> None:
    pattern, size, leaves, digest = vector
    data = PATTERNS[pattern](int(size))
    assert len(leaf_digests(memoryview(data))) == 16 * int(leaves)
    found = [digest_bytes(data).hex(), by_plan(data, native=True), by_plan(data, native=False)]
    assert found == [digest] * 3


def test_the_page_has_vectors_around_every_boundary() -> None:
    around = {edge + step for edge in (1024, LEAF_NBYTES) for step in (-1, 0, 1)}
    assert {int(vector[1]) for vector in VECTORS} >= {0, 1, (1 << 20) + 77} | around


def test_the_leaf_digests_of_the_page_hold() -> None:
    shown = re.findall(r"`([0-9a-f]{32})`", FORMAT_PAGE.partition("On the way:")[2])[:3]
    found = [leaf_digests(memoryview(PATTERNS["mod251"](size))) for size in (3, LEAF_NBYTES + 1)]
    assert b"".join(found).hex() == "".join(shown)


@pytest.mark.parametrize("vector", COLUMNS, ids=lambda vector: vector[0])
def test_the_column_lists_of_the_page_hold(vector: list[str]) -> None:
    shape, *numbers, digest = vector
    shape = json.loads(shape)
    tensor = torch.frombuffer(bytearray(PATTERNS["mod251"](prod(shape))), dtype=torch.uint8)
    plan = PackPlan({"a": tensor.view(shape)}, columns=True)
    plan.digest_in_place()
    cuts = plan.table.column_blocks
    found = [int(cuts.strips[0]), int(cuts.band_rows[0]), len(plan.column_list) // 16]
    assert found == list(map(int, numbers))
    assert plan.columns_digest == digest
    # As the page says it, without a pass over memory.
    matrix = tensor.view(-1, shape[-1]).numpy()
    width, band = shape[-1] // found[0], found[1]
    blocks = [
        xxhash.xxh3_128_digest(matrix[low : low + band, left : left + width].tobytes())
        for low in range(0, len(matrix), band)
        for left in range(0, shape[-1], width)
    ]
    assert xxhash.xxh3_128_hexdigest(b"".join(blocks)) == digest


def shown_manifest() -> str:
    return FORMAT_PAGE.partition("<!-- vectors: manifest -->")[2].split("\n")[3]


def test_the_manifest_of_the_page_is_one_and_comes_back_to_the_byte() -> None:
    text = shown_manifest()
    manifest = WeightUpdateManifest.from_json(text)
    assert manifest.to_json() == text
    assert WeightUpdateManifest.from_json(manifest.to_json(layout=False)) == manifest
    named = re.findall(r"`([0-9a-f]{32})`", FORMAT_PAGE.partition("Layout digest ")[2])
    assert named[:2] == [manifest.layout_digest, manifest.root]


def test_the_tensors_of_the_page_have_its_digests_shapes_and_lines() -> None:
    manifest = WeightUpdateManifest.from_json(shown_manifest())
    for name, dtype, shape, data, digest in TENSORS:
        found = manifest.tensors[name]
        assert (found.dtype, list(found.shape), found.checksum) == (
            dtype,
            json.loads(shape),
            digest,
        )
        assert digest_bytes(bytes.fromhex(data)).hex() == digest
    lines = FORMAT_PAGE.partition("<!-- vectors: lines -->")[2].partition("```text\n")[2]
    lines = lines.partition("```")[0]
    described = [[t.name, t.dtype, list(t.shape), t.checksum] for t in manifest.tensors.values()]
    assert lines == "".join(f"{canonical_json(line)}\n" for line in sorted(described))
    assert text_digest(lines) == manifest.root


def test_the_dtype_table_of_the_page_is_the_code_s() -> None:
    table = rows(FORMAT_PAGE, "### Dtypes")
    shown = {name: int(size) for size, names in table for name in re.findall(r"\w+", names)}
    assert shown == DTYPE_NBYTES


def edited(edit: Callable[[dict[str, Any], dict[str, Any]], object], *, sign: bool = True) -> str:
    """The page's manifest with its header and layout edited, and the layout named anew."""
    document = copy.deepcopy(json.loads(shown_manifest()))
    edit(document["header"], document["layout"])
    if sign:
        document["header"]["layout_digest"] = text_digest(canonical_json(document["layout"]))
    return canonical_json(document)


def layout(column: str, row: int, value: object) -> str:
    return edited(lambda _, layout: layout[column].__setitem__(row, value))


def fields(**changes: object) -> str:
    return edited(lambda _, layout: layout.update(changes))


def header(**changes: object) -> str:
    return edited(lambda header, _: header.update(changes))


def empty(header: dict[str, Any], layout: dict[str, Any]) -> None:
    """Take all tensors out."""
    layout |= {name: [] for name in ("dtypes", "names", "nbytes", "offsets", "shapes")}
    layout |= {"arena_nbytes": 0, "ties": {}, "trainable": None}
    header |= {"digests": "", "root": text_digest("")}


NAMED = json.loads(shown_manifest())["header"]["layout_digest"]

# One text that breaks each rule of the page's first table, in its order.
BREAKS: list[Callable[[], str]] = [
    lambda: shown_manifest().replace("trainer", "träiner"),
    lambda: shown_manifest().replace("manifest/3", "manifest/4"),
    lambda: shown_manifest().replace('"step":7', '"step":NaN'),
    lambda: header(more=1),
    lambda: " " + shown_manifest(),
    lambda: shown_manifest().partition(',"layout":')[0].replace(NAMED[:8], "00000000") + "}",
    lambda: edited(lambda _, layout: layout["names"].reverse(), sign=False),
    lambda: fields(more=1),
    lambda: fields(algorithm="X3T-64K"),
    lambda: edited(lambda _, layout: layout["dtypes"].pop()),
    lambda: fields(device="cuda"),
    lambda: fields(leaves=False, columns=True),
    lambda: header(columns="0" * 32),
    lambda: edited(lambda _, layout: layout["names"].reverse()),
    lambda: layout("names", 1, "bias"),
    lambda: fields(ties={"lm_head": "nobody"}),
    lambda: layout("dtypes", 0, "float7"),
    lambda: layout("offsets", 0, -256),
    lambda: layout("shapes", 1, [0, 2**60, 2**60]),
    lambda: layout("nbytes", 0, 12),
    lambda: layout("offsets", 3, 256),
    lambda: layout("offsets", 4, 1024),
    lambda: fields(arena_nbytes=768),
    lambda: fields(arena_nbytes=2048),
    lambda: fields(trainable="1000"),
    lambda: header(digests=""),
    lambda: header(root="0" * 32),
    lambda: header(metadata={"layout": {"kind": 3}}),
    lambda: edited(empty),
]
RULES = rows(FORMAT_PAGE, "## Validation")


@pytest.mark.parametrize("number", range(len(RULES)))
def test_a_manifest_that_breaks_a_rule_of_the_page_gets_its_error(number: int) -> None:
    assert len(BREAKS) == len(RULES)
    with pytest.raises(errors.WeightManifestValidationError) as caught:
        WeightUpdateManifest.from_json(BREAKS[number]())
    assert type(caught.value).__name__ == RULES[number][1], RULES[number][0]
