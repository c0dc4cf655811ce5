"""Requests of a transfer strategy, loaded by a real engine: all batches of a sync, or none."""

from typing import Any

import pytest

from rl_bridge import SGLangWeightLoader
from tests.engines.synced import sync_whole_or_not_at_all
from tests.sglang.bench import Bench


@pytest.mark.parametrize(
    "placement", [{"is_colocated": True}, {"is_elastic": True}], ids=["shared-memory", "broadcast"]
)
def test_an_engine_serves_each_sync_whole_or_not_at_all(
    bench: Bench, placement: dict[str, Any]
) -> None:
    first = bench.holds

    def check(number: int) -> None:
        bench.holds = (first + number) % 2
        bench.check(number)

    sync_whole_or_not_at_all(
        lambda receiver: SGLangWeightLoader(bench.engine, receiver),
        placement,
        [bench.weights[first], bench.next()],
        check,
    )
