"""After each update an engine holds and answers, to the bit, what a fresh one does."""

from pathlib import Path

import pytest

from rl_bridge import WeightUpdateRejectedError
from rl_bridge.engines.sglang.loaders import RouteName
from rl_bridge.engines.staging import Staging
from tests.sglang.bench import WAYS, Bench, executor_for


def alternate(
    bench: Bench, route: RouteName, tmp_path: Path, times: int, *, staging: Staging | None = None
) -> None:
    with executor_for(bench.engine, route=route, tmp_path=tmp_path, staging=staging) as executor:
        for turn in range(times):
            bench.plant("fail", nth=turn % len(bench.weights[0]))
            refused = bench.trainer.publish(bench.next())
            with pytest.raises(WeightUpdateRejectedError, match="planted"):
                executor.update_weights(refused)
            bench.check(f"after failure {turn}")
            bench.uproot()
            manifest = bench.update(executor)
            bench.check(f"after update {turn}")
            ack = executor.last_ack
            assert ack is not None
            assert ack.proof.root == manifest.root
            assert ack.proof.method == "digest"
            assert ack.proof.staging == (staging or ("beside" if route == "import" else ""))


@pytest.mark.parametrize(("route", "staging"), WAYS)
def test_updates_with_failures_mixed_in_equal_fresh_engines(
    route: RouteName, staging: Staging | None, bench: Bench, tmp_path: Path
) -> None:
    times = 2 if staging is None else 6
    alternate(bench, route, tmp_path, times, staging=staging)
