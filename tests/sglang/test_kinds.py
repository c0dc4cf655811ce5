"""The same for other models: after each update an engine equals a fresh one, to the bit."""

from pathlib import Path

import pytest

from tests.engines.models import Kind
from tests.sglang.bench import WAYS, Engines
from tests.sglang.test_equal import alternate


@pytest.mark.full  # two engines for each
@pytest.mark.parametrize(
    "kind", [Kind("qwen2", tied=True), Kind("llama"), Kind("llama", tied=True)], ids=str
)
def test_an_updated_engine_equals_a_fresh_one(kind: Kind, engines: Engines, tmp_path: Path) -> None:
    bench = engines.bench(kind)
    for route, staging in WAYS:
        alternate(bench, route, tmp_path, 2, staging=staging)
