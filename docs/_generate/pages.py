"""mkdocs hook: what the search shows first, and the edit links.

Pages that teach come before those that list names. Edit links follow from the repository's address.
"""

from typing import Any

__all__ = ["BOOSTS", "on_config", "on_page_markdown"]

# By the folder of a page, or its name where it has none.
BOOSTS = {
    "tutorials": 8.0,
    "how-to": 4.0,
    "index.md": 2.0,
    "explanation": 1.0,
    "reference": 0.25,
    "changelog.md": 0.1,
    "contributing.md": 0.1,
}


def on_config(config: Any) -> Any:
    """Give every page an edit link, where the repository's address is known."""
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    return config


def on_page_markdown(_markdown: str, *, page: Any, **_kwargs: Any) -> None:
    """Set the boost of a page; mkdocs calls this for every page, and None leaves its text."""
    boost = BOOSTS[page.file.src_uri.partition("/")[0]]
    page.meta.setdefault("search", {}).setdefault("boost", boost)
