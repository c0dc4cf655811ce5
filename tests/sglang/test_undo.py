"""An update that fails, wherever it does, leaves the engine as it was: same process, same bytes."""

from pathlib import Path
from typing import Any

import pytest

from rl_bridge import WeightUpdateRejectedError
from rl_bridge.engines.sglang.loaders import RouteName
from rl_bridge.engines.staging import Staging
from tests.sglang.bench import WAYS, Bench, executor_for, sums_of
from tests.sglang.test_equal import folder


@pytest.mark.parametrize(("route", "staging"), WAYS)
def test_an_install_that_fails_at_any_tensor_is_undone(
    route: RouteName, staging: Staging | None, bench: Bench, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "route": route,
        "directory": folder(route, tmp_path),
        "staging": staging,
    }
    with executor_for(bench.engine, **options) as executor:
        count = len(bench.weights[0])
        every = route == "import"
        for nth in range(count) if every else (0, count // 2, count - 1):
            bench.plant("fail", nth)
            manifest = bench.trainer.publish(bench.next())
            with pytest.raises(WeightUpdateRejectedError, match=f"planted at tensor {nth}"):
                executor.update_weights(manifest)
            assert sums_of(bench.engine) == bench.sums[bench.holds], nth
        bench.check()
        bench.uproot()
        bench.update(executor)
        bench.check()
