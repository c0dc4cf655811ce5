"""One round of `benchmarks/kills.py` on each side: what its table counts is what it sees."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    made = importlib.import_module("kills").Bench(tmp_path_factory.mktemp("kills"))
    yield made
    made.stop()


@pytest.mark.full  # its server, and a process for each trainer
@pytest.mark.parametrize(
    ("side", "step", "weights"),
    [("stock", "between buckets", {"mixed"}), ("ours", "in the install", {"old", "new"})],
)
def test_a_killed_trainer_leaves_what_the_row_says(
    side: str, step: str, weights: set[str], bench: Any
) -> None:
    row = bench.kill_trainer(side, step)
    assert row["weights"] in weights
    assert (row["trainer"], row["next"]) == ("killed", "lands")
