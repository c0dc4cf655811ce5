"""Requests of a transfer strategy, loaded by real engines: all batches of a sync, or none."""

from typing import Any

import pytest

from rl_bridge import VLLMWeightLoader
from tests.engines.drive import Setting, answers, start
from tests.engines.models import Checkpoints
from tests.engines.references import References
from tests.engines.synced import sync_whole_or_not_at_all

IN_PROCESS, TWO_RANKS = Setting(), Setting(in_process=False, ranks=2)


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("setting", "placement"),
    [
        pytest.param(IN_PROCESS, {"is_colocated": True}, id="in-process-shared-memory"),
        pytest.param(IN_PROCESS, {"is_elastic": True}, id="in-process-broadcast"),
        pytest.param(
            TWO_RANKS, {"is_elastic": True}, id="two-ranks-broadcast", marks=pytest.mark.full
        ),
    ],
)
def test_an_engine_serves_each_sync_whole_or_not_at_all(
    setting: Setting, placement: dict[str, Any], checkpoints: Checkpoints, references: References
) -> None:
    weights = [checkpoints.weights(setting.kind, version) for version in (0, 1)]
    fresh = [references.of(setting, version) for version in (0, 1)]
    with start(setting, checkpoints.path(setting.kind, 0)) as llm:

        def check(number: int) -> None:
            assert answers(llm) == fresh[number]

        sync_whole_or_not_at_all(
            lambda receiver: VLLMWeightLoader(llm, receiver), placement, weights, check
        )
