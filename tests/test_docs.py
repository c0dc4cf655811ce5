"""The documentation is true: its code runs, its vectors hold, its names exist."""

import json
import os
import re
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rl_bridge
from rl_bridge import errors
from rl_bridge.cli.program import app
from rl_bridge.lifecycle import TABLE, Role
from rl_bridge.transports import TRANSPORTS
from rl_bridge.transports.nixl.agent import Counters
from rl_bridge.transports.nixl.messages import Entry
from tests.script_runner import ScriptRunner

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
# (Its test is `tests/engine_protocol/test_engine_suite.py`.)
SMALL_ENGINE = sorted((DOCS / "examples" / "small_engine").glob("*.py"))
GUARANTEES = (DOCS / "explanation" / "failure-guarantees.md").read_text("utf-8")
TIMEOUT_S = 120

FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]*) -->\n)?^```(?P<language>\w*)(?P<options>[^\n]*)\n"
    r"(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    title: str | None
    reason: str | None


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def included(text: str) -> str:
    """Resolve the includes of other files, as the site's build does."""
    pattern = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
    return pattern.sub(lambda found: (ROOT / found[1]).read_text("utf-8"), text)


def blocks(page: Path) -> list[Block]:
    found = []
    for match in FENCE.finditer(page.read_text("utf-8")):
        title = re.search(r'title="([^"]+)"', match["options"])
        found.append(
            Block(
                match["language"],
                included(match["text"]),
                title[1] if title else None,
                match["reason"],
            )
        )
    return found


@pytest.fixture(scope="module")
def runner() -> Iterator[ScriptRunner]:
    """Runs scripts, and files of tests, each in a process of its own."""
    with ScriptRunner() as made:
        yield made


def run(script: Path, cwd: Path) -> None:
    """Run a script as its reader would: by a Python that is started for it."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{script.name}:\n{done.stdout}\n{done.stderr}"


def generator(name: str) -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "_generate" / f"{name}.py"))


# ---- code ---------------------------------------------------------------------------------------

RUNNABLE = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
# Of a suite that a page shows: what needs no other process, and no fifty rounds.
QUICK = "(arrive or undone or refused) and not hostile"
WITH_A_SUITE = DOCS / "how-to" / "write-a-transport.md"


@pytest.mark.parametrize(
    ("page", "chosen"),
    [
        *(pytest.param(page, QUICK, id=name_of(page)) for page in RUNNABLE),
        pytest.param(WITH_A_SUITE, "", id="a whole suite", marks=pytest.mark.full),
    ],
)
def test_the_code_of_a_page_runs(
    page: Path, chosen: str, tmp_path: Path, runner: ScriptRunner
) -> None:
    script = []
    for block in blocks(page):
        if block.language != "python" or block.reason is not None:
            continue
        if block.title is not None:
            (tmp_path / block.title).write_text(block.text, "utf-8")
            # An example that a page shows whole has a test of its own.
            if not shows_an_example(block):
                runner.run(tmp_path / block.title, tmp_path, chosen)
        else:
            script.append(block.text)
    if script:
        whole = tmp_path / "page.py"
        whole.write_text("\n".join(["import logging, sys", "logging.disable()", *script]), "utf-8")
        runner.run(whole, tmp_path)


def shows_an_example(block: Block) -> bool:
    files = [file for file in (*EXAMPLES, *SMALL_ENGINE) if file.name == block.title]
    return any(file.read_text("utf-8").strip() == block.text.strip() for file in files)


def test_python_is_always_called_python_and_every_block_left_out_has_a_reason() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language not in {"", "py", "python3", "pycon"}, name_of(page)
            assert block.reason is None or len(block.reason) > 10, name_of(page)


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_an_example_runs(example: Path, tmp_path: Path, runner: ScriptRunner) -> None:
    # One of them by a Python that is started for it, to see that nothing else is needed.
    if example.name == "publish_and_import.py":
        run(example, tmp_path)
    else:
        runner.run(example, tmp_path)


def test_every_command_that_the_docs_tell_to_type_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    commands = {str(info.name) for info in app.registered_commands}
    commands |= {str(info.name) for info in app.registered_groups}
    for page in PAGES:
        text = page.read_text("utf-8")
        assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets, name_of(page)
        typed = "\n".join(block.text for block in blocks(page) if block.language == "console")
        assert set(re.findall(r"^make ([a-z-]+)", typed, re.MULTILINE)) <= targets, name_of(page)
        named = set(re.findall(r"rl-bridge ([a-z]+)", text))
        assert named <= commands, name_of(page)


@pytest.mark.parametrize("page", sorted((DOCS / "tutorials").glob("*.md")), ids=name_of)
def test_a_notebook_has_its_tutorial_and_runs_cell_by_cell(
    page: Path, tmp_path: Path, runner: ScriptRunner
) -> None:
    path = page.with_suffix(".ipynb")
    text = path.read_text("utf-8")
    assert text == generator("write")["notebooks"]()[path], "run: python docs/_generate/write.py"
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 3
    # Cells that an interpreter takes one by one, as a notebook's kernel does.
    script = tmp_path / "cells.py"
    script.write_text(
        f"""
import json, logging
from pathlib import Path
logging.disable()
names = {{"__name__": "__main__"}}
for cell in json.loads(Path({str(path)!r}).read_text("utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
""",
        "utf-8",
    )
    runner.run(script, tmp_path)


# ---- what is generated --------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text("utf-8")
    assert generator("write")["fill"](text) == text, "run: python docs/_generate/write.py"


def test_the_generated_pictures_are_up_to_date_and_each_is_shown() -> None:
    names = ("architecture", "lifecycle")
    pages = "".join((DOCS / "explanation" / f"{name}.md").read_text("utf-8") for name in names)
    found = generator("write")["pictures"]()
    homes = (DOCS / "assets" / "folders", DOCS / "assets" / "states")
    assert set(found) == {path for home in homes for path in home.iterdir() if path.is_file()}
    for path, picture in found.items():
        assert path.read_text("utf-8") == picture, "run: python docs/_generate/write.py"
        assert f"](../assets/{path.parent.name}/{path.name})" in pages


def test_every_folder_of_the_path_has_a_picture_and_its_path_names_files_that_exist() -> None:
    drawn = generator("folders")
    no_path = {"cli", "compat", "demo", "testing", "__pycache__"}
    top = {path.name for path in (ROOT / "rl_bridge").iterdir() if path.is_dir()} - no_path
    assert {folder.partition("/")[0] for folder in drawn["FOLDERS"]} == top
    for folder, path in drawn["PATH"].items():
        assert set(path) <= set(drawn["files"](folder)), folder


@pytest.mark.parametrize("name", ["architecture", "where-to-look"])
def test_files_that_a_page_of_the_house_names_exist(name: str) -> None:
    text = (DOCS / "explanation" / f"{name}.md").read_text("utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)+[\w.-]*|\w+\.(?:py|md))`", text))
    assert len(named) > 20
    places = [ROOT / "rl_bridge", ROOT]
    missing = {
        one
        for one in named - {"__init__.py"}
        if not any((place / f"{one}{end}").exists() for place in places for end in ("", ".py"))
    }
    assert missing == set()


