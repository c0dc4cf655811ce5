"""What the suites of all transports share."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave fifty rounds to the full run: G8's own tests go over every transport in fewer."""
    for item in items:
        if item.path.parent == HERE and item.name.startswith("test_fifty_"):
            item.add_marker(pytest.mark.full)
