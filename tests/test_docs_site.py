"""The built site: it fetches nothing from elsewhere, its search finds what teaches."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://example.org/rl_bridge"
BUILD_S = 300


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built strictly, by somebody who says where the repository is."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        env=os.environ | {"RL_BRIDGE_REPOSITORY": REPOSITORY, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_a_reader_fetches_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
    )
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text("utf-8")
        foreign = [tag for tag in loads.findall(text) if 'rel="canonical"' not in tag]
        assert foreign == [], page
        # Material's script fetches Mermaid from elsewhere as soon as a page has a diagram of it.
        assert 'class="mermaid"' not in text, page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text("utf-8"))


def test_the_search_finds_the_tutorial_before_a_list_of_names(site: Path) -> None:
    docs = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    boosts = {one["location"]: one.get("boost", 1.0) for one in docs}

    def of(folder: str) -> set[float]:
        return {boost for where, boost in boosts.items() if where.startswith(folder)}

    assert max(of("reference/")) < min(of("explanation/"))
    assert max(of("explanation/")) < min(of("how-to/")) < min(of("tutorials/"))
    # A word in a title counts most, and there the boost decides.
    titled = [one["location"] for one in docs if "publish" in one["title"].lower()]
    assert max(titled, key=boosts.__getitem__) == "tutorials/first-update/#publish"


def test_each_page_links_to_its_source_in_the_repository(site: Path) -> None:
    page = (site / "tutorials" / "first-update" / "index.html").read_text("utf-8")
    assert f'href="{REPOSITORY}/edit/main/docs/tutorials/first-update.md"' in page
    assert f'href="{REPOSITORY}"' in page