@pytest.mark.parametrize("role", list(Role))
def test_the_lifecycle_page_shows_every_move_of_the_table(role: Role) -> None:
    picture = DOCS / "assets" / "states" / f"{role}.svg"
    page = (DOCS / "explanation" / "lifecycle.md").read_text("utf-8")
    assert f"](../assets/states/{picture.name})" in page
    words = " · ".join(ET.parse(picture).getroot().itertext()).split(" · ")
    words = [word.strip() for word in words]
    for moves in TABLE[role].values():
        for place, (event, target) in enumerate(moves.items()):
            assert f"{event} → {target}" in words or (place == 0 and event in words)


def test_figures_come_from_the_raw_file_or_are_missing() -> None:
    figures = generator("figures")
    page = (DOCS / "reference" / "benchmarks.md").read_text("utf-8")
    assert figures["MARKER"] in page
    assert "make bench" in figures["render"](None)
    where = {"cpu": "a processor", "cpu_cores_usable": 2, "kernel": "6.1", "python": "3.11"}
    row = {"usable_s": 0.25, "verified": True, "kind": "snapshot"}
    results = {
        "environment": where | {"versions": {"torch": "2.4"}, "commit": "0" * 40},
        "timestamp": "2020-01-01",
        "payload": {"nbytes": 1},
        "quick": True,
        "ratios": {"publish_vs_memcpy": 0.9731, "flip_ms_4gib": None, "peers": {"ours": 0.25}},
        "details": {
            "publish_vs_memcpy": {"aim": ">= 0.9", "aim_met": True},
            "flip_ms_4gib": {"aim": "<= 2.0 ms", "aim_met": None, "reason": "too large"},
            "peers": {"rows": {"ours": row}},
        },
    }
    shown = figures["render"](results)
    assert "| `publish_vs_memcpy` | 0.9731 | >= 0.9 | yes |" in shown
    assert "not measured (too large)" in shown
    assert "| `ours` | 0.25 |" in shown
    if figures["RESULTS"].is_file():
        assert "Measured" in figures["on_page_markdown"](page)


