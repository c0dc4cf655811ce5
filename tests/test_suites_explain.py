"""Whoever runs the suites against something of his own is told what is missing."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.testing.faults import arena_address
from rl_bridge.testing.transport_case import only_report

# Fails inside one of the suite's helpers; there is no conftest that has its assertions explained.
OUTSIDER = """
from rl_bridge.testing import TransportSuite
from rl_bridge.testing.transport_case import only_report

def test_two():
    only_report(["one", "two"])
"""


def test_assertions_of_the_suites_are_explained_without_a_conftest(tmp_path: Path) -> None:
    (tmp_path / "test_outsider.py").write_text(OUTSIDER)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_outsider.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "where 2 = len(['one', 'two'])" in done.stdout
    assert "Warning" not in done.stdout


def test_the_suites_modules_need_no_pytest_to_be_found(tmp_path: Path) -> None:
    program = "import sys, rl_bridge.testing.faults; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=120, check=True)


@pytest.mark.parametrize("handle", [{}, {"slot": "a file"}, {"slot": {"name": "x"}}])
def test_a_transport_without_locate_is_told_to_give_one(handle: dict[str, Any]) -> None:
    end: Any = object()
    with pytest.raises(LookupError, match="class a `locate`: staticmethod"):
        arena_address(end, "f" * 32, handle)


def test_a_publisher_without_reports_is_told_that_records_shows_none() -> None:
    with pytest.raises(AssertionError, match=r"records\(\) shows no consumer"):
        only_report([])
