"""An update that fails, wherever it does, leaves the engine as it was: same process, same bytes."""

from pathlib import Path
from typing import Any

import pytest

from rl_bridge import TornEngine, WeightUpdateRejectedError
from rl_bridge.engines.sglang.loaders import RouteName
from tests.sglang.bench import WAYS, Bench, executor_for, sums_of
from tests.sglang.test_equal import folder


@pytest.mark.parametrize(("route", "exchange"), WAYS)
def test_an_install_that_fails_at_any_tensor_is_undone(
    route: RouteName, exchange: bool, bench: Bench, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "route": route,
        "directory": folder(route, tmp_path),
        "exchange": exchange,
    }
    with executor_for(bench.engine, **options) as executor:
        count = len(bench.weights[0])
        every = (route, exchange) == WAYS[0]
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


def test_a_version_that_cannot_be_made_beside_the_serving_one_touches_nothing(
    bench: Bench,
) -> None:
    with executor_for(bench.engine) as executor:
        bench.plant("staging")
        with pytest.raises(WeightUpdateRejectedError, match="planted in the staging"):
            executor.update_weights(bench.trainer.publish(bench.next()))
        bench.check()
        bench.uproot()
        bench.update(executor)
        bench.check()


def test_the_label_stays_that_of_the_version_that_is_served(bench: Bench) -> None:
    with executor_for(bench.engine) as executor:
        served = bench.update(executor)
        label = f"{served.weight_version}@{served.root}"
        bench.plant("fail", 3)
        with pytest.raises(WeightUpdateRejectedError):
            executor.update_weights(bench.trainer.publish(bench.next()))
        (output,) = bench.engine.generate(
            input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 4, "temperature": 0}
        )
        spans = output["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == [label]
        assert executor.active_weight_version == served.weight_version


@pytest.mark.parametrize("exchange", [True, False])
def test_a_torn_engine_takes_a_later_version_in_full(exchange: bool, bench: Bench) -> None:
    with executor_for(bench.engine, exchange=exchange) as executor:
        bench.update(executor)
        bench.plant("undo", 20)
        with pytest.raises(TornEngine):
            executor.update_weights(bench.trainer.publish(bench.next()))
        bench.uproot()
        bench.update(executor)
        executor.check_servable()
        bench.check()


def test_an_undone_update_is_rejected_and_frees_its_slot(bench: Bench) -> None:
    with executor_for(bench.engine) as executor:
        bench.plant("fail", 1)
        manifest = bench.trainer.publish(bench.next())
        with pytest.raises(WeightUpdateRejectedError):
            executor.update_weights(manifest)
        reports = {report.worker: report for report in bench.trainer.holders(manifest)}
        assert "planted" in str(reports)
        bench.uproot()
        for _ in range(6):  # more than there are slots
            bench.update(executor)
        bench.check()