@pytest.mark.parametrize("name", ["nixl", "ray", "vllm", "sglang"])
def test_figures_of_other_benchmarks_come_from_their_raw_files(name: str) -> None:
    figures = generator("figures")
    page = (DOCS / "reference" / "benchmarks.md").read_text("utf-8")
    assert f"<!-- figures: benchmarks/results/{name}.json -->" in page
    render = figures["render_plain" if name in {"nixl", "ray"} else "render_engine"]
    assert "benchmarks/" in render(name, None)
    results = ROOT / "benchmarks" / "results" / f"{name}.json"
    if results.is_file():
        shown = render(name, json.loads(results.read_text("utf-8")))
        assert "Measured" in shown
        assert shown in figures["on_page_markdown"](page)


FIGURE = re.compile(
    r"\d[\d.,]*\s*(?:[GMK]i?B/s|GB per s|ms\b|µs|us\b|(?:milli|micro)?seconds?\b)"
    r"|\b\d[\d.,]*\s*(?:times|x) (?:as fast|faster)"
)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_has_a_figure_of_speed_typed_by_hand(page: Path) -> None:
    prose = FENCE.sub("", page.read_text("utf-8"))
    assert not FIGURE.findall(prose)


# ---- names --------------------------------------------------------------------------------------


def referenced() -> set[str]:
    pages = (DOCS / "reference").glob("*.md")
    text = "\n".join(page.read_text("utf-8") for page in pages)
    return set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))


def test_the_reference_shows_every_face_and_what_is_public_beside_them() -> None:
    faces = {f"rl_bridge.{face}" for face in rl_bridge.FACES}
    assert faces <= referenced()
    # The options of transports are public, their classes are not; nor are these two of a face.
    transports = {f"{kind.__module__}.{kind.__name__}" for kind in TRANSPORTS.values()}
    answers = {f"{kind.__module__}.{kind.__name__}" for kind in (Entry, Counters)}
    assert referenced() == faces | transports | answers


def test_every_error_has_a_row_that_says_what_to_do() -> None:
    tables = GUARANTEES.partition("## Errors")[2].partition("## Deaths")[0]
    named = set(re.findall(r"`(\w+)`", tables))
    assert set(errors.__all__) <= named


def test_the_tests_that_hold_a_guarantee_exist() -> None:
    named = set(re.findall(r"`(tests/[\w./-]+)`", GUARANTEES))
    assert named
    assert {path for path in named if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize(
    "words",
    [
        "weight_version must increase monotonically",
        "cannot acknowledge update before import_update succeeds",
        "tensor checksum mismatch",
        "multi-node/RDMA weight transport is not implemented",
    ],
)
def test_troubleshooting_quotes_what_the_code_says(words: str) -> None:
    assert f"`{words}`" in GUARANTEES
    sources = (ROOT / "rl_bridge").rglob("*.py")
    whole = "".join(re.sub(r'"\n\s*f?"', "", path.read_text("utf-8")) for path in sources)
    assert words in whole


def test_pictures_are_well_formed() -> None:
    for picture in (DOCS / "assets").glob("*.svg"):
        assert ET.parse(picture).getroot().tag.endswith("svg")
