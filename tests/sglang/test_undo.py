"""An update that fails, wherever it does, leaves the engine as it was: same process, same bytes."""

from pathlib import Path

import pytest

from rl_bridge.engines.sglang.loaders import RouteName
from rl_bridge.engines.staging import Staging
from tests.sglang.bench import WAYS, Bench, executor_for


@pytest.mark.parametrize(("route", "staging"), WAYS)
def test_an_install_that_fails_at_any_tensor_is_undone(
    route: RouteName, staging: Staging | None, bench: Bench, tmp_path: Path
) -> None:
    count = len(bench.weights[0])
    tensors = range(count) if route == "import" else (0, count // 2, count - 1)
    with executor_for(bench.engine, route=route, tmp_path=tmp_path, staging=staging) as executor:
        bench.fails_at(executor, tensors)
